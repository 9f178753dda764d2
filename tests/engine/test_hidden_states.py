"""`hidden_state_layers`: what enters layers of the target, beside transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.theorem import PROMPTS
from helpers.told import layer_inputs

import mtpc
from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.models.load import family_of, read_target
from mtpc.weights.checkpoint import Checkpoint


def target(directory: Path) -> Any:
    files = Checkpoint(directory)
    model = read_target(files, family_of(files), "float64").eval()
    family_of(files).as_decoded(model)
    return model


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "step3p5", "qwen3_next"])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_they_are_what_enters_the_layers(
    family: str, backend: str, checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """Of prompts in several chunks and in one, and of what is decoded; requests that join later."""
    directory = checkpoint(family)
    model = target(directory)
    layers = (0, len(model.get_decoder().layers))
    spec = mtpc.compile(
        directory, spec_tokens=0, hidden_state_layers=layers, batch_buckets=(2,), max_len=80,
        prefill_chunk=8, backend=backend, dtype="float64", cache_dir=cpu_cache,
    )  # fmt: skip
    prompts = [PROMPTS[9][:3], PROMPTS[10][:21], PROMPTS[11][:10]]
    for prompt, done in zip(prompts, spec.generate(prompts, 7, ignore_eos=True), strict=True):
        text = torch.tensor([[*prompt, *done][:-1]])
        wanted, _ = layer_inputs(model, text, layers)
        assert done.hidden_states is not None
        torch.testing.assert_close(done.hidden_states, wanted[0], rtol=0, atol=1e-5)


def test_they_outlive_reused_pages_and_preemption(
    checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """A prompt whose pages are in the prefix cache; and a pool too small for all requests."""
    options = dict(spec_tokens=0, hidden_state_layers=[2], max_len=64, page_size=4, num_pages=14)
    spec = mtpc.compile(
        checkpoint("qwen2"), batch_buckets=(4,), backend="cpu", cache_dir=cpu_cache, **options
    )
    model = target(checkpoint("qwen2"))
    begun = list(PROMPTS[9][:20])
    first = spec.generate([begun], 4, ignore_eos=True)
    prompts = [[*begun, *PROMPTS[11][:size]] for size in (1, 3, 5, 7)]
    several = spec.generate(prompts, 12, ignore_eos=True)
    assert spec.stats.preemptions > 0
    assert spec.stats.reused_tokens > 0
    for prompt, done in zip([begun, *prompts], [*first, *several], strict=True):
        wanted, _ = layer_inputs(model, torch.tensor([[*prompt, *done][:-1]]), (2,))
        assert done.hidden_states is not None
        torch.testing.assert_close(done.hidden_states.double(), wanted[0], rtol=0, atol=1e-4)


def test_an_end_that_no_step_decides_has_none(
    checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    spec = mtpc.compile(
        checkpoint("qwen2"), spec_tokens=0, backend="cpu", max_len=64, cache_dir=cpu_cache
    )
    assert spec.generate([1, 2, 3], 4).hidden_states is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(spec_tokens=1), "spec_tokens is 1; expected spec_tokens=0"),
        (dict(spec_tokens=0, hidden_state_layers=(99,)), r"\(99,\); expected numbers up to"),
        (dict(spec_tokens=0, hidden_state_layers=3), "is 3; expected numbers of layers, such as"),
        (dict(spec_tokens=0, hidden_state_layers=(-1,)), "is -1; expected an integer >= 0"),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        mtpc.compile(
            checkpoint("mimo"), **{"hidden_state_layers": (1,), **options}, cache_dir=tmp_path
        )


def test_residual_streams_are_not_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="deepseek_v4 has no residual stream of one"):
        mtpc.compile(
            checkpoint("deepseek_v4"), spec_tokens=0, hidden_state_layers=(0,), cache_dir=tmp_path
        )
