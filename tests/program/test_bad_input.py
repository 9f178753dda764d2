"""Bad input gets one clear error that says what was found, expected and to do; nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import TINY
from helpers.plans import changed
from helpers.theorem import PROMPTS
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.config import CompileOptions
from mtpc.engine.engine import Engine
from mtpc.errors import (
    CapacityError,
    CheckpointError,
    NumericsError,
    OptionError,
    RequestError,
    UnsupportedModelError,
)
from mtpc.layout import BufferSpec, Layout
from mtpc.layout.progress import Progress

EAGER = {"backend": "eager", "dtype": "float64", "batch_buckets": (1,), **TINY}


@pytest.fixture
def spec(compiled: Callable[..., Any]) -> mtpc.SpecModel:
    return compiled("mimo", 2)


@pytest.fixture
def damaged(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """damaged(family): a private copy of a checkpoint, to break."""

    def get(family: str = "mimo") -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / "copy"))

    return get


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 4, "prompt is empty"),
        ([3, 96], 4, r"prompt id 96; expected ids in 0\.\.95"),
        ([-1], 4, "prompt id -1"),
        ([3], 0, "max_new_tokens is 0"),
        ([3], True, "max_new_tokens is True"),
        ([3] * 60, 5, r"60 \+ max_new_tokens 5 = 65 tokens; max_len is 64"),
        ("text", 4, "no tokenizer"),
        (torch.zeros(2, 2, dtype=torch.int64), 4, r"shape \(2, 2\)"),
    ],
)
def test_requests(spec: mtpc.SpecModel, prompt: Any, new: Any, message: str) -> None:
    """Refused before anything runs: the good prompt beside it has cost nothing."""
    before = spec.stats.prefill_steps
    with pytest.raises(RequestError, match=message):
        spec.generate([[5, 6], prompt], max_new_tokens=new)
    assert spec.stats.prefill_steps == before
    assert not spec.engine.has_work
    assert len(spec.generate([5, 6], 3, ignore_eos=True)) == 3


def test_prompts_in_every_form(spec: mtpc.SpecModel) -> None:
    """Lists, tensors and arrays of one or two dimensions are the same prompts."""
    wanted = spec.generate([[5, 6, 7], [8, 9, 3]], 4)
    rows = torch.tensor([[5, 6, 7], [8, 9, 3]])
    assert spec.generate(rows, 4) == wanted
    assert spec.generate(list(rows), 4) == wanted
    assert spec.generate(rows.numpy(), 4) == wanted
    assert spec.generate(rows[0], 4) == spec.generate(rows[0].numpy(), 4) == wanted[0]
    with pytest.raises(RequestError, match="neither text nor token ids"):
        spec.generate([[5.0, 6.0]], 4)
    with pytest.raises(RequestError, match="prompts is None"):
        spec.generate(None, 4)  # type: ignore[arg-type]


def test_generate_swallows_no_output_of_other_requests(spec: mtpc.SpecModel) -> None:
    request_id = spec.engine.add([5, 6], 3)
    with pytest.raises(RequestError, match="added by hand"):
        spec.generate([7], 2)
    spec.engine.abort(request_id)
    assert len(spec.generate([7], 2, ignore_eos=True)) == 2


def test_exactly_max_len_is_served(spec: mtpc.SpecModel) -> None:
    assert len(spec.generate([3] * 60, 4, ignore_eos=True)) == 4


def test_no_prompts_is_no_work(spec: mtpc.SpecModel) -> None:
    assert spec.generate([], 4) == []


def test_more_requests_than_the_largest_bucket_queue(
    spec: mtpc.SpecModel, oracle: Callable[..., Any]
) -> None:
    assert max(spec.options.batch_buckets) < 7
    out = spec.generate(PROMPTS[:7], 6)
    assert out == [oracle("mimo").generate(prompt, 6) for prompt in PROMPTS[:7]]


def test_stop_ids(spec: mtpc.SpecModel) -> None:
    """Refused before a slot or page is taken."""
    free = (spec.engine.pages.num_free, spec.engine.slots.num_free)
    with pytest.raises(RequestError, match="9 stop ids; at most 8"):
        spec.generate([3], 2, stop_ids=list(range(9)))
    for odd in ("a", 1.5, True):
        with pytest.raises(RequestError, match=f"stop_ids has {odd!r}, an? .*; expected"):
            spec.generate([3], 2, stop_ids=[odd])
    assert (spec.engine.pages.num_free, spec.engine.slots.num_free) == free


def test_defaults_and_the_alias_of_an_option(checkpoint: Callable[..., Path]) -> None:
    """max_len is what the model has."""
    options = {name: value for name, value in EAGER.items() if name != "max_len"}
    spec = mtpc.compile(checkpoint("mimo"), num_speculative_tokens=0, **options)
    assert (spec.options.max_len, spec.options.spec_tokens) == (512, 0)


def test_a_pool_too_small_for_a_request(spec: mtpc.SpecModel) -> None:
    few = changed(spec.options, num_pages=6)
    engine = Engine(spec.program, few, spec.engine.vocab_size)
    with pytest.raises(CapacityError, match=r"needs 8 pages of 4 tokens, the pool has 5"):
        engine.add([3] * 20, 6)
    # What fits is served, one after the other where both do not.
    texts = {engine.add([token] * 8, 4): list[int]() for token in (3, 4)}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    assert [len(text) for text in texts.values()] == [4, 4]
    spec.engine.reset_prefix_cache()  # This engine wrote over its pages.


def test_a_pool_too_small_for_anything(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CapacityError, match="too small for any request"):
        mtpc.compile(checkpoint("mimo"), spec_tokens=3, num_pages=2, **EAGER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_tokens": -1}, r"spec_tokens is -1; expected an integer in 0\.\.16"),
        ({"spec_tokens": 1000}, "spec_tokens is 1000"),
        ({"spec_tokens": 2.0}, r"spec_tokens is 2\.0 \(float\)"),
        ({"spec_token": 2}, "did you mean 'spec_tokens'"),
        ({"num_speculative_token": 2}, "did you mean 'num_speculative_tokens'"),
        ({"spec_tokens": 2, "num_speculative_tokens": 2}, "given twice"),
        ({"wibble": 2}, "known options:"),
        ({"batch_buckets": ()}, "batch_buckets is empty"),
        ({"batch_buckets": (0,)}, "batch_buckets is 0"),
        ({"batch_buckets": None}, "batch_buckets is None"),
        ({"prefill_rows": 3, "prefill_chunk": 2}, r"prefill_rows is 3; expected .* in 1\.\.2"),
        (
            {"prefill_rows": 3, "batch_buckets": (4,), "prefill_chunk": 8},
            "3, which does not divide prefill_chunk 8",
        ),
        ({"prefill_chunk": 8, "busy_prefill_chunk": 9}, r"expected an integer in 1\.\.8"),
        ({"max_len": 1}, "max_len is 1"),
        ({"backend": "cqu"}, "did you mean 'cpu'"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; expected one of bfloat16"),
        ({"dtype": torch.float32}, r"dtype is torch\.float32; expected one of"),
        ({"backend": None}, "backend is None"),
        ({"disabled_passes": "hoist-shared"}, "expected pass names"),
        ({"disabled_passes": 3}, "disabled_passes is 3; expected pass names"),
        ({"enabled_passes": None}, "enabled_passes is None; expected pass names"),
        ({"enabled_passes": (3,)}, r"enabled_passes is \(3,\); expected pass names"),
        ({"spec_tiers": 2}, r"spec_tiers is 2; expected several numbers"),
        ({"spec_tokens": "auto", "spec_tiers": "01"}, "spec_tiers is '01'; expected several"),
        ({"spec_tokens": "auto", "spec_tiers": 3.0}, r"spec_tiers is 3\.0; expected several"),
        ({"spec_tokens": 2, "spec_tiers": ("a", 2)}, r"spec_tiers is 'a' \(str\)"),
        ({"spec_tokens": 2, "spec_tiers": (-1, 2)}, r"spec_tiers is -1; expected an integer in 0"),
        ({"spec_tokens": "many"}, r"spec_tokens is 'many' \(str\)"),
        ({"backend": 3}, "backend is 3"),
        ({"cache_dir": 3}, "cache_dir is 3"),
        ({"draft_vocab": 2.5}, r"draft_vocab is 2\.5"),
        ({"max_len": 513}, "max_len is 513; the model was made for at most 512"),
        ({"disabled_passes": ("hoist",)}, "unknown pass 'hoist'"),
    ],
)
def test_options(checkpoint: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        mtpc.compile(checkpoint("mimo"), **{**EAGER, **options})


SWITCHES = [field.name for field in fields(CompileOptions) if isinstance(field.default, bool)]


@pytest.mark.parametrize("value", ["no", "False", 0, None])
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    """ "no" is true where Python is asked."""
    with pytest.raises(OptionError, match=f"{name} is {value!r}; expected True or False"):
        CompileOptions(**{name: value})


def test_every_option_refuses_what_it_cannot_be() -> None:
    for field in fields(CompileOptions):
        with pytest.raises(OptionError, match=field.name):
            CompileOptions(**{field.name: object()})


def test_something_that_is_no_model() -> None:
    with pytest.raises(OptionError, match="cannot compile a dict"):
        mtpc.compile({}, **EAGER)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        mtpc.compile(tmp_path / "nowhere", **EAGER)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        mtpc.compile(tmp_path, **EAGER)


def test_a_broken_config(damaged: Callable[..., Path]) -> None:
    directory = damaged()
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        mtpc.compile(directory, **EAGER)


def test_an_unknown_architecture(damaged: Callable[..., Path]) -> None:
    directory = damaged()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Gpt9"]}))
    message = rf"{directory}/config\.json: architectures \['Gpt9'\] are not supported; expected a "
    with pytest.raises(UnsupportedModelError, match=message):
        mtpc.compile(directory, **EAGER)
    near = {**config, "architectures": ["Glm4MoEForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(near))
    with pytest.raises(UnsupportedModelError, match=r"the nearest is Glm4MoeForCausalLM"):
        mtpc.compile(directory, **EAGER)


@pytest.mark.parametrize("keep", [0, 7, 200, -1000])
def test_a_truncated_file(damaged: Callable[..., Path], keep: int) -> None:
    directory = damaged()
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        mtpc.compile(directory, **EAGER)


def test_no_weights_at_all(damaged: Callable[..., Path]) -> None:
    directory = damaged()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        mtpc.compile(directory, **EAGER)


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite a checkpoint's tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_missing_mtp_tensor(damaged: Callable[..., Path]) -> None:
    name = "model.mtp_layers.0.input_proj.weight"
    directory = edit(damaged(), lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match=r"missing projection\.weight; unexpected none"):
        mtpc.compile(directory, **EAGER)


def test_an_unconsumed_mtp_tensor(damaged: Callable[..., Path]) -> None:
    name = "model.mtp_layers.0.self_attn.q_norm.weight"
    directory = edit(damaged(), lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=r"unexpected block\.self_attn\.q_norm\.weight"):
        mtpc.compile(directory, **EAGER)


def test_a_mtp_tensor_of_another_shape(damaged: Callable[..., Path]) -> None:
    name = "model.mtp_layers.0.input_proj.weight"
    directory = edit(damaged(), lambda tensors: tensors.update({name: torch.ones(64, 64)}))
    with pytest.raises(CheckpointError, match=r"is \(64, 64\), expected \(64, 128\)"):
        mtpc.compile(directory, **EAGER)


def test_a_missing_expert(damaged: Callable[..., Path]) -> None:
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    directory = edit(damaged("glm4_moe"), lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match=r"experts lacks 1\.up_proj"):
        mtpc.compile(directory, **EAGER)


def test_a_missing_target_tensor(damaged: Callable[..., Path]) -> None:
    directory = edit(damaged(), lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor"):
        mtpc.compile(directory, **EAGER)


def test_an_mtp_layer_with_a_head_of_another_shape(damaged: Callable[..., Path]) -> None:
    directory, name = damaged("glm4_moe"), "model.layers.2.shared_head.head.weight"
    edit(directory, lambda tensors: tensors.update({name: torch.zeros(95, 64)}))
    with pytest.raises(CheckpointError, match=r"head\.weight is \(95, 64\), expected \(96, 64\)"):
        mtpc.compile(directory, spec_tokens=1, **EAGER)


@pytest.mark.parametrize(
    ("family", "announced", "message"),
    [
        ("mimo", 2, r"MTP layer 1 of .*: missing block\.input_layernorm\.weight"),
        ("mimo_v2", 2, r"stores more MTP layers \(model\.mtp\.layers\.2\..*than the 2 that its"),
    ],
)
def test_more_or_fewer_mtp_layers(
    family: str, announced: int, message: str, damaged: Callable[..., Path]
) -> None:
    directory = damaged(family)
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = announced
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        mtpc.compile(directory, spec_tokens=1, **EAGER)


def test_a_target_tensor_of_another_shape(damaged: Callable[..., Path]) -> None:
    directory = edit(damaged(), lambda t: t.update({"model.norm.weight": torch.ones(3)}))
    message = r"describes model\.norm\.weight as \[64\], by hidden_size .*; .* tensor is \[3\]"
    with pytest.raises(CheckpointError, match=message):
        mtpc.compile(directory, **EAGER)


def test_a_quantised_mtp_layer(damaged: Callable[..., Path]) -> None:
    name = "model.mtp_layers.0.input_proj.weight_scale_inv"
    directory = edit(damaged(), lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match="and has block scales"):
        mtpc.compile(directory, **EAGER)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight"]
)
def test_nan_weights(damaged: Callable[..., Path], name: str) -> None:
    """Reported by name, not silently decoded."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 3] = torch.nan

    with pytest.raises(CheckpointError, match="hold NaN or infinity"):
        mtpc.compile(edit(damaged(), spoil), **EAGER)


def test_nan_logits(spec: mtpc.SpecModel) -> None:
    """Weights that turn bad after compilation: the request ends with an error, not with text."""
    weight = spec.loaded.target.get_output_embeddings().weight.data
    good = weight[5].clone()
    try:
        weight[5] = torch.nan
        with pytest.raises(NumericsError, match="NaN or infinite after 0 new tokens"):
            spec.generate([3, 4], 5)
    finally:
        weight[5] = good
    assert not spec.engine.has_work
    assert spec.generate([3, 4], 5)


def test_no_mtp_layers(checkpoint: Callable[..., Path], compiled: Callable[..., Any]) -> None:
    """spec_tokens=0 still works, and the error says so."""
    with pytest.raises(CheckpointError, match="use spec_tokens=0 to decode without drafts"):
        mtpc.compile(checkpoint("mimo", "plain"), spec_tokens=1, **EAGER)
    spec = compiled("mimo", 0, "plain", batch_buckets=(1,))
    assert len(spec.generate([3, 4], 5, ignore_eos=True)) == 5


def test_model_objects(checkpoint: Callable[..., Path], oracle: Callable[..., Any]) -> None:
    """A model object is shared, left as it was, and needs its checkpoint for the MTP layers."""
    directory = checkpoint("glm4_moe")
    model = transformers.Glm4MoeForCausalLM.from_pretrained(directory, dtype=torch.float64)
    before = (model.config.to_json_string(), model.config._attn_implementation)
    experts = model.config._experts_implementation
    options = {k: v for k, v in EAGER.items() if k != "dtype"}
    spec = mtpc.compile(model, spec_tokens=1, **options)
    assert spec.generate(PROMPTS[4], 8) == oracle("glm4_moe").generate(PROMPTS[4], 8)
    assert (model.config.to_json_string(), model.config._attn_implementation) == before
    assert model.config._experts_implementation == experts
    held = {t.data_ptr() for t in spec.loaded.target.parameters()}
    assert held == {t.data_ptr() for t in model.parameters()}
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(CheckpointError, match="expected a local directory"):
        mtpc.compile(model, spec_tokens=2, **options)
    with pytest.raises(OptionError, match="dtype='float64' with a model object"):
        mtpc.compile(model, spec_tokens=0, **EAGER)


def test_ctrl_c_during_compile(checkpoint: Callable[..., Path]) -> None:
    """Nothing half-made is returned; a second try works."""

    def interrupt(progress: Progress) -> None:
        if progress.stage == "lower":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mtpc.compile(checkpoint("mimo"), spec_tokens=0, progress=interrupt, **EAGER)
    assert mtpc.compile(checkpoint("mimo"), spec_tokens=0, **EAGER).generate([3], 2)


def test_ctrl_c_during_generate(spec: mtpc.SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages and slots come back, and the next call is served as ever."""
    wanted = spec.generate(PROMPTS[3:6], 10)
    free = spec.engine.pages.num_free
    real, calls = spec.engine.step, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(spec.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(PROMPTS[3:6], 10)
    monkeypatch.undo()
    assert not spec.engine.has_work
    assert spec.engine.pages.num_free == free
    assert spec.generate(PROMPTS[3:6], 10) == wanted


def test_a_buffer_that_no_memory_holds() -> None:
    """One error that names it, its size and what to change, on any device."""
    layout = Layout([BufferSpec("kv.0.keys", (2**50,), torch.float32)], {})
    with pytest.raises(CapacityError, match=r"no memory for kv.0.keys: 4194304.0 GiB on cpu; low"):
        layout.allocate("kv.0.keys")
