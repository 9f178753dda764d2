"""What a traced draft does not serve inside SGLang, said before anything is built."""

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
    """Raise unless a draft can be served.

    Args:
        name: of the draft class.
        config: the host's.
        quant_config: the host's, or None.

    Raises:
        UnsupportedModelError: several ranks, quantised weights, or an attention index.
    """
    parallel = get_parallel()
    wide = [
        f"{what} over {getattr(parallel, width)} ranks"
        for width, what in _WIDTHS.items()
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
