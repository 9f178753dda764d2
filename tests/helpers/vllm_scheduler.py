"""vLLM as a worker of mtpc's sees it: its classes at that seam, and its scheduler.

Written from vLLM 0.32: what `SchedulerOutput` holds (v1/core/sched/output.py), how requests are
given blocks, begin, are preempted and come again (v1/core/sched/scheduler.py:591-1570), how emitted
tokens move `num_computed_tokens` (:2105-2128), and which draft tokens it schedules (:860-876,
:2550-2569). Block 0 no request has (v1/core/block_pool.py). The runner's two versions differ in how
a preempted request comes again; a fake runs either. tests/peers/vllm_steps.py runs vLLM itself.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from helpers.fake_modules import fake_modules

CHECK = "mtpc.integrations.vllm.step_requests:StepRequests"
GREEDY: dict[str, Any] = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0)
GREEDY |= dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
GREEDY |= dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "logprob_token_ids"))
GREEDY |= dict.fromkeys(("prompt_logprob_token_ids", "structured_outputs", "logit_bias"))
GREEDY |= dict.fromkeys(("allowed_token_ids", "bad_words", "watermarking"))
GREEDY |= dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids"))


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """v1/kv_cache_interface.py:510-560: what a block costs."""

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self) -> int:
        width = self.head_size + self.head_size_v
        return self.num_kv_heads * self.block_size * width * self.dtype.itemsize


@dataclass
class ModelRunnerOutput:
    """v1/outputs.py: rows, and the row of each request."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)


class WorkerBase:
    """v1/worker/worker_base.py:44-118."""

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        vars(self).update(vars(vllm_config), vllm_config=vllm_config)
        self.local_rank, self.rank = local_rank, rank
        self.distributed_init_method = distributed_init_method
        self.current_platform = SimpleNamespace(dist_backend="gloo")
        self.device = self.model_runner = None


def _modules() -> dict[str, dict[str, Any]]:
    return {
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
        "vllm.v1.outputs": {
            "DraftTokenIds": namedtuple("DraftTokenIds", "req_ids draft_token_ids"),
            "ModelRunnerOutput": ModelRunnerOutput,
        },
        "vllm.v1.worker.gpu_worker": {"init_worker_distributed_environment": lambda *_: None},
        "vllm.v1.worker.worker_base": {
            "CompilationTimes": namedtuple("CompilationTimes", "language_model encoder"),
            "WorkerBase": WorkerBase,
        },
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": object},
    }


@contextmanager
def installed() -> Iterator[None]:
    """The fake as `vllm`, for imports of mtpc's package; both are forgotten at the end."""
    with fake_modules("vllm", _modules()):
        yield


def config(model: str, spec_tokens: int, context: int, seqs: int, page: int) -> SimpleNamespace:
    """vLLM's config of one rank, as its command line makes it."""
    part = SimpleNamespace
    return part(
        model_config=part(
            **dict(model=model, hf_config=part(), max_model_len=context, dtype=torch.float32),
            **dict(logits_processors=[CHECK], quantization=None, revision=None),
            **dict(hf_overrides={}, runner_type="generate", enable_prompt_embeds=False),
            original_max_model_len=context,
        ),
        cache_config=part(
            **dict(block_size=page, cache_dtype="auto", enable_prefix_caching=False),
            **dict(kv_cache_memory_bytes=1 << 20, num_gpu_blocks_override=None),
        ),
        speculative_config=part(
            **dict(method="mtp", num_speculative_tokens=spec_tokens),
            draft_model_config=part(model=model),
            **dict(rejection_sample_method="standard", num_speculative_tokens_per_batch_size=None),
        ),
        parallel_config=part(world_size_across_dp=1),
        scheduler_config=part(max_num_seqs=seqs, async_scheduling=False),
        device_config=part(device=torch.device("cpu")),
        load_config=part(load_format="auto"),
        **dict(lora_config=None, kv_transfer_config=None, ec_transfer_config=None),
        watermark_config=None,
    )


@dataclass(eq=False)
class Req:
    """A request: `Request` of v1/request.py."""

    name: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    status: str = "new"
    mm_features: Any = ()
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(**GREEDY))

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class Scheduler:
    """Gives requests blocks, and runs a worker as `EngineCore.step` does.

    Args:
        worker: a `StepWorker`.
        blocks: of the pool, block 0 among them; None: as many as its bytes hold.
        v2: whether vLLM's V2 runner is chosen.
    """

    def __init__(self, worker: Any, blocks: int | None = None, v2: bool = False):
        self.worker, self.v2 = worker, v2
        worker.init_device()
        worker.load_model()
        (spec,) = worker.get_kv_cache_spec().values()
        self.page, self.k = spec.block_size, worker.speculative_config.num_speculative_tokens
        blocks = blocks or worker.determine_available_memory() // spec.page_size_bytes
        size = blocks * spec.page_size_bytes
        assert size <= worker.determine_available_memory()
        pool = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[SimpleNamespace(size=size)])
        worker.initialize_from_config(pool)
        for name, tensor in worker.steps.state.items():  # vLLM's blocks come as others left them.
            if worker.steps.model.buffers[name].is_paged:
                tensor.fill_(float("nan"))
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0))
        self.free = (order + 1).tolist()
        self.finished, self.preempted = set[str](), set[str]()
        self.accepted: list[int] = []

    def step(
        self,
        counts: Mapping[Req, int | None],
        most_drafts: int | None = None,
        placeholders: Sequence[Req] = (),
    ) -> dict[str, list[int]]:
        """One iteration.

        Args:
            counts: tokens of each scheduled request: of its prompt, or None, all that it lacks.
            most_drafts: drafts to schedule of each request, where fewer than there are.
            placeholders: requests that lack one token, whose drafts vLLM makes up as -1.
        """
        asked = dict.fromkeys(placeholders, [-1] * self.k)
        drafts = {req: asked.get(req, req.drafts[:most_drafts]) for req in counts}
        lacking = {r: len(r.text) - r.computed if n is None else n for r, n in counts.items()}
        scheduled = {r.name: lacking[r] + len(drafts[r]) for r in counts}
        known = {req: len(req.blocks) for req in counts}
        for req in counts:
            self._give(req, req.computed + scheduled[req.name] + self.k)
        output = self._output(list(counts), known, scheduled)
        output.scheduled_spec_decode_tokens = {r.name: d for r, d in drafts.items() if d}
        found = self.worker.execute_model(output)
        assert found.req_ids == [req.name for req in counts]
        tokens = dict(zip(found.req_ids, found.sampled_token_ids, strict=True))
        for req in counts:
            new, spec = tokens[req.name], drafts[req]
            req.computed += scheduled[req.name]
            assert len(new) <= len(spec) + 1
            if spec and new:
                req.computed -= len(spec) + 1 - len(new)
                self.accepted.append(len(new) - 1)
            req.output += new
            req.drafts, req.status = [], "running"
        taken = self.worker.take_draft_token_ids()
        rows = dict(zip(taken.req_ids, taken.draft_token_ids, strict=True))
        for req in counts:
            if req.computed >= len(req.text) - 1:
                req.drafts = rows[req.name]
                assert len(req.drafts) == self.k
        return tokens

    def until(self, reqs: Sequence[Req], count: int) -> None:
        """Decode together until each has `count` tokens."""
        while going := [req for req in reqs if len(req.output) < count]:
            self.step(dict.fromkeys(going))

    def finish(self, req: Req) -> None:
        """End a request: the worker hears of it with the next iteration."""
        self.finished.add(req.name)
        self._take(req)

    def preempt(self, req: Req) -> None:
        """Take a request's blocks. It comes again with all its tokens."""
        self.preempted.add(req.name)
        self._take(req)
        req.status, req.drafts, req.computed = "preempted", [], 0

    def share(self, req: Req, other: Req, length: int) -> None:
        """Let a new request begin with blocks of another, as vLLM's prefix cache does."""
        req.blocks, req.computed = other.blocks[: length // self.page], length

    def _give(self, req: Req, length: int) -> None:
        while len(req.blocks) * self.page < length:
            req.blocks.append(self.free.pop())

    def _take(self, req: Req) -> None:
        self.free += req.blocks
        req.blocks = []

    def _output(self, reqs: list[Req], known: dict[Req, int], scheduled: dict[str, int]) -> Any:
        come = ("new", "preempted") if self.v2 else ("new",)
        new = [req for req in reqs if req.status in come]
        cached = [req for req in reqs if req.status not in come]
        resumed = {req.name for req in cached if req.status == "preempted"}
        finished, self.finished = self.finished, set()
        preempted, self.preempted = self.preempted, set()
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=req.name,
                    prompt_token_ids=req.prompt,
                    prefill_token_ids=req.text if self.v2 else None,
                    block_ids=(list(req.blocks),),
                    num_computed_tokens=req.computed,
                    mm_features=req.mm_features,
                    sampling_params=req.sampling_params,
                )
                for req in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[req.name for req in cached],
                resumed_req_ids=resumed,
                new_block_ids=[
                    (new,) if (new := r.blocks[0 if r.name in resumed else known[r] :]) else None
                    for r in cached
                ],
                num_computed_tokens=[req.computed for req in cached],
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
        )
