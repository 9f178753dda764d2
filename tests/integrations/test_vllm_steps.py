"""`StepWorker`: vLLM's iterations as whole steps of mtpc, over a fake of vLLM's scheduler.

With vLLM itself tests/peers/vllm_steps.py runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import vllm_scheduler as vllm
from helpers.oracles import Oracle
from helpers.sampling_oracle import FILTERS
from helpers.theorem import PROMPTS
from helpers.vllm_scheduler import Req, Scheduler

from mtpc import SamplingParams
from mtpc.errors import NumericsError, OptionError, RequestError, UnsupportedModelError

K, PAGE, SEQS, CONTEXT, BLOCKS = 3, 4, 3, 56, 48
FAMILIES = ("mimo", "glm4_moe", "deepseek_v3", "qwen3_next")
"""Dense, with experts, with latents, and hybrid."""


@pytest.fixture
def host() -> Iterator[None]:
    with vllm.installed():
        yield


@pytest.fixture
def start(host: None, checkpoint: Callable[..., Path]) -> Callable[..., Scheduler]:
    """start(family): a scheduler over a worker, as vLLM's executor makes it."""

    def make(family: str, shares: bool = False, v2: bool = False) -> Scheduler:
        from mtpc.integrations.vllm.step_worker import StepWorker

        config = vllm.config(str(checkpoint(family)), K, CONTEXT, SEQS, PAGE)
        config.cache_config.enable_prefix_caching = shares
        config.cache_config.num_gpu_blocks_override = BLOCKS
        place = dict(local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True)
        return Scheduler(StepWorker(vllm_config=config, **place), BLOCKS, v2)

    return make


def check(family: str, oracle: Callable[..., Oracle], *reqs: Req) -> None:
    for req in reqs:
        expected = oracle(family).generate(req.prompt, len(req.output), stop=False)
        assert req.output == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_plain_decoding(
    family: str, start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """Chunks beside requests that decode, slots used again with what their rows still held, batches
    of one to three, fewer drafts than there are; a decoding iteration is one replay."""
    scheduler = start(family)
    first, second, third = (Req(f"r{i}", PROMPTS[i]) for i in (3, 4, 5))
    assert scheduler.step({first: None, second: 3})["r4"] == []
    scheduler.step({second: len(second.prompt) - 3, first: None})
    scheduler.until([first, second], 6)
    scheduler.step({first: None, second: None}, most_drafts=1)
    scheduler.step({first: None, second: None}, most_drafts=0)
    scheduler.finish(first)
    again = Req("r3", PROMPTS[2])  # vLLM may use a name again.
    scheduler.step({again: None, third: None, second: None})
    scheduler.until([again, second, third], 14)
    check(family, oracle, first, second, third, again)
    assert {0, K} <= set(scheduler.accepted)
    replays = scheduler.worker.steps.program.replays
    assert {part for _, part in replays} == {"step"}


def test_a_decoding_iteration_is_one_replay(start: Callable[..., Scheduler]) -> None:
    scheduler = start("mimo")
    reqs = [Req("a", PROMPTS[3]), Req("b", PROMPTS[4])]
    scheduler.step(dict.fromkeys(reqs))
    replays = scheduler.worker.steps.program.replays
    before = replays.total()
    scheduler.step(dict.fromkeys(reqs))
    assert replays.total() == before + 1


def sampled(name: str, prompt: list[int], params: SamplingParams) -> Req:
    """A request with parameters as vLLM holds them."""
    asked = {name: value for name, value in vars(params).items() if name in vllm.GREEDY}
    asked |= {"allowed_token_ids": params.allowed_ids and list(params.allowed_ids)}
    asked |= {"logit_bias": dict(params.logit_bias) or None}
    return Req(name, prompt, sampling_params=SimpleNamespace(**vllm.GREEDY | asked))


@pytest.mark.parametrize("spec_tokens", [0, K])
def test_sampled_texts_are_those_of_the_engine(
    spec_tokens: int, start: Callable[..., Scheduler], compiled: Callable[..., Any]
) -> None:
    """Beside a greedy request, in slots whose rows still hold another's parameters; prompts in
    chunks, and fewer drafts than there are. At any K the engine gives one text for a seed."""
    engine = compiled("mimo", spec_tokens, sampling=True, token_mask=False)
    scheduler = start("mimo")
    for names in (("all filters", "repetition"), ("bias", "presence"), ("hot", "allowed")):
        asked = [FILTERS[name] for name in (names[0], "greedy", names[1])]
        reqs = [sampled(f"r{i}", PROMPTS[3 + i], params) for i, params in enumerate(asked)]
        scheduler.step(dict.fromkeys(reqs, 2))
        scheduler.step({req: len(req.prompt) - 2 for req in reqs})
        scheduler.step(dict.fromkeys(reqs), most_drafts=1)
        scheduler.until(reqs, 12)
        prompts = [req.prompt for req in reqs]
        expected = engine.generate(prompts, 12, sampling=asked, ignore_eos=True)
        assert [req.output[:12] for req in reqs] == expected, names
        for req in reqs:
            scheduler.finish(req)
    assert {0, K} <= set(scheduler.accepted)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_a_preempted_request_samples_on(
    v2: bool, start: Callable[..., Scheduler], compiled: Callable[..., Any]
) -> None:
    """In another slot, with the noise of the seed, and with penalties for what it had emitted."""
    params = replace(FILTERS["frequency"], repetition_penalty=1.3)
    scheduler = start("mimo", v2=v2)
    first, other = sampled("a", PROMPTS[3], params), Req("b", PROMPTS[4])
    scheduler.step(dict.fromkeys((first, other)))
    scheduler.until([first, other], 5)
    scheduler.preempt(first)
    third = Req("c", PROMPTS[5])
    scheduler.step({other: None, third: None})
    scheduler.step({first: None, other: None})
    scheduler.until([first], 14)
    engine = compiled("mimo", K, sampling=True, token_mask=False)
    assert first.output[:14] == engine.generate(first.prompt, 14, sampling=params, ignore_eos=True)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("family", ["mimo", "qwen3_next"])
def test_preempted_requests_come_again(
    family: str, v2: bool, start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """Beside as many others as there are slots, with another slot and other blocks."""
    scheduler = start(family, v2=v2)
    first, *others = (Req(f"r{i}", PROMPTS[i]) for i in (3, 4, 5, 2))
    scheduler.step({first: None, others[0]: None})
    scheduler.until([first, others[0]], 5)
    scheduler.preempt(first)
    scheduler.step(dict.fromkeys(others))
    scheduler.until(others, 8)
    scheduler.finish(others[1])
    scheduler.step({first: 7, others[0]: None})
    scheduler.step({first: None, others[2]: None})
    scheduler.until([first, others[0], others[2]], 14)
    check(family, oracle, first, *others)


def test_a_prefix_of_another_request(
    start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """It lacks one token, and vLLM schedules it with drafts that do not exist."""
    scheduler = start("mimo", shares=True)
    text = [*PROMPTS[5], *PROMPTS[4]]
    first, second = Req("a", text), Req("b", [*text[:8], 7])
    scheduler.step({first: None})
    scheduler.share(second, first, 8)
    assert len(scheduler.step({first: None, second: None}, placeholders=[second])["b"]) == 1
    scheduler.until([first, second], 8)
    check("mimo", oracle, first, second)


def test_the_end_of_the_context(
    start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """There vLLM schedules as many drafts as there is room for, and none in the end."""
    scheduler = start("mimo")
    req = Req("a", PROMPTS[3])
    scheduler.step({req: None})
    while len(req.text) < CONTEXT:
        scheduler.step({req: None}, most_drafts=CONTEXT - 1 - len(req.text))
    assert len(req.text) == CONTEXT
    check("mimo", oracle, req)


def test_drafts_that_vllm_chooses_are_verified(
    start: Callable[..., Scheduler], oracle: Callable[..., Oracle]
) -> None:
    """vLLM's scheduler decides on drafts; here it has better ones than the model's."""
    scheduler = start("mimo")
    req = Req("a", PROMPTS[3])
    scheduler.step({req: None})
    text = oracle("mimo").generate(req.prompt, 1 + 4 * (K + 1), stop=False)
    while len(req.output) < len(text):
        req.drafts = text[len(req.output) :][:K]
        scheduler.step({req: None})
    assert scheduler.accepted == [K] * 4
    assert req.output == text


def test_the_pool_is_as_large_as_vllm_says(host: None, checkpoint: Callable[..., Path]) -> None:
    """Where vLLM makes fewer blocks than its bytes hold, steps are compiled for that."""
    from mtpc.integrations.vllm.step_worker import StepWorker

    config = vllm.config(str(checkpoint("mimo")), K, CONTEXT, 1, PAGE)
    place = dict(local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True)
    worker: Any = StepWorker(vllm_config=config, **place)
    scheduler = Scheduler(worker, 23)
    paged = {n: b for n, b in worker.steps.model.buffers.items() if b.is_paged}
    assert {buffer.shape[0] for buffer in paged.values()} == {23}
    (spec,) = worker.get_kv_cache_spec().values()
    tensors = [worker.steps.state[name] for name in paged]
    assert sum(tensor.nbytes for tensor in tensors) == 23 * spec.page_size_bytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    req = Req("a", PROMPTS[3])
    scheduler.step({req: None})
    scheduler.until([req], 4)


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "qwen3_next"])
def test_steps_are_compiled_once(family: str, host: None, checkpoint: Callable[..., Path]) -> None:
    """The checkpoint's headers say how large a block is, and so how many the given bytes hold."""
    from mtpc.integrations.vllm.step_worker import StepWorker

    asked = list[int | None]()

    class Counted(StepWorker):
        def _compile(self, num_pages: int | None) -> None:
            asked.append(num_pages)
            super()._compile(num_pages)

    config = vllm.config(str(checkpoint(family)), K, CONTEXT, 1, PAGE)
    place = dict(local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True)
    scheduler = Scheduler(Counted(vllm_config=config, **place))
    assert asked == [None]
    req = Req("a", PROMPTS[3])
    scheduler.step({req: None})
    scheduler.until([req], 4)


def test_logits_that_are_no_numbers(start: Callable[..., Scheduler]) -> None:
    scheduler = start("mimo")
    req = Req("a", PROMPTS[3])
    scheduler.step({req: None})
    pages = scheduler.worker.steps.state["kv.0.k"]
    pages[req.blocks] = float("nan")
    with pytest.raises(NumericsError, match="the logits of a were not finite"):
        scheduler.step({req: None})


def test_what_pages_do_not_carry_is_not_shared(start: Callable[..., Scheduler]) -> None:
    with pytest.raises(UnsupportedModelError, match="turn the host's prefix cache off"):
        start("qwen3_next", shares=True)


def test_images_are_refused(start: Callable[..., Scheduler]) -> None:
    scheduler = start("mimo")
    with pytest.raises(UnsupportedModelError, match="start vLLM with --language-model-only"):
        scheduler.step({Req("a", PROMPTS[3], mm_features=[object()]): None})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_tokens": 2}, "min_tokens"),
        ({"logprobs": 0}, "log-probabilities"),
        ({"prompt_logprobs": 1}, "log-probabilities"),
        ({"structured_outputs": object()}, "a grammar"),
        ({"watermarking": True}, "watermarking"),
        ({"bad_words": ["no"]}, "bad_words"),
    ],
)
def test_what_a_request_may_not_ask(host: None, asked: dict[str, Any], said: str) -> None:
    """vLLM answers a ValueError of this hook with status 400."""
    from mtpc.integrations.vllm.step_requests import StepRequests

    StepRequests.validate_params(SimpleNamespace(**vllm.GREEDY))
    with pytest.raises(RequestError, match=f"asks for {said}") as found:
        StepRequests.validate_params(SimpleNamespace(**vllm.GREEDY | asked))
    assert isinstance(found.value, ValueError)


def test_parameters_out_of_range_are_refused(host: None) -> None:
    """And a top_k of -1 is vLLM's old way to keep all tokens."""
    from mtpc.integrations.vllm.step_requests import StepRequests, sampling_of

    assert sampling_of(SimpleNamespace(**vllm.GREEDY | {"top_k": -1})) == SamplingParams()
    with pytest.raises(RequestError, match="seed is -5; expected"):
        StepRequests.validate_params(SimpleNamespace(**vllm.GREEDY | {"seed": -5}))


@pytest.mark.parametrize(
    ("part", "asked", "said"),
    [
        ("", {"speculative_config": None}, "set speculative_config"),
        ("speculative_config", {"method": "eagle"}, "set speculative_config"),
        ("model_config", {"logits_processors": None}, "set logits_processors"),
        ("cache_config", {"kv_cache_memory_bytes": None}, "set kv_cache_memory_bytes"),
        ("cache_config", {"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ("parallel_config", {"world_size_across_dp": 2}, "several ranks"),
        ("scheduler_config", {"async_scheduling": True}, "async_scheduling"),
        ("model_config", {"quantization": "fp8"}, "quantization fp8 of plain weights"),
        ("model_config", {"hf_overrides": {"a": 1}}, "hf_overrides"),
        ("", {"lora_config": object()}, "LoRA"),
        ("", {"watermark_config": object()}, "watermarking"),
        ("", {"kv_transfer_config": object()}, "a KV connector"),
    ],
)
def test_options_that_steps_do_not_take(
    host: None, part: str, asked: dict[str, Any], said: str
) -> None:
    from mtpc.integrations.vllm.step_worker import check_config

    config = vllm.config("here", K, CONTEXT, SEQS, PAGE)
    check_config(config)
    vars(getattr(config, part) if part else config).update(asked)
    with pytest.raises(OptionError, match=said):
        check_config(config)


def test_a_quantised_checkpoint_is_read_by_mtpc(host: None) -> None:
    """vLLM names its scheme, too; it is not an option of vLLM's then."""
    from mtpc.integrations.vllm.step_worker import check_config

    config = vllm.config("here", K, CONTEXT, SEQS, PAGE)
    config.model_config.quantization = "fp8"
    config.model_config.hf_config.quantization_config = {"quant_method": "fp8"}
    check_config(config)


def test_vllm_has_no_model(start: Callable[..., Scheduler]) -> None:
    worker = start("mimo").worker
    assert worker.model_runner is None
    with pytest.raises(UnsupportedModelError, match="vLLM has none"):
        worker.get_model()
