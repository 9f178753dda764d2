"""The draft chain over a host's pools: one graph drafts what uncached single steps draft."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny, uncached
from helpers.plain_host import Group, Host, Linear
from torch import Tensor, nn

from mtpc import ops
from mtpc.backends import make_backend
from mtpc.errors import CapacityError, GraphError, UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite, expand_latent
from mtpc.integrations.chain import ChainPlan, DraftChain, HostPools
from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.host_calls import HostCall
from mtpc.integrations.layer_sites import HostLayers, LinearSite
from mtpc.models.mtp_layers import stored_tensors

STEPS, PAGES = 3, 40
LENS = (9, 1, 14)


class PoolAttention(nn.Module):
    """A host's attention in the small: stores rows in a pool, attends within one request."""

    def __init__(self, site: AttentionSite, pools: dict[str, Tensor]):
        super().__init__()
        self.site, self.pools = site, pools
        self.slots: Any = None

    def forward(self, q: Tensor, first: Tensor, second: Tensor) -> Tensor:
        if self.site.kind == "latent":
            rows = torch.cat([first, second], -1)
            ops.write_cache(self.pools["latent"], rows, self.slots, None)
            first, second = expand_latent(self.site, first, second)
        else:
            ops.write_cache(self.pools["k"], first, self.slots, None)
            ops.write_cache(self.pools["v"], second, self.slots, None)
        shared = q.shape[1] // first.shape[1]
        keys, values = (t.repeat_interleave(shared, 1).transpose(0, 1) for t in (first, second))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * self.site.scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ values).transpose(0, 1)


def make_pools(site: AttentionSite, page_size: int) -> dict[str, Tensor]:
    """Pools full of what must never be read."""
    widths = {"k": site.head_dim, "v": site.v_head_dim}
    if site.kind == "latent":
        shapes: dict[str, tuple[int, ...]] = {"latent": (site.latent_rank + site.rope_head_dim,)}
    else:
        shapes = {role: (site.num_kv_heads, width) for role, width in widths.items()}
    poison = float("nan")
    return {
        role: torch.full((PAGES, page_size, *shape), poison, dtype=torch.float64)
        for role, shape in shapes.items()
    }


class Hosted:
    """A tiny model whose draft stands over pools, its prompts' rows stored."""

    def __init__(self, family: str, page_size: int, layers: HostLayers | None = None):
        self.family, self.page_size, self.layers = family, page_size, layers
        self.target = tiny.build_target(family, experts_implementation="eager").double()
        self.layer = tiny.build_mtp_layer(family, self.target).double()
        if layers is not None:
            round_weights(self.layer)
        self.pools: dict[str, Tensor] = {}
        self.draft = TracedDraft(
            self.target.config,
            self._attention,
            DraftOptions(dtype=torch.float64, architecture=tiny.family_of(family).architectures[0]),
            layers,
        )
        self.draft.embedding = self.target.get_input_embeddings()
        prefix, row = self.draft.prefix, tiny.family_of(family)
        self.draft.load_weights((prefix + n, t) for n, t in stored_tensors(self.layer, row))
        self.head = self.target.get_output_embeddings().weight
        self.blocks = -(-32 // page_size)
        free = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.table = torch.zeros(len(LENS), self.blocks, dtype=torch.int32)
        for index, length in enumerate(LENS):
            used = -(-(length + STEPS) // page_size)
            self.table[index, :used], free = free[:used], free[used:]

    def _attention(self, site: AttentionSite) -> nn.Module:
        self.pools = make_pools(site, self.page_size)
        self.attention = PoolAttention(site, self.pools)
        return self.attention

    @torch.no_grad()
    def prompt(self, index: int) -> tuple[Tensor, Tensor]:
        """Store a prompt's rows; returns the rows' ids and target features, each [1, L, ...]."""
        length = LENS[index]
        ids = torch.randint(
            2, 96, (1, length + 1), generator=torch.Generator().manual_seed(11 + index)
        )
        features = uncached.target_features(self.target, ids)[:, :-1]
        positions = torch.arange(length)
        page = self.table[index].long()[positions // self.page_size]
        self.attention.slots = page * self.page_size + positions % self.page_size
        self.draft(ids[0, 1:], positions, features[0])
        return ids[:, 1:], features

    def pool_bits(self) -> list[Tensor]:
        """Copies of the pools, a row a slot, to be compared bit by bit."""
        return [pool.clone().flatten(0, 1).view(torch.int64) for pool in self.pools.values()]

    def chained_slots(self) -> list[int]:
        """Where a chain has its rows: behind each request's own."""
        slots = []
        for length, pages in zip(LENS, self.table.tolist(), strict=True):
            for position in range(length, length + STEPS):
                page = pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
        return sorted(slots)

    def uncached(self, ids: Tensor, features: Tensor) -> Tensor:
        """What an MTP layer returns in the last of these rows, [1, H]."""
        return uncached.run_mtp_uncached(self.family, self.target, self.layer, ids, features)[:, -1]

    def make_chain(self, buckets: tuple[int, ...], backend: str = "eager") -> DraftChain:
        plan = ChainPlan(STEPS, buckets, vocab_size=96)
        pools = HostPools(self.pools, self.blocks)
        head = self.head.detach() if self.layers is None else self.target.get_output_embeddings()
        return DraftChain(self.draft, head, pools, plan, make_backend(backend))

    @torch.no_grad()
    def rounds(self, index: int) -> tuple[Tensor, Tensor, list[int]]:
        """A stored prompt's first draft, the features that proposed it, and the drafts after it, by
        uncached steps."""
        ids, features = self.prompt(index)
        last = fed = self.uncached(ids, features)
        first, *more = [(last @ self.head.T).argmax(-1)]
        for _ in range(STEPS):
            ids = torch.cat([ids, (more or [first])[-1][None]], 1)
            features = torch.cat([features, last[:, None]], 1)
            last = self.uncached(ids, features)
            more.append((last @ self.head.T).argmax(-1))
        return first, fed, torch.cat(more).tolist()


@pytest.fixture(scope="module")
def chained() -> Callable[..., tuple[Hosted, DraftChain]]:
    """chained(family, page_size, backend): for one request and for four."""

    @cache
    def get(family: str, page_size: int, backend: str) -> tuple[Hosted, DraftChain]:
        hosted = Hosted(family, page_size)
        return hosted, hosted.make_chain((1, 4), backend)

    return get


SLOW = [
    *(("mimo", 1, "eager"), ("glm4_moe", 4, "eager"), ("deepseek_v3", 4, "null")),
    ("qwen3_next", 4, "eager"),
]


@pytest.mark.parametrize(
    ("family", "page_size", "backend"),
    [
        ("mimo", 4, "null"),
        pytest.param("deepseek_v3", 1, "eager", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
@torch.no_grad()
def test_the_chain_drafts_what_uncached_steps_draft(
    family: str, page_size: int, backend: str, chained: Callable[..., tuple[Hosted, DraftChain]]
) -> None:
    """A ragged batch in a bucket that is too large, twice: a round may be drafted again."""
    hosted, chain = chained(family, page_size, backend)
    firsts, fed, expected = zip(*map(hosted.rounds, range(len(LENS))), strict=True)
    rows = (torch.cat(firsts), torch.cat(fed), torch.tensor(LENS), hosted.table)
    before = hosted.pool_bits()
    for _ in range(2):
        assert chain.propose(*rows).tolist() == list(expected)
        for old, new in zip(before, hosted.pool_bits(), strict=True):
            changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
            assert changed == hosted.chained_slots()
    one = chain.propose(*(row[2:] for row in rows))
    assert one.tolist() == [expected[2]]
    assert len(set(map(tuple, expected))) > 1


STEP = 2.0**-7
"""What weights of `CodedHost` are multiples of."""


def round_weights(layer: nn.Module) -> None:
    """Round weights that a host computes with to what codes of 8 bits stand for."""
    for name, parameter in layer.named_parameters():
        if "_proj" in name or name.startswith("projection"):
            parameter.data = (parameter / STEP).round().clamp(-127, 127) * STEP


class Coded(Linear):
    """One rank's part of a linear layer, as codes: its parameter is no weight to multiply by."""

    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor)
        if name == "weight":
            self.register_buffer("codes", (self.weight / STEP).round().to(torch.int8))
            self.weight.data.fill_(torch.nan)

    def forward(self, rows: Tensor) -> Tensor:
        self.weight.data = self.codes.double() * STEP  # type: ignore[operator]
        out = super().forward(rows)
        self.weight.data.fill_(torch.nan)
        return out


class CodedHost(Host):
    """A quantised host."""

    def linear(self, site: LinearSite) -> nn.Module:
        return Coded(site, self.rank, self.group)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(("mimo", 2), ("deepseek_v3", 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mimo", 1), ("glm4_moe", 2))),
    ],
)
def test_a_chain_over_the_hosts_layers(family: str, ranks: int) -> None:
    """Cut among ranks that are threads, and quantised: what uncached steps of the whole draft."""
    group = Group(ranks)
    members = [Hosted(family, 4, CodedHost(rank, group)) for rank in range(ranks)]
    chains = [member.make_chain((4,)) for member in members]
    with ThreadPoolExecutor(ranks) as pool:
        told = [list(pool.map(lambda m, i=i: m.rounds(i), members)) for i in range(len(LENS))]
        firsts, fed, expected = zip(*(by_rank[0] for by_rank in told), strict=True)
        rows = (torch.cat(firsts), torch.cat(fed), torch.tensor(LENS), members[0].table)
        for _ in range(2):
            for found in pool.map(lambda chain: chain.propose(*rows), chains):
                assert found.tolist() == list(expected)
    assert len(set(map(tuple, expected))) > 1
    calls = [n for n in chains[0].graphs[4].graph.nodes if "call_host" in str(n.target)]
    layers = len(members[0].draft.hosted) - ("deepseek" in family)  # It has an expansion.
    assert len(calls) == STEPS * (layers + 2)
    own = {name for name, _ in chains[0]._weights.items() if "_proj" in name}
    assert own == {n for n in own if n.endswith("kv_b_proj.weight")}


def test_a_host_that_does_not_keep_its_word_is_named() -> None:
    rows, kept = torch.zeros(3, 4), nn.Linear(4, 6)
    with pytest.raises(
        GraphError, match=r"Linear of the host returned \(3, 6\).*expected \(3, 5\)"
    ):
        HostCall(kept, 5)(rows)
    with pytest.raises(GraphError, match="which is gone; keep the draft and the head"):
        HostCall(nn.Linear(4, 6), 6)(rows)


def test_a_chain_is_one_flat_graph_that_passes_have_rewritten(
    chained: Callable[..., tuple[Hosted, DraftChain]],
) -> None:
    """Nothing is left between the steps: one graph, its shared work hoisted."""
    _, chain = chained("deepseek_v3", 1, "eager")
    graph = chain.graphs[4]
    assert graph.is_flat
    assert graph.part == "propose"
    done = {record.name: record.rewrites for record in graph.history}
    assert done["fuse-draft-chain"] == 4 * STEPS
    assert done["hoist-shared"] > 0
    assert done["absorb-latent"] == STEPS


def test_too_many_requests_are_refused(
    chained: Callable[..., tuple[Hosted, DraftChain]],
) -> None:
    hosted, chain = chained("deepseek_v3", 1, "eager")
    ids, lens = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int32)
    table = torch.zeros(5, hosted.blocks, dtype=torch.int32)
    with pytest.raises(CapacityError, match=r"5 requests.*at most 4"):
        chain.propose(ids, torch.zeros(5, 64, dtype=torch.float64), lens, table)


def test_more_than_one_attention_is_refused() -> None:
    draft: Any = SimpleNamespace(sites=[None, None], family=SimpleNamespace(name="odd"))
    with pytest.raises(UnsupportedModelError, match="has 2 attention layers"):
        DraftChain(draft, torch.zeros(4, 4), HostPools({}, 1), ChainPlan(1, (1,), 4), Any)  # type: ignore[arg-type]
