"""Block drafters: drafts are the authors' code's, text is plain decoding, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import block_drafters, eagle, tiny
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.records import NEW, STOP, Records, wanted
from helpers.released import dflash
from helpers.released.dflash import DFlash
from helpers.released.eagle3 import PEagle
from helpers.reuse import Conversations, check_reuse
from helpers.sampling_oracle import FILTERS
from helpers.theorem import PROMPTS, check_drafts, check_theorem, poison
from torch import Tensor
from transformers import AutoConfig

import mtpc
from mtpc.errors import MtpcError
from mtpc.models.caches import PagedKV
from mtpc.models.dflash import DFlashConfig, DFlashLayer
from mtpc.models.drafter import Pairing
from mtpc.models.family import MTPWiring
from mtpc.models.load import find_family
from mtpc.models.seams import StepContext, register_seams
from mtpc.weights.paired_checkpoint import PairedCheckpoint

OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "dtype": "float64", "batch_buckets": (2,)}
ON_CPU: dict[str, Any] = {"backend": "cpu", "sampling": True, "batch_buckets": (1, 4)}
"""What users run, with small pages and few buckets."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def drafter(directory: Path, rename: dict[str, str] | None = None, **changes: Any) -> Path:
    """A random drafter in `directory`, with another config and other names of tensors."""
    config = {**block_drafters.CONFIG, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    inner = {**config, **config.get("transformer_layer_config", {})}
    tensors = block_drafters.new_dflash(inner, inner.get("target_hidden_size", 64))
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return eagle.save_head(tensors, config, directory)


def oracle_of(directory: Path, family: str = "llama") -> DraftOracle:
    """Drafts by the authors' code of the drafter in the directory `draft` of a target's."""
    plain = Oracle(family, directory)
    return DraftOracle(plain, DFlash(plain.model, directory))


@pytest.mark.parametrize(
    ("family", "spec_tokens", "changes"),
    [
        pytest.param("llama", 1, {}, marks=pytest.mark.slow),
        ("qwen3", 3, {"num_hidden_layers": 3, "attention_bias": None}),
        # Windows end at a row's own position; full attention is both ways.
        ("llama", 7, SLIDING),
        # By the authors' entry, all layers are causal within the block.
        pytest.param(
            *("llama", 3),
            {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 1], "causal": True}},
            marks=pytest.mark.slow,
        ),
        # A block of all rows may be longer than the authors'.
        pytest.param("qwen2", 15, {"block_size": 8}, marks=pytest.mark.slow),
        # DSpark: a block of K rows, and each draft depends on the one before it.
        ("llama", 3, block_drafters.SPARK),
        pytest.param("qwen3", 1, block_drafters.SPARK, marks=pytest.mark.slow),
        pytest.param("llama", 7, block_drafters.SPARK, marks=pytest.mark.slow),
        pytest.param("llama", 15, block_drafters.SPARK, marks=pytest.mark.slow),
        # DFlash2: convolutions within a block, and each draft is chosen among candidates.
        pytest.param("llama", 3, block_drafters.SECOND, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, block_drafters.SECOND, marks=pytest.mark.slow),
        pytest.param("llama", 7, block_drafters.SECOND, marks=pytest.mark.slow),
        pytest.param("llama", 15, block_drafters.SCALED, marks=pytest.mark.slow),
    ],
)
def test_drafts_equal_the_authors_code(
    family: str, spec_tokens: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Row by row after each step; text is transformers'."""
    tiny.make_checkpoint(family, tmp_path, mtp=False, num_hidden_layers=4)
    draft = drafter(tmp_path / "draft", **changes)
    spec = mtpc.compile(tmp_path, draft=draft, spec_tokens=spec_tokens, **OPTIONS)
    oracle = oracle_of(tmp_path, family)
    assert check_drafts(spec, oracle, [PROMPTS[3], PROMPTS[9]], 10) >= 6
    prompts = [PROMPTS[5], PROMPTS[12]]
    wanted = [oracle.oracle.generate(prompt, 12, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 12, ignore_eos=True) == wanted


def blocks_of(lens: list[int], rows: int, table: Tensor) -> StepContext:
    """Rows at the end of requests of these lengths, in pages of four."""
    starts = torch.arange(len(lens) + 1, dtype=torch.int32) * rows
    positions = torch.cat([torch.arange(n - rows, n) for n in lens])
    pages = table.repeat_interleave(rows, 0).gather(1, positions[:, None] // 4)[:, 0]
    zeros = torch.zeros(len(lens), dtype=torch.int64)
    metadata = (positions, pages * 4 + positions % 4, torch.tensor(lens).int(), starts)
    return StepContext.of((*metadata, table.int(), zeros, zeros.int()), {})


@pytest.mark.parametrize("says", ["SECOND", "SCALED"])
def test_rows_of_dflash2(says: str, tmp_path: Path) -> None:
    """Its layers over the blocks of two requests, and its choice: a page of plain code, in ms."""
    target = tiny.make_checkpoint("llama", tmp_path, mtp=False, num_hidden_layers=4)
    drafter(tmp_path / "draft", **getattr(block_drafters, says))
    oracle: Any = oracle_of(target).page
    config = AutoConfig.from_pretrained(target)
    paired = PairedCheckpoint(target, tmp_path / "draft")
    read = DFlashConfig.read(Pairing(find_family(["LlamaForCausalLM"]), paired, config))
    names = dict(embedding_norm="", hidden_norm="", projection="", final_norm="")
    layer: Any = DFlashLayer(MTPWiring(**names), read, 0, ()).double()
    renamed = {"layers.": "block.", "fc.": "projection.", "norm.": "final_norm."}
    stored = {
        next((name.replace(o, n, 1) for o, n in renamed.items() if name.startswith(o)), name): t
        for name, t in oracle.stored.items()
    }
    layer.load_state_dict(stored)
    register_seams()
    torch.manual_seed(4)
    table, lens, rows = torch.tensor([[1, 4, 2, 6], [5, 3, 7, 8]]), [14, 11], 4
    pool = {i: PagedKV(*torch.full((2, 9, 4, 2, 24), float("nan")).double()) for i in (0, 1)}
    found, wanted, states = [], [], [torch.randn(1, n - rows, 128).double() for n in lens]
    for each, length, pages in zip(states, lens, table, strict=True):
        context = blocks_of([length - rows], length - rows, pages[None])
        entered = layer.hidden_norm(layer.projection(each[0]))
        layer.keep(entered, replace(context, layers=pool))
    block = torch.randn(2, rows, 64).double()
    hidden = layer.run(block.flatten(0, 1), replace(blocks_of(lens, rows, table), layers=pool))
    before, logits = torch.tensor([3, 8]), torch.randn(2, 96).double()
    choose, hidden = layer.bias, hidden.unflatten(0, (2, rows))
    found = choose(logits, hidden[:, 1], before)
    scale = read.embedding_scale
    for request, each in enumerate(states):
        wanted = dflash.run(oracle.stored, oracle.inner, each, scale * block[request : request + 1])
        torch.testing.assert_close(layer.final_norm(hidden[request]), wanted[0], rtol=0, atol=1e-9)
        chosen = oracle.selected(logits[request], wanted[0, 1], int(before[request]))
        torch.testing.assert_close(found[request], chosen, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("spec_tokens", "layers"),
    [
        (3, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(7, 4, marks=pytest.mark.slow),
        pytest.param(15, 1, marks=pytest.mark.slow),
    ],
)
def test_drafts_of_p_eagle(spec_tokens: int, layers: int, tmp_path: Path) -> None:
    """The first draft of a pass over all rows, the others of one over masks; then text."""
    tiny.make_checkpoint("llama", tmp_path, mtp=False, num_hidden_layers=4)
    draft = block_drafters.save_peagle(tmp_path / "draft", layers)
    spec = mtpc.compile(tmp_path, draft=draft, spec_tokens=spec_tokens, **OPTIONS)
    plain = Oracle("llama", tmp_path)
    oracle = DraftOracle(plain, PEagle(plain.model, tmp_path))
    assert check_drafts(spec, oracle, [PROMPTS[3], PROMPTS[9]], 10) >= 6
    wanted = [plain.generate(prompt, 12, stop=False) for prompt in PROMPTS[5:7]]
    assert spec.generate(PROMPTS[5:7], 12, ignore_eos=True) == wanted


@pytest.mark.slow
def test_p_eagle_on_the_cpu(trained: Path, tmp_path: Path, oracle: Callable[..., Oracle]) -> None:
    """From files: an embedding of its own, of the shape of the target's, is read beside it."""
    draft = block_drafters.save_peagle(tmp_path / "draft", layers=1)
    options = {**TINY, "backend": "cpu", "dtype": "float64", "batch_buckets": (2,)}
    spec = mtpc.compile(trained, draft=draft, spec_tokens=3, **options)
    wanted = [oracle("llama").generate(prompt, 12, stop=False) for prompt in PROMPTS[5:7]]
    assert spec.generate(PROMPTS[5:7], 12, ignore_eos=True) == wanted
    assert not spec.stats.fallbacks


def planted(spec: Any, text: list[int], prompt: list[int], oracle: DraftOracle) -> int:
    """Decode with right drafts in place of the drafter's; returns how many drafts were compared."""
    poison(spec)
    found, compared, rows = list(prompt), 0, spec.program.shared["state.token_ids"]
    spec.engine.add(prompt, len(text))
    while spec.engine.has_work:
        found += [token for output in spec.engine.step() for token in output.token_ids]
        for request in spec.engine.running:
            if not request.is_prefilled:
                continue
            drafts = rows[request.slot, 1:].tolist()
            assert drafts == oracle.drafts(found, len(drafts))
            compared += 1
            right = text[len(found) - len(prompt) :][: len(drafts)]
            rows[request.slot, 1 : 1 + len(right)] = torch.tensor(right)
    assert found == prompt + text
    return compared


@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_a_block_has_pages_after_all_drafts_are_accepted(
    length: int, trained: Path, spec_in_full: Any
) -> None:
    """It ends K rows behind K + 1 new tokens, at each place of a page of four."""
    oracle, prompt = oracle_of(trained), PROMPTS[12][:length]
    text = oracle.oracle.generate(prompt, 17, stop=False)
    before = spec_in_full.stats.accepted[-1]
    assert planted(spec_in_full, text, prompt, oracle) >= 4
    assert spec_in_full.stats.accepted[-1] > before


@pytest.fixture(scope="module")
def trained(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained target, with a drafter in `draft` whose drafts are accepted in part."""
    return block_drafters.beside(checkpoint("llama"), tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="module")
def spec_in_full(trained: Path) -> Any:
    return mtpc.compile(trained, draft=trained / "draft", spec_tokens=3, **OPTIONS)


@pytest.fixture(scope="module")
def spec_on_cpu(trained: Path) -> Any:
    """What users run, but for float64."""
    options = {**TINY, "dtype": "float64", **ON_CPU}
    return mtpc.compile(trained, draft=trained / "draft", spec_tokens=3, **options)


def test_the_text_is_that_of_plain_decoding(
    spec_on_cpu: Any, oracle: Callable[..., Oracle]
) -> None:
    """Random requests in company, from poisoned memory; drafts are accepted in part."""
    check_theorem(spec_on_cpu, oracle("llama"), max_examples=6).check_all_happened()
    assert not spec_on_cpu.stats.fallbacks


def test_drafts_on_the_cpu_are_the_authors(spec_on_cpu: Any, trained: Path) -> None:
    assert check_drafts(spec_on_cpu, oracle_of(trained), PROMPTS[2:8], 12) > 20


def test_reuse_changes_no_text_and_no_draft(spec_on_cpu: Any) -> None:
    """Turns, forks, evictions, preemption and aborts: pages hold the context's keys alone."""
    check_reuse(Conversations(spec_on_cpu), 4)


def test_sampled_text_is_the_same(spec_on_cpu: Any, sampling_oracle: Callable[..., Any]) -> None:
    """Every parameter; drafts are sampled with the target's random numbers."""
    plain = sampling_oracle("llama")
    poison(spec_on_cpu)
    prompts = [PROMPTS[2 + i % 4] for i in range(len(FILTERS))]
    accepted = sum(spec_on_cpu.stats.accepted)
    found = spec_on_cpu.generate(prompts, 14, sampling=list(FILTERS.values()))
    pairs = zip(prompts, FILTERS.values(), strict=True)
    assert found == [plain.generate(prompt, 14, params) for prompt, params in pairs]
    assert sum(spec_on_cpu.stats.accepted) > accepted


def test_text_under_a_grammar(spec_on_cpu: Any, sampling_oracle: Callable[..., Any]) -> None:
    """Each draft is one that the grammar allows after the last accepted token."""
    plain, params = sampling_oracle("llama"), FILTERS["temperature"]
    poison(spec_on_cpu)
    engine, prompts = spec_on_cpu.engine, PROMPTS[3:8]
    ids = [engine.add(prompt, NEW, (STOP,), params, grammar=Records()) for prompt in prompts]
    texts: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    assert list(texts.values()) == [wanted(plain, prompt, params) for prompt in prompts]


@pytest.mark.slow
def test_bfloat16_on_the_cpu_is_plain_decoding(trained: Path, cpu_cache: Path) -> None:
    """Compiled with default options: the text of K = 0, and a certificate for every step."""
    fixed = dict(backend="cpu", dtype="bfloat16", cache_dir=cpu_cache, batch_buckets=(2,))
    plain = mtpc.compile(trained, spec_tokens=0, **TINY, **fixed)
    spec = mtpc.compile(trained, draft=trained / "draft", spec_tokens=3, **TINY, **fixed)
    assert spec.generate(PROMPTS, 20) == plain.generate(PROMPTS, 20)
    assert 0 < spec.stats.acceptance_rate < 1
    assert not spec.stats.fallbacks


# ---------------------------------------------------------------------- layouts and refusals


def test_names_of_speculators(tmp_path: Path) -> None:
    """Its config, ids of the layers whose inputs are captured, and a part of the vocabulary."""
    target = tiny.make_checkpoint("llama", tmp_path, mtp=False, num_hidden_layers=4)
    inner = {k: v for k, v in block_drafters.CONFIG.items() if k not in ("dflash_config",)}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": 80,
        "block_size": 8,
        "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [1, 3],
    }
    generator = torch.Generator().manual_seed(2)
    ids = torch.randperm(96, generator=generator)[:80].sort().values
    tensors = {**block_drafters.new_dflash(inner), **eagle.token_map(ids, 96)}
    tensors["lm_head.weight"] = torch.randn(80, 64, generator=generator)
    draft = eagle.save_head(tensors, config, tmp_path / "draft")
    spec = mtpc.compile(target, draft=draft, spec_tokens=3, **OPTIONS)
    assert check_drafts(spec, oracle_of(target), [PROMPTS[3], PROMPTS[9]], 10) >= 6


def refused(checkpoint: Path, draft: Path, **options: Any) -> str:
    with pytest.raises(MtpcError) as raised:
        mtpc.compile(checkpoint, draft=draft, **{**OPTIONS, "spec_tokens": 2, **options})
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=90), "vocab_size is 90, and the target's is 96; use a block drafter"),
        (dict(target_hidden_size=48), "hidden_size is 48, and the target's is 64"),
        (dict(hidden_size=48), "hidden_size is 48, and the target's is 64"),
        (dict(model_type="llama"), "with model_type='llama'; expected layers as Qwen3"),
        (dict(layer_types=["sliding_attention"] * 2), "sliding_attention without sliding_window"),
        (
            dict(architectures=["DFlash2DraftModel"]),
            "conv_kernel_size is None; expected a number: set it in dflash_config",
        ),
        (
            dict(dflash_config={"mask_token_id": 96, "target_layer_ids": [0, 2]}),
            "mask_token_id is 96; expected one of the 96 token ids",
        ),
        (
            dict(dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 9]}),
            r"layers to capture are \[1, 10\]; expected different ones of the target's",
        ),
        (
            dict(dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 0]}),
            r"layers to capture are \[2, 1\]; expected ascending ones",
        ),
        (dict(dflash_config={"mask_token_id": 1}), r"layers to capture are \[\]"),
        (dict(num_hidden_layers=3), "missing block.2"),
        (dict(markov_head_type="rnn"), "with markov_head_type='rnn'"),
        (dict(rope_is_neox_style=False), "with rope_is_neox_style=False"),
        (
            dict(dflash_config={**block_drafters.CONFIG["dflash_config"], "use_swa": True}),
            "with use_swa=True",
        ),
    ],
)
def test_a_drafter_that_does_not_fit(
    changes: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = block_drafters.new_dflash(
        {**block_drafters.CONFIG, **changes, "num_hidden_layers": 2}
    )
    draft = eagle.save_head(tensors, {**block_drafters.CONFIG, **changes}, tmp_path)
    found = refused(checkpoint("llama"), draft)
    assert re.search(message, found), found
    assert str(tmp_path) in found
