"""Making grouped weights from plain ones: schemes, and the scales of least squared error.

A scheme names the form of every linear layer and expert. What stays plain is decided by a module's
name, in checkpoints and in transformers' modules alike (`stays_plain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtpc.weights.grouped import GroupedWeight, GroupForm, Kind, Runs
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, take_rows


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised.

    Attributes:
        kind: of the codes; all have symmetric scales.
        group: inputs that share a scale; None for one scale a row.
    """

    kind: Kind
    group: int | None = None

    def spec(self, inputs: int, dtype: torch.dtype) -> GroupSpec | None:
        """The spec of a weight with so many inputs; None if this scheme does not fit it.

        Scales of groups have the weight's dtype, scales of rows are float32.
        """
        form = GroupForm(self.kind, self.group or inputs)
        if form.misfit(inputs) is not None:
            return None
        is_wide = self.group is None or dtype not in (torch.bfloat16, torch.float16)
        return GroupSpec(form, "float32" if is_wide else str(dtype).removeprefix("torch."))


SCHEMES: Mapping[str, Scheme] = {
    "int4-g32": Scheme("int4", 32),
    "int4-g128": Scheme("int4", 128),
    "int8": Scheme("int8"),
    "fp8": Scheme("float8"),
}
"""By the names of `mtpc.option_checks.SCHEMES`."""

PLAIN = (
    "embed_tokens",  # Rows of it are read, not all of it.
    "embed",
    "gate",
    "router",
    "shared_expert_gate",  # Small, and an expert too many or too few costs more than the bytes.
    "kv_b_proj",  # Absorbed into the attention of latent caches, by parts.
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

_LARGEST: Mapping[Kind, tuple[int, int]] = {"int4": (-8, 7), "int8": (-128, 127)}
_FACTORS: Mapping[Kind, tuple[float, ...]] = {
    "int4": tuple(0.66 + 0.04 * step for step in range(12)),
    "int8": (0.85, 0.9, 0.95, 0.98, 1.0),
}
"""Scales to try, in units of: a group's largest magnitude / the largest code."""
_CHUNK, _CHUNK_ON_GPU = (1 << 15) - 1, 1 << 20
"""Weights that are rounded at once. On a processor temporaries stay in its caches, and PyTorch
splits no operation: its threads would wait for each other in each of hundreds of short ones."""
_MOST_THREADS, _LEAST_SPLIT = 8, 4
_TO_WHOLE = 1.5 * 2.0**23
"""Adding this to a float32 number below 2^22, and subtracting it, rounds it as `round` does."""


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
    """`scheme_spec`, but None if the scheme is None or the weight, "X.weight", stays plain."""
    return None if scheme is None or stays_plain(name) else scheme_spec(scheme, weight)


def is_head(name: str) -> bool:
    """Whether a weight, "X.weight", is an output head."""
    return name.removesuffix(".weight").rpartition(".")[2] in HEADS


def quantise(weight: Tensor, spec: GroupSpec) -> GroupedWeight:
    """Round a weight to codes; each scale is the one of least squared error among those tried.

    With `by_largest` integers have the usual scale: the largest magnitude over the largest code.

    Args:
        weight: floating point [..., N, K], finite.
        spec: of a scheme: no zero points.

    Returns:
        On the weight's device. A group of zeros has scale 0.
    """
    form, flat = spec.form, weight.detach().reshape(-1, weight.shape[-1])
    groups = weight.shape[-1] // form.group
    is_float = form.kind == "float8"
    codes = torch.empty(
        flat.shape, dtype=torch.float8_e4m3fn if is_float else torch.uint8, device=weight.device
    )
    dtype = getattr(torch, spec.scales)
    scales = torch.empty((len(flat), groups), dtype=dtype, device=weight.device)
    rows = max(1, (_CHUNK_ON_GPU if weight.is_cuda else _CHUNK) // max(weight.shape[-1], 1))

    def fill(start: int) -> None:
        part = flat[start : start + rows].float().unflatten(-1, (groups, form.group))
        step = _float8_scales(part, dtype) if is_float else _scales(part, spec, dtype)
        scales[start : start + rows] = step
        inverse = _inverse(step.float()[..., None])
        if is_float:
            limit = torch.finfo(torch.float8_e4m3fn).max
            numbers = (part * inverse).clamp_(-limit, limit).to(torch.float8_e4m3fn)
        else:
            numbers = (_round(part, inverse, form.kind) + form.default_zero).to(torch.uint8)
        codes[start : start + rows] = numbers.flatten(1)

    starts = range(0, len(flat), rows)
    if weight.device.type != "cpu" or len(starts) < _LEAST_SPLIT:
        for start in starts:
            fill(start)
    else:
        with ThreadPoolExecutor(min(_MOST_THREADS, torch.get_num_threads())) as threads:
            list(threads.map(fill, starts))
    shape = (*weight.shape[:-1], groups)
    return GroupedWeight(form, codes.view(weight.shape), scales.view(shape))


def quantised_rows(weight: Tensor, spec: GroupSpec) -> GroupedRows:
    """The rows of `quantise`, rounded on demand. Of slices, only what their scales need is read."""
    rows = GroupedRows(tuple(weight.shape), lambda start, stop: quantise(weight[start:stop], spec))

    def take(runs: Runs, dim: int) -> GroupedRows:
        if dim == -1 and spec.cut(runs) != spec:
            return take_rows(rows, runs, dim)
        parts = [weight.narrow(dim, start, stop - start) for start, stop in runs]
        return quantised_rows(parts[0] if len(parts) == 1 else torch.cat(parts, dim), spec)

    return replace(rows, take=take)


def _round(part: Tensor, inverse: Tensor, kind: Kind) -> Tensor:
    low, high = _LARGEST[kind]
    return (part * inverse).clamp_(low, high).add_(_TO_WHOLE).sub_(_TO_WHOLE)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _scales(part: Tensor, spec: GroupSpec, dtype: torch.dtype) -> Tensor:
    """Scales [n, G] of groups [n, G, group], as rounded to their dtype."""
    kind = spec.form.kind
    whole = part.abs().amax(-1) / _LARGEST[kind][1]
    if spec.by_largest:
        return whole.to(dtype)
    best, least = whole.to(dtype), torch.full_like(whole, float("inf"))
    for factor in _FACTORS[kind]:
        tried, codes, error = _try(part, (whole * factor).to(dtype), kind)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
        # Given the codes, this scale has the least error of all.
        squares = codes.square().sum(-1)
        fitted = torch.where(squares == 0, 0.0, (codes * part).sum(-1) / squares)
        tried, _, error = _try(part, fitted.to(dtype), kind)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _try(part: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, codes, squared error of each group)."""
    wide = scale.float()[..., None]
    codes = _round(part, _inverse(wide), kind)
    return scale, codes, (codes * wide).sub_(part).square_().sum(-1)


def _float8_scales(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales from the largest magnitudes. No search: float8 codes have their own exponents."""
    return (part.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max).to(dtype)
