"""One file a family: its architectures, MTP wiring, state, and names in checkpoints."""
