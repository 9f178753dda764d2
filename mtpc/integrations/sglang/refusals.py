"""Refuses configurations that a traced draft does not support in SGLang, before it is built."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel

from mtpc.errors import UnsupportedModelError

_WIDTHS = {
    "tp_size": "tensor parallelism",
    "pp_size": "pipeline parallelism",
    "attn_dp_size": "data-parallel attention",
    "attn_cp_size": "context parallelism",
}


def check_served(name: str, config: Any, quant_config: Any) -> None:
    """Raise an error unless a draft can be served.

    Args:
        name: name of the draft class.
        config: SGLang's draft config.
        quant_config: SGLang's quantisation config, or None.

    Raises:
        UnsupportedModelError: SGLang uses several ranks, the weights are quantised, or the draft
            has a sparse attention index.
    """
    parallel = get_parallel()
    wide = [
        f"{kind} over {getattr(parallel, width)} ranks"
        for width, kind in _WIDTHS.items()
        if getattr(parallel, width) > 1
    ]
    found = wide[0] if wide else None
    if found is None and quant_config is not None:
        found = f"weights quantised by {quant_config.get_name()!r}"
    if found is None and getattr(config, "index_topk", None):
        found = "a sparse attention index (index_topk)"
    if found is not None:
        raise UnsupportedModelError(
            f"mtpc's {name} in SGLang: found {found}; a traced draft runs on one rank with the "
            "checkpoint's own weights and full attention. Start SGLang without "
            "SGLANG_EXTERNAL_MODEL_PACKAGE to use its own draft"
        )
