"""mtpc inside SGLang: draft models, and one graph for the whole draft phase. See
docs/embedding-sglang.md.

Two seams of the host, both asked for by whoever starts it; nothing changes otherwise:

- `SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.models` overrides draft architectures.
"""
