"""Drafts from a part of the vocabulary: recipe, pass, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.families import EACH_FAMILY_OF_FEW, TINY
from helpers.grouped import pack_codes
from helpers.plans import plan_of
from helpers.theorem import PROMPTS
from helpers.whole_steps import compiler_of, model_of
from hypothesis import given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.backends.eager import EagerBackend
from mtpc.backends.pipeline import select_passes
from mtpc.cli.main import main
from mtpc.errors import OptionError
from mtpc.layout import StepKey
from mtpc.passes.base import is_call
from mtpc.passes.quantise_draft import draft_spec
from mtpc.passes.trim_draft_head import runs
from mtpc.weights import recipes
from mtpc.weights.grouped import pack_scales
from mtpc.weights.packing import pack
from mtpc.weights.quantise import quantise
from mtpc.weights.recipes import Grouped, Packed, Recipe, Rows

LISTED = (1, 2, 3, 7, 40, 41, 42, 60, 61, 90)


@given(ids=st.sets(st.integers(0, 60), min_size=1))
def test_runs_are_the_ids(ids: set[int]) -> None:
    found = runs(tuple(sorted(ids)))
    assert [i for start, stop in found for i in range(start, stop)] == sorted(ids)
    gaps = [start - stop for (_, stop), (start, _) in pairwise(found)]
    assert all(gap > 0 for gap in gaps)  # As few as can be.


@settings(deadline=None, derandomize=True, max_examples=20)
@given(ids=st.sets(st.integers(0, 69), min_size=1))
def test_rows_of_a_weight(ids: set[int]) -> None:
    """Plain, packed and in int8; and through JSON."""
    weight = bf16(70, 8)
    rows = Rows(runs(tuple(sorted(ids))), "head")
    plain = recipes.make(rows, {"head": weight}.__getitem__)
    assert torch.equal(plain, weight[sorted(ids)])
    assert plain.data_ptr() != weight.data_ptr()
    spec = draft_spec(weight)
    assert spec is not None
    int8 = quantise(plain, spec)
    made: dict[Recipe, torch.Tensor] = {
        Packed(rows): pack(plain),
        Grouped("codes", spec, rows): pack_codes(int8.codes, "int8"),
        Grouped("scales", spec, rows): pack_scales(int8.scales),
    }
    for recipe, expected in made.items():
        assert torch.equal(recipes.make(recipe, {"head": weight}.__getitem__), expected)
        assert recipes.from_json(recipes.to_json(recipe)) == recipe
        assert list(recipes.names(recipe)) == ["head"]
    renamed = recipes.substitute(rows, lambda name: f"model.{name}")
    assert renamed == Rows(rows.runs, "model.head")


@pytest.mark.parametrize("draft_vocab", [pytest.param(24, marks=pytest.mark.slow), LISTED])
@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
@pytest.mark.parametrize("sampling", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafts_are_listed_and_what_is_emitted_stays(
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Any],
    sampling: bool,
    family: str,
    draft_vocab: Any,
) -> None:
    options = dict(spec_tokens=3, batch_buckets=(4,), draft_vocab=draft_vocab)
    options |= {**TINY, "sampling": sampling}
    spec = model_of(compiler_of(checkpoint(family), "float64", EagerBackend(), **options))
    allowed = set(spec.options.draft_vocab)
    outputs: dict[int, list[int]] = {spec.engine.add(p, 20): [] for p in PROMPTS[:4]}
    drafts: set[int] = set()
    while spec.engine.has_work:
        for output in spec.engine.step():
            outputs[output.request_id] += output.token_ids
        slots = [r.slot for r in spec.engine.running if r.output_ids]
        drafts |= set(spec.program.shared["state.token_ids"][slots, 1:].flatten().tolist())
    assert list(outputs.values()) == [oracle(family).generate(p, 20, False) for p in PROMPTS[:4]]
    assert drafts <= allowed
    assert len(drafts) > 1
    assert sum(spec.stats.accepted) > 0  # The listed tokens do occur.


@pytest.mark.parametrize(("family", "trims"), [("mimo", True), ("gemma4", False)])
def test_what_trims_nothing_says_so(
    family: str, trims: bool, compiled: Callable[..., mtpc.SpecModel]
) -> None:
    """Gemma 4's assistant scores some clusters of tokens."""
    spec = compiled(family, 1, batch_buckets=(1,), draft_vocab=24)
    said = [line for line in spec.stats.fallbacks if "draft_vocab has no effect" in line]
    assert len(said) == (not trims)


def test_a_draft_is_the_best_of_the_listed(checkpoint: Callable[..., Path]) -> None:
    """Where the whole head's choice is listed, the trimmed head makes it too."""

    def first_drafts(**changes: Any) -> list[int]:
        options = dict(spec_tokens=1, batch_buckets=(1,), **TINY, **changes)
        spec = model_of(compiler_of(checkpoint("mimo"), "float64", EagerBackend(), **options))
        drafts = []
        for prompt in PROMPTS:
            spec.engine.add(prompt, 1)
            while spec.engine.has_work:
                spec.engine.step()
            drafts.append(int(spec.program.shared["state.token_ids"][1, 1]))
        return drafts

    whole = first_drafts()
    listed = sorted(set(whole[:4]))
    for before, after in zip(whole, first_drafts(draft_vocab=listed), strict=True):
        assert after in listed
        assert after == before or before not in listed
    assert not set(whole) <= set(listed)


def test_sampled_text_stays(checkpoint: Callable[..., Path]) -> None:
    """A draft is drawn as the target's token is, from the listed ones."""
    params = mtpc.SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5)
    texts, drafted = [], []
    for more in (dict(spec_tokens=0), dict(spec_tokens=2, draft_vocab=LISTED)):
        options = dict(batch_buckets=(2,), **{**TINY, "sampling": True}, **more)
        spec = model_of(compiler_of(checkpoint("mimo"), "float64", EagerBackend(), **options))
        texts.append(spec.generate(PROMPTS[:2], 30, sampling=params, ignore_eos=True))
        drafted.append(sum(spec.stats.accepted))
    assert texts[0] == texts[1]
    assert drafted[1] > 0


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_target_keeps_its_head(
    checkpoint: Callable[..., Path], phase: str, sampling: bool
) -> None:
    options = dict(spec_tokens=3, batch_buckets=(2,), draft_vocab=LISTED)
    options |= {**TINY, "sampling": sampling}
    compiler = compiler_of(checkpoint("mimo"), "bfloat16", EagerBackend(), **options)
    key = StepKey.decode(2, 3) if phase == "decode" else StepKey.prefill(1, 8, 3)
    graph = compiler.rewrite(compiler.trace(key))
    record = next(r for r in graph.history if r.name == "trim-draft-head")
    assert record.rewrites == 3
    heads = [n for n in graph.graph.nodes if is_call(n, torch.ops.aten.linear.default)]
    features = [n.meta["val"].shape[-1] for n in heads if "lm_head" in str(n.args[1])]
    assert sorted(features) == [10, 10, 10, 96]


def test_with_int8_and_packed_weights(checkpoint: Callable[..., Path]) -> None:
    """The passes after it take the trimmed rows; the drafts stay listed."""
    options = dict(spec_tokens=3, batch_buckets=(2,), **TINY, draft_vocab=LISTED)
    passes = ("quantise-draft", "pack-weights")
    spec = model_of(
        compiler_of(
            checkpoint("mimo"), "bfloat16", EagerBackend(), enabled_passes=passes, **options
        )
    )
    spec.generate(PROMPTS[5], 12, ignore_eos=True)
    step = spec.program.steps[StepKey.decode(2, 3)]
    assert step.graph is not None
    recipe = step.graph.weights.recipes["quantised.trimmed_lm_head_weight.codes"]
    assert isinstance(recipe, Grouped)
    assert recipe.part == Rows(runs(LISTED), "lm_head.weight")


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "draft_vocab is 0"), ((1, -2), "draft_vocab is -2"), ("ab", "draft_vocab is 'ab'"),
     (1.5, "expected token ids, or a number n")],
)  # fmt: skip
def test_bad_lists(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_of(draft_vocab=value)


def test_a_number_is_the_lowest_ids() -> None:
    assert plan_of(draft_vocab=3).draft_vocab == (0, 1, 2)


def test_a_list_for_another_model(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match=r"draft_vocab names token 96; expected ids in 0\.\.95"):
        mtpc.compile(checkpoint("mimo"), spec_tokens=1, backend="eager", draft_vocab=97)


def test_the_pass_needs_a_list() -> None:
    with pytest.raises(OptionError, match="needs the option draft_vocab"):
        select_passes(plan_of(enabled_passes=("trim-draft-head",)))
    names = [
        p.name
        for p in select_passes(plan_of(disabled_passes=("trim-draft-head",), draft_vocab=LISTED))
    ]
    assert "trim-draft-head" not in names


def test_a_list_from_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mtpc vocab` counts, and `--draft-vocab` takes what it wrote."""
    text, out = tmp_path / "text", tmp_path / "ids"
    text.write_text("the house and the garden and the sea " * 20)
    assert main(["vocab", str(text), "-n", "3", "--out", str(out)]) == 0
    assert "3 of " in capsys.readouterr().out
    ids = [int(line) for line in out.read_text().split()]
    assert len(ids) == 3
    assert ids == sorted(ids)
    assert main(["vocab", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "cannot read" in capsys.readouterr().err
    text.write_text("")
    assert main(["vocab", str(text), "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
