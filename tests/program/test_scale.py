"""The paper model of several devices, against figures that others have published, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks import scale as page
from mtpc.models.load import load
from mtpc.scale import DEVICES, RankModel, Sum


@cache
def models(name: str, ranks: int, experts: bool = False) -> list[RankModel]:
    """A rank of a released model, for K = 0, 1, 2, 3."""
    return [*page.rank_models(name, ranks, experts)]


def active_parameters(model: RankModel, part: str) -> float:
    """Elements of a part that one token is computed with, all of its embedding among them."""
    return sum(
        w.numel * (model._active / w.total if w.role == "experts" else 1)
        for w in model._used(part).values()
    )


def test_deepseek_v3_is_what_its_authors_say() -> None:
    """README_WEIGHTS.md of DeepSeek-V3 and arXiv:2412.19437: 671B in all, 37B a token; MTP module:
    11.5B of its own, 2.4B a token with the shared embedding and head. arXiv:2505.09343, table 1:
    70.272 KB of KV a token. 61 layers of 512 + 64 numbers of two bytes."""
    plain, drafting = models("DeepSeek-V3", 1)[:2]
    own = {part: sum(w.numel for w in drafting.weights.values() if w.part == part)
           for part in ("target", "mtp.0")}  # fmt: skip
    assert own["target"] == pytest.approx(671e9, rel=0.001)
    assert own["mtp.0"] == pytest.approx(11.5e9, rel=0.015)
    assert active_parameters(drafting, "target") == pytest.approx(37e9, rel=0.02)
    assert active_parameters(drafting, "mtp.0") == pytest.approx(2.4e9, rel=0.06)
    assert plain.token_bytes == 70_272 == 61 * 576 * 2
    assert drafting.token_bytes == 62 * 576 * 2
    # The released files are 688.6 GB with the MTP module's copies of embedding and head.
    copies = 2 * 2 * 129_280 * 7168
    assert drafting.weight_bytes + copies == pytest.approx(688.6e9, rel=0.005)


def test_qwen3_next_is_what_its_authors_say() -> None:
    """80B in all, 3B a token; 12 of 48 layers with two heads of 256 in the KV cache."""
    plain = models("Qwen3-Next-80B-A3B", 1)[0]
    total = sum(w.numel for w in plain.weights.values())
    assert total == pytest.approx(80e9, rel=0.01)
    embedding = 151_936 * 2048
    assert active_parameters(plain, "target") - 2 * embedding == pytest.approx(3e9, rel=0.15)
    assert plain.token_bytes == 12 * 2 * 2 * 256 * 2
    recurrent = 36 * 32 * 128 * 128 * 4
    assert plain.request_bytes == pytest.approx(recurrent, rel=0.05)


@pytest.mark.parametrize(
    ("name", "ranks", "experts"),
    [
        ("DeepSeek-V3", 8, False),
        ("DeepSeek-V3", 8, True),
        ("Qwen3-Next-80B-A3B", 2, False),
        ("Qwen3-Next-80B-A3B", 2, True),
    ],
)
def test_ranks_hold_the_model_together(name: str, ranks: int, experts: bool) -> None:
    """n ranks hold what is cut once, and n times what is not; KV heads likewise."""
    for one, rank in zip(models(name, 1), models(name, ranks, experts), strict=True):
        for key, weight in rank.weights.items():
            times = 1 if weight.kind == "replicated" else ranks
            assert weight.nbytes * times == one.weights[key].nbytes, key
        cut = ranks if name.startswith("Qwen") else 1  # Latents are on every rank.
        assert rank.token_bytes * cut == one.token_bytes


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        ("mimo", {"embed_tokens"}),
        ("qwen4_exp", {"embed_tokens", "ngram_embedding"}),
        ("gemma4", {"embed_tokens_per_layer"}),  # The other embedding is the head, too.
    ],
)
def test_tables_are_read_by_rows(
    family: str, tables: set[str], checkpoint: Callable[..., Path]
) -> None:
    loaded = load(checkpoint(family, "random"), None, False, headers_only=True)
    found = {n.split(".")[-2] for n, w in loaded.weights().items() if id(w) in loaded.tables}
    assert found == tables


def test_the_terms_of_a_step() -> None:
    """One device and K = 0: dense weights once, 8 of 256 experts, a row of the embedding."""
    model, device = models("DeepSeek-V3", 1)[0], DEVICES["h200"]
    sizes = {"experts": 0, "dense": 0, "rows": 0}
    for weight in model.weights.values():
        sizes[weight.role] += weight.nbytes
    time = model.step_time(device, 1, 1e-5)
    read = sizes["dense"] + sizes["experts"] * 8 / 256 + sizes["rows"] / 129_280
    assert time.weights == pytest.approx(read / 4.8e12)
    cached = 70_272 * page.MAX_LEN + model.request_bytes
    assert time.caches == pytest.approx(cached / 4.8e12)
    assert (time.transfer, time.latency, time.collectives) == (0, 0, 0)
    both = model.step_time(device, 2, 1e-5)
    experts = sizes["experts"] * (1 - (31 / 32) ** 2)
    assert both.weights * 4.8e12 == pytest.approx(
        sizes["dense"] + experts + sizes["rows"] * 2 / 129_280
    )


def test_collectives_of_a_step() -> None:
    """The plan sums shared experts, dense layers' and experts' results, and the embedding's."""
    plain, drafting = models("DeepSeek-V3", 8)[:2]
    device = DEVICES["h200"]
    assert plain.step_time(device, 1, 1e-5).collectives == 1 + 3 + 58 * 2 + 1
    assert drafting.step_time(device, 1, 1e-5).collectives == 121 + 1 + 2 + 1
    sent = plain.step_time(device, 4, 1e-5).sent
    reduced, chosen = 4 * 120 * 7168 * 2 * 2 * 7 / 8, 4 * 12 * 8 * 7 / 8
    assert sent == pytest.approx(reduced + chosen)
    assert Sum("target", "all_gather", 100).sent(3, 4) == 225


def test_whole_experts_cost_the_same_on_average() -> None:
    """As the page says: what differs is the busiest device, which the formula does not know."""
    for cut, whole in zip(models("DeepSeek-V3", 8), models("DeepSeek-V3", 8, True), strict=True):
        assert cut.weight_bytes == whole.weight_bytes
        for batch in page.BATCHES:
            cost = cut.step_time(DEVICES["h200"], batch, 1e-5)
            assert cost == whole.step_time(DEVICES["h200"], batch, 1e-5)


def test_what_fits_fits() -> None:
    """One request more does not; a device without room for the weights holds none."""
    model, memory = models("DeepSeek-V3", 8)[3], DEVICES["h200"].memory
    each = (page.MAX_LEN + 2 * 3 + 15) // 16 * 16 * model.token_bytes + model.request_bytes
    count = model.largest_batch(memory)
    assert count * each <= model.free(memory) < (count + 1) * each
    assert model.largest_context(memory) == 163_840
    assert model.largest_batch(80 * 10**9) == model.largest_context(80 * 10**9) == 0
    small = models("DeepSeek-V3", 8)[0]
    edge = memory - small.free(memory) + 1000 * int(small.token_bytes) + small.request_bytes
    assert small.largest_context(edge) == 1000


def test_the_page_says_what_the_formula_says() -> None:
    """benchmarks/results/paper/scale.json, of which docs/scale.md shows rows."""
    from benchmarks.render import RESULTS, load

    record, _ = load(RESULTS / "paper" / "scale.json")
    assert record["rows"] == [*page.rows()], "run python -m benchmarks.scale --out"
