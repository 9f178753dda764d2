"""mtpc's draft classes against SGLang's real ones, without an engine; under SGLang's interpreter:

    VENV/bin/python tests/peers/sglang_contract.py

For every architecture that mtpc overrides, those too that SGLang cannot run on a CPU: the host's
own registry and `ModelConfig` choose our class for a checkpoint that mtpc wrote; constructor,
methods and parameters are those of the class it stands in for; the checkpoint's tensors load;
and logits and hidden states of a prompt, through the host's RadixAttention and LogitsProcessor,
equal those of an uncached computation with transformers' modules, on one rank and on two; so do the
drafts of `MTPC`'s graph over the host's layers. What the host cannot serve is refused in words.
`sglang_setup.sh` makes the environment. Exits with 1 where something fails.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "mtpc.integrations.sglang.models",
}
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import sglang_on_cpu  # noqa: E402
import torch  # noqa: E402
from helpers import tiny, uncached  # noqa: E402
from helpers.fake_sglang import chain_speculative_sampling  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import (  # noqa: E402
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import (  # noqa: E402
    ForwardContext,
    forward_context,
)
from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import (  # noqa: E402
    SpawnRanks,
    get_parallel,
    publish,
    reset_context,
)
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput  # noqa: E402
from sglang_plugin import quantise  # noqa: E402

from mtpc.backends import make_backend  # noqa: E402
from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError  # noqa: E402
from mtpc.integrations.chain import ChainPlan, DraftChain, HostPools  # noqa: E402

HOSTS_OWN = {
    "mimo": ("mimo_mtp", "MiMoMTP"),
    "glm4_moe": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN"),
    "deepseek_v3": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextForCausalLMMTP"),
    "qwen3_5": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "step3p5": ("step3p5_mtp", "Step3p5MTP"),
    "deepseek_v4": ("deepseek_v4_nextn", "DeepseekV4ForCausalLMNextN"),
}
"""By mtpc's family: the host's module and class that are overridden."""
NOT_MADE = ("step3p5", "deepseek_v4")
"""Families of which no layer is made: the host fails over the configs that transformers writes."""
LIMIT_S = 900
"""For each process."""


class CausalAttention:
    """An attention backend over the rows of one prompt, without cache: what the host's compute."""

    prefill_attention_backend_str = "triton"

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
        assert save_kv_cache
        assert forward_batch is not None
        self.layers.append(layer)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim).transpose(0, 1)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim).transpose(0, 1)
        shared = layer.tp_q_head_num // layer.tp_k_head_num
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        rows = torch.arange(q.shape[1])
        distance = rows[:, None] - rows
        seen = distance >= 0
        if layer.sliding_window_size > 0:
            seen &= distance <= layer.sliding_window_size
        scores = (q @ k.transpose(1, 2) * layer.scaling).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def batch_of(ids: torch.Tensor, hidden: torch.Tensor, mode: ForwardMode) -> ForwardBatch:
    """The host's batch of one request whose rows are all of a prompt."""
    count = len(ids)
    lens = torch.tensor([count])
    return ForwardBatch(
        forward_mode=mode,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=lens,
        out_cache_loc=torch.arange(1, count + 1),
        seq_lens_sum=count,
        positions=torch.arange(count),
        extend_seq_lens=lens,
        spec_info=EagleDraftExtendInput(hidden_states=hidden),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )


def check_family(family: str, directory: Path, **changes: Any) -> None:
    """Everything that the module's description promises, for one family."""
    target = tiny.build_target(family, **changes)
    layers = tiny.build_mtp_layers(family, target)
    if torch.distributed.get_rank() == 0:
        tiny.save_checkpoint(family, target, layers, directory)
    torch.distributed.barrier()
    config = ModelConfig(str(directory), is_draft_model=True, dtype="float32").hf_config
    ours, name = ModelRegistry.resolve_model_cls(config.architectures)
    assert name == HOSTS_OWN[family][1]
    for index, layer in enumerate(layers):
        check_layer(family, directory, ours, config, target, layer, index)


def check_layer(
    family: str, directory: Path, ours: Any, config: Any, target: Any, layer: Any, index: int
) -> None:
    """One MTP layer as the host makes, loads and calls it; with several it gives the index."""
    which = {"draft_model_idx": index} if index else {}
    draft = ours(config=config, quant_config=None, **which).eval()
    tensors = load_file(directory / "model.safetensors")
    taken = draft.load_weights(iter(tensors.items()))
    DefaultModelLoader.postprocess_weights(draft, torch.device("cpu"))
    expected = {n for n in tensors if n.startswith(draft.draft.prefix)}
    assert taken == expected, taken ^ expected
    embed = part_of(draft.draft.embedding, target.get_input_embeddings().weight)
    head = part_of(draft.lm_head, target.get_output_embeddings().weight)
    draft.set_embed_and_head(embed, head)
    shared = draft.get_embed_and_head()
    assert shared[0] is embed
    assert (shared[1] is head) == (layer.head is None)
    check_numbers(family, target, layer, draft)
    refused("miss", lambda: draft.load_weights(iter([])), CheckpointError)


def part_of(module: Any, weight: torch.Tensor) -> torch.nn.Parameter:
    """A rank's rows of the target's embedding or head, as the host loads them."""
    module.weight_loader(module.weight, weight.detach())
    return torch.nn.Parameter(module.weight.detach().clone())


def check_signatures(ours: type, own: type) -> None:
    """Whatever the host passes to its own class, ours takes, by the same names."""
    for method in ("__init__", "forward", "load_weights", "set_embed_and_head"):
        theirs = inspect.signature(getattr(own, method)).parameters
        mine = inspect.signature(getattr(ours, method)).parameters
        # Arguments of the host's subclasses among themselves, which its workers never pass.
        apart = {"is_mtp", "is_nextn", "input_embeds", "pp_proxy_tensors", "kwargs"}
        missing = theirs.keys() - mine.keys() - apart
        assert not missing, f"{ours.__name__}.{method} lacks {sorted(missing)}"


@torch.no_grad()
def check_numbers(family: str, target: Any, layer: Any, draft: Any) -> None:
    """A prompt through the wrapper equals the uncached computation, in each phase of the host."""
    ids = torch.randint(2, 96, (1, 14), generator=torch.Generator().manual_seed(5))
    features = uncached.fed_features(family, target, ids)[:, :-1]
    rows = ids[:, 1:]
    hidden = uncached.run_mtp_uncached(family, target, layer, rows, features)[0]
    logits = uncached.logits_of(target, hidden, layer)
    for mode in (ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND):
        batch = batch_of(rows[0], features[0], mode)
        backend = CausalAttention()
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
            out = draft.forward(batch.input_ids, batch.positions, batch)
        assert [found.layer_id for found in backend.layers] == [0]
        last = slice(None) if mode == ForwardMode.DRAFT_EXTEND_V2 else slice(-1, None)
        torch.testing.assert_close(out.hidden_states, hidden, rtol=1e-4, atol=1e-4)
        found = out.next_token_logits
        torch.testing.assert_close(found, logits[last], rtol=1e-4, atol=1e-4)
    check_images(family, target, layer, draft)
    check_chain(family, target, layer, draft)
    idle = batch_of(rows[0, :0], features[0, :0], ForwardMode.IDLE)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=idle):
        out = draft.forward(idle.input_ids, idle.positions, idle)
    assert out.next_token_logits.shape == (0, 96)
    assert draft.run.forward_batch is None


@torch.no_grad()
def check_images(family: str, target: Any, layer: Any, draft: Any) -> None:
    """Where a prompt has images the target's embeddings count, and ids in the last row alone."""
    ids = torch.randint(2, 96, (1, 14), generator=torch.Generator().manual_seed(6))
    features = uncached.fed_features(family, target, ids)[:, :-1]
    rows = ids[0, 1:]
    embeddings = target.get_input_embeddings()(rows)
    hidden = uncached.run_mtp_uncached(family, target, layer, rows[None], features)[0]
    marks = torch.where(torch.arange(len(rows)) < len(rows) - 1, 10**6, rows)
    batch = batch_of(marks, features[0], ForwardMode.EXTEND)
    batch.mm_input_embeds = torch.cat([embeddings[:-1], torch.full_like(embeddings[:1], 7.0)])
    kinds = {f"contains_{kind}_inputs": lambda: True for kind in ("audio", "video", "image")}
    batch.mm_inputs = [SimpleNamespace(**kinds)]
    batch.extend_start_loc = torch.zeros(1, dtype=torch.int64)
    backend = CausalAttention()
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        out = draft.forward(batch.input_ids, batch.positions, batch)
    torch.testing.assert_close(out.hidden_states, hidden, rtol=1e-4, atol=1e-4)


def check_chain(family: str, target: Any, layer: Any, draft: Any) -> None:
    """`MTPC`'s graph over the host's layers drafts what uncached steps draft, on every rank."""
    from mtpc.integrations.sglang.propose import GatheredHead

    (site,), steps, pages = draft.draft.sites, 3, (4, 2)
    shapes = {"k": (site.num_kv_heads, site.head_dim), "v": (site.num_kv_heads, site.v_head_dim)}
    if site.kind == "latent":
        shapes = {"latent": (site.latent_rank + site.rope_head_dim,)}
    pools = {role: torch.full((*pages, *shape), torch.nan) for role, shape in shapes.items()}
    chain = DraftChain(
        *(draft.draft, GatheredHead(draft.lm_head, 96), HostPools(pools, 2)),
        *(ChainPlan(steps, (1,), 96), make_backend("eager")),
    )
    width = target.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(7)
    ids, features = torch.tensor([[9]]), torch.randn(1, 1, width, generator=generator)
    table, first = torch.tensor([[2, 3]]), (ids[0], features[0], torch.tensor([0]))
    found = chain.propose(*first, table)[0].tolist()
    for token in found:
        hidden = uncached.run_mtp_uncached(family, target, layer, ids, features)
        assert token == int(uncached.logits_of(target, hidden[0], layer)[-1].argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
        features = torch.cat([features, hidden[:, -1:]], 1)
    calls = [n for n in chain.graphs[1].graph.nodes if "call_host" in str(n.target)]
    assert len(calls) == steps * (len(draft.draft.hosted) - (site.kind == "latent") + 2)


def refused(words: str, make: Any, error: type[Exception] = UnsupportedModelError) -> None:
    """Assert that something is refused, in these words."""
    try:
        make()
    except error as found:
        if words in str(found):
            return
        raise
    raise AssertionError(f"nothing was refused: {words}")


def check_quantised(directory: Path) -> None:
    """DeepSeek-V3 in blocks of FP8: a rank has its codes and scales, and expands latents exactly.

    Nothing runs the experts, whose kernel the host registers for CUDA only.
    """
    group = get_parallel().tp_group
    if group.rank_in_group == 0:
        sizes = dict(moe_intermediate_size=64, q_lora_rank=32, qk_rope_head_dim=16, v_head_dim=16)
        tiny.make_checkpoint("deepseek_v3", directory, **sizes)
        quantise(directory, 16)
    torch.distributed.barrier()
    config = ModelConfig(str(directory), is_draft_model=True, dtype="float16").hf_config
    ours, _ = ModelRegistry.resolve_model_cls(config.architectures)
    with set_default_torch_dtype(torch.float16):
        draft = ours(config=config, quant_config=Fp8Config.from_config(config.quantization_config))
    tensors = load_file(directory / "model.safetensors")
    draft.load_weights(iter(tensors.items()))
    refused("eh_proj.weight_scale_inv", lambda: draft.load_weights(
        iter({**tensors, f"{draft.draft.prefix}eh_proj.weight_scale_inv": torch.ones(4, 8)}.items())
    ), CheckpointError)  # fmt: skip
    experts = draft.draft.hosted["block.mlp.experts"].module.inner
    for leaf in ("weight", "weight_scale_inv"):
        stored = tensors[f"{draft.draft.prefix}mlp.experts.3.up_proj.{leaf}"]
        mine = stored.chunk(group.world_size)[group.rank_in_group]
        held = getattr(experts, f"w13_{leaf}")[3].chunk(2)[1]
        assert torch.equal(held.float(), mine.float()), leaf
    (site,) = draft.draft.graph.sites
    DefaultModelLoader.postprocess_weights(draft.draft.graph.linears, torch.device("cpu"))
    site.quant_method.process_weights_after_loading(site)
    codes, scales = (
        tensors[f"{draft.draft.prefix}self_attn.kv_b_proj.{leaf}"].float()
        for leaf in ("weight", "weight_scale_inv")
    )
    whole = codes * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    mine = whole.chunk(group.world_size)[group.rank_in_group]
    found = torch.cat([site.to_key, site.to_value], 1).flatten(0, 1)
    torch.testing.assert_close(found, mine.half(), rtol=1e-3, atol=1e-6)


def check_names() -> None:
    """Each class that is overridden takes what the host's own takes; no other is overridden."""
    ours = {n for n, c in ModelRegistry.models.items() if c.__module__.startswith("mtpc.")}
    assert ours == {name for _, name in HOSTS_OWN.values()}, ours
    for module, name in HOSTS_OWN.values():
        own = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
        check_signatures(ModelRegistry.resolve_model_cls([name])[0], own)
    stays, _ = ModelRegistry.resolve_model_cls(["MiMoV2MTP"])
    assert stays.__module__.startswith("sglang."), stays


def check_algorithm() -> None:
    """MTPC is known to the host, answers all that it asks of an algorithm, and refuses by name."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    import mtpc.integrations.sglang as ours
    from mtpc.integrations.sglang.propose import ProposeRunner, host_pools

    ours.register()
    found = SpeculativeAlgorithm.from_string("mtpc")
    asked = {n for n, v in vars(SpeculativeAlgorithm).items() if inspect.isfunction(v)}
    missing = {n for n in asked if not n.startswith("_")} - set(dir(found))
    assert missing <= {"get_platform_worker_cls"}, missing
    for name in ("is_eagle", "need_topk", "carries_draft_hidden_states", "has_draft_kv"):
        assert getattr(found, name)() == getattr(SpeculativeAlgorithm.EAGLE, name)(), name
    assert issubclass(found.factory(None), EAGLEWorkerV2)
    fields = dict(speculative_num_steps=3, speculative_num_draft_tokens=4)
    options = ("adaptive", "use_rejection_sampling", "token_map")
    fields |= {f"speculative_{name}": None for name in options} | {"enable_multi_layer_eagle": None}
    fields |= {f"speculative_accept_threshold_{name}": 1.0 for name in ("single", "acc")}
    good = SimpleNamespace(speculative_eagle_topk=1, **fields)
    found.validate_server_args(good)
    good.speculative_use_rejection_sampling = True
    found.validate_server_args(good)
    for field, value, words in (
        ("speculative_eagle_topk", 4, "topk 4"),
        ("speculative_num_steps", None, "steps None"),
        ("speculative_num_draft_tokens", 9, "9 draft tokens for 3 steps"),
        ("speculative_accept_threshold_acc", 0.5, "threshold_acc 0.5 with rejection sampling"),
    ):
        bad = SimpleNamespace(**{**vars(good), field: value})
        refused(words, lambda bad=bad: found.validate_server_args(bad), OptionError)
    foreign = SimpleNamespace(draft_runner=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    refused("did not trace", lambda: ProposeRunner(foreign))
    other = SimpleNamespace(dtype=torch.float8_e4m3fn)
    refused(MHATokenToKVPool.__name__, lambda: host_pools(other, torch.bfloat16))


def check_rejection_sampling() -> None:
    """The host's kernel emits from MTPC's proposals what the tests' reference of it emits."""
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    from mtpc.integrations.sglang.propose import proposals

    generator, count, steps, vocab = torch.Generator().manual_seed(3), 48, 3, 96
    logits = torch.randn(count, 1 + steps, vocab, generator=generator) * 3
    target = logits.softmax(-1)
    # Near what the target says, so that some drafts are accepted and some are not.
    first = (logits[:, 0] + torch.randn(count, vocab, generator=generator)).softmax(-1)
    drafts = torch.multinomial(target[:, :steps].flatten(0, 1), 1, generator=generator)
    drafts = drafts.view(count, steps)
    drafts[:, 0] = torch.multinomial(first, 1, generator=generator)[:, 0]
    drawn = proposals(first, drafts[:, 1:])
    candidates = torch.cat([drafts[:, :1], drafts], 1)
    coins, last = (
        torch.rand(*shape, generator=generator) for shape in ((count, 1 + steps), (count,))
    )
    predicts = torch.zeros(count * (1 + steps), dtype=torch.int32)
    accepted, numbers = torch.full((count, 1 + steps), -1, dtype=torch.int32), predicts[:count] * 0
    index = torch.arange(count * (1 + steps)).view(count, 1 + steps)
    chain_speculative_sampling_triton(
        *(predicts, accepted, numbers, candidates, index, None, None, coins, last, target, drawn),
        *(1.0, 1.0, True),
    )
    expected = chain_speculative_sampling(candidates, coins, last, target, drawn)
    found = [predicts[accepted[r, : n + 1].long()].tolist() for r, n in enumerate(numbers.tolist())]
    assert found == expected
    assert len({len(tokens) for tokens in found}) > 2


def check_refusals() -> None:
    """What is not served is said before anything is built. Leaves the host's context changed."""
    ours, _ = ModelRegistry.resolve_model_cls(["MiMoMTP"])
    for arguments, words in (
        ({"pp_size": 2}, "pipeline parallelism over 2 ranks"),
        ({"tp_size": 2, "ep_size": 2}, "expert parallelism over 2 ranks"),
    ):
        reset_context()
        publish(
            ServerArgs(model_path="none", **arguments), role="test", ranks=SpawnRanks(world_rank=0)
        )
        refused(words, lambda: ours(config=SimpleNamespace()))


def start_host(rendezvous: str, rank: int, ranks: int) -> None:
    """What the host's layers need of a process: arguments, and groups of its ranks."""
    sglang_on_cpu.stay_on_cpu()
    arguments = ServerArgs(model_path="none", tp_size=ranks)
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
    initialize_model_parallel(backend="gloo")


def check_all(kept: Path, ranks: int) -> int:
    """Check, with checkpoints below a directory that ranks share; returns the exit code."""
    failed = []
    families = [family for family in HOSTS_OWN if family not in NOT_MADE]
    checks = {f: lambda path, f=f: check_family(f, path) for f in families}
    checks["deepseek_v3, FP8"] = check_quantised
    if ranks == 1:
        checks["names and signatures"] = lambda path: check_names()
        checks["algorithm MTPC"] = lambda path: check_algorithm()
        checks["rejection sampling"] = lambda path: check_rejection_sampling()
        checks["refusals"] = lambda path: check_refusals()
    else:
        shared = {"num_attention_heads": 4, "num_key_value_heads": 1}
        checks["shared heads"] = lambda path: check_family("mimo", path, **shared)
    for name, check in checks.items():
        try:
            check(kept / name)
            print(f"{name}, {ranks} rank(s): as promised", flush=True)
        except Exception:
            failed.append(name)
            print(f"{name}, {ranks} rank(s): FAILED\n{traceback.format_exc()}", flush=True)
            if ranks > 1:  # The other rank may wait for this one, and fails when this one ends.
                break
    return 1 if failed else 0


def main() -> int:
    """Check on one rank and on two, each a process; returns the exit code."""
    if len(sys.argv) > 1:
        rendezvous, rank, ranks = sys.argv[1:]
        start_host(rendezvous, int(rank), int(ranks))
        return check_all(Path(rendezvous).parent, int(ranks))
    status = 0
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as kept:
            command = [sys.executable, __file__, f"{kept}/rendezvous"]
            group = [subprocess.Popen([*command, str(i), str(ranks)]) for i in range(ranks)]
            status |= max(abs(process.wait(LIMIT_S)) for process in group)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
