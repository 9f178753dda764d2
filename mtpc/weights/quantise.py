"""Making grouped weights from plain ones: schemes, and the scales of least squared error.

A scheme names the form of every linear layer and expert. What stays plain is decided by a module's
name, in checkpoints and in transformers' modules alike (`stays_plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mtpc.weights.grouped import GroupedWeight, GroupForm, Kind, Runs
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, take_rows
from mtpc.weights.rounding import (
    Grid,
    best_scales,
    feedback,
    inverse_of,
    round_with_feedback,
)


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised.

    Attributes:
        kind: of the codes; all have symmetric scales.
        group: inputs that share a scale; None for one scale a row.
        block: ggml's name of the type, where weights are stored as GGUF's blocks: their scales are
            float16.
    """

    kind: Kind
    group: int | None = None
    block: str | None = None

    def spec(self, inputs: int, dtype: torch.dtype) -> GroupSpec | None:
        """The spec of a weight with so many inputs; None if this scheme does not fit it.

        Scales of rows are float32; those of groups have the weight's dtype, but for blocks.
        """
        form = GroupForm(self.kind, self.group or inputs)
        if form.misfit(inputs) is not None:
            return None
        if self.block is not None:
            return GroupSpec(form, "float16")
        is_wide = self.group is None or dtype not in (torch.bfloat16, torch.float16)
        return GroupSpec(form, "float32" if is_wide else str(dtype).removeprefix("torch."))


SCHEMES: Mapping[str, Scheme] = {
    "iq4_nl": Scheme("iq4", 32, "IQ4_NL"),
    "q5_0": Scheme("int5", 32, "Q5_0"),
    "q8_0": Scheme("int8", 32, "Q8_0"),
    "int4-g32": Scheme("int4", 32),
    "int4-g128": Scheme("int4", 128),
    "int8-g128": Scheme("int8", 128),
    "int8": Scheme("int8"),
    "fp8": Scheme("float8"),
}
"""By the names of `mtpc.config.SCHEMES`."""

TABLES = ("embed_tokens", "embed")
"""Last parts of names of embeddings, of which rows are read, not all."""
PLAIN = (
    *TABLES,
    "gate",
    "router",
    "shared_expert_gate",  # Small, and an expert too many or too few costs more than the bytes.
    "kv_b_proj",
    "k_b_proj",
    "v_b_proj",  # Absorbed into the attention of latent caches, by parts.
    "eh_proj",
    "fc",
    "input_proj",
    "projection",  # Joints of MTP layers: other servers read them as they are.
)
"""Last parts of names of modules whose weights are never quantised."""
HEADS = ("lm_head", "head", "output")
"""Last parts of names of output heads, those of MTP layers included."""
_OTHERS = ("visual", "vision_model", "vision_tower")
"""Parts of names of modules that mtpc does not run."""

_GROUPS, _CHUNK, _CHUNK_ON_GPU = 512, 1 << 16, 1 << 22
"""Groups whose scales are searched for at once, and the most weights: on a processor temporaries
stay in its caches."""
_FED_BACK = 1 << 12
"""Weights that are rounded at once with error feedback."""
_MOST_THREADS = 8


def stays_plain(name: str) -> bool:
    """Whether every scheme leaves a weight, "X.weight", as it is."""
    *outer, last = name.removesuffix(".weight").split(".")
    return last in PLAIN or not {*outer, last}.isdisjoint(_OTHERS)


def scheme_spec(scheme: str, weight: Tensor) -> GroupSpec | None:
    """How a scheme stores a plain weight; None if it leaves it as it is.

    A scheme changes matrices and stacks of them only.

    Args:
        scheme: a name of `SCHEMES`.
        weight: its shape and dtype are read.
    """
    is_matrix = weight.dim() in (2, 3) and weight.is_floating_point()
    return SCHEMES[scheme].spec(weight.shape[-1], weight.dtype) if is_matrix else None


def spec_by_scheme(scheme: str | None, name: str, weight: Tensor) -> GroupSpec | None:
    """`scheme_spec`, but None if there is no scheme or the weight, "X.weight", stays plain."""
    return None if not scheme or stays_plain(name) else scheme_spec(scheme, weight)


def is_head(name: str) -> bool:
    """Whether a weight, "X.weight", is an output head."""
    return name.removesuffix(".weight").rpartition(".")[2] in HEADS


def quantise(weight: Tensor, spec: GroupSpec, moments: Tensor | None = None) -> GroupedWeight:
    """Round a weight to codes; each scale is the one of least squared error among those tried.

    With `by_largest` integers have the usual scale: the largest magnitude over the largest code.

    Args:
        weight: floating point [..., N, K], finite.
        spec: of a scheme: no zero points.
        moments: second moments of blocks of the inputs, float32 [K / B, B, B]. They say how much
            the error of each weight counts, and how weights of later inputs make up for it.

    Returns:
        On the weight's device. A group of zeros has scale 0.
    """
    form, flat = spec.form, weight.detach().reshape(-1, weight.shape[-1])
    groups, grid = weight.shape[-1] // form.group, Grid(form.kind)
    code_type = torch.float8_e4m3fn if form.kind == "float8" else torch.uint8
    codes = torch.empty(flat.shape, dtype=code_type, device=weight.device)
    dtype = getattr(torch, spec.scales)
    scales = torch.empty((len(flat), groups), dtype=dtype, device=weight.device)
    step = _rows_at_once(flat, groups)
    importance = None if moments is None else _importance(moments, form.group, step)

    def fill(start: int) -> None:
        rows = slice(start, start + step)
        part = flat[rows].float().view(-1, form.group).t().contiguous()
        of_each = None if importance is None else importance[:, : part.shape[1]]
        best = best_scales(part, of_each, grid, dtype, spec.by_largest)
        scales[rows] = best.view(-1, groups)
        if moments is None:
            numbers = grid.nearest(part, inverse_of(best.float()))
            codes[rows] = grid.codes(numbers).t().reshape(-1, flat.shape[1])

    _in_parts(fill, range(0, len(flat), step), weight.is_cuda)
    if moments is not None:
        upper = feedback(moments)

        def feed_back(start: int) -> None:
            rows = slice(start, start + many)
            numbers = round_with_feedback(flat[rows].float(), scales[rows], grid, upper)
            codes[rows] = grid.codes(numbers).t()

        many = max(_FED_BACK // len(upper), 64)
        _in_parts(feed_back, range(0, len(flat), many), weight.is_cuda)
    shape = (*weight.shape[:-1], groups)
    return GroupedWeight(form, codes.view(weight.shape), scales.view(shape))


def _rows_at_once(flat: Tensor, groups: int) -> int:
    """Rows whose scales are searched for at once."""
    inputs = max(flat.shape[1], 1)
    if flat.is_cuda:
        return max(1, _CHUNK_ON_GPU // inputs)
    return max(1, min(_GROUPS // groups, _CHUNK // inputs))


def _importance(moments: Tensor, group: int, rows: int) -> Tensor:
    """How much an error counts, [group, M], for the groups of so many rows."""
    return moments.diagonal(dim1=1, dim2=2).reshape(-1, group).t().repeat(1, rows)


def _in_parts(fill: Callable[[int], None], starts: Sequence[int], is_on_gpu: bool) -> None:
    """Call a function for all parts of a matrix, by threads of its own.

    PyTorch's threads would wait for each other in each of hundreds of short operations. So each of
    these threads has no other beside it.
    """
    count = torch.get_num_threads()
    if is_on_gpu or count == 1:
        for start in starts:
            fill(start)
        return
    alone = partial(torch.set_num_threads, 1)
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, count), initializer=alone) as threads:
            list(threads.map(fill, starts))
    finally:
        torch.set_num_threads(count)  # Threads that are started from now on have as many again.


def quantised_rows(weight: Tensor, spec: GroupSpec) -> GroupedRows:
    """The rows of `quantise`, rounded on demand. Of slices, only what their scales need is read."""
    rows = GroupedRows(tuple(weight.shape), lambda start, stop: quantise(weight[start:stop], spec))

    def take(runs: Runs, dim: int) -> GroupedRows:
        if dim == -1 and spec.cut(runs) != spec:
            return take_rows(rows, runs, dim)
        parts = [weight.narrow(dim, start, stop - start) for start, stop in runs]
        return quantised_rows(parts[0] if len(parts) == 1 else torch.cat(parts, dim), spec)

    return replace(rows, take=take)
