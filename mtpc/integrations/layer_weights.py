"""Loads one MTP layer of a traced draft from a checkpoint's tensors, one by one.

The draft's own parameters are checked together and then copied. Tensors of layers that the host
computes go to the host as they come, so that they need not be in memory together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError
from mtpc.integrations.layer_sites import ExpertsSite, HostLayers, LinearSite
from mtpc.models.mtp_layers import check_tensors, layer_tensors, module_name
from mtpc.weights.checkpoint import is_finite, listing, refuse_not_finite

if TYPE_CHECKING:
    from mtpc.integrations.draft import TracedDraft

_ENDS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
"""Role -> how the name of the target's own tensor ends, but for families with other names."""


@dataclass(frozen=True)
class Hosted:
    """A layer that the host computes.

    Attributes:
        site: the layer's description.
        module: the host's module.
    """

    site: LinearSite | ExpertsSite
    module: nn.Module


@dataclass
class _Given:
    """What one hosted layer has received: tensor names below the site's, and set parameters."""

    names: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


def _widened(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FP8 weights with scales beside them as float32: "X.weight" by "X.scale" or
    "X.weight_scale_inv", one for each rectangle. Others stay, and so do scales without weights."""
    found = dict(stored)
    for name, codes in stored.items():
        beside = (name.removesuffix("weight") + "scale", f"{name}_scale_inv")
        scale = next((other for other in beside if other in stored and other != name), None)
        if codes.dtype != torch.float8_e4m3fn or scale is None or stored[scale].dim() != 2:
            continue
        grid = stored[scale].float()
        (rows, more), (columns, rest) = (
            divmod(n, m) for n, m in zip(codes.shape, grid.shape, strict=True)
        )
        if more or rest:
            continue  # Blocks at the edges are smaller, and nothing here says how large others are.
        del found[scale]
        each = grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        found[name] = codes.float() * each
    return found


class LayerWeights:
    """Takes tensors of a checkpoint in any order; `finish` checks that the layer is complete.

    Args:
        draft: the draft whose layer is loaded.
        hosted: the host's layers, by the names of their modules within `MTPLayer`.
        host: loads the host's layers; None if there are none.
    """

    def __init__(self, draft: TracedDraft, hosted: Mapping[str, Hosted], host: HostLayers | None):
        self._draft, self._hosted, self._host = draft, hosted, host
        self._what = f"MTP layer {draft.index} of {draft.family.name}"
        self._named = {
            role: {f"{stored}weight" for own, stored in draft.family.stored_prefixes
                   if f"{own}weight".endswith(ending)}
            for role, ending in _ENDS.items()
        }  # fmt: skip
        self._names: set[str] = set()
        self._own: dict[str, Tensor] = {}
        self._ends: dict[str, Tensor] = {}
        self._targets: dict[str, Tensor] = {}
        self._given: dict[str, _Given] = defaultdict(_Given)
        self._unknown: list[str] = []
        self._not_finite: list[str] = []

    def take(self, name: str, tensor: Tensor) -> None:
        """Take a tensor by its name in the checkpoint.

        It is ignored unless it belongs to the layer, or is the target's embedding or head.

        Raises:
            CheckpointError: the host refuses the tensor.
        """
        family, prefix = self._draft.family, self._draft.prefix
        if not name.startswith(prefix):
            for role, ending in _ENDS.items():
                if name in self._named[role] or (name.endswith(ending) and ".layers." not in name):
                    self._targets[role] = tensor
            return
        self._names.add(name)
        name = name.removeprefix(prefix)
        if name in family.shared_tensors:
            self._ends[family.shared_tensors[name]] = tensor
            return
        place = self._place(module_name(name, family))
        if place is None:
            self._own[name] = tensor
        else:
            self._load(*place, tensor)

    def finish(self) -> set[str]:
        """Check all tensors, copy the draft's own parameters, and set `TracedDraft.own`.

        Returns:
            The layer's names in the checkpoint.

        Raises:
            CheckpointError: see `TracedDraft.load_weights`.
        """
        self._draft.own = self._own_ends()
        self._own = _widened(self._own)
        eight_bits = sorted(n for n, t in self._own.items() if t.dtype.itemsize == 1)
        if eight_bits:
            raise CheckpointError(
                f"{self._what}: {len(eight_bits)} tensor(s) of 8 bits: {listing(eight_bits)}; "
                "expected unquantised weights where the draft computes itself"
            )
        self._check_hosted()
        layer = self._draft.layer
        tensors = layer_tensors(self._own, self._draft.family, layer)
        check_tensors(layer, tensors, self._what)
        self._not_finite += [name for name, tensor in tensors.items() if not is_finite(tensor)]
        refuse_not_finite(self._not_finite, self._what)
        layer.load_state_dict(tensors)
        return self._names

    def _place(self, name: str) -> tuple[str, str] | None:
        """(module, name below it) for a tensor of a hosted layer."""
        stem, _, leaf = name.rpartition(".")
        if stem in self._hosted:
            return stem, leaf
        for module, hosted in self._hosted.items():
            if isinstance(hosted.site, ExpertsSite) and name.startswith(f"{module}."):
                return module, name.removeprefix(f"{module}.")
        return None

    def _load(self, module: str, name: str, tensor: Tensor) -> None:
        hosted, given = self._hosted[module], self._given[module]
        assert self._host is not None
        full = f"{hosted.site.name}.{name}"
        if not is_finite(tensor):
            self._not_finite.append(full)
        try:
            given.parameters |= self._host.load(hosted.module, name, tensor)
        except LookupError:
            self._unknown.append(full)
        given.names.add(name)

    def _check_hosted(self) -> None:
        missing, unknown = list[str](), list(self._unknown)
        for module, hosted in self._hosted.items():
            assert self._host is not None
            site, given = hosted.site, self._given[module]
            absent = self._host.parameters(hosted.module) - given.parameters
            if isinstance(site, ExpertsSite):
                lacking, more = site.lacking(given.names)
                unknown += [f"{site.name}.{name}" for name in more]
                # A parameter that holds all experts counts as set after its first expert.
                absent = lacking or absent
            missing += [f"{site.name}.{name}" for name in absent]
        if missing or unknown:
            raise CheckpointError(
                f"{self._what}: the host's layers miss {listing(sorted(missing))}; unexpected "
                f"{listing(sorted(unknown))}; the host made them by the config's quantisation: "
                "correct the config's list of layers that are not quantised, or use the host's "
                "own draft"
            )

    def _own_ends(self) -> dict[str, Tensor]:
        """The layer's stored embedding and head, by role, that differ from the target's."""
        theirs = dict(self._targets)
        if "embedding" in theirs:
            theirs.setdefault("head", theirs["embedding"])  # They are tied.
        return {
            role: tensor
            for role, tensor in self._ends.items()
            if getattr(self._draft.layer.wiring, role) == "own"
            and role in theirs
            and not torch.equal(tensor, theirs[role])
        }
