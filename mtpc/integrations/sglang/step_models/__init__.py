"""Targets for `SGLANG_EXTERNAL_MODEL_PACKAGE`, whose iterations run as mtpc's steps."""
