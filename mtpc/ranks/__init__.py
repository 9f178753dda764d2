"""Several processes share a model: who they are, what each holds, and how they exchange values."""
