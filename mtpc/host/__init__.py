"""The lower level: verify and propose as programs over a host's own buffers; docs/embedding.md."""
