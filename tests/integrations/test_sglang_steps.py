"""`MTPC_STEP`: SGLang's iterations as whole steps of mtpc, over a fake of SGLang's scheduler.

With SGLang itself tests/peers/sglang_plugin.py runs it (`--drafts mtpc-step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fake_sglang
from helpers.oracles import Oracle
from helpers.sampling_oracle import FILTERS, SamplingOracle, distribution
from helpers.sglang_scheduler import GREEDY, TOP_K_ALL, HybridPool, KVPool, Req, Scheduler
from helpers.theorem import PROMPTS
from torch import nn

from mtpc import SamplingParams
from mtpc.errors import OptionError, UnsupportedModelError

K, PAGE, SLOTS, WIDTH = 3, 4, 3, 64
FAMILIES = ("mimo", "glm4_moe", "qwen3_next")
"""Dense, with experts, and hybrid."""


@pytest.fixture
def host() -> Iterator[SimpleNamespace]:
    with fake_sglang.installed() as found:
        yield found


@pytest.fixture
def start(
    host: SimpleNamespace, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> Callable[..., Scheduler]:
    """start(family): a scheduler over the worker that SGLang's registry gives for `MTPC_STEP`."""

    def make(family: str, shares: bool = False) -> Scheduler:
        import mtpc.integrations.sglang as plugin
        from mtpc.integrations.sglang.step_models.targets import EntryClass

        plugin.register()
        arguments = SimpleNamespace(
            model_path=str(checkpoint(family)),
            speculative_num_draft_tokens=K + 1,
            disable_radix_cache=not shares,
        )
        config = oracle(family).model.config
        (target,) = (cls for cls in EntryClass if cls.__name__ == config.architectures[0])
        width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        layers = range(config.num_hidden_layers)
        full = [i for i in layers if kinds[i % len(kinds)] == "full_attention"]
        pool = HybridPool if len(full) < len(layers) else KVPool
        shape = PAGE, config.num_key_value_heads, width
        runner = SimpleNamespace(
            model=target(config),
            token_to_kv_pool=pool(full, 40, shape, torch.float32),
            page_size=PAGE,
            device="cpu",
            dtype=torch.float32,
            model_config=SimpleNamespace(
                context_len=WIDTH - 2 * (K + 1), num_hidden_layers=config.num_hidden_layers
            ),
        )
        registered = fake_sglang.SpeculativeAlgorithm.registered["MTPC_STEP"]
        worker_class = registered.factory(arguments)
        worker = worker_class(arguments, 0, 0, SimpleNamespace(model_runner=runner))
        return Scheduler(worker, SLOTS, PAGE, WIDTH)

    return make


def until(scheduler: Scheduler, reqs: list[Req], count: int) -> None:
    """Decode together until each has `count` tokens."""
    while going := [req for req in reqs if len(req.output) < count]:
        scheduler.decode(going)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_plain_decoding(
    family: str, start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """Prompts together and in chunks, a prompt longer than a prefill step, a slot that is used
    again with what its row still held, batches of one, two and three; one replay an iteration."""
    scheduler = start(family)
    first, second, third = (Req(PROMPTS[i], slot) for i, slot in ((3, 2), (4, 3), (5, 1)))
    scheduler.extend([first, second], [len(first.prompt), 3])
    assert second.output == []
    scheduler.extend([second], [len(second.prompt) - 3])
    until(scheduler, [first, second], 9)
    scheduler.leave(first)
    again = Req(PROMPTS[2], first.slot)
    scheduler.extend([again, third], [len(again.prompt), len(third.prompt)])
    until(scheduler, [again, second, third], 14)
    for req in (first, second, third, again):
        expected = oracle(family).generate(req.prompt, len(req.output), stop=False)
        assert req.output == expected
    assert {0, K} <= set(scheduler.accepted)
    replays = scheduler.worker.steps.program.replays
    assert {part for _, part in replays} == {"step"}
    decoded = sum(count for (key, _), count in replays.items() if key.phase == "decode")
    assert decoded == scheduler.num_decoded


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_prefix_of_another_request(
    family: str, start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """SGLang's prefix cache gives whole pages that another request computed."""
    scheduler = start(family, shares=True)
    text = PROMPTS[5] + PROMPTS[4]
    first, second = Req(text, 1), Req([*text[:9], 7, 8], 2)
    scheduler.extend([first], [len(text)])
    scheduler.share(second, first, 8)
    scheduler.extend([second], [len(second.prompt) - 8])
    until(scheduler, [first, second], 8)
    for req in (first, second):
        expected = oracle(family).generate(req.prompt, len(req.output), stop=False)
        assert req.output == expected


def theirs(params: SamplingParams) -> SimpleNamespace:
    """Parameters as SGLang holds them."""
    asked = {name: value for name, value in vars(params).items() if name in GREEDY}
    asked |= {"top_k": params.top_k or TOP_K_ALL, "sampling_seed": params.seed}
    if not params.temperature:
        asked |= {"temperature": 1.0, "top_k": 1}
    bias = {str(token): value for token, value in dict(params.logit_bias).items()}
    return SimpleNamespace(**GREEDY | asked | {"logit_bias": bias or None})


@pytest.mark.parametrize("spec_tokens", [0, K])
def test_sampled_texts_are_those_of_the_engine(
    spec_tokens: int, start: Callable[..., Scheduler], compiled: Callable[..., Any]
) -> None:
    """Beside a greedy request, in slots whose rows still hold another's parameters; prompts in
    chunks. At any K the engine gives one text for a seed."""
    engine = compiled("mimo", spec_tokens, sampling=True, token_mask=False)
    scheduler = start("mimo")
    names = [("all but min_p", "presence"), ("min_p", "bias"), ("hot", "frequency")]
    cases = FILTERS | {"all but min_p": replace(FILTERS["all filters"], min_p=0.0)}
    for pair in names:
        asked = [cases[pair[0]], cases["greedy"], cases[pair[1]]]
        reqs = [Req(PROMPTS[3 + i], 1 + i) for i in range(3)]
        for req, params in zip(reqs, asked, strict=True):
            req.sampling_params = theirs(params)
        scheduler.extend(reqs, [2, 2, 2])
        scheduler.extend(reqs, [len(req.prompt) - 2 for req in reqs])
        until(scheduler, reqs, 12)
        prompts = [req.prompt for req in reqs]
        expected = engine.generate(prompts, 12, sampling=asked, ignore_eos=True)
        assert [req.output[:12] for req in reqs] == expected, pair
        for req in reqs:
            scheduler.leave(req)
    assert {0, K} <= set(scheduler.accepted)


def test_sglangs_repetition_penalty_counts_the_output_alone(
    start: Callable[..., Scheduler], sampling_oracle: Callable[..., SamplingOracle]
) -> None:
    """sampling/penaltylib/repetition_penalty.py: nothing of the prompt is scattered there."""
    scheduler, plain = start("mimo"), sampling_oracle("mimo")
    params, req = SamplingParams(repetition_penalty=0.6), Req(PROMPTS[5], 1)
    req.sampling_params = theirs(params)
    scheduler.extend([req], [len(req.prompt)])
    until(scheduler, [req], 10)
    expected = list[int]()
    for _ in req.output:
        logits = plain.logits([*req.prompt, *expected])
        expected.append(int(distribution(logits, [], expected, params, set()).argmax()))
    assert req.output == expected
    assert plain.generate(req.prompt, 10, params) != expected[:10]


def test_without_a_seed_each_request_gets_its_own(start: Callable[..., Scheduler]) -> None:
    scheduler = start("mimo")
    reqs = [Req(PROMPTS[3], slot) for slot in (1, 2)]
    for req in reqs:
        req.sampling_params = theirs(SamplingParams(temperature=50.0))
    scheduler.extend(reqs, [len(req.prompt) for req in reqs])
    until(scheduler, reqs, 12)
    assert reqs[0].output[:12] != reqs[1].output[:12]


def test_what_pages_do_not_carry_is_not_shared(start: Callable[..., Scheduler]) -> None:
    with pytest.raises(UnsupportedModelError, match="turn the host's prefix cache off"):
        start("qwen3_next", shares=True)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"top_k": TOP_K_ALL, "min_p": 0.1, "top_p": 0.5}, "min_p together with top_p"),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5}, "repetition_penalty together"),
        ({"repetition_penalty": 2.0, "logit_bias": {"3": 1.0}}, "repetition_penalty together"),
        ({"top_k": 4, "temperature": 1e-4}, "temperature is 0.0001; expected 0"),
        ({"top_k": 4, "sampling_seed": -1}, "seed is -1"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
        ({"return_logprob": True}, "log-probabilities"),
        ({"grammar": object()}, "a grammar"),
        ({"lora_id": "one"}, "LoRA"),
        ({"multimodal_inputs": object()}, "embeddings"),
    ],
)
def test_what_a_request_may_not_ask(host: SimpleNamespace, asked: Any, said: str) -> None:
    """It ends with a message and status 400; a plain one beside it goes on."""
    from mtpc.integrations.sglang.requests import sampling_or_end

    plain, other = Req([1], 1), Req([2], 2)
    for name, value in asked.items():
        holder = other.sampling_params if name in GREEDY else other
        setattr(holder, name, value)
    assert [sampling_or_end(req) for req in (plain, other)] == [SamplingParams()] * 2
    assert plain.to_finish is None
    assert said in other.to_finish.message
    assert (other.to_finish.status_code, other.to_finish.err_type) == (400, "BadRequestError")


def test_a_model_of_sglangs_own_is_refused(host: SimpleNamespace) -> None:
    """Its forward would run beside mtpc's; and mtpc's target runs by no other worker."""
    from mtpc.integrations.sglang.step_models.targets import HostedTarget
    from mtpc.integrations.sglang.step_worker import StepWorker

    target = SimpleNamespace(model_runner=SimpleNamespace(model=nn.Linear(1, 1)))
    with pytest.raises(UnsupportedModelError, match=r"Linear; set SGLANG_EXTERNAL_MODEL_PACKAGE"):
        StepWorker(SimpleNamespace(), 0, 0, target)
    HostedTarget(None).load_weights([])
    batch = SimpleNamespace(forward_mode="EXTEND")
    with pytest.raises(UnsupportedModelError, match="by --speculative-algorithm MTPC_STEP alone"):
        HostedTarget(None)(torch.tensor([1]), torch.tensor([0]), batch)


def test_new_weights_are_refused(host: SimpleNamespace) -> None:
    """SGLang's `update_weights_from_disk` would otherwise report a success, and change nothing."""
    from mtpc.integrations.sglang.step_models.targets import HostedTarget

    target = HostedTarget(None)
    target.load_weights([])
    with pytest.raises(UnsupportedModelError, match="start SGLang again to change weights"):
        target.load_weights([])


OPTIONS: dict[str, Any] = dict(
    **dict(speculative_num_steps=K, speculative_eagle_topk=1, speculative_num_draft_tokens=K + 1),
    **dict(speculative_adaptive=False, speculative_token_map=None, enable_multi_layer_eagle=False),
    **dict(speculative_use_rejection_sampling=False, kv_cache_dtype="auto", quantization=None),
    **dict(tp_size=1, pp_size=1, dp_size=1, ep_size=1, enable_hierarchical_cache=False),
    **dict(enable_lora=None, disaggregation_mode="null", enable_watermark=False),
    **dict(speculative_draft_model_path="draft", max_running_requests=4, device="cuda"),
)
"""SGLang's ServerArgs that matter here, as its command line makes them."""


def test_iterations_are_synchronous(host: SimpleNamespace) -> None:
    """And SGLang captures no graph: its target has no forward."""
    import mtpc.integrations.sglang as plugin

    plugin.register()
    served = SimpleNamespace(**OPTIONS)
    algorithm = fake_sglang.SpeculativeAlgorithm.registered["MTPC_STEP"]
    algorithm.handle_server_args(served)
    assert served.disable_overlap_schedule
    assert served.disable_cuda_graph
    assert served.enable_mixed_chunk is False


@pytest.mark.parametrize(
    "asked",
    [
        {"tp_size": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"enable_hierarchical_cache": True},
        {"enable_lora": True},
        {"enable_watermark": True},
        {"disaggregation_mode": "decode"},
        {"speculative_eagle_topk": 4},
    ],
)
def test_options_that_steps_do_not_take(host: SimpleNamespace, asked: dict[str, Any]) -> None:
    from mtpc.integrations.sglang.algorithm import check_step_arguments

    check_step_arguments(SimpleNamespace(**OPTIONS))
    with pytest.raises(OptionError, match=rf"MTPC_STEP: found .*{next(iter(asked.values()))}"):
        check_step_arguments(SimpleNamespace(**OPTIONS | asked))
