"""Slices of all ranks put together are the whole, and are those that transformers itself cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from helpers import eagle, tiny
from helpers.families import ASSISTED, DRAFTED
from torch import Tensor, nn

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.models.load import LoadedModel, load
from mtpc.models.shards import STYLES, Shard, ShardPlan

FAMILIES = [name for name in tiny.CONFIGS if "@" not in name and name not in (*DRAFTED, *ASSISTED)]


@pytest.fixture(scope="session")
def shapes(checkpoint: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    """shapes(family): its tiny model with MTP layers, from headers."""
    return lambda family: load(checkpoint(family, "random"), None, True, headers_only=True)


def plans(loaded: LoadedModel) -> Iterator[ShardPlan]:
    """Every plan that the model allows for up to 4 ranks."""
    for ranks in (1, 2, 4):
        for experts in (False, True):
            with suppress(OptionError, UnsupportedModelError):
                yield ShardPlan(loaded, ranks, experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_slices_are_the_whole(family: str, shapes: Callable[[str], LoadedModel]) -> None:
    """Each element is in one rank's slices; what is replicated, in every rank's."""
    loaded = shapes(family)
    made = list(plans(loaded))
    assert len(made) > 1
    for plan in made:
        cut = set[str]()
        for name, tensor in loaded.weights().items():
            shard = plan.shard(name, tensor)
            seen = torch.zeros(tensor.shape, dtype=torch.int32)
            for rank in range(plan.ranks):
                taken = take(seen, shard, rank, plan.ranks)
                assert sum(map(Tensor.numel, taken)) == shard.count(
                    tuple(tensor.shape), rank, plan.ranks
                )
                for part in taken:
                    part += 1
            holders = plan.ranks if shard.kind == "replicated" else 1
            assert (seen == holders).all(), name
            cut |= {name} if shard.kind != "replicated" else set()
        if plan.ranks > 1:
            assert cut, "nothing is cut"
            block = loaded.mtp_layers[0].block
            stacked = {n for n, _ in block.named_parameters() if ".experts." in n}
            assert {f"mtp.0.block.{name}" for name in stacked} <= cut


def take(tensor: Tensor, shard: Shard, rank: int, ranks: int) -> list[Tensor]:
    """Views of what a rank holds."""
    if not tensor.dim():
        return [tensor]
    spans = shard.ranges(tensor.shape[shard.dim], rank, ranks)
    return [tensor.narrow(shard.dim, first, last - first) for first, last in spans]


def test_a_vocabulary_may_be_uneven() -> None:
    shard = Shard("vocab")
    held = [shard.ranges(10, rank, 4) for rank in range(4)]
    assert held == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    assert [len(part) for part in torch.arange(10).chunk(4)] == [3, 3, 3, 1]


@contextmanager
def fake_mesh(rank: int, ranks: int) -> Iterator[object]:
    """A device mesh of processes that do not exist, seen by one of them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


EXPERTS = ("grouped_gemm", "moe_tp_experts", "ep_dispatch_experts")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(12, 8), (4, 12, 8), (12,)])
def test_slices_are_those_of_transformers(style: str, shape: tuple[int, ...]) -> None:
    """Its styles cut a parameter, as they do while a model is loaded, and we cut the same."""
    styles = pytest.importorskip("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    pytest.importorskip("transformers.distributed.expert_parallel")
    if (len(shape) != 2 and "embedding" in style) or (len(shape) < 3 and style in EXPERTS):
        pytest.skip("no such weights")
    if len(shape) == 1 and style.startswith("packed_"):
        pytest.skip("transformers cuts a bias of joined projections as one; no family has any")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    name = "bias" if len(shape) == 1 else "weight"
    shard = STYLES[style].shard(len(shape))
    for rank in range(2):
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(whole.clone()))
        with fake_mesh(rank, 2) as mesh:
            styles[style].shard_param(module, name, mesh)
            made = getattr(module, name).data
            local = made.to_local() if hasattr(made, "to_local") else made
        assert torch.equal(local, torch.cat(take(whole, shard, rank, 2), shard.dim))


def test_refusals(shapes: Callable[[str], LoadedModel]) -> None:
    """What was found, what is expected, what to do."""
    for family, ranks, experts, said in (
        ("mimo", 4, False, "layer 0 has 2 key/value heads for 4 ranks: more ranks than heads"),
        ("mimo", 3, False, "key/value heads for 3 ranks.*use --tensor-parallel-size 2"),
        ("deepseek_v3", 8, True, "has 4 experts for 8 ranks.*expected a number of ranks that"),
        ("deepseek_v3", 3, False, "features for 3 ranks: 32 does not divide by 3"),
        ("glm_moe_dsa", 3, False, "has 4 attention heads for 3 ranks"),
    ):
        with pytest.raises(OptionError, match=said):
            ShardPlan(shapes(family), ranks, experts)
    with pytest.raises(UnsupportedModelError, match=r"no base_model_ep_plan; expected .*leave out"):
        ShardPlan(shapes("mimo"), 2, True)
    loaded = shapes("mimo")
    loaded.target.tp_plan = {}
    with pytest.raises(UnsupportedModelError, match=r"no base_model_tp_plan; .*parallel-size 1"):
        ShardPlan(loaded, 2)
    loaded.target._tp_plan = {"lm_head": "diagonal"}
    with pytest.raises(UnsupportedModelError, match="has the style 'diagonal'; expected one of"):
        ShardPlan(loaded, 2)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "longcat_flash"])
def test_an_eagle_head_is_cut_by_its_own_plan(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever attention its target has, also where a decoder layer of that has several."""
    entries = {**eagle.CONFIG, "num_key_value_heads": 2, "eagle_config": None}
    entries["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    draft = eagle.save_head(eagle.new_head(entries, 64), entries, tmp_path)
    loaded = load(checkpoint(family, "random"), None, True, headers_only=True, draft=draft)
    plan = ShardPlan(loaded, 2)
    cut = {
        name.removeprefix("mtp.0.").removesuffix(".weight"): plan.shard(name, tensor).kind
        for name, tensor in loaded.weights().items()
        if name.startswith("mtp.") and plan.shard(name, tensor).kind != "replicated"
    }
    columns = [*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    assert cut == {
        **{f"block.{name}": "colwise" for name in columns},
        **{f"block.{name}": "rowwise" for name in rows},
        "head": "vocab",
    }
    assert plan.cuts_cache(f"kv.{loaded.config.num_hidden_layers}.k")


def test_caches_follow_their_heads(shapes: Callable[[str], LoadedModel]) -> None:
    """Keys and values are cut where the plan cuts their projections; latents never are."""
    found = {
        family: {
            spec.name.split(".")[2]: plan.cuts_cache(spec.name)
            for spec in plan._loaded.state_specs
            if spec.name.startswith("kv.")
        }
        for family in ("mimo", "deepseek_v3", "qwen3_next", "step3p5", "exaone_moe")
        for plan in [ShardPlan(shapes(family), 2)]
    }
    assert found["mimo"] == {"k": True, "v": True}
    assert found["deepseek_v3"] == {"latent": False}
    assert found["qwen3_next"] == {"k": True, "v": True} | dict.fromkeys(
        ("recurrent", "history", "standing"), False
    )
    assert not any(found["step3p5"].values()), "its plan gathers keys and values"
    assert found["exaone_moe"] == dict.fromkeys(("k", "v", "ring_k", "ring_v"), True)
