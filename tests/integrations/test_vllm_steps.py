"""`StepWorker`: vLLM's iterations as whole steps of mtpc, over a fake of vLLM's scheduler.

With vLLM itself tests/peers/vllm_steps.py runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import vllm_scheduler as vllm
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.vllm_scheduler import Req, Scheduler

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
    """vLLM asks how large a block is, and then says how many there are: compiled for that."""
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
        ({"temperature": 0.5}, "sampling"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logprobs": 0}, "log-probabilities"),
        ({"prompt_logprobs": 1}, "log-probabilities"),
        ({"structured_outputs": object()}, "a grammar"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
    ],
)
def test_what_a_request_may_not_ask(host: None, asked: dict[str, Any], said: str) -> None:
    """vLLM answers a ValueError of this hook with status 400."""
    from mtpc.integrations.vllm.step_requests import GreedyRequests

    GreedyRequests.validate_params(SimpleNamespace(**vllm.GREEDY))
    with pytest.raises(RequestError, match=f"asks for {said}") as found:
        GreedyRequests.validate_params(SimpleNamespace(**vllm.GREEDY | asked))
    assert isinstance(found.value, ValueError)


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
