"""`--worker-cls mtpc.integrations.vllm.step_worker.StepWorker`: an iteration is mtpc's step."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.host.contract import HostBuffer
from mtpc.host.hosted import HostedModel
from mtpc.integrations.host_steps import HostSteps, check_prefixes, compile_steps
from mtpc.integrations.vllm.step_batch import StepBatch

LAYER = "mtpc"
"""What vLLM knows as the only layer with a KV cache: a block of it has the pages of all layers."""
CHECK = "mtpc.integrations.vllm.step_requests:StepRequests"


class StepWorker(WorkerBase):
    """A worker of vLLM whose forward is mtpc's step: verify, acceptance and all drafts, one graph.

    vLLM keeps scheduler, prefix cache, preemption, blocks, and the size of the pool. Its blocks are
    mtpc's pages, and its block 0, which no request has, is mtpc's page 0. The model, its weights,
    recurrent state and rows by request are mtpc's.

    Args:
        vllm_config: vLLM's config.
        **place: see vLLM's `WorkerBase`.

    Raises:
        OptionError: vLLM's options ask for what the steps do not do.
    """

    steps: HostSteps

    def __init__(self, vllm_config: Any, **place: Any):
        super().__init__(vllm_config, **place)
        check_config(vllm_config)

    def init_device(self) -> None:
        """Make the groups of one rank that vLLM's executors ask for."""
        self.device = self.device_config.device
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Compile the steps, for the pool that vLLM makes once it knows how large a block is."""
        self._compile(self.cache_config.num_gpu_blocks_override)
        check_prefixes(self._hosted, self.cache_config.enable_prefix_caching)

    def get_model(self) -> Any:
        """Refuse: the model is not vLLM's.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError("mtpc's steps run the model; vLLM has none to look into")

    def get_supported_tasks(self) -> tuple[str, ...]:
        """vLLM's name of what the steps do."""
        return ("generate",)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Each buffer of mtpc is a tensor of its own: its layer outermost, then blocks."""
        return ["LBNHC"]

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """One layer whose block is as large as the pages of all of mtpc's layers together."""
        size = self.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=size,
            num_kv_heads=1,
            head_size=page_bytes(self._hosted) // size,
            head_size_v=0,
            dtype=torch.uint8,
        )
        return {LAYER: spec}

    def determine_available_memory(self) -> int:
        """The bytes that the user gives vLLM's cache, or those of as many blocks as asked for."""
        given = self.cache_config.kv_cache_memory_bytes
        return int(given or self._hosted.options.num_pages * page_bytes(self._hosted))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate vLLM's pool, and bind the steps to it."""
        if kv_cache_config.num_blocks != self._hosted.options.num_pages:
            self._compile(kv_cache_config.num_blocks)
        (tensor,) = kv_cache_config.kv_cache_tensors
        memory = torch.zeros(tensor.size, dtype=torch.uint8, device=self.device)
        self.steps = HostSteps(self._hosted, cut_pool(memory, self._hosted.buffers))
        self._batch = StepBatch(self.steps)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing: the steps are compiled."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    @torch.no_grad()
    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        """Run one iteration of vLLM's scheduler.

        Raises:
            NumericsError: see `StepBatch.run`.
        """
        found = self._batch.run(scheduler_output)
        order = {name: index for index, name in enumerate(found)}
        self._emitted = [name for name, tokens in found.items() if tokens]
        return ModelRunnerOutput(list(found), order, sampled_token_ids=list(found.values()))

    def take_draft_token_ids(self) -> DraftTokenIds:
        """The drafts of the last iteration's requests, which vLLM schedules next."""
        drafts = [self._batch.requests[name].drafts or [] for name in self._emitted]
        return DraftTokenIds(self._emitted, drafts)

    def _compile(self, num_pages: int | None) -> None:
        self._hosted = compile_steps(
            self.model_config.model,
            self.speculative_config.num_speculative_tokens,
            (num_pages, self.cache_config.block_size),
            self.model_config.max_model_len,
            self.scheduler_config.max_num_seqs,
            (self.device_config.device.type, self.model_config.dtype),
            self.cache_config.kv_cache_memory_bytes or 0,
        )


def page_bytes(hosted: HostedModel) -> int:
    """Bytes of a page, of all buffers by page together."""
    paged = [buffer for buffer in hosted.buffers.values() if buffer.is_paged]
    return sum(prod(b.shape[1:]) * b.dtype.itemsize for b in paged)


def cut_pool(memory: Tensor, buffers: Mapping[str, HostBuffer]) -> dict[str, Tensor]:
    """mtpc's buffers by page, as views of vLLM's pool, uint8 [bytes], by name."""
    found, begin = dict[str, Tensor](), 0
    paged = [buffer for buffer in buffers.values() if buffer.is_paged]
    # Wider types first, so that each begins at a multiple of its size.
    for buffer in sorted(paged, key=lambda each: -each.dtype.itemsize):
        end = begin + prod(buffer.shape) * buffer.dtype.itemsize
        found[buffer.name] = memory[begin:end].view(buffer.dtype).view(buffer.shape)
        begin = end
    return found


def check_config(config: Any) -> None:
    """Refuse options of vLLM that mtpc's whole steps do not support.

    Raises:
        OptionError: the options do. The message lists them all.
    """
    model, cache, spec = config.model_config, config.cache_config, config.speculative_config
    stored = getattr(model.hf_config, "quantization_config", None)
    is_sized = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override
    is_own = spec and spec.method == "mtp" and spec.draft_model_config.model == model.model
    asked = {
        "no drafts by the checkpoint's MTP layers: set speculative_config to "
        '{"method": "mtp", "num_speculative_tokens": K}': (
            not is_own
            or spec.rejection_sample_method != "standard"
            or spec.num_speculative_tokens_per_batch_size
        ),
        f"no check of requests: set logits_processors to {CHECK}": (
            CHECK not in (model.logits_processors or ())
        ),
        "no size of the KV cache: set kv_cache_memory_bytes or num_gpu_blocks_override": (
            not is_sized
        ),
        "several ranks": config.parallel_config.world_size_across_dp > 1,
        "async_scheduling": config.scheduler_config.async_scheduling,
        f"kv_cache_dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        f"quantization {model.quantization} of plain weights": model.quantization and not stored,
        f"load_format {config.load_config.load_format}": (
            config.load_config.load_format not in ("auto", "safetensors")
        ),
        "hf_overrides": model.hf_overrides,
        f"revision {model.revision}": model.revision,
        f"runner {model.runner_type}": model.runner_type != "generate",
        "prompt embeddings": model.enable_prompt_embeds,
        "LoRA": config.lora_config,
        "watermarking": config.watermark_config,
        "a KV connector": config.kv_transfer_config or config.ec_transfer_config,
        "max_model_len -1": model.original_max_model_len == -1,
    }
    found = [what for what, is_asked in asked.items() if is_asked]
    if found:
        raise OptionError(
            f"mtpc's StepWorker does not run with these options of vLLM: {'; '.join(found)}; "
            "change them, or leave worker_cls out"
        )
