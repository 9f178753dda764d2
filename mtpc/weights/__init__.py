"""What a checkpoint holds: files, tensors, their formats, and recipes for derived weights."""
