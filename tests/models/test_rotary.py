"""Types of rotary embeddings: text equal to transformers', how far they reach, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.tiny import make_checkpoint, with_entries

import mtpc
from mtpc.errors import MtpcError, OptionError
from mtpc.models.eagle3 import Eagle3Layer
from mtpc.models.load import load

ORIGINAL, MOST = 16, 48
"""Positions of training, and `max_position_embeddings` of the tiny models."""
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
FROM = {"original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **FROM}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, **FROM}
ENTRIES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **FROM},
    "longrope": LONGROPE,
    "llama3": LLAMA3,
    "proportional": {"partial_rotary_factor": 0.5},
}
"""Each type of transformers, as config.json has it."""
REACH = {"linear": 4 * MOST, "yarn": 4 * ORIGINAL}
"""Limits of `max_len` other than `max_position_embeddings`."""
OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "dtype": "float64", "batch_buckets": (2,)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """plain(family): a random checkpoint of one layer, its angles unscaled."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            sizes = {"num_hidden_layers": 1, "max_position_embeddings": MOST, "head_dim": 16}
            made[family] = make_checkpoint(family, directory, mtp=family == "mimo", **sizes)
        return made[family]

    return get


def scaled(directory: Path, into: Path, kind: str, **entries: Any) -> Path:
    """A copy of a checkpoint with a type of rotary embedding."""
    rope = {"rope_type": kind, **(ENTRIES.get(kind, {}) | entries)}
    return with_entries(directory, into, ("rope_parameters",), rope_scaling=rope, rope_theta=1e4)


def check_text(spec: mtpc.SpecModel, family: str, directory: Path, cases: dict[int, int]) -> None:
    """Prompts of some lengths, each with so many new tokens, get transformers' text; together, too.

    transformers computes each token from the whole text, and keeps nothing.
    """
    oracle = Oracle(family, directory)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 96, (n,), generator=generator).tolist() for n in cases]
    for prompt, new in zip(prompts, cases.values(), strict=True):
        expected = oracle.generate(prompt, new, stop=False)
        assert spec.generate(prompt, new, ignore_eos=True) == expected
    together = spec.generate(prompts, min(cases.values()), ignore_eos=True)
    each = [spec.generate(p, min(cases.values()), ignore_eos=True) for p in prompts]
    assert together == each


DEFAULT_RUN = {("yarn", 0), ("dynamic", 0)}
"""test_longrope_by_max_len has a third type."""


@pytest.mark.parametrize(
    ("kind", "spec_tokens"),
    [
        pytest.param(*case, marks=() if case in DEFAULT_RUN else pytest.mark.slow)
        for case in [(kind, k) for kind in ENTRIES for k in (0, 3)]
    ],
)
def test_text_of_each_type(
    kind: str, spec_tokens: int, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Before and after the original length; texts of longrope begin after it (see the next)."""
    family = "mimo" if spec_tokens else "qwen2"
    directory = scaled(plain(family), tmp_path, kind)
    most = REACH.get(kind, MOST)
    options = {**OPTIONS, "max_len": min(most, 64), "spec_tokens": spec_tokens}
    cases = {5: 15, ORIGINAL + 3: 20}
    if kind == "longrope":
        cases = {ORIGINAL + 1: 12, ORIGINAL + 9: 20}
    check_text(mtpc.compile(directory, **options), family, directory, cases)


def test_longrope_by_max_len(plain: Callable[[str], Path], cpu_cache: Path, tmp_path: Path) -> None:
    """Up to the original length the factors are the short ones. Cached steps are not shared, and a
    warm start has the factors of its own `max_len`."""
    directory = scaled(plain("qwen2"), tmp_path, "longrope")
    options = {**OPTIONS, "backend": "cpu", "spec_tokens": 0, "cache_dir": cpu_cache}
    del options["max_len"]
    texts = {}
    for start in ("cold", "warm"):
        for max_len, cases in ((ORIGINAL, {3: 9, 6: 10}), (MOST, {ORIGINAL + 2: 12})):
            frozen = start == "warm"
            spec = mtpc.compile(directory, **options, max_len=max_len, frozen=frozen)
            check_text(spec, "qwen2", directory, cases)
            texts[start, max_len] = spec.generate([3, 5], 12, ignore_eos=True)
    assert texts["cold", ORIGINAL] == texts["warm", ORIGINAL]
    assert texts["cold", MOST] == texts["warm", MOST]


def test_angles_of_a_model_object(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """A forward leaves long angles in an object: mtpc computes its own, and changes no object."""
    directory = scaled(plain("qwen2"), tmp_path, "longrope")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    rotary = model.get_decoder().rotary_emb
    angles = {}
    for length in (ORIGINAL, MOST):
        model(torch.arange(length)[None] + 2)
        angles[length] = rotary.inv_freq.clone()
    assert not torch.equal(*angles.values())
    loaded = load(model, None, needs_mtp=False)
    for length, expected in angles.items():
        fixed = loaded.for_length(length).target.get_decoder().rotary_emb
        assert torch.equal(fixed.inv_freq, expected)
    assert torch.equal(rotary.inv_freq, angles[MOST])
    assert rotary.rope_type == "longrope"


def with_drafter(kind: str, target: Path, into: Path) -> Path:
    """A copy of a target's EAGLE-3 head with a type of rotary embedding."""
    own = {**ENTRIES[kind], **{name: SHORT + [9.0] * 4 for name in ENTRIES[kind] if "_f" in name}}
    rope = {"rope_scaling": {"rope_type": kind, **own}, "rope_theta": 1e4}
    return with_entries(target / "draft", into, ("rope_parameters",), **rope)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_of_a_drafter(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An EAGLE-3 head has a config of its own."""
    target = checkpoint("qwen3", "random")
    draft = with_drafter(kind, target, tmp_path)
    loaded = load(target, "float64", needs_mtp=True, draft=draft)
    layer = loaded.for_length(MOST).mtp_layers[0]
    assert isinstance(layer, Eagle3Layer)
    assert layer.rotary.rope_type == "default"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_of_a_drafter_change_no_text(
    kind: str, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    target = checkpoint("qwen3", "random")
    draft = with_drafter(kind, target, tmp_path)
    options = {**OPTIONS, "batch_buckets": (1,), "max_len": MOST, "draft": draft}
    spec = mtpc.compile(target, **options, spec_tokens=2)
    expected = oracle("qwen3", "random").generate(PROMPTS[4], 20, stop=False)
    assert spec.generate(PROMPTS[4], 20, ignore_eos=True) == expected


QWEN_CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""As Qwen's model cards have it, beside `max_position_embeddings` that is not multiplied."""


@pytest.mark.parametrize(
    ("most", "rope", "expected"),
    [
        (40960, QWEN_CARD, 131072),
        (32768, QWEN_CARD, 131072),
        (131072, QWEN_CARD, 131072),
        (163840, {**QWEN_CARD, "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (4096, {"type": "yarn", "factor": 2.5}, 10240),
        (4096, {"type": "linear", "factor": 4.0}, 16384),
        (4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),
        (131072, {"rope_type": "llama3", **LLAMA3, "factor": 8.0}, 131072),
        (131072, {"rope_type": "longrope", **LONGROPE}, 131072),
        (4096, {"rope_type": "default"}, 4096),
        (4096, None, 4096),
    ],
)
def test_limit_of_max_len(
    most: int, rope: Any, expected: int, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    entries = {"max_position_embeddings": most, "rope_theta": 1e6, "rope_scaling": rope}
    directory = with_entries(plain("qwen2"), tmp_path, ("rope_parameters",), **entries)
    loaded = load(directory, None, needs_mtp=False, headers_only=True)
    assert loaded.max_positions == expected


def test_limits_of_layer_types(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """DeepSeek-V4: the layers without scaling have the limit."""
    source = checkpoint("deepseek_v4", "random")
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    rope["compress"] |= {"rope_type": "yarn", "factor": 16, **FROM}
    directory = with_entries(source, tmp_path, (), rope_parameters=rope)
    loaded = load(directory, None, needs_mtp=False, headers_only=True)
    assert loaded.max_positions == ORIGINAL * 16
    rope["compress"]["factor"] = 99
    directory = with_entries(source, tmp_path, (), rope_parameters=rope)
    loaded = load(directory, None, needs_mtp=False, headers_only=True)
    assert loaded.max_positions == 512


@pytest.mark.parametrize("kind", ENTRIES)
def test_beyond_the_limit(kind: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """One error before anything is traced; it names the limit, and what raises it."""
    most = REACH.get(kind, MOST)
    directory = scaled(plain("qwen2"), tmp_path, kind)
    said = f"max_len is {most + 1}; .* at most {most} positions .*lower it, or scale by yarn"
    with pytest.raises(OptionError, match=said):
        mtpc.compile(directory, **{**OPTIONS, "max_len": most + 1, "spec_tokens": 0})


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (
            {"rope_type": "ntk", "factor": 2.0},
            "rope_type 'ntk'.*expected one of default, linear, dy",
        ),
        ({"type": "su", **LONGROPE}, "rope_type 'su'.*longrope"),
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_type 'mrope'"),
        ({"rope_type": "axial"}, "rope_type 'axial'"),
        ({"rope_type": 3}, "rope_type 3"),
        ({"rope_type": ["yarn"]}, "rope_type"),
        ({"rope_type": "linear", "factor": 0}, "'linear' with factor 0; expected a number above 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor '4'"),
        ({"rope_type": "linear", "factor": True}, "factor True"),
        ({"rope_type": "linear", "factor": math.inf}, "factor inf"),
        ({"rope_type": "linear", "factor": math.nan}, "factor nan"),
        ({"rope_type": "linear", "factor": None}, "rope_scaling.*None"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "yarn", "factor": -1.0, **FROM}, "factor -1.0"),
        ({"rope_type": "yarn", **FROM}, "'factor'"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": "2"}, "attention_factor '2'"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({**QWEN_CARD, "original_max_position_embeddings": None}, "original_max_position"),
        (
            {"rope_type": "longrope", **LONGROPE, "long_factor": [2.0] * 3},
            "'longrope'; expected short",
        ),
        (
            {
                "rope_type": "longrope",
                **LONGROPE,
                "short_factor": SHORT[1:],
                "long_factor": LONG[1:],
            },
            "'longrope', and transformers refuses it",
        ),
        ({"rope_type": "longrope", **LONGROPE, "short_factor": None}, "'longrope'"),
        (
            {"rope_type": "longrope", **LONGROPE, "long_factor": [0.0] * 8},
            "long_factor of eq.*above 0",
        ),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": -1}, "high_freq_factor -1"),
        (
            {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0},
            "low_freq_factor 0",
        ),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": -1.0}, "rope_theta -1.0"),
        ([1], "rope_scaling is a list"),
        ("yarn", "rope_scaling is text 'yarn'"),
    ],
)
def test_refused_entries(
    rope: Any, said: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """One error that names the type or the entry, before anything is traced."""
    entries = {"rope_scaling": rope, "rope_theta": 1e4}
    directory = with_entries(plain("qwen2"), tmp_path, ("rope_parameters",), **entries)
    with pytest.raises(MtpcError, match=f"(?s){said}") as caught:
        mtpc.compile(directory, **{**OPTIONS, "max_len": MOST, "spec_tokens": 0})
    assert len(str(caught.value)) < 900
