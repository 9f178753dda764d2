"""The package for SGLANG_EXTERNAL_MODEL_PACKAGE. SGLang reads `EntryClass` of its modules."""
