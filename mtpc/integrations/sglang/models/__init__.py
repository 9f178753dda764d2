"""To be named in SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang reads its modules' `EntryClass`."""
