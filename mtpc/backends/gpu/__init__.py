"""The dialect of GPU backends: their operators and passes."""
