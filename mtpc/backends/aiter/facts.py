"""What aiter's sources say of the functions that mtpc calls, and of those that it does not: data.

The checks of calls (`limits`), the tests of the contract and a table of docs/gpu.md follow from it.
Each fact names lines of the sources. `tests/helpers/aiter_sources.py` holds lines and signatures
against a checkout of aiter, and tells what has moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

COMMIT = "e404860"
"""Of the sources, August 2026."""
DEVICES = ("gfx942", "gfx950")
"""Where all of the bound kernels are; `sizes` has the formulas of these."""


@dataclass(frozen=True)
class Source:
    """A line of aiter's sources.

    Attributes:
        file: below the checkout.
        line: its number.
        text: what it contains.
    """

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Fact:
    """What a check compares with, and where it is from."""

    value: Any
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Heads:
    """Latent attention with so many heads of queries, in bfloat16.

    Attributes:
        heads: on this rank.
        rows: the most query rows of a request in a decode step; None: any number.
        tested: the most that aiter's own tests try.
        devices: architectures whose kernels take decode steps.
        prompts: those whose kernels take requests of any number of rows each.
        sources: of all this.
    """

    heads: int
    rows: int | None
    tested: int
    devices: tuple[str, ...]
    prompts: tuple[str, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Unbound:
    """A function, or a form of a call, that mtpc leaves out.

    Attributes:
        function: aiter's.
        operator: of mtpc, whose calls it could take; or several.
        form: of these calls.
        why: what stands against it.
        sources: of that.
    """

    function: str
    operator: str
    form: str
    why: str
    sources: tuple[Source, ...]


_MLA, _ASM, _TEST = "aiter/mla.py", "csrc/py_itfs_cu/asm_mla.cu", "op_tests/test_mla.py"
_MOE, _TILES = "aiter/fused_moe.py", "csrc/ck_gemm_moe_2stages_codegen/gen_instances.py"
_UNIFIED = "aiter/ops/triton/attention/unified_attention.py"
_UNIFIED_KERNEL = "aiter/ops/triton/_triton_kernels/attention/unified_attention.py"
_OPS, _CONFIGS = "aiter/ops", "aiter/ops/triton/configs/gemm"
_SORT = "csrc/include/moe_sorting_opus.h"


def _both(kernel: str, first: int, second: int) -> tuple[Source, Source]:
    """A kernel's lines in both devices' tables: q, KV, heads, persistent, rows, prompt, ..."""
    lines = zip(DEVICES, (first, second), strict=True)
    one, two = (Source(f"hsa/{name}/mla/mla_asm.csv", line, kernel) for name, line in lines)
    return one, two


_MTP = Source(_TEST, 605, "asm_supports_mtp = decode_qlen <= 4")
HEADS: Mapping[int, Heads] = MappingProxyType(
    {
        each.heads: each
        for each in (
            Heads(
                8, 1, 1, DEVICES, (),
                (
                    *_both("bf16,bf16,8,0,1,0,1,0,", 25, 33),
                    Source(_ASM, 960, "max_seqlen_q == 1"),
                    # Two kernels for two rows; their order in a hash table chooses.
                    Source("hsa/gfx950/mla/mla_asm.csv", 34, "bf16,bf16,8,0,2,0,1,0,"),
                    Source("hsa/gfx950/mla/mla_asm.csv", 35, "bf16,bf16,8,0,2,0,1,0,"),
                    Source(_ASM, 161, "for(const auto& el : *cfgs)"),
                ),
            ),
            Heads(
                16, 8, 4, DEVICES, DEVICES,
                (
                    *_both("bf16,bf16,16,0,1,0,1,0,", 4, 5),
                    *_both("bf16,bf16,16,0,4,0,1,0,", 5, 6),
                    *_both("bf16,bf16,16,0,8,0,1,0,", 6, 7),
                    *_both("bf16,bf16,16,0,0,1,0,0,", 18, 26),
                    Source(_ASM, 886, "config_max_seqlen_q = 8;"),
                    _MTP,
                ),
            ),
            Heads(
                32, None, 4, DEVICES, (),
                (
                    *_both("bf16,bf16,32,0,0,0,1,0,", 23, 30),
                    Source(_ASM, 914, "config_max_seqlen_q = 0;"),
                    Source(_TEST, 830, "(32, 4)"),
                ),
            ),
            Heads(
                64, 1, 1, ("gfx950",), (),
                (
                    Source("hsa/gfx950/mla/mla_asm.csv", 32, "bf16,bf16,64,0,1,0,1,0,"),
                    Source(_ASM, 939, "config_max_seqlen_q = 1;"),
                    Source(_TEST, 627, "ASM decode faults on nhead=64 with qlen>1"),
                    Source(_TEST, 628, "nhead == 64 and decode_qlen > 1"),
                ),
            ),
            Heads(
                128, None, 4, DEVICES, DEVICES,
                (
                    *_both("bf16,bf16,128,0,0,0,1,0,", 2, 2),
                    *_both("bf16,bf16,128,0,0,1,0,0,", 19, 27),
                    Source(_ASM, 866, "config_max_seqlen_q = 0;"),
                    Source(_TEST, 834, "(128, 4)"),
                ),
            ),
        )
    }
)  # fmt: skip
"""`mla_decode_fwd` and, for prompts, `mla_prefill_fwd` (`_ASM`, 1252), by the number of heads.

An assembly kernel is found by heads and rows; one for 0 rows takes any number, by a wider grid.
Those of 16 heads have rows for 1, up to 4 and up to 8. Other numbers of heads and rows are put
together of these: `limits.latent_parts`.
"""

FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        "latent dtype": Fact("bfloat16", (Source(_ASM, 841, "kv_dtype == AITER_DTYPE_bf16"),)),
        # Width of a row, and of its part that is a value, too.
        "latent widths": Fact(
            (576, 512),
            (Source(_TEST, 248, "kv_lora_rank + qk_rope"), Source(_ASM, 813, "KV->size(3)")),
        ),
        "latent rows follow each other": Fact(
            True, (Source(_ASM, 806, "Q->is_contiguous()"), Source(_ASM, 714, "KV->stride(0)"))
        ),
        # Of the cache, and valid: aiter's own test of latent attention has so many.
        "rows behind the lists": Fact(
            10_000, (Source(_TEST, 168, "n_kv_idx = kv_indptr[-1].item() + 10000"),)
        ),
        "prompt heads": Fact(
            (16, 128), (Source(_ASM, 1252, "gqa_ratio == 16 || gqa_ratio == 128"),)
        ),
        "prompts are not split": Fact(True, (Source(_MLA, 1164, "num_kv_splits = 1"),)),
        "splits are given": Fact(
            True, (Source(_MLA, 281, "@functools.lru_cache"), Source(_MLA, 594, "num_kv_splits"))
        ),
        # Heads for which one split writes the results; with other heads, four rows do.
        "one split is final": Fact(
            (8, 32), (Source(_MLA, 633, "nhead == 32"), Source(_MLA, 638, "nhead == 8"))
        ),
        "attention dtypes": Fact(
            ("bfloat16", "float16"), (Source(_UNIFIED, 207, "assert kv_cache_dtype in ("),)
        ),
        "keys of a tile": Fact(64, (Source(_UNIFIED, 218, "TILE_SIZE = min(64,"),)),
        "tiles are whole pages": Fact(
            True, (Source(_UNIFIED, 254, "TILE_SIZE % block_size == 0"),)
        ),
        # A tile may be one page, and Triton multiplies tiles of 16 keys or more.
        "least page": Fact(16, (Source(_UNIFIED, 218, "TILE_SIZE = min(64,"),)),
        "expert dtypes": Fact(
            ("bfloat16", "float16"), (Source(_MOE, 753, "assert dtype in ["),)
        ),
        # The largest tile of features or inputs.
        "expert step": Fact(
            128,
            (
                Source(_TILES, 123, "A16W16_gemm1_heuristic_dispatch"),
                Source(_TILES, 369, "A16W16_gemm2_gfx950_heuristic_dispatch"),
            ),
        ),
        # Of the sum over experts; so no call of `fused_moe` is batch-invariant, or repeatable.
        "sums by atomics": Fact(
            ("fused_moe",), (Source(_MOE, 218, "stage2 atomically accumulates"),)
        ),
    }
)  # fmt: skip
"""By name; see the functions of `limits` and `sizes`."""

UNBOUND = (
    Unbound(
        "mla_decode_fwd", "latent_attention", "float8 latents",
        "one scale for all pages, and queries in float8, too: only a plan of work, which mtpc does "
        "not make, takes 16 bits. mtpc keeps latents in the model's dtype",
        (
            Source(_ASM, 665, "kv_scale,             //   [1]"),
            Source("hsa/gfx942/mla/mla_asm.csv", 7, "bf16,fp8,16,1,4,0,1,0,"),
            Source("hsa/gfx942/mla/mla_asm.csv", 14, "fp8,fp8,16,0,1,0,1,0,"),
        ),
    ),
    Unbound(
        "unified_attention", "paged_attention", "pages of codes",
        "one scale for all keys; mtpc's pages have one for each row and head",
        (Source(_UNIFIED_KERNEL, 253, "k_descale = tl.load(k_descale_ptr)"),),
    ),
    Unbound(
        "fused_moe", "grouped_experts", "float8 in blocks or by channel (DeepSeek-V3)",
        "rounds rows to float8, once before each product; mtpc::grouped_experts rounds none",
        (Source(_MOE, 759, "q_dtype_a = w1.dtype"), Source(_MOE, 3131, "quant_func(")),
    ),
    Unbound(
        "fused_moe", "grouped_experts", "MXFP4 (DeepSeek-V4)",
        "reads two codes a byte, which mtpc widens to 8 bits (pack-groups), and rounds rows to 4",
        (Source(_MOE, 797, "q_dtype_a = dtypes.fp4x2"),),
    ),
    Unbound(
        "fused_moe", "grouped_biased_experts", "MXFP4 (gpt-oss)",
        "reads two codes a byte; rows stay in 16 bits only below a number that the environment "
        "sets, so prompts are rounded otherwise than decode steps",
        (
            Source(_MOE, 768, "AITER_BF16_FP8_MOE_BOUND"),
            Source(_MOE, 792, 'get_gfx() != "gfx950" or M < bf16_fp8_bound'),
        ),
    ),
    Unbound(
        "fused_moe", "experts", "GELU; bounds of gate and up",
        "its GELU is the exact one; other kernels have the bounds, these ignore them",
        (Source(_MOE, 3993, "torch.nn.functional.gelu(gate)"),),
    ),
    Unbound(
        "gemm_a8w8_blockscale", "grouped_linear", "float8 in blocks",
        "takes rows in float8; mtpc::grouped_linear rounds none. Its decorator hides the signature",
        (
            Source("aiter/ops/gemm_op_a8w8.py", 804, "@torch_compile_guard"),
            Source("aiter/ops/gemm_op_a8w8.py", 806, "XQ: Tensor"),
        ),
    ),
    Unbound(
        "gemm_a16w8_blockscale", "grouped_linear", "float8 in blocks, rows in 16 bits",
        "computes what mtpc::grouped_linear does, on codes [N, K]; mtpc's are in tiles of 32 "
        "features. gfx942 has one configuration, of 128 rows, too many for a decode step",
        (
            Source("aiter/ops/triton/gemm/basic/gemm_a16w8_blockscale.py", 27, "prequant"),
            Source(f"{_CONFIGS}/gfx942-GEMM-A16W8_BLOCKSCALE.json", 3, '"BLOCK_SIZE_M": 128'),
            Source(f"{_CONFIGS}/gfx950-GEMM-A16W8_BLOCKSCALE.json", 3, '"BLOCK_SIZE_M": 8'),
        ),
    ),
    Unbound(
        "fused_split_gdr_update, gdr_decode_packed_bf16", "gated_delta_rule", "all",
        "write the state that they read, and mtpc's step keeps the state before its drafts. One "
        "has an order of its own for states, the other one row a request and 8 and 32 heads",
        (
            Source(f"{_OPS}/fused_split_gdr_update.py", 65, "swizzled state, updated in-place"),
            Source(f"{_OPS}/gdr_decode_packed_bf16.py", 11, "NUM_QK_HEADS = 8"),
            Source(f"{_OPS}/gdr_decode_packed_bf16.py", 50, "Decode one token"),
        ),
    ),
    Unbound(
        "mhc_pre, mhc_fused_post_pre", "sinkhorn", "all",
        "join it with the product before it and the sums behind it, which mtpc's step has apart; "
        "their decorators hide the signatures",
        (
            Source(f"{_OPS}/mhc.py", 312, "@torch_compile_guard"),
            Source(f"{_OPS}/mhc.py", 517, "@torch_compile_guard"),
        ),
    ),
    Unbound(
        "deepgemm_fp8_paged_mqa_logits, top_k_per_row_decode", "choose_slots", "all",
        "the scores are of queries and keys in float8; mtpc keeps both in the model's dtype",
        (Source(f"{_OPS}/triton/attention/pa_mqa_logits.py", 464, "dtype = float8"),),
    ),
    Unbound(
        "biased_grouped_topk, topk_softmax", "group_topk, topk", "all",
        "compute scores and their norm, too, which Inductor fuses with what is around them",
        (
            Source(f"{_OPS}/topk.py", 178, "correction_bias"),
            Source(f"{_OPS}/moe_op.py", 34, "need_renorm"),
        ),
    ),
    Unbound(
        "rmsnorm2d_fwd", "rms_norm", "all",
        "its decorator hides the signature; mtpc fuses norms with more",
        (Source("aiter/jit/utils/torch_guard.py", 210, "def wrapper(*args, **kwargs)"),),
    ),
    Unbound(
        "pa_fwd_asm, pa_persistent_fwd", "paged_attention", "all",
        "want pages in another order than mtpc's", (),
    ),
)  # fmt: skip
"""Where Triton's kernels run instead."""
