"""Pages of codes: the text is the model's own with such keys and values, whatever K and batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.coded import hadamard
from helpers.oracles import Oracle
from helpers.reuse import Conversations, check_reuse
from helpers.theorem import PROMPTS, check_after_rejection, check_theorem
from transformers import DynamicCache

import mtpc
from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.models.seams import CACHE

LARGEST = {"int8": 127.0, "fp8": 448.0}


def through_codes(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """[..., D] as it is read again: each row by itself, rounded to codes of its largest number.
    Blocks of a power of two features are spread before they become int8."""
    block = rows.shape[-1] & -rows.shape[-1] if kind == "int8" else 1
    signs = hadamard(block).to(rows.dtype)
    spread = (rows.unflatten(-1, (-1, block)) @ signs).flatten(-2).float()
    scale = (spread.abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp(min=1e-30)
    codes = spread / scale
    codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()
    read = codes.to(rows.dtype) * scale.to(rows.dtype)
    return (read.unflatten(-1, (-1, block)) @ signs).flatten(-2) / block


def key_shift(decoder: Any, layer: int) -> Any:
    """What a layer's keys have in common: the bias, as the first 4,096 positions turn it on the
    average. 0 of layers without one."""
    attention = decoder.layers[layer].self_attn if layer < len(decoder.layers) else None
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    if bias is None or hasattr(attention, "k_norm"):
        return 0.0
    heads = bias.detach().view(-1, 1, attention.head_dim)
    turned = heads.new_zeros(attention.head_dim) + 1
    angles = torch.outer(torch.arange(4096).double(), decoder.rotary_emb.inv_freq.double())
    turned[: 2 * angles.shape[1]] = angles.cos().mean(0).repeat(2)
    return heads * turned


class CodedCache(DynamicCache):
    """transformers' cache; what its layers attend to went through codes.

    `shifts` of a layer's keys [H_kv, 1, D] do not.
    """

    def __init__(self, kind: str, shifts: dict[int, Any], **options: Any):
        super().__init__(**options)
        self.kind, self.shifts = kind, shifts

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.shifts:
            shift = self.shifts[layer_idx]
            keys = through_codes(keys - shift, self.kind) + shift
            values = through_codes(values, self.kind)
        return super().update(keys, values, layer_idx, *args, **kwargs)


class CodedOracle(Oracle):
    """Plain float64 decoding by transformers, with codes for keys and values of some layers."""

    def __init__(self, family: str, directory: Path, kind: str, layers: frozenset[int]):
        super().__init__(family, directory)
        self.kind, self.layers = kind, layers

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        decoder = self.model.get_decoder()
        config = self.model.config.get_text_config(decoder=True)
        shifts = {layer: key_shift(decoder, layer) for layer in self.layers}
        cache = CodedCache(self.kind, shifts, config=config)
        out = decoder(input_ids=torch.tensor([ids]), use_cache=True, **{CACHE: cache})
        states: torch.Tensor = out.last_hidden_state
        return states


@pytest.fixture
def coded_oracle(checkpoint: Callable[..., Path]) -> Callable[..., CodedOracle]:
    """coded_oracle(spec, family, kind): codes where a program has pages of them."""

    def get(spec: mtpc.SpecModel, family: str, kind: str) -> CodedOracle:
        names = [name.split(".") for name in spec.program.layout]
        layers = frozenset(int(name[1]) for name in names if name[-1] == "k_scale")
        assert layers
        return CodedOracle(family, checkpoint(family, "trained"), kind, layers)

    return get


@pytest.mark.parametrize(
    ("family", "kind", "spec_tokens"),
    [
        ("mimo", "int8", 3),
        pytest.param("mimo", "fp8", 3, marks=pytest.mark.slow),
        *(
            pytest.param(family, kind, k, marks=pytest.mark.slow)
            for family in ("mimo", "glm4_moe", "step3p7", "mimo_v2")
            for kind in LARGEST
            for k in (0, 1, 3)
            if (family, k) != ("mimo", 3)
        ),
    ],
)
def test_the_theorem_with_pages_of_codes(
    family: str,
    kind: str,
    spec_tokens: int,
    compiled: Callable[..., Any],
    coded_oracle: Callable[..., CodedOracle],
) -> None:
    """Ragged batches over poisoned memory, joins, leaves, stops, rejected drafts."""
    few = {} if spec_tokens == 3 else {"batch_buckets": (4,)}
    spec = compiled(family, spec_tokens, kv_cache_dtype=kind, **few)
    plain = coded_oracle(spec, family, kind)
    check_theorem(spec, plain, max_examples=12).check_all_happened()
    if spec_tokens == 3:
        for accepted in range(4):
            check_after_rejection(spec, plain, accepted)


def test_codes_are_not_the_models_own_dtype(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """The test above could not tell otherwise: some text differs from the model's own."""
    spec = compiled("mimo", 3, kv_cache_dtype="int8")
    wanted = [oracle("mimo").generate(prompt, 30, stop=False) for prompt in PROMPTS]
    assert spec.generate(PROMPTS, 30, ignore_eos=True) != wanted


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mimo", "int8"), *(pytest.param(f, "int8", marks=pytest.mark.slow)
                         for f in ("qwen3_next", "step3p7", "mimo_v2"))],
)  # fmt: skip
def test_reuse_of_pages_of_codes(family: str, kind: str, compiled: Callable[..., Any]) -> None:
    """Turns, forks, evictions, preemption and aborts: texts, drafts, codes and scales of runs that
    reuse nothing. Of other families with rings and recurrent state beside the pages."""
    check_reuse(Conversations(compiled(family, 3, kv_cache_dtype=kind)), 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "qwen3_next", "step3p7"])
def test_restarts_with_pages_of_codes(
    family: str, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """Codes and scales through files, to an engine that begins with wild memory."""
    conversations = Conversations(compiled(family, 3, kv_cache_dtype="int8"), tmp_path)
    check_reuse(conversations, 4)
    assert conversations.seen["loaded"] > 30


def test_a_page_of_codes_takes_about_half(compiled: Callable[..., Any]) -> None:
    """A byte a number, and four a token and head; the tiny model's float64 takes eight."""
    plain, coded = (compiled("mimo", 3, **options).program.layout for options in
                    ({}, {"kv_cache_dtype": "int8"}))  # fmt: skip
    for name in ("kv.0.k", "kv.0.v"):
        pages, size, heads, width = plain.shape(name)
        assert coded.nbytes(name) == plain.nbytes(name) // 8 == pages * size * heads * width
        assert coded.shape(f"{name}_scale") == (pages, size, heads)
        assert coded.nbytes(f"{name}_scale") == 4 * pages * size * heads


def test_what_has_no_pages_of_keys_and_values_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="'int8', but deepseek_v3 has no pages"):
        mtpc.compile(checkpoint("deepseek_v3", "trained"), kv_cache_dtype="int8", backend="eager")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(OptionError, match="'int4'; expected one of auto, int8, fp8"):
        mtpc.CompileOptions(kv_cache_dtype="int4")
