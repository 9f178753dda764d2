"""The interface for hosts: verify and propose over the host's own buffers (docs/embedding.md)."""
