"""EAGLE-3 heads and MTP layers in checkpoints of their own: wiring, names, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import eagle, tiny
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.plans import plan_of
from helpers.released.eagle3 import Eagle3
from helpers.theorem import PROMPTS, check_drafts
from helpers.tiny import apart
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import CacheError, CheckpointError, MtpcError, OptionError, UnsupportedModelError
from mtpc.models.load import load
from mtpc.models.stepped import SteppedModel
from mtpc.program.open_cache import checkpoint_fields, sample_digest
from mtpc.weights.checkpoint import open_checkpoint

OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "dtype": "float64", "batch_buckets": (2,)}
DEFAULT_LAYERS = {"eagle_config": None}
IDS = "eagle_aux_hidden_state_layer_ids"


def head(directory: Path, rename: dict[str, str] | None = None, **changes: Any) -> Path:
    """A random head in `directory`, with another config and other names of tensors."""
    config = {**eagle.CONFIG, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    target = config.get("target_hidden_size", config["hidden_size"])
    tensors = eagle.new_head(config, target)
    if target != config["hidden_size"]:
        shape = config["vocab_size"], config["hidden_size"]
        tensors["embed_tokens.weight"] = torch.randn(shape)
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return eagle.save_head(tensors, config, directory)


@pytest.mark.parametrize(
    ("family", "depth", "changes"),
    [
        # The authors' layers by default; widths of its own; the residual after the norm.
        (
            "qwen3",
            7,
            {
                **DEFAULT_LAYERS,
                **dict(hidden_size=48, target_hidden_size=64, norm_before_residual=True),
                **dict(norm_output=True),  # EAGLE-3.1.
            },
        ),
        pytest.param("llama", 8, DEFAULT_LAYERS, marks=pytest.mark.slow),
        pytest.param("qwen2", 7, DEFAULT_LAYERS, marks=pytest.mark.slow),
        pytest.param("mimo", 7, DEFAULT_LAYERS, marks=pytest.mark.slow),
        # EAGLE-3.1, without the norms of captured rows.
        pytest.param("llama", 7, {**DEFAULT_LAYERS, "norm_output": True}, marks=pytest.mark.slow),
        # The last layer's output is what enters the final norm.
        pytest.param(
            *("llama", 4),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_drafts_equal_the_authors_code(
    family: str, depth: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Text is transformers', drafts are those of a page of plain code; the model is not changed."""
    tiny.make_checkpoint(family, tmp_path, mtp=family == "mimo", num_hidden_layers=depth)
    draft = head(tmp_path / "draft", **changes)
    spec = mtpc.compile(tmp_path, draft=draft, spec_tokens=3, **OPTIONS)
    plain = Oracle(family, tmp_path)
    oracle = DraftOracle(plain)
    oracle.page = Eagle3(plain.model, tmp_path)
    assert check_drafts(spec, oracle, [PROMPTS[3], PROMPTS[9]], 10) >= 6
    prompts = [PROMPTS[5], PROMPTS[12]]
    wanted = [plain.generate(prompt, 12, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 12, ignore_eos=True) == wanted


@torch.no_grad()
def solved(directory: Path) -> Path:
    """A target and a head that both map a token to its successor, so that every draft is right.

    The target's layers write nothing, and its head is the permuted embedding. The head attends to
    its own row alone (queries and keys are the token's embedding), takes that embedding, and takes
    away what it was fed. Its rows are all tokens but one, in another order.
    """
    target = tiny.build_target("llama")
    for block in target.get_decoder().layers:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    embedding = target.get_input_embeddings().weight
    embedding.copy_(torch.nn.functional.normalize(torch.randn_like(embedding), dim=1))
    generator = torch.Generator().manual_seed(1)
    before = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(95, generator=generator)])
    target.get_output_embeddings().weight.copy_(embedding[before])
    target.get_decoder().norm.weight.fill_(1)
    config = {**eagle.CONFIG, "draft_vocab_size": 95, "head_dim": 64}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    tensors = eagle.new_head(config, 64)
    eye, none = torch.eye(64), torch.zeros(64, 64)
    attention = {
        "q": torch.cat([10 * eye, none], 1),
        "k": torch.cat([eye, none], 1),
        "v": torch.cat([eye, -eye], 1),
        "o": eye,
    }
    tensors |= {f"midlayer.self_attn.{name}_proj.weight": w for name, w in attention.items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1)
        elif name in ("fc.weight", "midlayer.mlp.down_proj.weight"):
            tensor.zero_()
    ids = 1 + torch.randperm(95, generator=generator)
    tensors |= eagle.token_map(ids, 96)
    tensors["lm_head.weight"] = target.get_output_embeddings().weight[ids].clone()
    eagle.save_head(tensors, config, directory / "draft")
    return tiny.save_checkpoint("llama", target, [], directory)


@pytest.mark.slow
def test_full_acceptance(tmp_path: Path) -> None:
    """Drafts that are always right are always accepted: K + 1 tokens a step."""
    directory = solved(tmp_path)
    spec = mtpc.compile(directory, draft=directory / "draft", spec_tokens=3, **OPTIONS)
    prompts = [[5, 9, 5, 7], [40, 40, 3]]
    out = spec.generate(prompts, 17, ignore_eos=True)
    assert out == [Oracle("llama", directory).generate(p, 17, stop=False) for p in prompts]
    assert spec.stats.acceptance_length == 4.0


def test_float32_on_the_cpu_is_transformers_text(
    checkpoint: Callable[..., Path], cpu_cache: Path, tmp_path: Path
) -> None:
    """Compiled steps, K = 2, and steps of the cache; another head's headers are not in it."""
    directory = checkpoint("llama")
    options = {**TINY, "backend": "cpu", "dtype": "float32", "batch_buckets": (1,)}
    given = {**options, "spec_tokens": 2, "cache_dir": cpu_cache, "prefix_caching": False}
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    spec = mtpc.compile(directory, draft=directory / "draft", **given)
    for prompt in (PROMPTS[4], PROMPTS[11]):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0]
        text = wanted[len(prompt) :].tolist()
        assert spec.generate(prompt, 20) == text
    accepted = list(spec.stats.accepted)
    assert sum(accepted) > 0
    again = mtpc.compile(directory, draft=directory / "draft", frozen=True, **given)
    for prompt in (PROMPTS[4], PROMPTS[11]):
        again.generate(prompt, 20)
    assert list(again.stats.accepted) == accepted
    other = head(tmp_path, hidden_act="gelu")
    with pytest.raises(CacheError, match="frozen"):
        mtpc.compile(directory, frozen=True, draft=other, **given)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [1, 2, 3, 4])
def test_bfloat16_on_the_cpu_is_plain_decoding(
    spec_tokens: int, checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """Compiled bfloat16: the text of K = 0, and transformers' where no two logits nearly tie."""
    directory = checkpoint("llama")
    fixed = dict(backend="cpu", dtype="bfloat16", cache_dir=cpu_cache, batch_buckets=(2,))
    plain = mtpc.compile(directory, spec_tokens=0, **TINY, **fixed)
    draft = {"draft": directory / "draft", "spec_tokens": spec_tokens}
    spec = mtpc.compile(directory, **draft, **TINY, **fixed)
    assert spec.generate(PROMPTS, 20) == plain.generate(PROMPTS, 20)
    assert 0 < spec.stats.acceptance_rate < 1
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    same = 0
    for prompt, text in zip(PROMPTS, spec.generate(PROMPTS, 20), strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0]
        same += wanted[len(prompt) :].tolist() == text
    assert same >= 0.8 * len(PROMPTS)


@pytest.mark.slow
def test_sampled_text_does_not_depend_on_the_head(checkpoint: Callable[..., Path]) -> None:
    """Drafts of a part of the vocabulary are sampled as tokens, by the noise of their ids."""
    directory = checkpoint("llama")
    given = {**OPTIONS, "sampling": True}
    plain = mtpc.compile(directory, spec_tokens=0, **given)
    spec = mtpc.compile(directory, spec_tokens=3, draft=directory / "draft", **given)
    params = mtpc.SamplingParams(temperature=0.7, seed=3, top_p=0.95)
    prompts = PROMPTS[3:7]
    wanted = plain.generate(prompts, 20, ignore_eos=True, sampling=params)
    assert spec.generate(prompts, 20, ignore_eos=True, sampling=params) == wanted
    assert sum(spec.stats.accepted) > 0


@pytest.mark.slow
def test_a_model_object_keeps_what_it_is(checkpoint: Callable[..., Path]) -> None:
    """Its layers have no hooks afterwards, and the drafts are those of its directory."""
    directory = checkpoint("llama")
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    given = {name: value for name, value in OPTIONS.items() if name != "dtype"}
    spec = mtpc.compile(model, draft=directory / "draft", spec_tokens=2, **given)
    assert not any(module._forward_pre_hooks for module in model.modules())
    plain = Oracle("llama", directory)
    assert check_drafts(spec, DraftOracle(plain), [PROMPTS[3]], 8) > 0


# ---------------------------------------------------------------------- MTP layers


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("mimo", ("", "")),
        pytest.param(*("glm4_moe", ("model.layers.2.", "model.layers.0.")), marks=pytest.mark.slow),
    ],
)
def test_mtp_layers_of_their_own(
    family: str,
    rename: tuple[str, str],
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> None:
    """By the names of a full checkpoint, and by those of an exporter's one layer."""
    target, draft = apart(checkpoint(family), tmp_path, rename)
    spec = mtpc.compile(target, draft=draft, spec_tokens=3, **OPTIONS)
    assert check_drafts(spec, DraftOracle(oracle(family)), [PROMPTS[3], PROMPTS[9]], 10) >= 6
    with pytest.raises(CheckpointError, match=r"announces no MTP layers.*give a drafter"):
        mtpc.compile(target, spec_tokens=3, **OPTIONS)


def test_a_drafter_wins_over_mtp_layers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """And that is said."""
    draft, said = head(tmp_path), list[str]()
    given = {**OPTIONS, "batch_buckets": (1,), "spec_tokens": 1}
    given |= {"draft": head(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]})}
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :128].contiguous()
    save_file(tensors, draft / "model.safetensors")
    mtpc.compile(checkpoint("mimo"), progress=lambda p: said.append(p.stage), **given)
    assert any("drafts in place of the target's own MTP layers" in line for line in said)


# ---------------------------------------------------------------------- layers, keys, refusals


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({IDS: [3, 1, 2]}, (1, 2, 3)),
        ({"eagle_config": {IDS: [0, 1, 2]}}, (1, 2, 3)),
        ({"eagle_config": {IDS: [3, 1, 2]}}, (2, 3, 4)),
        ({"eagle_config": {IDS: [1, 2, 3]}, IDS: [0, 1, 2]}, (0, 1, 2)),
        # Nothing but the final norm stands after the last of seven layers.
        ({"eagle_config": {IDS: [1, 5, 7]}}, (1, 5, 7)),
        # As outputs, these are the authors' [2, 3, 4]; as inputs, these are.
        ({"eagle_config": {IDS: [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {IDS: [2, 3, 4]}}, (2, 3, 4)),
    ],
)
def test_where_ids_stand_says_what_they_count(
    given: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    """Inputs of layers at the top, and outputs in `eagle_config`, where they can be outputs."""
    target = tiny.make_checkpoint("llama", tmp_path / "target", mtp=False, num_hidden_layers=7)
    draft = head(tmp_path / "draft", **{**DEFAULT_LAYERS, **given})
    loaded = load(open_checkpoint(target, draft), None, True, headers_only=True)
    assert SteppedModel(loaded, {}, 2).target.layer_ids == layers


def test_names_of_other_tools(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """speculators' config and names, and a norm before the residual."""
    inner = {**eagle.CONFIG, "architectures": None}
    config = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner}
    config |= {"draft_vocab_size": 88, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    tensors = eagle.new_head(eagle.CONFIG, 64)
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    draft = eagle.save_head(tensors, {**config, "norm_before_residual": True}, tmp_path)
    (layer,) = load(open_checkpoint(checkpoint("llama"), draft), None, True).mtp_layers
    assert layer.config.norm_first
    assert torch.equal(layer.projection.weight, tensors["fc.weight"])


def test_a_quantised_head(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """FP8 with a scale a block, beside a plain target: as what its codes stand for."""
    tensors, wanted = eagle.new_head(eagle.CONFIG, 64), dict[str, torch.Tensor]()
    for name in [name for name in tensors if "_proj" in name]:
        scale = (tensors[name].abs().max() / 448).reshape(1, 1)
        codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        wanted[name] = (codes.float() * scale).bfloat16()
    says = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {**eagle.CONFIG, "torch_dtype": "bfloat16", "quantization_config": says}
    draft = eagle.save_head(tensors, config, tmp_path)
    source = open_checkpoint(checkpoint("llama"), draft)
    (layer,) = load(source, "bfloat16", True).mtp_layers
    assert len(wanted) == 7
    for name, weight in wanted.items():
        inner = name.replace("midlayer.", "block.")
        assert torch.equal(layer.get_parameter(inner), weight), name
    assert {f"draft.{name}" for name in wanted} <= source.specs.keys()
    assert any(note.startswith("draft: 7 of 7 quantised") for note in source.notes)


def test_a_head_is_in_the_key(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its config and its headers, and no path."""
    keys = [
        checkpoint_fields(open_checkpoint(checkpoint("llama"), draft))
        for draft in (
            head(tmp_path / "one"),
            head(tmp_path / "same"),
            head(tmp_path / "theta", rope_theta=5e5),
            head(tmp_path / "wider", intermediate_size=96),
            None,
        )
    ]
    assert keys[0] == keys[1]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 4


def test_ranks_compare_the_values_of_a_head(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = eagle.new_head(eagle.CONFIG, 64)
    other = {**tensors, "norm.weight": tensors["norm.weight"] + 1}
    digests = [
        sample_digest(open_checkpoint(checkpoint("llama"), eagle.save_head(t, eagle.CONFIG, d)))
        for t, d in ((tensors, tmp_path / "one"), (tensors, tmp_path / "same"), (other, tmp_path))
    ]
    assert digests[0] == digests[1] != digests[2]


def refused(checkpoint: Path, draft: Path, **options: Any) -> str:
    with pytest.raises(MtpcError) as raised:
        mtpc.compile(checkpoint, draft=draft, spec_tokens=2, **{**OPTIONS, **options})
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=100), "must name 88 different tokens of the target's 96"),
        (dict(vocab_size=90), "vocab_size is 90, and the target's is 96; use an EAGLE-3 head"),
        (dict(hidden_size=48), "hidden_size is 48, and the target's is 64"),
        (dict(target_hidden_size=48), "hidden_size is 48, and the target's is 64"),
        (dict(num_hidden_layers=2), "EAGLE-3 head with num_hidden_layers=2; expected one layer"),
        (dict(norm_before_fc=True), "with norm_before_fc=True"),
        (dict(layer_types=["sliding_attention"]), "with layer_types=\\['sliding_attention'\\]"),
        (dict(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False"),
        (dict(eagle_config=None), "layers to capture are \\[2, 2, 1\\]; expected different ones"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "are \\[1, 2, 9\\]; expected"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2]), "projection.weight is .* expected"),
        (dict(architectures=["LlamaForCausalLM"]), "is no drafter for llama: its architectures"),
        (dict(architectures=None), "is no drafter for llama"),
    ],
)
def test_a_head_that_does_not_fit(
    changes: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = refused(checkpoint("llama"), head(tmp_path, **changes))
    assert re.search(message, found), found
    assert str(tmp_path) in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "lacks d2t, which says what tokens the 88 rows"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight, and the target's is of another"),
        (lambda t: t.pop("fc.weight"), "missing projection.weight"),
        (lambda t: t.update({"q_norm.weight": torch.ones(2)}), "unexpected q_norm.weight"),
        (lambda t: t["d2t"].add_(40), "d2t must name 88 different tokens of the target's 96"),
        (lambda t: t["d2t"].sub_(torch.arange(88)), "d2t must name 88 different tokens"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "hold NaN or infinity"),
    ],
)
def test_a_head_with_wrong_tensors(
    change: Any, message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = eagle.new_head(eagle.CONFIG, 64)
    change(tensors)
    found = refused(checkpoint("llama"), eagle.save_head(tensors, eagle.CONFIG, tmp_path))
    assert message in found, found


def test_what_else_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    llama, draft = checkpoint("llama"), head(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"announces no MTP layers.*give a drafter"):
        mtpc.compile(llama, spec_tokens=3, **OPTIONS)
    with pytest.raises(CheckpointError, match="is not a directory"):
        mtpc.compile(llama, draft=tmp_path / "nothing", **OPTIONS)
    with pytest.raises(OptionError, match="draft is 3; expected a directory's path"):
        mtpc.compile(llama, draft=3)
    with pytest.raises(OptionError, match="draft_vocab names tokens for a drafter"):
        mtpc.compile(llama, draft=draft, draft_vocab=20, **OPTIONS)
    with pytest.raises(OptionError, match="wiring has hidden_first, which has no meaning"):
        mtpc.compile(llama, draft=draft, wiring={"hidden_first": True}, **OPTIONS)
    with pytest.raises(UnsupportedModelError, match="has no residual stream of one row"):
        mtpc.compile(checkpoint("deepseek_v4", "random"), draft=draft, **OPTIONS)


def test_without_drafts_a_head_is_not_read(tmp_path: Path) -> None:
    options = plan_of(draft=tmp_path / "nothing", spec_tokens=0)
    assert options.draft == ""
