"""Draft tokens equal an independent, uncached, eager oracle after every single step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import ASSISTED, DRAFTED, FAMILY_NAMES, NEAR_FAMILIES
from helpers.oracles import FLOAT32_INSIDE, DraftOracle, TransformersDraftOracle
from helpers.theorem import PROMPTS, check_caches, check_drafts, check_theorem, poison
from transformers.modeling_layers import MtpModel

HERE = ("glm4_moe",)
"""Random models that are compiled in this file by default, and whose oracle is float64."""
LATE = (*(f for f in NEAR_FAMILIES if f != "nemotron_h"), *DRAFTED[1:], *ASSISTED[1:])
"""Trained models of the slow run: test_wiring.py has the rows of near families, whose parts other
families have, too; the others draft as the first of their kind."""
DEFAULTS = {"sampling": True}
"""What `mtpc.compile` does, for programs that no other file shares."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            pytest.param(family, "trained", marks=[pytest.mark.slow] * (family in LATE))
            for family in (*FAMILY_NAMES, *NEAR_FAMILIES, *DRAFTED, *ASSISTED)
        ),
        *(
            pytest.param(family, "random", marks=[pytest.mark.slow] * (family not in HERE))
            for family in (*FAMILY_NAMES, *NEAR_FAMILIES, *DRAFTED, *ASSISTED)
        ),
    ],
)
def test_drafts_equal_the_wiring(
    family: str, kind: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """All families against pages of plain code, K = 3, two requests in a bucket of 4.

    Trained drafts rest on a row's token; random ones on all that their row attends to. The trained
    models are the theorem's; their text, in company, is that of plain decoding.
    """
    few = {} if kind == "trained" else {"batch_buckets": (4,), **DEFAULTS}
    spec, plain = compiled(family, 3, kind, **few), oracle(family, kind)
    prompts = [PROMPTS[3], PROMPTS[9]]
    assert check_drafts(spec, DraftOracle(plain), prompts, 12) >= 6
    if kind == "trained":
        prompts = [PROMPTS[0], PROMPTS[3], *PROMPTS[7:12]]
        wanted = [plain.generate(prompt, 12, stop=False) for prompt in prompts]
        assert spec.generate(prompts, 12, ignore_eos=True) == wanted


def test_drafts_of_a_part_of_the_vocabulary(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """A head with rows for some tokens, whose drafts are picked among all."""
    spec = compiled("llama", 2, "random", batch_buckets=(1,), **DEFAULTS)
    assert check_drafts(spec, DraftOracle(oracle("llama", "random")), [PROMPTS[9]], 8) >= 4


@pytest.mark.parametrize(
    "family",
    [
        *HERE,
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in (*FAMILY_NAMES, *NEAR_FAMILIES)
            if f not in (*HERE, *FLOAT32_INSIDE)
        ),
    ],
)
def test_random_models_decode_alike(
    family: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """The theorem where next to nothing is accepted, and texts are as random as the weights."""
    spec = compiled(family, 3, "random", batch_buckets=(4,), **DEFAULTS)
    check_theorem(spec, oracle(family, "random"), max_examples=2)


@pytest.mark.slow
def test_a_random_recurrent_model_decodes_alike(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """The same for prompts whose texts keep the margin that its oracle's float32 asks for."""
    spec, plain = (
        compiled("qwen3_next", 3, "random", batch_buckets=(4,), **DEFAULTS),
        oracle("qwen3_next", "random"),
    )
    poison(spec)
    prompts = [PROMPTS[i] for i in (0, 4, 6, 9, 12)]
    wanted = [plain.generate(prompt, 14, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 14, ignore_eos=True) == wanted


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param("step3p7@3", 2, marks=pytest.mark.slow),
        pytest.param("mimo_v2", 1, marks=pytest.mark.slow),
        pytest.param("step3p7", 2, marks=pytest.mark.slow),
        pytest.param("step3p7@3", 4, marks=pytest.mark.slow),
    ],
)
def test_several_layers_chain_truly(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """2 and 3 layers, K below, at and above their number; prompts of 1 token and many chunks."""
    spec = compiled(family, spec_tokens, batch_buckets=(4,), **DEFAULTS)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[7], PROMPTS[12]]
    assert check_drafts(spec, DraftOracle(oracle(family)), prompts, 12) >= 16
    assert 0 < spec.stats.acceptance_rate < 1
    check_caches(spec, PROMPTS[7])


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        ("step3p7@3", 4),
        (ASSISTED[0], 3),
        pytest.param("glm_moe_dsa@shared", 3, marks=pytest.mark.slow),
        pytest.param("mimo_v2", 3, marks=pytest.mark.slow),
    ],
)
def test_drafts_after_rejections_at_every_position(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Planted drafts: 0..K are accepted in turn, and what is drafted next stays right.

    The weights are random, but for the assistant's: its trained program is that of other tests.
    """
    kind, few = ("trained", {}) if family in ASSISTED else ("random", {"batch_buckets": (2,)})
    spec, plain = compiled(family, spec_tokens, kind, **few), oracle(family, kind)
    poison(spec)
    prompts, new = [PROMPTS[4], PROMPTS[10]], 24
    truths = [plain.generate(prompt, new, stop=False) for prompt in prompts]
    texts = {spec.engine.add(prompt, new): list(prompt) for prompt in prompts}
    tokens, drafts, turn = spec.program.shared["state.token_ids"], DraftOracle(plain), 0
    while spec.engine.has_work:
        before = spec.stats.decode_steps
        outputs = spec.engine.step()
        stepped = {output.request_id for output in outputs}
        for output in outputs:
            texts[output.request_id] += output.token_ids
        both = spec.stats.decode_steps > before and len(spec.engine.running) == 2
        for request, prompt, truth in zip(spec.engine.running, prompts, truths, strict=False):
            text = texts[request.request_id]
            if both and request.request_id in stepped:
                assert tokens[request.slot].tolist()[1:] == drafts.drafts(text, spec_tokens)
            known = len(text) - len(prompt)
            right = (turn + request.request_id) % (spec_tokens + 1)
            planted = truth[known : known + spec_tokens]
            if len(planted) == spec_tokens:
                wrong = [(token + 1) % 96 for token in planted[right:]]
                tokens[request.slot, 1:] = torch.tensor([*planted[:right], *wrong])
        turn += 1
    assert [
        text[len(prompt) :] for text, prompt in zip(texts.values(), prompts, strict=True)
    ] == truths
    assert all(count > 0 for count in spec.stats.accepted)
    for prompt in (PROMPTS[0], PROMPTS[10]):
        check_caches(spec, prompt)


TRANSFORMERS: dict[str, Any] = {
    "step3p7": {
        "wiring": (("first_features", "after"), ("head", "target"), ("next_features", "after"))
    }
}
"""What makes mtpc draft as transformers' `MtpModel`, where a family's authors do not."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(f, kind, marks=[pytest.mark.slow] * (kind == "random" or f not in HERE))
        for f in ("glm4_moe", "deepseek_v3", "step3p7")
        for kind in ("trained", "random")
    ],
)
def test_drafts_equal_transformers_mtp(
    family: str, kind: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Where transformers can build the MTP layer, its own MtpModel is the oracle.

    It feeds features after both norms to all layers, and has the target's head only.
    """
    if family == "step3p7" and not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this MtpModel gives Step-3.7's rotary embedding no layer type: it cannot run")
    few = {} if kind == "trained" else DEFAULTS
    spec = compiled(family, 3, kind, batch_buckets=(4,), **few, **TRANSFORMERS.get(family, {}))
    prompts = [PROMPTS[5], PROMPTS[10]]
    assert check_drafts(spec, TransformersDraftOracle(oracle(family, kind)), prompts, 10) >= 6
