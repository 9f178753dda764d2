"""Every causal LM class of transformers: mtpc computes what it computes, or says why it cannot.

What it does with each class is in the table of docs/models.md, which `tests/helpers/derived.py`
writes. transformers' own forward in float64 is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import derived, tiny
from helpers.derived import CLASSES, EQUAL, NEW, OPTIONS, PROMPTS

import mtpc
from mtpc.errors import UnsupportedModelError
from mtpc.models.derived import derive
from mtpc.models.observe import _window as window_of
from mtpc.models.observe import observe
from mtpc.models.seams import ClampedGate, Gate, gate_of

BY_DEFAULT = (
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3MoeForCausalLM",
    "Phi3ForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "GraniteForCausalLM",
    "StableLmForCausalLM",
    "GPT2LMHeadModel",
    "Llama4ForCausalLM",
    "FalconH1ForCausalLM",
    "MiniMaxForCausalLM",
    "BertLMHeadModel",
)
"""Windows, sinks, experts, one matrix for several, scaled logits, latents, multipliers, attention
that hands nothing on, learned positions, Mamba-2 beside attention; chunks, other recurrent state
and an encoder are refused."""
ROWS = derived.written()
is_newest = transformers.__version__.startswith("5.24.")


@pytest.mark.skipif(not is_newest, reason="the table is of transformers 5.24")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in BY_DEFAULT)) for n in ROWS]
)
def test_a_class_is_transformers_own_or_is_refused(name: str, tmp_path: Path) -> None:
    """Three prompts, two at a time, in chunks; as the table says. How near a class that computes in
    float32 is depends on the processor."""
    found, said = derived.outcome(name, tmp_path), ROWS[name]
    assert found == said or (found.startswith(EQUAL) and said.startswith(EQUAL))


def test_the_table_is_of_classes() -> None:
    if is_newest:
        assert ROWS.keys() == CLASSES.keys()
    assert [said for said in ROWS.values() if said.startswith("FAILED")] == []
    assert sum(said.startswith(EQUAL) for said in ROWS.values()) >= 70


def test_what_a_class_keeps() -> None:
    """Seen by running it without values: heads, widths and windows, of a released size."""
    config = transformers.Gemma3TextConfig(num_hidden_layers=7)
    found = observe(transformers.Gemma3ForCausalLM, config)
    assert [state.window for state in found.values()] == [4096] * 5 + [0, 4096]
    assert {(state.heads, state.widths) for state in found.values()} == {(4, (256, 256))}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GemmaForCausalLM", Gate(gelu=True)),
        ("Qwen3MoeForCausalLM", Gate()),
        ("HYV4ForCausalLM", Gate(10.0, limit_input=True)),
        ("GptOssForCausalLM", ClampedGate(7.0, 1.702)),
        ("AriaTextForCausalLM", None),
    ],
)
def test_gates_of_experts(name: str, expected: Gate | ClampedGate | None) -> None:
    """By the values of the class's own activation, whatever its attributes are called."""
    model = derived.tiny_model(name)
    experts = [m for m in model.modules() if getattr(type(m), "_apply_gate", None)]
    assert {gate_of(module) for module in experts} <= {expected}
    assert experts or name == "GemmaForCausalLM"


def test_a_text_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    """Gemma 3 as released: names and entries are one level deeper."""
    config = derived.tiny_config("gemma3")
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).double().eval()
    model.save_pretrained(tmp_path)
    spec = mtpc.compile(tmp_path, spec_tokens=0, **OPTIONS)
    wanted = [derived.continued(model, prompt, 1e-6) for prompt in PROMPTS]
    assert spec.generate([*PROMPTS], NEW, ignore_eos=True) == wanted


@pytest.mark.slow
def test_an_eagle3_head_drafts_for_any_class(tmp_path: Path) -> None:
    """Text is the target's own, and drafts are accepted in part or not; they change nothing."""
    from helpers import eagle

    model = derived.tiny_model("Olmo2ForCausalLM", num_hidden_layers=4)
    model.save_pretrained(tmp_path / "target")
    head = {**eagle.CONFIG, "vocab_size": 128, "draft_vocab_size": 128}
    eagle.save_head(eagle.new_head(head, 64), head, tmp_path / "head")
    spec = mtpc.compile(tmp_path / "target", draft=tmp_path / "head", spec_tokens=1, **OPTIONS)
    wanted = [derived.continued(model, prompt, 1e-6) for prompt in PROMPTS]
    assert spec.generate([*PROMPTS], NEW, ignore_eos=True) == wanted
    assert sum(spec.stats.drafted) > 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("BertLMHeadModel", "an encoder"),
        ("BartForCausalLM", "attends to an encoder"),
        ("WhisperForCausalLM", "attends to an encoder"),
    ],
)
def test_encoders_are_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        derive([name])


def test_an_unknown_class_is_no_family(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    entries: dict[str, Any] = {"architectures": ["NoSuchForCausalLM"]}
    directory = tiny.with_entries(checkpoint("mimo", "random"), tmp_path, (), **entries)
    with pytest.raises(UnsupportedModelError, match="decoder-only causal LM of transformers 5"):
        mtpc.compile(directory, spec_tokens=0, **OPTIONS)


def test_layers_of_one_kind_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look runs a mask on thousands of pairs of positions."""
    looked, look = [], window_of
    monkeypatch.setattr("mtpc.models.observe._window", lambda mask: looked.append(0) or look(mask))
    kinds = ["sliding_attention", "full_attention"] * 4
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 8}
    config = transformers.Gemma3TextConfig(
        **sizes, num_hidden_layers=8, layer_types=kinds, sliding_window=16
    )
    states = observe(transformers.Gemma3ForCausalLM, config)
    assert [states[layer].window for layer in range(8)] == [16, 0] * 4
    assert len(looked) == 2
