"""DeepSeek-V4's draft at SGLang's seams, over a fake of them (`helpers/fake_sglang.py`).

SGLang's worker is played: a pass over a prompt, one over the verified rows of each iteration, and
single rows between, all over one pool by slots. So drafts are those of mtpc's own engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fake_sglang
from helpers.fake_sglang import Mode
from helpers.fake_sglang_layers import DeepseekV4Backend, Fp8Config
from helpers.oracles import DraftOracle, Oracle
from helpers.plain_host import TOKENS
from helpers.theorem import PROMPTS, poison
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config

from mtpc.errors import CheckpointError, UnsupportedModelError

K, NEW = 3, 18


@pytest.fixture
def host() -> Iterator[SimpleNamespace]:
    with fake_sglang.installed() as found:
        found.arguments.speculative_algorithm = "NEXTN"
        yield found


@pytest.fixture(autouse=True)
def float64(checkpoint: Callable[..., Path]) -> Iterator[None]:
    """SGLang's loader makes models under the checkpoint's dtype (model_loader/loader.py:838).

    Checkpoints, which other tests share, are made before.
    """
    for kind in ("trained", "random"):
        checkpoint("deepseek_v4", kind)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def oracle(checkpoint: Callable[..., Path]) -> Callable[..., Oracle]:
    """As conftest's, but of this test alone: its angles are float64."""

    def get(family: str, kind: str = "trained") -> Oracle:
        return Oracle(family, checkpoint(family, kind))

    return get


def weights_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def made(source: Any, weights: dict[str, Tensor], target: Any = None, quantised: Any = None) -> Any:
    """The draft as SGLang makes and loads it."""
    from mtpc.integrations.sglang.models.drafts import DeepseekV4ForCausalLMNextN

    draft = DeepseekV4ForCausalLMNextN(config=source, quant_config=quantised)
    draft.load_weights(weights.items())
    if target is not None:
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        draft.set_embed_and_head(*(end.weight for end in ends))
    return draft


@dataclass
class Served:
    """One request of SGLang's: its text, its slots by position, and what the target computes."""

    page: Any
    text: list[int]
    slots: Tensor
    drafts: list[int] = field(default_factory=list)

    def features(self, start: int) -> Tensor:
        """What the target gives in the rows from `start` on of text and drafts, [.., streams * H];
        the last text token's row, and the drafts' rows, are those of a verification."""
        return self.page.first([*self.text, *self.drafts])[start:].flatten(1)


@dataclass
class Worker:
    """What SGLang's EAGLE worker asks of a draft model (speculative/eagle_worker_v2.py)."""

    draft: Any
    backend: DeepseekV4Backend

    def forward(
        self, mode: str, requests: list[Served], starts: list[int], ids: list[list[int]],
        features: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Rows of each request from position `starts`: logits and hidden states by request."""
        counts = [len(tokens) for tokens in ids]
        spans = [torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        ends = [a + n for a, n in zip(starts, counts, strict=True)]
        self.backend.slots = [r.slots[:end] for r, end in zip(requests, ends, strict=True)]
        where = [r.slots[span] for r, span in zip(requests, spans, strict=True)]
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            spec_info=SimpleNamespace(hidden_states=torch.cat(features)),
            out_cache_loc=torch.cat(where),
            extend_lens=counts,
            mm_input_embeds=None,
        )
        out = self.draft(
            torch.tensor([token for each in ids for token in each]), torch.cat(spans), batch
        )
        return out.next_token_logits.split(counts), out.hidden_states.split(counts)

    def propose(self, requests: list[Served], rows: list[tuple[Tensor, Tensor]]) -> None:
        """K drafts of each request, from the logits and hidden states of its last certain row."""
        for request, (logits, _) in zip(requests, rows, strict=True):
            request.drafts = [int(logits.argmax())]
        fed = [hidden[None] for _, hidden in rows]
        for step in range(K - 1):
            starts = [len(request.text) - 1 + step for request in requests]
            ids = [[request.drafts[-1]] for request in requests]
            found, fed = self.forward("DECODE", requests, starts, ids, fed)
            for request, logits in zip(requests, found, strict=True):
                request.drafts.append(int(logits[0].argmax()))


def engines_drafts(spec: Any, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """mtpc's own drafts, by the text that they continue."""
    poison(spec)
    texts = {spec.engine.add(prompt, NEW): list(prompt) for prompt in prompts}
    found = {}
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in [r for r in spec.engine.running if r.is_prefilled]:
            row = spec.program.shared["state.token_ids"][request.slot].tolist()
            found[tuple(texts[request.request_id])] = row[1 : 1 + K]
    return found


@torch.no_grad()
def test_drafts_are_those_of_mtpcs_engine(
    host: SimpleNamespace,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    compiled: Callable[..., Any],
) -> None:
    """Two requests that are longer than the window, at all counts of accepted drafts, in float64.
    Rejected rows stay in the pool until later rows stand there."""
    plain = oracle("deepseek_v4")
    page, weights = DraftOracle(plain).page, weights_of(checkpoint("deepseek_v4"))
    prompts = [PROMPTS[7], PROMPTS[10]]
    expected = engines_drafts(compiled("deepseek_v4", K), prompts)
    pool = torch.full((80, plain.model.config.head_dim), float("nan"))
    host.backend = DeepseekV4Backend(pool)
    worker = Worker(made(plain.model.config, weights, plain.model), host.backend)
    free = torch.randperm(80, generator=torch.Generator().manual_seed(2)).split(40)
    texts = [[*prompt, *plain.generate(prompt, NEW + K + 1, stop=False)] for prompt in prompts]
    requests = [
        Served(page, text[: len(prompt) + 1], slots)
        for text, prompt, slots in zip(texts, prompts, free, strict=True)
    ]
    # The pass over the prompts, whose ids are shifted by one row.
    fed = [request.features(0)[:-1] for request in requests]
    ids = [request.text[1:] for request in requests]
    logits, hidden = worker.forward("EXTEND", requests, [0, 0], ids, fed)
    worker.propose(requests, [(a[-1], b[-1]) for a, b in zip(logits, hidden, strict=True)])
    compared, accepted = 0, set()
    while all(len(r.text) < len(p) + NEW for r, p in zip(requests, prompts, strict=True)):
        starts, fed, ids, last = [], [], [], []
        for request, truth in zip(requests, texts, strict=True):
            assert request.drafts == expected[tuple(request.text)]
            compared += 1
            start = len(request.text) - 1
            right = truth[start + 1 : start + 1 + K]
            count = next((i for i in range(K) if request.drafts[i] != right[i]), K)
            starts.append(start)
            fed.append(request.features(start))
            # Rows behind the bonus token hold what the target chose there; any token does.
            ids.append([*truth[start + 1 : start + 2 + count], *[7] * (K - count)])
            last.append(count)
            accepted.add(count)
            request.text += truth[start + 1 : start + 2 + count]
        logits, hidden = worker.forward("DRAFT_EXTEND_V2", requests, starts, ids, fed)
        rows = [(a[i], b[i]) for a, b, i in zip(logits, hidden, last, strict=True)]
        worker.propose(requests, rows)
    assert compared >= 8
    assert len(accepted) > 1
    assert worker.draft.run.forward_batch is None


@torch.no_grad()
def test_rows_are_the_oracles(
    host: SimpleNamespace, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Logits and streams of a prompt, also by ROCm's backend; and of an idle batch, none."""
    plain = oracle("deepseek_v4", "random")
    page, ids = DraftOracle(plain).page, TOKENS[1:12]
    host.platform.is_hip = True
    host.backend = DeepseekV4Backend(torch.full((20, plain.model.config.head_dim), float("nan")))
    weights = weights_of(checkpoint("deepseek_v4", "random"))
    draft = made(plain.model.config, weights, plain.model)
    fed = page.first(TOKENS[:11])
    request = Served(page, TOKENS[:12], torch.randperm(20))
    found = Worker(draft, host.backend).forward("EXTEND", [request], [0], [ids], [fed.flatten(1)])
    streams = page.run(0, ids, fed)
    # transformers' eager attention has its softmax in float32, and SGLang's experts their weights.
    torch.testing.assert_close(found[1][0], streams.flatten(1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found[0][0], page.logits(0, streams), atol=2e-5, rtol=2e-5)
    idle = SimpleNamespace(
        forward_mode=Mode("IDLE"), spec_info=SimpleNamespace(hidden_states=fed[:0].flatten(1))
    )
    out = draft(torch.tensor([], dtype=torch.int64), torch.tensor([]), idle)
    assert out.next_token_logits.shape == (0, 96)
    assert out.hidden_states.shape == (0, streams.flatten(1).shape[1])


def test_sglangs_config_is_read_as_the_checkpoints(
    host: SimpleNamespace, checkpoint: Callable[..., Path]
) -> None:
    """SGLang reads DeepSeek-V4's entries by DeepSeek-V3's class (utils/hf_transformers/common.py:
    204), which adds an `intermediate_size` of 18432: in V4's class another name of the experts'."""
    directory = checkpoint("deepseek_v4", "random")

    class Alias(DeepseekV3Config):
        model_type = "deepseek_v4"

    entries = json.loads((directory / "config.json").read_text())
    given = Alias(**{k: v for k, v in entries.items() if k != "model_type"})
    assert given.to_dict()["intermediate_size"] == 18432
    draft = made(given, weights_of(directory))
    config = draft.draft.config
    assert config.moe_intermediate_size == entries["moe_intermediate_size"] == 32
    assert (config.sliding_window, config.head_dim) == (6, 16)


def test_what_sglangs_backend_does_not_compute_is_refused(
    host: SimpleNamespace, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    weights = weights_of(checkpoint("deepseek_v4", "random"))
    config = oracle("deepseek_v4", "random").model.config
    host.kernel.dsv4_attn_backend = "trtllm"
    with pytest.raises(UnsupportedModelError, match="V4 with --dsv4-attn-backend trtllm; expected"):
        made(config, weights)
    host.kernel.dsv4_attn_backend, host.unified_kv_fp8 = "auto", True
    with pytest.raises(UnsupportedModelError, match="with SGLANG_DSV4_UNIFIED_KV_FP8=1; expected"):
        made(config, weights)
    host.unified_kv_fp8, host.arguments.speculative_algorithm = False, "MTPC"
    with pytest.raises(UnsupportedModelError, match="found MTPC over DeepSeek-V4's pool"):
        made(config, weights)


BLOCK = 8
LINEARS = (".wq_", ".wkv.", ".wo_", "_proj.", ".w1.", ".w2.", ".w3.")


def in_blocks(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The MTP layer's linear layers in FP8, as they are released: codes "X.weight", and exponents
    "X.scale", one for each block; and the weights that these stand for."""
    coded, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        if not (name.startswith("mtp.") and any(part in name for part in LINEARS)):
            continue
        rows, columns = weight.shape
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        largest = blocks.abs().amax((1, 3))
        scale = (largest / 400).log2().ceil().exp2()
        whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        codes = (weight / whole).to(torch.float8_e4m3fn)
        coded[name], plain[name] = codes, codes.to(weight.dtype) * whole
        coded[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
    return coded, plain


@torch.no_grad()
def test_fp8_blocks_as_released(
    host: SimpleNamespace, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """SGLang's layers take codes and scales, and the grouped projection, which the draft computes,
    is what its codes stand for."""
    model = oracle("deepseek_v4", "random").model
    coded, plain = in_blocks(weights_of(checkpoint("deepseek_v4", "random")))
    assert sum(t.dtype == torch.float8_e4m3fn for t in coded.values()) == 22
    host.backend = DeepseekV4Backend(torch.full((20, model.config.head_dim), float("nan")))
    request, ids = Served(None, TOKENS[:6], torch.arange(20)), TOKENS[1:6]
    fed = [torch.randn(5, 2 * 64, generator=torch.Generator().manual_seed(3))]
    found = [
        Worker(draft, host.backend).forward("EXTEND", [request], [0], [ids], fed)[1][0]
        for draft in (
            made(model.config, coded, model, Fp8Config(BLOCK)),
            made(model.config, plain, model),
        )
    ]
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)
    lacking = {n: t for n, t in coded.items() if n != "mtp.0.attn.wo_a.scale"}
    with pytest.raises(CheckpointError, match=r"8 bits: attn\.wo_a\.weight"):
        made(model.config, lacking, model, Fp8Config(BLOCK))
