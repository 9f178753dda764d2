"""What mtpc's plugin asks of SGLang, written from the sources of SGLang 0.5.23.

SGLang is not installed with the tests. These classes have the names, arguments and demands of
SGLang's at the seams that mtpc stands in; the line of SGLang's source is beside each demand.
tests/peers runs the same plugin with SGLang itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from helpers import fake_sglang_layers as layers
from helpers.fake_modules import fake_modules
from helpers.sglang_scheduler import TOP_K_ALL, BaseSpecWorker, HybridPool, KVPool


class Mode:
    """`ForwardMode` (model_executor/forward_batch_info.py:227-293)."""

    def __init__(self, name: str):
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "DRAFT_EXTEND_V2"

    def is_extend_without_speculative(self) -> bool:
        return self.name == "EXTEND"


class RadixAttention(nn.Module):
    """layers/radix_attention.py:52-149."""

    kv_b_proj: Any = None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
    ):
        super().__init__()
        self.tp_q_head_num, self.qk_head_dim, self.scaling = num_heads, head_dim, scaling
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.layer_id, self.logit_cap = layer_id, logit_cap
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.sliding_window_size = sliding_window_size or -1

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        k = k.view(-1, self.tp_k_head_num, self.qk_head_dim)
        v = v.view(-1, self.tp_v_head_num, self.v_head_dim)
        out: Tensor = HOST.backend.forward(q, k, v, self, forward_batch, save_kv_cache)
        return out


@dataclass
class KVWriteLoc:
    """mem_cache/memory_pool.py:1881-1928."""

    loc: Tensor

    @classmethod
    def for_batch(cls, forward_batch: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


class MLATokenToKVPool:
    """One row of latent and rope key a slot: memory_pool.py:4970-4976 writes `cache_k` alone."""

    def __init__(self, slots: int, rank: int, width: int, dtype: torch.dtype):
        self.page_size, self.dtype, self.rank = 1, dtype, rank
        self.rows = torch.full((slots, 1, width), float("nan"), dtype=dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.rows

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.rows[..., : self.rank]

    def set_kv_buffer(self, layer: Any, loc: KVWriteLoc, cache_k: Tensor, cache_v: Any) -> None:
        self.rows[loc.loc] = cache_k


@dataclass
class AiterBackend:
    """What `AiterAttnBackend` (layers/attention/aiter_backend.py) asks and computes for MLA.

    Attributes:
        pool: the latent pool.
        slots: by request, the slots of its tokens up to those of this forward.
        prefill_attention_backend_str: base_attn_backend.py:60.
    """

    pool: MLATokenToKVPool
    slots: list[Tensor] = field(default_factory=list)
    prefill_attention_backend_str: str | None = "aiter"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, batch: Any, save: bool
    ) -> Tensor:
        if save:  # 3782, 4721
            self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v)
        rank, width = self.pool.rank, self.pool.rows.shape[2]
        if batch.forward_mode.is_decode():  # 4673, 1569: any shape is viewed by heads.
            q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
            return self._absorbed(q.view(-1, layer.tp_q_head_num, width), layer, batch)
        assert len(q.shape) == len(k.shape) == len(v.shape) == 3  # 3838
        if not batch.forward_mode.is_extend_without_speculative():  # 4050
            return self._absorbed(q, layer, batch)
        if not any(batch.extend_prefix_lens_cpu):  # 3864: flash_attn_varlen_func(q, k, v)
            assert q.shape[1:] == k.shape[1:]
            return self._attend(q, k, v, layer, batch, [len(s) for s in self.slots])
        assert layer.qk_head_dim != width  # 3885; otherwise it is mla_prefill_fwd.
        rows = self.pool.rows[torch.cat(self.slots)]
        latents, rope_keys = rows.split([rank, width - rank], -1)
        expanded = layer.kv_b_proj(latents.contiguous())[0]  # 3914
        nope = k.shape[-1] - (width - rank)  # 3837
        expanded = expanded.view(-1, layer.tp_k_head_num, nope + layer.v_head_dim)
        keys, values = expanded.split([nope, layer.v_head_dim], -1)
        keys = torch.cat([keys, rope_keys.expand(-1, layer.tp_k_head_num, -1)], -1)
        return self._attend(q, keys, values, layer, batch, [len(s) for s in self.slots])

    def _absorbed(self, q: Tensor, layer: RadixAttention, batch: Any) -> Tensor:
        """One head of latents: mla_decode_fwd, whose result has the latent's width."""
        rows = self.pool.rows[torch.cat(self.slots)].expand(-1, layer.tp_q_head_num, -1)
        lengths = [len(s) for s in self.slots]
        return self._attend(q, rows, rows[..., : self.pool.rank], layer, batch, lengths)

    @staticmethod
    def _attend(
        q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, batch: Any, lengths: list[int]
    ) -> Tensor:
        """The last rows of each request are queries; returns [T, N * D_v], as the kernels do."""
        counts = batch.extend_lens
        out = []
        for query, key, value in zip(
            q.split(counts), k.split(lengths), v.split(lengths), strict=True
        ):
            scores = torch.einsum("qnd,knd->nqk", query, key) * layer.scaling
            first = len(key) - len(query)
            mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + first)
            weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
            out.append(torch.einsum("nqk,knd->qnd", weights, value).flatten(1))
        return torch.cat(out)


class CausalBackend:
    """A backend over the rows of one prompt, without a cache."""

    prefill_attention_backend_str = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, batch: Any, save: bool
    ) -> Tensor:
        assert save
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        shared = layer.tp_q_head_num // layer.tp_k_head_num
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qnd,knd->nqk", q, k) * layer.scaling
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = distance >= 0
        if layer.sliding_window_size > 0:
            seen &= distance <= layer.sliding_window_size
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("nqk,knd->qnd", weights, v).flatten(1)


class Vocabulary(nn.Module):
    """`VocabParallelEmbedding` and `ParallelLMHead` of one rank."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def weight_loader(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data.copy_(tensor)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class LogitsProcessor(nn.Module):
    """layers/logits_processor.py:541-900: it stores the states from before the norm if given."""

    def __init__(self, config: Any):
        super().__init__()

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        hidden_states_before_norm: Tensor | None = None,
    ) -> SimpleNamespace:
        stored = hidden_states if hidden_states_before_norm is None else hidden_states_before_norm
        return SimpleNamespace(
            next_token_logits=hidden_states @ lm_head.weight.T, hidden_states=stored
        )


class CustomSpecAlgo:
    """speculative/spec_registry.py:27-69."""

    def __init__(self, name: str, factory: Any, supports_overlap: Any, validate_server_args: Any):
        self.name, self.factory = name, factory
        self.supports_overlap, self.validate_server_args = supports_overlap, validate_server_args


class SpeculativeAlgorithm:
    """speculative/spec_info.py; `register` is spec_registry.py:215-245."""

    registered: dict[str, CustomSpecAlgo] = {}  # noqa: RUF012 (as SGLang's `_REGISTRY`)

    @classmethod
    def register(
        cls, name: str, *, supports_overlap: bool, validate_server_args: Any, spec_class: Any
    ) -> Any:
        def decorator(factory: Any) -> Any:
            cls.registered[name] = spec_class(name, factory, supports_overlap, validate_server_args)
            return factory

        return decorator

    def supports_grammar_overlap(self) -> bool: ...  # type: ignore[empty-body]
    def carries_draft_hidden_states(self) -> bool: ...  # type: ignore[empty-body]
    def build_disagg_draft_input(self) -> Any: ...
    def create_future_map(self) -> Any: ...
    def need_topk(self) -> bool: ...  # type: ignore[empty-body]


class FINISH_ABORT:
    """managers/schedule_batch.py:332-345."""

    def __init__(self, message: Any = None, status_code: Any = None, err_type: Any = None):
        self.message, self.status_code, self.err_type = message, status_code, err_type


class EAGLEWorkerV2:
    """speculative/eagle_worker_v2.py:1305: what a scheduler calls."""

    device = "cpu"
    speculative_num_steps = 1

    def init_cuda_graphs(self) -> None:
        """Nothing is captured."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
    ) -> Any:
        return batch, on_publish, grammar_barrier


def chain_speculative_sampling(
    candidates: Tensor, coins: Tensor, last_coins: Tensor, target: Tensor, draft: Tensor
) -> list[list[int]]:
    """`chain_speculative_sampling_triton` (kernels/ops/speculative/reject_sampling.py:133-239).

    Args:
        candidates: int64 [R, 1 + steps], the last token and the drafts.
        coins: float [R, 1 + steps], uniform in [0, 1).
        last_coins: float [R], uniform in [0, 1).
        target: float [R, 1 + steps, V], what the target would emit after each candidate.
        draft: float [R, steps, V], what the drafts were drawn from.

    Returns:
        By request, the emitted tokens.
    """
    assert draft.shape == (target.shape[0], target.shape[1] - 1, target.shape[2])
    emitted = []
    for r, drafts in enumerate(candidates[:, 1:].tolist()):
        row, tokens = 0, []
        for token in drafts:
            p, q = target[r, row, token], draft[r, row, token]
            if not (0 < q <= 1 and coins[r, row] * q < p):
                break
            tokens.append(token)
            row += 1
        rest = target[r, row]
        if row < len(drafts):
            rest = (rest - draft[r, row]).clamp(min=0)
        above = rest.cumsum(0) > last_coins[r] * rest.sum()
        tokens.append(int(above.int().argmax()) if above.any() else len(rest) - 1)
        emitted.append(tokens)
    return emitted


def _alone(part: Tensor, dim: int) -> Tensor:
    """`GroupCoordinator.all_gather` (distributed/parallel_state.py:1374) of one rank."""
    return part


HOST = SimpleNamespace(
    backend=None,
    platform=SimpleNamespace(is_hip=False),
    arguments=SimpleNamespace(speculative_algorithm="MTPC"),
    kernel=SimpleNamespace(dsv4_attn_backend="auto"),
    unified_kv_fp8=False,
    parallel=SimpleNamespace(
        **dict(tp_size=1, pp_size=1, attn_dp_size=1, attn_cp_size=1, moe_ep_size=1),
        tp_group=SimpleNamespace(all_gather=_alone),
    ),
)
"""What SGLang's runtime context answers; `installed` sets it back."""


def _modules() -> dict[str, dict[str, Any]]:
    named: dict[str, dict[str, Any]] = {
        "layers.radix_attention": {"RadixAttention": RadixAttention},
        "layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "layers.vocab_parallel_embedding": {
            "ParallelLMHead": Vocabulary,
            "VocabParallelEmbedding": Vocabulary,
        },
        "mem_cache.memory_pool": {
            "KVWriteLoc": KVWriteLoc,
            "HybridLinearKVPool": HybridPool,
            "MHATokenToKVPool": KVPool,
            "MLATokenToKVPool": MLATokenToKVPool,
        },
        "model_executor.forward_context": {
            "get_attn_backend": lambda: HOST.backend,
            "get_token_to_kv_pool": lambda: HOST.backend.pool,
        },
        "runtime_context": {
            "attention_backends": lambda: ("triton", "triton"),
            "get_exec": lambda: HOST,
            "get_parallel": lambda: HOST.parallel,
            "get_platform": lambda: HOST.platform,
            "get_server_args": lambda: HOST.arguments,
        },
        "managers.schedule_batch": {"FINISH_ABORT": FINISH_ABORT},
        "managers.utils": {"GenerationBatchResult": SimpleNamespace},
        "sampling.sampling_params": {"TOP_K_ALL": TOP_K_ALL},
        "speculative.base_spec_worker": {"BaseSpecWorker": BaseSpecWorker},
        "speculative.eagle_info": {"EagleDraftInput": SimpleNamespace},
        "speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
        "speculative.eagle_worker_v2": {"EAGLEWorkerV2": EAGLEWorkerV2},
        "layers.linear": {
            "ColumnParallelLinear": layers.ColumnParallelLinear,
            "ReplicatedLinear": layers.ReplicatedLinear,
            "ReplicatedParallelGroup": layers.ReplicatedParallelGroup,
            "RowParallelLinear": layers.RowParallelLinear,
        },
        "layers.moe": {"get_moe_a2a_backend": lambda: layers.NO_EXCHANGE},
        "layers.moe.utils": {
            "speculative_moe_a2a_backend_context": nullcontext,
            "speculative_moe_backend_context": nullcontext,
        },
        "speculative.spec_utils": {"draft_tp_context": nullcontext},
        "layers.moe.fused_moe_triton": {"FusedMoE": layers.FusedMoE},
        "layers.moe.topk": {"StandardTopKOutput": layers.TopK},
        "model_loader.weight_utils": {"default_weight_loader": layers.load_whole},
        "layers.attention.deepseek_v4_backend": {"SWA_WINDOW": layers.WINDOW},
        "layers.attention.deepseek_v4_backend_hip_radix": {"SWA_WINDOW": layers.WINDOW},
        "layers.attention.dsv4.unified_kv_gate": {"is_unified_kv_fp8": lambda: HOST.unified_kv_fp8},
    }
    return {f"sglang.srt.{name}": parts for name, parts in named.items()}


@contextmanager
def installed() -> Iterator[SimpleNamespace]:
    """The fake as `sglang`, for imports of mtpc's package; both are forgotten at the end."""
    try:
        with fake_modules("sglang", _modules()):
            yield HOST
    finally:
        HOST.backend, HOST.platform.is_hip, HOST.unified_kv_fp8 = None, False, False
        HOST.parallel.tp_group.all_gather = _alone
        HOST.arguments.speculative_algorithm, HOST.kernel.dsv4_attn_backend = "MTPC", "auto"
        SpeculativeAlgorithm.registered.clear()
