"""Small ragged calls of the ops that have a Triton kernel, for benchmarks.gpu.ops.

The batches have requests of several lengths, one that is off, and rows of no request. Pages and
rows that must not be read are NaN. Numbers are made on the host, so that every device gets the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtpc.engine.sampling_rows import pack_bits
from mtpc.layout import SCRATCH_SLOT
from mtpc.ops.attention import LARGEST_CODE, quantise_rows
from mtpc.sampling_params import FLOATS, INTS
from mtpc.weights.grouped import GroupForm, Kind, pack_scales, raw_codes
from mtpc.weights.packing import pack

LENGTHS = ((37, 4), (1, 1), (0, 3), (130, 2))
"""Of each request: positions with its rows, and rows; without positions it is off."""
PAGE, SPARE_ROWS, WILD = 16, 2, 2**30
_CODES = tuple(LARGEST_CODE)
HALVES, ALL = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Inputs:
    """Makes arguments of one dtype, reproducibly.

    Attributes:
        dtype: of what is not an index.
        generator: of all numbers.
    """

    dtype: torch.dtype
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        needed = [-(-seq // PAGE) for seq, _ in LENGTHS]
        own = (1 + torch.randperm(sum(needed) + 1, generator=self.generator)).split(
            [*needed, 1]
        )  # The last is nobody's, as page 0 is.
        self.table = torch.full((len(LENGTHS), max(needed) + 1), WILD, dtype=torch.int32)
        self._used = torch.zeros(sum(needed) + 2, PAGE, dtype=torch.bool)
        for row, ((seq, _), pages) in enumerate(zip(LENGTHS, own, strict=False)):
            self.table[row, : len(pages)] = pages
            self._used[pages] = (torch.arange(len(pages) * PAGE) < seq).view(-1, PAGE)
        counts = torch.tensor([count for _, count in LENGTHS])
        self.starts = torch.cat([counts[:1] * 0, counts.cumsum(0)]).int()
        self.seq_lens = torch.tensor([seq for seq, _ in LENGTHS], dtype=torch.int32)
        on = (self.seq_lens > 0).repeat_interleave(counts)
        self._live = torch.cat([on, torch.zeros(SPARE_ROWS, dtype=torch.bool)])

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block table, lengths, first rows."""
        return self.table, self.seq_lens, self.starts

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Above 0, below 1."""
        return (0.01 + 0.98 * torch.rand(shape, generator=self.generator)).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64, from 0."""
        return torch.randint(high, shape, generator=self.generator)

    def rows(self, *shape: int) -> Tensor:
        """Of all requests; NaN in those of none that is on."""
        return _poison(self.normal(len(self._live), *shape), self._live)

    def cache(self, *shape: int) -> Tensor:
        """A pool of pages, NaN where no request has a position."""
        return _poison(self.normal(*self._used.shape, *shape), self._used)

    def coded(self, codes: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
        """A pool of codes, and their scales, NaN where no request has a position."""
        rows = self.normal(*self._used.shape, *shape)
        made, scales = quantise_rows(rows.flatten(0, 1), codes)
        return made.view(rows.shape), _poison(scales.view(rows.shape[:-1]), self._used)

    def distinct(self, count: int, high: int, rows: int) -> Tensor:
        """`count` different numbers below `high` in each row."""
        return torch.rand(rows, high, generator=self.generator).argsort(1)[:, :count]


def _poison(numbers: Tensor, keep: Tensor) -> Tensor:
    numbers[~keep] = torch.nan
    return numbers


Arguments = tuple[Any, ...]
Make = Callable[[Inputs], Iterator[Arguments]]


def _paged_attention(new: Inputs) -> Iterator[Arguments]:
    """Grouped heads as dense models have them; then unequal dims and every option."""
    cache = new.cache(2, 128)
    yield new.rows(8, 128), cache, new.cache(2, 128), *new.indices, 0.09
    uneven = new.rows(6, 96), new.cache(3, 96), new.cache(3, 64)
    yield *uneven, *new.indices, 0.1, 20, 30.0, new.normal(6)
    for codes in _CODES:
        pools = [new.coded(codes, 3, width) for width in (96, 64)]
        (keys, k_scale), (values, v_scale) = pools
        rows = (new.rows(6, 96), keys, values, *new.indices)
        yield *rows, 0.1, 0, 0.0, None, k_scale, v_scale


def _latent_attention(new: Inputs) -> Iterator[Arguments]:
    yield new.rows(16, 576), new.cache(576), *new.indices, 0.05, 512


def _choose_slots(new: Inputs) -> Iterator[Arguments]:
    """Weights above 0: the best scores are then no ties of zeros, of which any may be chosen."""
    query = new.rows(8, 64)
    yield query, new.uniform(len(query), 8), new.cache(64), *new.indices, 8


def _slots(new: Inputs, pages: int) -> Tensor:
    slots = 16 + torch.randperm(PAGE * (pages - 1), generator=new.generator)[:7]
    slots[2] = slots[5] = -1
    return slots


def _no_codes(dtype: torch.dtype, *shape: int) -> Tensor:
    """A pool of pages of zeros."""
    return torch.zeros(4, PAGE, *shape, dtype=dtype)


def _write_cache(new: Inputs) -> Iterator[Arguments]:
    """Then codes of rows of many sizes, one of zeros, one of what is no number."""
    yield new.normal(4, PAGE, 2, 64), new.normal(7, 2, 64), _slots(new, 4), None
    rows = new.normal(7, 11, 80) * torch.logspace(-3, 3, 7).to(new.dtype)[:, None, None]
    rows[0, 1], rows[1, 2, 3] = 0, torch.nan
    for codes in _CODES:
        yield _no_codes(codes, 11, 80), rows, _slots(new, 4), torch.zeros(4, PAGE, 11)


def _rotate_and_write(new: Inputs) -> Iterator[Arguments]:
    """Half of each head is turned, and values have a width of their own."""
    rows = (new.normal(7, 6, 64), new.normal(7, 2, 64), new.normal(7, 2, 48))
    angles = (new.normal(7, 32).cos(), new.normal(7, 32).sin())
    caches = (new.normal(4, PAGE, 2, 64), new.normal(4, PAGE, 2, 48))
    yield *rows, *angles, *caches, _slots(new, 4), None, None
    for codes in _CODES:
        coded = (_no_codes(codes, 2, 64), _no_codes(codes, 2, 48))
        scales = (torch.zeros(4, PAGE, 2), torch.zeros(4, PAGE, 2))
        yield *rows, *angles, *coded, _slots(new, 4), *scales


def _rotate(new: Inputs) -> Iterator[Arguments]:
    yield new.normal(7, 6, 64), new.normal(7, 32).cos(), new.normal(7, 32).sin()


def _rms_norm(new: Inputs) -> Iterator[Arguments]:
    """Of hidden states and of heads; by a weight, and by 1 + weight."""
    yield new.normal(7, 2048), new.normal(2048), 1e-5
    yield new.normal(7, 4, 80), new.normal(80), 1e-5, True


def _add_rms_norm(new: Inputs) -> Iterator[Arguments]:
    yield new.normal(7, 2048), new.normal(7, 2048), new.normal(2048), 1e-5


def _draft_entry(new: Inputs) -> Iterator[Arguments]:
    halves = [(new.normal(7, 2048), new.normal(2048)) for _ in range(2)]
    yield *halves[0], *halves[1], 1e-5


def _silu_and_mul(new: Inputs) -> Iterator[Arguments]:
    yield (new.normal(7, 2 * 1500),)


def _skinny_linear(new: Inputs) -> Iterator[Arguments]:
    """As many features as no block holds, and more inputs than one step of a program's loop."""
    for rows in (1, 3):
        yield new.normal(rows, 1160), new.normal(37, 1160) / 34, new.normal(37)
        yield new.normal(rows, 1160), new.normal(37, 1160) / 34, None


def _batch_invariant_linear(new: Inputs) -> Iterator[Arguments]:
    """By more rows than a tile has; with inputs in two parts; of a matrix for each part."""
    yield new.normal(67, 1160), new.normal(37, 1160) / 34, new.normal(37)
    yield new.normal(3, 2048), new.normal(16, 2048) / 45, None
    yield new.normal(3, 4, 72).transpose(0, 1), new.normal(4, 40, 72) / 8, None


def _row_sum(new: Inputs) -> Iterator[Arguments]:
    for width in (8, 1160):
        yield (new.normal(7, width) / width**0.5,)


def _norm_linear(new: Inputs) -> Iterator[Arguments]:
    """By a weight, with a bias; by 1 + weight; gated."""
    for rows in (1, 4):
        x, added, norm = new.normal(rows, 1160), new.normal(rows, 1160), new.normal(1160)
        weight = new.normal(38, 1160) / 34
        yield x, added, norm, 1e-5, False, weight, new.normal(38), False
        yield x, added, norm, 1e-5, True, weight, None, False
        yield x, added, norm, 1e-5, False, weight, None, True


def _experts(new: Inputs) -> Iterator[Arguments]:
    for tokens, limit in ((1, ()), (5, ()), (5, (1.0, True))):
        weights = (new.normal(8, 256, 256) / 16, new.normal(8, 256, 128) / 11)
        choices = (new.distinct(2, 8, tokens), new.uniform(tokens, 2))
        yield new.normal(tokens, 256), *weights, *choices, *limit


def _relu2_experts(new: Inputs) -> Iterator[Arguments]:
    """One row, a few, and more of one expert than a tile has; choices of no expert."""
    for tokens in (1, 5, 40):
        weights = (new.normal(8, 128, 256) / 16, new.normal(8, 256, 128) / 24)
        ids = new.distinct(2, 8, tokens)
        ids[3:, 0] = 8
        yield new.normal(tokens, 256), *weights, ids, new.uniform(tokens, 2)


def _gated_delta_rule(new: Inputs) -> Iterator[Arguments]:
    """Requests that stand where the last step left them, that replay drafts, that begin; then so
    many rows that they go in chunks."""
    key_heads, heads, dim, width, drafts = 2, 4, 64, 4, 3
    channels = (2 * key_heads + heads) * dim
    slots = torch.tensor([2, 4, 0, 1])
    weights = (new.normal(channels, width) / 2, new.normal(heads), new.normal(heads))
    recurrent = torch.randn(5, heads, dim, dim, generator=new.generator) / 8
    history = new.normal(5, drafts + width - 1, channels + 2 * heads)
    standing = torch.zeros(5, dtype=torch.int32)
    standing[2], standing[1] = 33, 126  # Of 33 and 128 that were committed.
    certain = torch.ones(len(slots), dtype=torch.int32)
    state = (recurrent, history, standing)
    yield new.rows(channels + 2 * heads), *weights, *state, slots, *new.indices[1:], certain
    standing = standing.clone()
    standing[4] = 28  # Of 30 that were committed.
    state, slots = (recurrent.clone(), history.clone(), standing), torch.tensor([3, 4])
    lens, counts = torch.tensor([70, 120]).int(), torch.tensor([70, 90]).int()
    starts = torch.tensor([0, 70, 160]).int()
    prompts = new.normal(160, channels + 2 * heads)
    yield prompts, *weights, *state, slots, lens, starts, counts


def _mamba2_scan(new: Inputs) -> Iterator[Arguments]:
    """Of rows as `_gated_delta_rule` has; a bias of the convolution and groups, or neither."""
    heads, dim, state_dim, width, drafts = 4, 64, 128, 4, 3
    for groups in (2, 1):
        channels = heads * dim + 2 * groups * state_dim
        bias = new.normal(channels) if groups > 1 else None
        weights = (new.normal(channels, width) / 4, bias, *(new.normal(heads) for _ in range(3)))
        recurrent = torch.randn(5, heads, state_dim, dim, generator=new.generator) / 8
        history = new.normal(5, drafts + width - 1, channels + heads)
        standing = torch.tensor([0, 126, 33, 0, 0]).int()
        state = (recurrent, history, standing, torch.tensor([2, 4, 0, 1]))
        certain = torch.ones(len(LENGTHS), dtype=torch.int32)
        rows = new.rows(channels + heads)
        yield rows, *weights, *state, *new.indices[1:], certain, groups
        standing = torch.tensor([0, 0, 0, 0, 28]).int()  # Of 30 that were committed.
        state = (recurrent.clone(), history.clone(), standing, torch.tensor([3, 4]))
        lens, counts = torch.tensor([70, 120]).int(), torch.tensor([70, 90]).int()
        prompts, starts = new.normal(160, channels + heads), torch.tensor([0, 70, 160]).int()
        yield prompts, *weights, *state, lens, starts, counts, groups


def _slot_attention(new: Inputs) -> Iterator[Arguments]:
    """Rings that are full, half full and empty; entries that are chosen, all there are, and none.
    What nobody sees is NaN."""
    tokens, places, count, dim, window = 6, 20, 40, 64, 16
    sees_ring = torch.rand(tokens, places, generator=new.generator) < 0.5
    sees_ring[3:] = False
    at = torch.arange(tokens)
    sees_fresh = (at[:, None] >= at[None]) & (at[:, None] // 3 == at[None] // 3)
    slots, counts = 1 + at // 3, torch.tensor([0, 9, 33, 40, 1, 5])
    query, fresh, ring, entries = (
        new.normal(*shape, dim) for shape in ((tokens, 8), (tokens,), (3, places), (3, count))
    )
    ring[0], entries[0] = torch.nan, torch.nan
    rows = (query, fresh, ring, slots, sees_ring, sees_fresh, new.normal(8), 0.125, window)
    chosen = torch.full((tokens, count), -1, dtype=torch.int32)
    for row, seen in enumerate(counts.tolist()):
        chosen[row, :seen] = new.distinct(seen, count, 1)[0].sort().values + slots[row] * count
    yield rows
    yield (*rows, entries, counts, None)
    yield (*rows, entries, counts, chosen)


def _grouped(new: Inputs, kind: Kind, group: int, *shape: int, zeros: bool = False) -> Arguments:
    """Codes over their whole range, scales that make the weight's numbers small, zero points."""
    form = GroupForm(kind, group, has_zeros=zeros)
    top = max(2 * form.default_zero, 1)
    if kind == "float8":
        codes = torch.randn(shape, generator=new.generator).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, top, shape, generator=new.generator, dtype=torch.uint8)
    groups = (*shape[:-1], shape[-1] // group)
    scales = (torch.rand(groups, generator=new.generator) + 0.5) / (top * shape[-1] ** 0.5)
    points = torch.randint(0, top, groups, generator=new.generator, dtype=torch.uint8)
    return (
        pack(raw_codes(codes, kind)).view(codes.dtype),
        pack_scales(scales.half()),
        pack_scales(points) if zeros else None,
    )


def _grouped_linear(new: Inputs) -> Iterator[Arguments]:
    for kind, group, zeros in _GROUPED_FORMS:
        parts = _grouped(new, kind, group, 90, 256, zeros=zeros)
        yield new.normal(5, 256), *parts, 90, new.normal(90)
    yield new.normal(2, 3, 256), *parts, 90


def _grouped_gated_linear(new: Inputs) -> Iterator[Arguments]:
    yield new.normal(5, 256), *_grouped(new, "int4", 32, 128, 256), 128


def _grouped_experts(new: Inputs) -> Iterator[Arguments]:
    for kind, group, zeros in _GROUPED_FORMS:
        sizes = ((8, 256, 256), (8, 256, 128))
        parts = [
            part
            for size in sizes
            for part in _grouped(new, kind, min(group, size[-1]), *size, zeros=zeros)
        ]
        yield new.normal(5, 256), *parts, new.distinct(2, 8, 5), new.uniform(5, 2)
    yield new.normal(1, 256), *parts, new.distinct(2, 8, 1), new.uniform(1, 2), 1.0, True


def _grouped_biased_experts(new: Inputs) -> Iterator[Arguments]:
    forms: tuple[tuple[Kind, int], ...] = (("int4", 32), ("int8", 32), ("float8", 128))
    for kind, group in forms:
        wide = _grouped(new, kind, group, 8, 256, 256)[:2]
        narrow = _grouped(new, kind, group, 8, 256, 128)[:2]
        weights = (*wide, new.normal(8, 256), *narrow, new.normal(8, 256))
        yield new.normal(5, 256), *weights, new.distinct(2, 8, 5), new.uniform(5, 2), 1.5, 1.7


_GROUPED_FORMS: tuple[tuple[Kind, int, bool], ...] = (
    ("int4", 32, False), ("int4", 128, True), ("int8", 64, False), ("int8", 256, False),
    ("float8", 128, False),
)  # fmt: skip
_VOCAB, _SLOTS = 1500, 7
_ASKED: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.001, "masked": 1},
    {"temperature": 1.2, "penalised": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
)
_NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "logprobs": -1}


def _parameters(new: Inputs, **more: float) -> tuple[Tensor, Tensor]:
    """Of every slot; what the slots ask for differs."""
    asked = [_NEUTRAL | _ASKED[slot % len(_ASKED)] | more for slot in range(_SLOTS)]
    floats = torch.tensor([[float(a.get(n, 0)) for n in FLOATS] for a in asked]).double()
    ints = torch.tensor([[int(a.get(n, 0)) for n in INTS] for a in asked])
    ints[:, INTS.index("seed")] = new.integers(2**62, _SLOTS)
    return floats, ints


def _sample(new: Inputs) -> Iterator[Arguments]:
    """Two rows each of requests that ask for what the slots hold, one of them off."""
    slots = torch.tensor([4, SCRATCH_SLOT, 1, 6, 3])
    rows = 2 * len(slots)
    words = [pack_bits(new.distinct(700, _VOCAB, 1)[0].tolist(), _VOCAB) for _ in range(2)]
    bias_ids = new.distinct(4, _VOCAB, _SLOTS)
    bias_ids[:, 3] = -1
    yield (
        3 * new.normal(rows, _VOCAB), new.integers(_VOCAB, rows), new.integers(1000, rows),
        slots, *_parameters(new), bias_ids, new.normal(_SLOTS, 4).double(),
        *(word.repeat(_SLOTS, 1) for word in words), new.integers(3, _SLOTS, _VOCAB).int(),
        new.distinct(2, _VOCAB, _SLOTS),
    )  # fmt: skip


def _emitted(new: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Of four requests with up to three tokens; the second is off."""
    slots = torch.tensor([3, SCRATCH_SLOT, 5, 1])
    return new.integers(_VOCAB, 4, 3), torch.tensor([3, 2, 1, 0], dtype=torch.int32), slots


def _count_tokens(new: Inputs) -> Iterator[Arguments]:
    yield new.integers(3, _SLOTS, _VOCAB).int(), *_emitted(new)


def _write_logprobs(new: Inputs) -> Iterator[Arguments]:
    reports = (
        torch.full((4, 3), 7.0).double(),
        torch.full((4, 3, 5), 7),
        torch.full((4, 3, 5), 7.0).double(),
    )
    # Different on every token: of equal ones either may be named second.
    logits = torch.stack([new.distinct(_VOCAB, _VOCAB, 1)[0] for _ in range(12)])
    yield *reports, (logits / 64).to(new.dtype), *_emitted(new), _parameters(new, logprobs=5)[1]


def _accept(new: Inputs) -> Iterator[Arguments]:
    """Of four requests with three drafts each; the second is off, the third has a prompt's rows."""
    slots = torch.tensor([3, SCRATCH_SLOT, 5, 1])
    finite = torch.arange(16) % 7 != 5
    limits = (new.integers(9, _SLOTS).int() + 1, new.integers(3, _SLOTS, 2), slots)
    active = slots != SCRATCH_SLOT
    lengths = (torch.arange(0, 17, 4).int(), (new.integers(40, 4) * active).int(), active)
    # Of three tokens, so that drafts are often right, and a stop token is often met.
    reports = (torch.full((4, 5), 7), *(torch.full((4,), 7).int() for _ in range(3)))
    choices = (*reports, new.integers(3, 16), finite, new.integers(3, 16))
    yield *choices, *lengths, *limits
    third = torch.arange(4) == 2
    yield *choices, *lengths, *limits, third, third
    yield *choices, *lengths, *limits, third, third & False


def _topk(new: Inputs) -> Iterator[Arguments]:
    """Rows with ties, and one with what is no number; groups of a router's scores."""
    x = (4 * new.normal(7, 250)).round() / 4
    x[3, 40::60] = torch.nan
    yield x, 8
    yield new.uniform(5, 8, 32), 2


def _group_topk(new: Inputs) -> Iterator[Arguments]:
    """Scores that differ, and scores of which many are equal; one is no number."""
    yield new.uniform(5, 256), 8, 8, 4
    x = (4 * new.normal(7, 160)).round() / 4
    x[3, 40] = torch.nan
    yield x, 6, 8, 3


def _row_max(new: Inputs) -> Iterator[Arguments]:
    """Rows with ties, and one with what is no number; part of a wider row."""
    x = (4 * new.normal(5, 20_000)).round() / 4
    x[3, 9_000::5_000] = torch.nan
    yield (x,)
    yield (new.normal(3, 9_000)[:, 500:],)


def _sinkhorn(new: Inputs) -> Iterator[Arguments]:
    yield new.normal(5, 4, 4), 20, 1e-6


CALLS: dict[str, tuple[Make, tuple[torch.dtype, ...]]] = {
    "write_cache": (_write_cache, HALVES),
    "rotate_and_write": (_rotate_and_write, HALVES),
    "rotate": (_rotate, HALVES),
    "rms_norm": (_rms_norm, HALVES),
    "add_rms_norm": (_add_rms_norm, HALVES),
    "draft_entry": (_draft_entry, HALVES),
    "silu_and_mul": (_silu_and_mul, HALVES),
    "skinny_linear": (_skinny_linear, HALVES),
    "norm_linear": (_norm_linear, HALVES),
    "batch_invariant_linear": (_batch_invariant_linear, ALL),
    "row_sum": (_row_sum, ALL),
    "paged_attention": (_paged_attention, ALL),
    "latent_attention": (_latent_attention, ALL),
    "choose_slots": (_choose_slots, ALL),
    "experts": (_experts, ALL),
    "relu2_experts": (_relu2_experts, ALL),
    "gated_delta_rule": (_gated_delta_rule, ALL),
    "mamba2_scan": (_mamba2_scan, ALL),
    "grouped_linear": (_grouped_linear, ALL),
    "grouped_gated_linear": (_grouped_gated_linear, HALVES),
    # In float32 one activation that is rounded the other way is more than the tolerance.
    "grouped_experts": (_grouped_experts, HALVES),
    "grouped_biased_experts": (_grouped_biased_experts, HALVES),
    "sample": (_sample, ALL),
    "count_tokens": (_count_tokens, (torch.int32,)),
    "write_logprobs": (_write_logprobs, (torch.float32,)),
    "accept": (_accept, (torch.int64,)),
    "topk": (_topk, ALL),
    "group_topk": (_group_topk, (torch.float32,)),
    "row_max": (_row_max, ALL),
    "sinkhorn": (_sinkhorn, (torch.float32,)),
    "slot_attention": (_slot_attention, ALL),
}
"""By op: its calls, and the dtypes to call it with (the first one in every configuration)."""
