"""How MTP layers are wired: features and logits of every row, against pages of plain code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.explained import explained
from helpers.families import EVERY_FAMILY
from helpers.oracles import DraftOracle, Oracle
from helpers.theorem import PROMPTS, check_drafts
from safetensors.torch import load_file, save_file
from torch import Tensor

import mtpc
from mtpc.errors import OptionError
from mtpc.layout import Layout
from mtpc.layout.buffers import K_MAX, C, M, N, P, S
from mtpc.models.load import LoadedModel, load
from mtpc.models.stepped import SteppedModel
from mtpc.step.metadata import flat_metadata, starts_of
from mtpc.step.records import Metadata

PAGE, BLOCKS = 4, 8
TEXT = PROMPTS[12]


class Rows:
    """A loaded model's pieces over one text, in one forward each."""

    def __init__(self, loaded: LoadedModel, length: int):
        sizes = {S: 2, K_MAX: 3, M: BLOCKS, P: PAGE, N: BLOCKS + 1, C: length + 3}
        layout = Layout(loaded.state_specs, sizes)
        pools = {n: layout.allocate(n) for n in layout if n.startswith("kv.")}
        self.model, self.length = SteppedModel(loaded, pools, 2), length

    def metadata(self) -> Metadata:
        """Of one request, in request slot 1, whose rows are all certain."""
        starts = starts_of(torch.tensor([self.length], dtype=torch.int32))
        table = torch.arange(1, BLOCKS + 1, dtype=torch.int32)[None]
        lens, active = torch.zeros(1, dtype=torch.int32), torch.tensor([True])
        rows = flat_metadata(lens, active, table, starts, self.length, PAGE)
        certain = torch.tensor([self.length], dtype=torch.int32)
        return Metadata(*rows, starts, table, torch.tensor([1]), certain)

    @torch.no_grad()
    def target(self, ids: list[int]) -> Tensor:
        return self.model.target(torch.tensor(ids), *self.metadata())

    @torch.no_grad()
    def draft(self, index: int, ids: list[int], fed: Tensor) -> tuple[Tensor, Tensor]:
        """What MTP layer `index` gives to the next draft, and its logits."""
        given = self.model.drafts[index](torch.tensor(ids), fed, *self.metadata())
        return given, self.model.draft_heads[index](given)


@torch.no_grad()
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_rows_equal_the_released_wiring(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Any]
) -> None:
    """Every row of every layer, from the stored tensors by their released names."""
    page = DraftOracle(oracle(family, "random")).page
    count = len(TEXT) - 1 - page.count
    loaded = load(checkpoint(family, "random"), "float64", True)
    rows = Rows(loaded, count)
    fed = target = page.first(TEXT[:count])
    # transformers' eager softmax is float32's; Gated DeltaNet is, too.
    torch.testing.assert_close(rows.target(TEXT[:count]), target, rtol=3e-5, atol=3e-5)
    for index in range(page.count):
        ids = TEXT[1 + index : count + 1 + index]
        wanted = page.run(index, ids, fed)
        found, logits = rows.draft(index, ids, fed)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits, page.logits(index, wanted), rtol=1e-9, atol=1e-9)
        fed = page.fed_next(target, wanted)


OWN = ("embedding", "head")


@pytest.fixture(scope="module")
def owning(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """owning(family): a checkpoint whose MTP layer has an embedding and a head of its own."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            target = tiny.build_target(family)
            layers = tiny.build_mtp_layers(family, target, own=OWN)
            made[family] = tmp_path_factory.mktemp(family)
            tiny.save_checkpoint(family, target, layers, made[family])
        return made[family]

    return get


@torch.no_grad()
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_own_embeddings_and_heads_are_used(family: str, owning: Callable[[str], Path]) -> None:
    """Stored ones that differ from the target's; `wiring` can do without them."""
    directory = owning(family)
    page = DraftOracle(Oracle(family, directory)).page
    count = len(TEXT) - 1
    fed, ids = page.first(TEXT[:count]), TEXT[1:]
    wanted = page.run(0, ids, fed)
    loaded = load(directory, "float64", True)
    found, logits = Rows(loaded, count).draft(0, ids, fed)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, page.logits(0, wanted), rtol=1e-9, atol=1e-9)
    assert {"mtp.0.embedding.weight", "mtp.0.head.weight"} <= explained(loaded).keys()
    for role in OWN:
        other = load(directory, "float64", True, ((role, "target"),))
        assert getattr(other.mtp_layers[0], role) is None
        features, logits = Rows(other, count).draft(0, ids, fed)
        assert torch.allclose(features, wanted) == (role == "head")
        assert not torch.allclose(logits, page.logits(0, wanted))


def test_copies_are_shared(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As released: an embedding and a head that equal the target's take no memory of their own."""
    directory = Path(shutil.copytree(checkpoint("glm4_moe", "random"), tmp_path / "copies"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"model.layers.2.{name}.weight"] = tensors[f"{of}.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load(directory, "float32", True)
    layer, target = loaded.mtp_layers[0], loaded.target
    assert layer.embedding.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert layer.head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()


FLIPS = (
    ("step3p7", "first_features", "after", {"target"}),
    ("step3p7", "next_features", "after", {"given"}),
    ("step3p7", "head", "target", {"logits"}),
    ("mimo", "first_features", "after", {"target"}),
    ("mimo", "hidden_first", False, {"given", "logits"}),
    ("mimo", "zero_first_embedding", False, {"given", "logits"}),
    ("glm4_moe", "next_features", "before", {"given"}),
    ("glm4_moe", "first_features", "before", {"target"}),
)
"""A rule with a wrong value, and what is then another than the page's."""


@torch.no_grad()
@pytest.mark.parametrize(("family", "rule", "value", "differs"), FLIPS)
def test_wrong_wiring_is_seen(
    family: str,
    rule: str,
    value: str | bool,
    differs: set[str],
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Any],
) -> None:
    """Each rule decides what it says and nothing else; the norm weights hide none of them."""
    page, count = DraftOracle(oracle(family, "random")).page, len(TEXT) - 1
    loaded = load(checkpoint(family, "random"), "float64", True, ((rule, value),))
    rows, fed = Rows(loaded, count), page.first(TEXT[:count])
    wanted = page.run(0, TEXT[1:], fed)
    given, logits = rows.draft(0, TEXT[1:], fed)
    pairs = {
        "target": (rows.target(TEXT[:count]), fed),
        "given": (given, wanted),
        "logits": (logits, page.logits(0, wanted)),
    }
    close = {n: torch.isclose(a, b, rtol=1e-3, atol=1e-3).all(1) for n, (a, b) in pairs.items()}
    assert {name for name, rows_of in close.items() if not rows_of.all()} == differs
    assert not any(close[name].any() for name in differs)


@pytest.mark.slow
@pytest.mark.parametrize("chaining", ["recycle", "layers"])
def test_other_ways_to_chain(
    chaining: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """MiMo-V2's layers as vLLM uses them, and chained on each other."""
    wiring = (("chaining", chaining),)
    spec = compiled("mimo_v2", 2, "random", batch_buckets=(4,), wiring=wiring)
    drafts = DraftOracle(oracle("mimo_v2", "random"))
    if chaining == "recycle":
        drafts.page.count = 1
        assert "kv.4.ring_k" not in spec.program.shared
    else:
        drafts.page.fed_next = lambda target, given: given
    assert check_drafts(spec, drafts, [PROMPTS[3], PROMPTS[9]], 12) >= 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first": "before"}, "no rule 'first'; expected one of hidden_first"),
        ({"first_features": "pre"}, "first_features='pre'; expected one of 'before', 'after'"),
        ({"hidden_first": 1}, "hidden_first=1; expected one of False, True"),
        ("first_features", "expected rules by name"),
    ],
)
def test_rules_that_do_not_exist(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        mtpc.CompileOptions(wiring=given)


def test_rules_of_features_mean_nothing_to_streams(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="first_features, which has no meaning for the draf"):
        load(checkpoint("deepseek_v4", "random"), None, True, (("first_features", "before"),))
