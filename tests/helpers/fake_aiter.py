"""A fake distribution `amd-aiter`: packages whose functions have the published signatures.

They compute with mtpc's references what aiter's sources (commit e404860) say that aiter computes,
and refuse what aiter would read wrongly. None of the published functions has a decorator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

UNIFIED = """
import torch

def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
    window_size, block_table, softcap, q_descale, k_descale, v_descale,
    q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None,
    shuffled_kv_cache=False, skip_reduce=False,
):
    assert causal and q.stride(2) == 1
    page = k.shape[1]
    tile = min(64, 1 << (page - 1).bit_length())
    assert tile <= page or tile % page == 0, "TILE_SIZE needs to be divisible by block_size"
    assert (q_descale, k_descale, v_descale) == (None, None, None)
    assert max_seqlen_k == block_table.shape[1] * k.shape[1]
    left, right = window_size
    assert (left, right) == (-1, -1) or right == 0
    result = torch.ops.mtpc.paged_attention(
        q, k, v, block_table, seqused_k, cu_seqlens_q, softmax_scale, left + 1, softcap, sinks
    )
    # Rows of no request and of requests without context are left open.
    open_rows = torch.ones(q.shape[0], dtype=torch.bool)
    for r in range(len(seqused_k)):
        rows = int(cu_seqlens_q[r + 1] - cu_seqlens_q[r])
        assert rows == 1 if max_seqlen_q == 1 else rows <= max_seqlen_q
        if seqused_k[r] > 0:
            open_rows[cu_seqlens_q[r]:cu_seqlens_q[r + 1]] = False
    out.copy_(result)
    out[open_rows] = float("nan")
"""

MLA = """
import torch

ARCH = "gfx950"
splits, prompts = [], []
# Assembly kernels for bfloat16 (hsa/*/mla/mla_asm.csv): heads and rows; with 0 rows, any number.
EVERYWHERE = [(128, 0), (16, 1), (16, 4), (16, 8), (32, 0), (64, 0), (8, 1)]
KERNELS = {"gfx942": EVERYWHERE, "gfx950": [*EVERYWHERE, (64, 1), (8, 2), (8, 2)]}
PROMPTS = (16, 128)

def kernels_of(arch, heads, rows):
    # Those among which the call is dispatched (csrc/py_itfs_cu/asm_mla.cu, 865 to 973).
    wanted = rows
    if heads in (32, 128):
        wanted = 0
    elif heads == 16:
        wanted = 1 if rows == 1 else 4 if rows <= 4 else 8
    elif heads == 64:
        wanted = 1 if rows == 1 else 0
    return [found for found in KERNELS[arch] if found == (heads, wanted)]

def attend(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, last, page_size, sm_scale):
    assert kv_buffer.shape[1:] == (page_size, 1, 576) and q.is_contiguous()
    assert kv_indices.dtype == kv_indptr.dtype == last.dtype == torch.int32
    # Assembly may fetch ahead of the last list: aiter's own test has so many rows there.
    ahead = kv_indices[kv_indptr[-1]:][:10000]
    assert len(ahead) == 10000 and ((ahead >= 0) & (ahead < len(kv_buffer))).all()
    for r in range(len(last)):
        rows = slice(int(qo_indptr[r]), int(qo_indptr[r + 1]))
        pages = kv_indices[kv_indptr[r]:kv_indptr[r + 1]]
        assert len(pages) > 0, "an empty list of pages"
        length = (len(pages) - 1) * page_size + last[r]
        starts = torch.tensor([0, rows.stop - rows.start])
        o[rows] = torch.ops.mtpc.latent_attention(
            q[rows], kv_buffer[:, :, 0], pages[None], length[None], starts, sm_scale, 512
        )

def mla_prefill_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
    sm_scale=None, logit_cap=0.0, num_kv_splits=None,
):
    assert q.shape[1] in PROMPTS
    # Rows behind the grid are left open.
    assert max_seqlen_q >= int((qo_indptr[1:] - qo_indptr[:-1]).max())
    prompts.append(len(q))
    o.fill_(float("nan"))
    attend(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, 1, sm_scale)

def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
    page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None,
    num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None,
    reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None,
    kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False,
    g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True,
):
    assert nhead_kv == 1
    (kernel,) = kernels_of(ARCH, q.shape[1], max_seqlen_q)
    assert max_seqlen_q <= (kernel[1] or max_seqlen_q)
    assert (qo_indptr[1:] - qo_indptr[:-1]).tolist() == [max_seqlen_q] * (len(qo_indptr) - 1)
    assert None not in (num_kv_splits, num_kv_splits_indptr), "aiter holds a tensor, for a while"
    assert num_kv_splits_indptr.dtype == torch.int32
    assert num_kv_splits_indptr.tolist() == [num_kv_splits * r for r in range(len(qo_indptr))]
    splits.append(num_kv_splits)
    attend(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, page_size, sm_scale
    )
"""

ENUMS = """
from enum import Enum

class ActivationType(Enum):
    No, Silu, Gelu, Swiglu, Situv2 = -1, 0, 1, 2, 3

class QuantType(Enum):
    No, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128 = range(6)
"""

SHUFFLE = """
def shuffle_weight(
    x, layout=(16, 16), use_int4=False, is_guinterleave=False, gate_up=False, pad_k_to=0,
):
    assert layout == (16, 16) and not (use_int4 or is_guinterleave or gate_up or pad_k_to)
    rows, inputs = x.shape[-2:]
    assert rows % 16 == 0 and inputs % 32 == 0
    # Of 16 rows, the pieces of 16 bytes: the first ones of all 16, then the second ones.
    piece = 16 // x.element_size()
    blocks = x.view(-1, rows // 16, 16, inputs // 32, 32 // piece, piece)
    made = blocks.permute(0, 1, 3, 4, 2, 5).contiguous().view(*x.shape)
    made.is_shuffled = True
    return made
"""

FUSED_MOE = """
import torch

from aiter import ActivationType, QuantType

shapes = []

def as_stored(w):
    rows, inputs = w.shape[-2:]
    piece = 16 // w.element_size()
    blocks = w.view(-1, rows // 16, inputs // 32, 32 // piece, 16, piece)
    return blocks.permute(0, 1, 4, 2, 3, 5).reshape(w.shape)

def sorted_choices(ids, weights, mask):
    # As moe_sorting: one place for each expert in each row, and local ids of what the mask keeps.
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32, (ids.dtype, weights.dtype)
    assert mask.dtype == torch.int32 and ids.shape == weights.shape
    assert ((ids >= 0) & (ids < mask.numel())).all(), "written out of the table's bounds"
    table = torch.zeros(ids.shape[0], mask.numel())
    taken = torch.zeros(table.shape, dtype=torch.bool)
    for choice in range(ids.shape[1]):  # A later choice of the same expert takes the place.
        place = ids[:, choice : choice + 1].long()
        table.scatter_(1, place, weights[:, choice : choice + 1])
        taken.scatter_(1, place, True)
    return table[:, mask.bool()], taken[:, mask.bool()]

def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None,
    activation=ActivationType.Silu, quant_type=QuantType.No, doweight_stage1=False, w1_scale=None,
    w2_scale=None, a1_scale=None, a2_scale=None, block_size_M=None, num_local_tokens=None,
    moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, intermediate_pad=0, bias1=None,
    bias2=None, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, gate_mode="separated",
    shared_w1=None, shared_w2=None, shared_w1_scale=None, shared_w2_scale=None,
    shared_expert_id=-1, stage2_scatter=None,
):
    assert (activation, quant_type) == (ActivationType.Silu, QuantType.No) and not doweight_stage1
    assert hidden_states.dtype in (torch.bfloat16, torch.float16) and hidden_states.is_contiguous()
    assert w1.is_contiguous() and w2.is_contiguous() and topk_ids.is_contiguous()
    assert w1.is_shuffled and w2.is_shuffled, "another module would be built"
    assert w2.shape[1] % 128 == 0 and w2.shape[2] % 128 == 0
    assert expert_mask[-1] == 0 and (topk_ids[:, -1] == len(expert_mask) - 1).all(), "the last"
    shapes.append(tuple(topk_ids.shape))
    table, taken = sorted_choices(topk_ids, topk_weight, expert_mask)
    assert table.shape[1] == w1.shape[0], "the mask keeps as many experts as there are"
    chosen = torch.where(taken, torch.arange(w1.shape[0]), -1)
    return torch.ops.mtpc.experts(hidden_states, as_stored(w1), as_stored(w2), chosen, table)
"""

ALL = {
    "aiter/ops/triton/unified_attention.py": UNIFIED,
    "aiter/mla.py": MLA,
    "aiter/__init__.py": ENUMS,
    "aiter/ops/shuffle.py": SHUFFLE,
    "aiter/fused_moe.py": FUSED_MOE,
}


def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(files, distribution): packages on sys.path, gone after the test."""

    def make(files: dict[str, str], distribution: str = "amd_aiter") -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
            path.write_text(text)
        info = tmp_path / f"{distribution}-0.1.5.dist-info"
        info.mkdir()
        name = distribution.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.5\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for name in [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]:
        del sys.modules[name]
