"""The graph cache: compiled steps on disk, which later starts check, load and bind."""
