"""The dialect of the cpu backend: its operators, its passes, and the backend."""
