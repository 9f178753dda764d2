"""GGUF files, llama.cpp's format, read as checkpoints by the names that transformers has."""
