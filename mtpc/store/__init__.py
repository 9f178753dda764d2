"""The graph cache on disk: entries by key, checked, and what a key must name of this machine."""
