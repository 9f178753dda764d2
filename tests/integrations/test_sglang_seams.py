"""mtpc's plugin at SGLang's seams, over a fake of them (`helpers/fake_sglang.py`).

The fake is written from SGLang's sources, so that what ROCm alone runs is tried, too. With SGLang
itself tests/peers/sglang_contract.py and sglang_plugin.py run the plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fake_sglang
from helpers.fake_sglang import AiterBackend, MLATokenToKVPool, Mode
from helpers.fake_sglang_layers import Fp8Config
from helpers.oracles import DraftOracle, Oracle
from helpers.plain_host import TOKENS
from safetensors.torch import load_file
from torch import Tensor, nn

from mtpc.errors import OptionError
from mtpc.integrations.attention_site import AttentionSite, expand_latent

STEPS, VOCAB = 3, 96


@pytest.fixture
def host() -> Iterator[SimpleNamespace]:
    with fake_sglang.installed() as found:
        yield found


@pytest.fixture
def algorithm(host: SimpleNamespace) -> Any:
    """`MTPC` as SGLang's registry has it."""
    import mtpc.integrations.sglang as plugin

    plugin.register()
    return fake_sglang.SpeculativeAlgorithm.registered["MTPC"]


def arguments(**changes: Any) -> SimpleNamespace:
    """SGLang's ServerArgs, as its command line makes them for K = 3."""
    fields = dict(
        speculative_num_steps=STEPS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=STEPS + 1,
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        speculative_token_map=None,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        enable_multi_layer_eagle=False,
        speculative_draft_model_path=None,
        model_path="model",
        revision=None,
        max_running_requests=None,
        device="cuda",
        disable_overlap_schedule=False,
        enable_mixed_chunk=True,
    )
    return SimpleNamespace(**{**fields, **changes})


def test_rocm_verifies_by_rejection_sampling(host: SimpleNamespace, algorithm: Any) -> None:
    """Else SGLang's verification takes the argmax on HIP, whatever a request asks."""
    for is_hip in (False, True):
        host.platform.is_hip = is_hip
        served = arguments()
        algorithm.validate_server_args(served)
        algorithm.handle_server_args(served)
        assert served.speculative_use_rejection_sampling is is_hip


@pytest.mark.parametrize("threshold", ["single", "acc"])
def test_thresholds_that_rejection_sampling_ignores_are_refused(
    host: SimpleNamespace, algorithm: Any, threshold: str
) -> None:
    given = {f"speculative_accept_threshold_{threshold}": 0.5}
    algorithm.validate_server_args(arguments(**given))
    with pytest.raises(OptionError, match=rf"threshold_{threshold} 0.5 with rejection sampling"):
        algorithm.validate_server_args(arguments(**given, speculative_use_rejection_sampling=True))
    host.platform.is_hip = True
    with pytest.raises(OptionError, match="which ROCm always needs"):
        algorithm.validate_server_args(arguments(**given))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_request_with_sampling_is_refused_on_a_cpu(
    host: SimpleNamespace, algorithm: Any, device: str
) -> None:
    """By SGLang's own end of a bad request; greedy requests of the same batch go on."""
    worker = algorithm.factory(arguments())()
    worker.device = device
    requests = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(top_k=top_k), to_finish=None, finished=lambda: False
        )
        for top_k in (1, 1 << 30)
    ]
    batch = SimpleNamespace(reqs=requests)
    assert worker.forward_batch_generation(batch, "publish", grammar_barrier="grammar") == (
        *(batch, "publish", "grammar"),
    )
    assert requests[0].to_finish is None
    end = requests[1].to_finish
    if device == "cuda":
        assert end is None
    else:
        assert "MTPC on a CPU takes the most probable token" in end.message
        assert (end.status_code, end.err_type) == (400, "BadRequestError")


class Chain:
    """Later drafts that follow from the first one, in place of a model's."""

    def propose(self, first: Tensor, *_: Tensor) -> Tensor:
        return (first[:, None] + torch.arange(1, STEPS)) % VOCAB


@torch.no_grad()
def test_drafts_come_with_what_they_were_drawn_from(host: SimpleNamespace) -> None:
    """So what SGLang's rejection sampling emits has the target's distribution.

    The first draft is drawn from q by the host, many times; the later ones are the chain's.
    """
    from mtpc.integrations.sglang.propose import ProposeRunner

    generator, runner = torch.Generator().manual_seed(7), object.__new__(ProposeRunner)
    runner.chain, runner.page_size = Chain(), 1  # type: ignore[assignment]
    runner.req_to_token = torch.arange(64).view(4, 16)
    runner.worker = SimpleNamespace(
        _topk1_parents_prealloc=torch.zeros(4, 2), _topk1_score_indices_prealloc=torch.zeros(4, 2)
    )

    def rows(count: int) -> Tensor:
        return (torch.randn(count, VOCAB, generator=generator) * 3).softmax(-1)

    count = 4000
    target = rows(1 + STEPS)
    q = 0.5 * target[0] + 0.5 * rows(1)[0]
    first = torch.multinomial(q, count, replacement=True, generator=generator)
    features, chained = torch.zeros(1, 4), {}
    for token in first.unique().tolist():
        given = SimpleNamespace(
            topk_index=torch.tensor([[token]]), hidden_states=features, draft_probs=q[None]
        )
        batch = SimpleNamespace(
            spec_info=given,
            batch_size=1,
            req_pool_indices=torch.tensor([2]),
            positions=torch.tensor([3]),
            sampling_info=SimpleNamespace(is_all_greedy=False),
        )
        _, _, drafts, drawn = runner.execute(batch)
        assert drafts.shape == (1, STEPS)
        assert drawn.shape == (1, STEPS, VOCAB)
        assert drafts[0, 0] == token
        chained[token] = (drafts[0].clone(), drawn[0])
        batch.sampling_info.is_all_greedy = True
        assert runner.execute(batch)[3] is None
    # The second token of the target depends on no draft here, so both can be counted alone.
    likely = chained[int(first.mode().values)][0]
    target[1] = 0.5 * target[1] + 0.5 * nn.functional.one_hot(likely[1], VOCAB)
    drafts, drawn = (torch.stack([chained[t][i] for t in first.tolist()]) for i in (0, 1))
    coins = torch.rand(count, 1 + STEPS, generator=generator)
    last = torch.rand(count, generator=generator)
    candidates = torch.cat([drafts[:, :1], drafts], 1)
    emitted = fake_sglang.chain_speculative_sampling(
        candidates, coins, last, target.expand(count, -1, -1), drawn
    )
    for place in (0, 1):
        tokens = torch.tensor([row[place] for row in emitted if len(row) > place])
        found, p = tokens.bincount(minlength=VOCAB) / len(tokens), target[place]
        assert len(tokens) > 1000
        # Five standard deviations, and one token.
        assert ((found - p).abs() < 5 * (p * (1 - p) / len(tokens)).sqrt() + 1 / len(tokens)).all()
    assert max(len(row) for row in emitted) > 2


LATENT = AttentionSite(*(0, "latent", 4, 4, 12, 10, 0.3), latent_rank=16, rope_head_dim=4)


def latent_attention(host: SimpleNamespace) -> Any:
    """mtpc's attention over the fake of SGLang's aiter backend, its expansion read."""
    from dataclasses import replace

    from mtpc.integrations.sglang.attention import DraftRun, LatentAttention

    expansion = nn.Linear(16, 4 * (8 + 10), bias=False).double()
    made = LatentAttention(replace(LATENT, expansion=expansion), 0, DraftRun()).double()
    made.quant_method.process_weights_after_loading(made)
    host.backend = AiterBackend(MLATokenToKVPool(40, 16, 20, torch.float64))
    return made


class Requests:
    """Two requests, whose rows a reference attends to in its own way."""

    def __init__(self, made: Any, host: SimpleNamespace):
        self.made, self.host = made, host
        free = torch.randperm(40, generator=torch.Generator().manual_seed(1))
        self.slots, self.lens = free.split(20), [0, 0]
        self.rows = [torch.empty(0, 20, dtype=torch.float64)] * 2

    def forward(self, mode: str, counts: list[int]) -> None:
        """A forward of `counts` new rows by request equals plain attention over its rows."""
        before, total = list(self.lens), sum(counts)
        q = torch.randn(total, 4, 12, dtype=torch.float64)
        latent = torch.randn(total, 16, dtype=torch.float64)
        rope = torch.randn(total, 4, dtype=torch.float64)
        for r, new in enumerate(torch.cat([latent, rope], -1).split(counts)):
            self.rows[r] = torch.cat([self.rows[r], new])
            self.lens[r] += counts[r]
        spans = [slice(a, b) for a, b in zip(before, self.lens, strict=True)]
        self.host.backend.slots = [s[:n] for s, n in zip(self.slots, self.lens, strict=True)]
        self.made.run.forward_batch = SimpleNamespace(
            forward_mode=Mode(mode),
            out_cache_loc=torch.cat([s[x] for s, x in zip(self.slots, spans, strict=True)]),
            extend_prefix_lens_cpu=before,
            extend_lens=counts,
        )
        found = self.made(q, latent, rope)
        expected = []
        for r, query in enumerate(q.split(counts)):
            keys, values = expand_latent(self.made.site, *self.rows[r].split([16, 4], -1))
            scores = torch.einsum("qnd,knd->nqk", query, keys) * 0.3
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + before[r])
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            expected.append(torch.einsum("nqk,knd->qnd", weights, values))
        torch.testing.assert_close(found, torch.cat(expected))


@torch.no_grad()
def test_latent_attention_on_the_aiter_backend(host: SimpleNamespace) -> None:
    """Prompts, a chunk after others' beginnings, verified rows and single rows, over one pool."""
    requests = Requests(latent_attention(host), host)
    for mode, counts in (
        ("EXTEND", [5, 1]),
        ("EXTEND", [3, 4]),
        ("DRAFT_EXTEND_V2", [3, 3]),
        ("DECODE", [1, 1]),
    ):
        requests.forward(mode, counts)
    host.backend.prefill_attention_backend_str = None  # The host's option counts then: triton.
    requests.forward("DECODE", [1, 1])
    with pytest.raises(AssertionError):  # The fake is aiter all the same, and takes no latents.
        requests.forward("EXTEND", [1, 1])


@pytest.fixture
def float64(checkpoint: Callable[..., Path]) -> Iterator[None]:
    """SGLang's loader makes models under the checkpoint's dtype (model_loader/loader.py).

    Checkpoints, which other tests share, are made before.
    """
    for family in ("step3p5", "deepseek_v3"):
        checkpoint(family, "random")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@torch.no_grad()
def test_a_layer_of_a_chain_has_its_own_head_and_features(
    host: SimpleNamespace,
    checkpoint: Callable[..., Path],
    float64: None,
) -> None:
    """Step-3.5's second MTP layer, as SGLang's multi-layer EAGLE makes, feeds and chains it."""
    from mtpc.integrations.sglang.models.drafts import Step3p5MTP

    directory = checkpoint("step3p5", "random")
    reference = DraftOracle(Oracle("step3p5", directory))  # Its own: angles are float64 here.
    config = reference.oracle.model.config
    draft = Step3p5MTP(config=config, draft_model_idx=1)
    draft.load_weights(load_file(directory / "model.safetensors").items())
    target, own = reference.oracle.model, draft.lm_head.weight
    draft.set_embed_and_head(
        target.get_input_embeddings().weight, target.get_output_embeddings().weight
    )
    assert draft.lm_head.weight is own
    assert draft.draft.embedding.weight is target.get_input_embeddings().weight
    page, ids = reference.page, TOKENS[1:10]
    fed = page.run(0, ids, page.first(TOKENS[:9]))
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(hidden_states=fed),
        forward_mode=Mode("DRAFT_EXTEND_V2"),
        mm_input_embeds=None,
    )
    host.backend = fake_sglang.CausalBackend()
    found = draft(torch.tensor(ids), torch.arange(len(ids)), batch)
    expected = page.run(1, ids, fed)
    torch.testing.assert_close(found.hidden_states, expected, atol=1e-10, rtol=1e-10)
    logits = page.logits(1, expected)
    torch.testing.assert_close(found.next_token_logits, logits, atol=1e-10, rtol=1e-10)


BLOCK, PROMPT = 8, TOKENS[:6]
PROJECTION = re.compile(r"layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")


def in_blocks(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The MTP layer's linear layers and experts in FP8, with a scale for each block."""
    coded = dict(weights)
    for name, weight in weights.items():
        if name.startswith(prefix) and PROJECTION.search(name):
            blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            codes = (blocks / scale[:, None, :, None]).reshape(weight.shape)
            coded[name] = codes.to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = scale.float()
    return coded


class Chained:
    """A draft of DeepSeek-V3 as SGLang makes it of FP8 weights, its prompt's rows stored."""

    def __init__(self, host: SimpleNamespace, directory: Path):
        from mtpc.integrations.sglang.models.drafts import DeepseekV3ForCausalLMNextN

        reference = DraftOracle(Oracle("deepseek_v3", directory))
        target = reference.oracle.model
        config, self.host = target.config, host
        prefix = f"model.layers.{config.num_hidden_layers}."
        coded = in_blocks(load_file(directory / "model.safetensors"), prefix)
        self.draft: Any = DeepseekV3ForCausalLMNextN(config=config, quant_config=Fp8Config(BLOCK))
        self.draft.load_weights(coded.items())
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        self.draft.set_embed_and_head(*(end.weight for end in ends))
        for site in self.draft.draft.graph.sites:
            site.quant_method.process_weights_after_loading(site)
        rank, width = config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
        self.pool = MLATokenToKVPool(40, rank, width, torch.float64)
        host.backend = AiterBackend(self.pool)
        self.slots = torch.randperm(39, generator=torch.Generator().manual_seed(1))[:16] + 1
        features = reference.page.first(PROMPT)
        self.first = self.forward("EXTEND", 0, [*PROMPT[1:], TOKENS[6]], features)

    def forward(self, mode: str, start: int, ids: list[int], features: Tensor) -> Any:
        """The last row's (token, features) after rows from a position on."""
        end = start + len(ids)
        self.host.backend.slots = [self.slots[:end]]
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            spec_info=SimpleNamespace(hidden_states=features),
            out_cache_loc=self.slots[start:end],
            extend_lens=[len(ids)],
            extend_prefix_lens_cpu=[start],
            mm_input_embeds=None,
        )
        out = self.draft(torch.tensor(ids), torch.arange(start, end), batch)
        return int(out.next_token_logits[-1].argmax()), out.hidden_states[-1:]

    def stepped(self) -> list[int]:
        """SGLang's own loop: a forward for each draft."""
        drafts, (token, features) = [self.first[0]], self.first
        for step in range(STEPS - 1):
            token, features = self.forward("DECODE", len(PROMPT) + step, [token], features)
            drafts.append(token)
        return drafts

    def worker(self) -> Any:
        """SGLang's draft worker."""
        return SimpleNamespace(
            draft_runner=SimpleNamespace(model=self.draft, token_to_kv_pool=self.pool),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots.int()[None], size=1),
            speculative_num_steps=STEPS,
            parallel_layout=None,
            _topk1_parents_prealloc=torch.zeros(1, 2),
            _topk1_score_indices_prealloc=torch.zeros(1, 2),
        )


@torch.no_grad()
def test_a_quantised_draft_is_chained_as_one_graph(
    host: SimpleNamespace, algorithm: Any, checkpoint: Callable[..., Path], float64: None
) -> None:
    """Over SGLang's layers, whose codes no graph reads; the drafts are those of single forwards."""
    chained = Chained(host, checkpoint("deepseek_v3", "random"))
    rows = chained.pool.rows.clone()
    expected = chained.stepped()
    written, chained.pool.rows[:] = chained.pool.rows.clone(), rows
    worker = algorithm.factory(arguments())()
    worker.speculative_num_steps, worker.draft_worker = STEPS, chained.worker()
    worker.init_cuda_graphs()
    token, features = chained.first
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(
            topk_index=torch.tensor([[token]]), hidden_states=features, draft_probs=None
        ),
        batch_size=1,
        req_pool_indices=torch.tensor([0]),
        positions=torch.tensor([len(PROMPT)]),
    )
    _, _, drafts, _ = worker.draft_worker.cuda_graph_runner.execute(batch)
    assert drafts.tolist() == [expected]
    assert len(set(expected)) > 1
    torch.testing.assert_close(chained.pool.rows, written, equal_nan=True)
    kinds = {type(layer.module.inner).__name__ for layer in chained.draft.draft.hosted.values()}
    assert kinds == {"ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear", "FusedMoE"}


@torch.no_grad()
def test_a_head_that_ranks_share_is_gathered(host: SimpleNamespace) -> None:
    """Each rank has consecutive rows; the last ones are no tokens."""
    from mtpc.integrations.sglang.propose import GatheredHead

    weight, hidden = torch.randn(12, 5), torch.randn(3, 5)
    parts = [SimpleNamespace(weight=part) for part in weight.chunk(2)]
    whole = [hidden @ part.weight.T for part in parts]
    host.parallel.tp_group.all_gather = lambda part, dim: torch.cat(whole, dim)
    found = GatheredHead(parts[1], 10)(hidden)  # type: ignore[arg-type]
    torch.testing.assert_close(found, (hidden @ weight.T)[:, :10])
