"""Calibration: how much errors of weights cost, and which matrices get more bits for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from helpers.tiny import make_checkpoint
from torch import Tensor, nn

from mtpc.cli.main import main
from mtpc.errors import CheckpointError
from mtpc.models.calibrate import WINDOW, _drawn_gradient, _Layer, sensitivities
from mtpc.models.load import family_of, read_target
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.gguf.file import GgufFile
from mtpc.weights.gguf.write import names_of
from mtpc.weights.mixture import choose_schemes, expected_losses
from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import Sensitivity, moments_width
from mtpc.weights.write_quantised import quantise_checkpoint

FILES = Path(__file__).parent / "gguf"
BITS = {"iq4_nl": 4.5, "q5_0": 5.5, "q8_0": 8.5}


def _model(checkpoint: Checkpoint) -> Any:
    return read_target(checkpoint, family_of(checkpoint), "bfloat16")


def test_a_loss_is_that_of_tokens_that_the_model_draws() -> None:
    """As often as it gives them; the gradient is that of PyTorch's cross entropy."""
    torch.manual_seed(0)
    one = torch.randn(9)
    logits = one.repeat(20000, 1)
    found = _drawn_gradient(logits, torch.Generator().manual_seed(0))
    probabilities = one.softmax(0)
    is_drawn = found < probabilities - 0.5
    assert is_drawn.sum(1).eq(1).all()
    torch.testing.assert_close(is_drawn.float().mean(0), probabilities, atol=0.015, rtol=0)
    logits = logits[:50].requires_grad_()
    nn.functional.cross_entropy(logits, is_drawn[:50].long().argmax(1), reduction="sum").backward()
    torch.testing.assert_close(found[:50], logits.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_sensitivities_are_those_of_the_layers(tied: bool, tmp_path: Path) -> None:
    """Inputs and gradients of each layer from a run of its own; a tied embedding has the head's."""
    checkpoint = Checkpoint(make_checkpoint("mimo", tmp_path / "plain", tie_word_embeddings=tied))
    ids = torch.randint(0, 64, (2 * WINDOW + 7,))
    found = sensitivities(checkpoint, ids)
    model, draws = _model(checkpoint), torch.Generator().manual_seed(0)
    seen = dict[str, list[tuple[Tensor, Any]]]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):

            def keep(_: Any, given: Any, output: Any, at: str = f"{name}.weight") -> None:
                output.retain_grad()
                seen.setdefault(at, []).append((given[0][0].detach(), output))

            module.register_forward_hook(keep)
    for window in ids[: 2 * WINDOW].view(2, -1):
        logits = model(window[None]).logits[0]
        logits.backward(_drawn_gradient(logits.detach(), draws))
    assert len(seen) > 7
    table = seen.pop("model.embed_tokens.weight")
    for name, pairs in seen.items():
        inputs = torch.cat([given for given, _ in pairs]).float()
        squares = torch.cat([output.grad[0] for _, output in pairs]).float().square()
        weights = squares.sum(1)
        together = sum(
            (output.grad[0].float().T @ given.float()).square().sum() for given, output in pairs
        )
        apart = (weights * inputs.square().sum(1)).sum()
        moments = (inputs.T * weights) @ inputs / weights.sum()
        torch.testing.assert_close(found[name].moments[0], moments, rtol=0.02, atol=3e-3)
        scale = float(weights.mean() * together / apart)
        assert found[name].scale == pytest.approx(scale, rel=0.05)
    embedding = found["model.embed_tokens.weight"]
    assert found.keys() == {*seen, "model.embed_tokens.weight"}
    if tied:
        assert embedding is found["lm_head.weight"]
        return
    places = torch.cat([output.grad[0] for _, output in table]).float().square().mean(0)
    torch.testing.assert_close(embedding.moments.flatten(), places)
    assert embedding.scale == 1


def test_inputs_that_are_written_over_are_refused() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    _Layer("mlp.up_proj", layer)
    x = torch.randn(1, 5, 8, requires_grad=True) * 1.0
    y = layer(x)
    with torch.no_grad():
        x *= 2
    with pytest.raises(CheckpointError, match=r"writes over the inputs of mlp\.up_proj; quantise"):
        y.sum().backward()


@pytest.mark.parametrize("scheme", BITS)
def test_an_expected_loss_is_what_rounding_costs(scheme: str) -> None:
    """Within a sixth, for a matrix whose inputs depend on each other."""
    torch.manual_seed(0)
    mixing = torch.eye(128) + 0.3 * torch.randn(128, 128)
    inputs = torch.randn(6000, 128) @ mixing * (torch.rand(128) + 0.1)
    weight = torch.randn(96, 128)
    width = moments_width(128)
    blocks = inputs[:4096].unflatten(1, (-1, width)).permute(1, 2, 0)
    known = Sensitivity(blocks @ blocks.transpose(1, 2) / 4096, 3.0)
    expected = expected_losses(weight, [scheme], known)[scheme]
    spec = SCHEMES[scheme].spec(128, weight.dtype)
    assert spec is not None
    change = quantise(weight, spec, known.moments).dequantise() - weight
    measured = 3.0 / 2 * float((inputs[4096:] @ change.T).square().mean())
    assert expected == pytest.approx(measured, rel=1 / 6)


def test_losses_are_in_nats(tmp_path: Path) -> None:
    """The KL divergence that rounding one matrix costs transformers' model is what was expected:
    most are near it, of 2,048 tokens and to second order."""
    checkpoint = Checkpoint(make_checkpoint("mimo", tmp_path / "plain"))
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (4 * WINDOW,))
    known, model = sensitivities(checkpoint, ids), _model(checkpoint).float()
    windows, ratios = ids.view(4, -1), []
    with torch.no_grad():
        plain = model(windows).logits.log_softmax(-1)
        for name, weight in model.named_parameters():
            if name not in known or weight.shape[1] % 32:
                continue
            before = weight.clone()
            spec = SCHEMES["iq4_nl"].spec(weight.shape[1], weight.dtype)
            assert spec is not None
            weight.copy_(quantise(before, spec, known[name].moments).dequantise())
            now = model(windows).logits.log_softmax(-1)
            weight.copy_(before)
            cost = float((plain.exp() * (plain - now)).sum(-1).mean())
            expected = expected_losses(before, ["iq4_nl"], known[name])["iq4_nl"]
            ratios.append(expected / cost)
    assert len(ratios) > 7
    assert 0.8 < median(ratios) < 1.25
    assert min(ratios) > 0.5
    assert max(ratios) < 4


def test_bits_go_where_they_gain_most() -> None:
    """The budget is kept, and no choice within it, were it of parts of matrices, loses much less:
    by Lagrange's bound, the least of loss + price * bits is less than what any choice has."""
    draw = random.Random(0)
    for _ in range(20):
        sizes = {str(n): draw.randint(10, 30) for n in range(60)}
        first = {name: draw.random() ** 3 for name in sizes}
        losses = {n: {"iq4_nl": x, "q5_0": 0.28 * x, "q8_0": 0.004 * x} for n, x in first.items()}
        losses["0"] = {}
        bits = draw.uniform(4.5, 7)
        budget = bits * sum(sizes.values())
        chosen = choose_schemes(losses, sizes, BITS, bits)
        lost = sum(each[chosen[name]] for name, each in losses.items() if each)
        spent = {name: BITS[scheme] * sizes[name] for name, scheme in chosen.items()}
        bounds = []
        for price in (2 ** (exponent / 4) for exponent in range(-60, 0)):
            least = [
                min(loss + price * BITS[scheme] * sizes[name] for scheme, loss in each.items())
                for name, each in losses.items()
                if each
            ]
            bounds.append(sum(least) - price * (budget - spent["0"]))
        assert chosen["0"] == "iq4_nl"
        assert sum(spent.values()) <= budget + 1e-6
        assert lost <= 1.1 * max(bounds) + 0.02


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_the_library_reads_a_mixture(name: str, tmp_path: Path) -> None:
    """Its types are what is told, within the budget; a mixture of experts has stacks of the scheme
    of fewest bits, because nothing is known about them."""
    gguf = pytest.importorskip("gguf")
    source, out = FILES / f"{name}.gguf", tmp_path / "out.gguf"

    def calibrate(checkpoint: Checkpoint) -> Mapping[str, Sensitivity]:
        return sensitivities(checkpoint, torch.randint(0, 64, (WINDOW,)))

    written = quantise_checkpoint(source, out, "iq4_nl", calibrate=calibrate, bits=5.2)
    (file,) = Checkpoint(source).files
    assert isinstance(file, GgufFile)
    matrices = {stored for stored, name in names_of(file).items() if name.endswith(".weight")}
    counts, spent, total = Counter[str](), 0, 0
    for tensor in gguf.GGUFReader(out).tensors:
        scheme = tensor.tensor_type.name.lower()
        if scheme in BITS:
            assert tensor.name in matrices
            counts[scheme] += 1
            spent, total = spent + 8 * int(tensor.n_bytes), total + int(tensor.n_elements)
            assert "_exps" not in tensor.name or scheme == "iq4_nl"
    assert counts == written.quantised
    assert counts.keys() == BITS.keys()
    assert 5 < spent / total <= 5.2


def test_bits_are_checked_before_the_text_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_checkpoint("mimo", tmp_path / "plain")
    missing = str(tmp_path / "missing")
    for source, scheme, bits, message in (
        (FILES / "llama.gguf", "q5_0", "5", "bits is 5; expected at least the 5.5 of q5_0"),
        (FILES / "llama.gguf", "iq4_nl", "nan", "bits is nan; expected at least the 4.5 of iq4_nl"),
        (directory, "int4-g32", "4.7", "bits are those of a GGUF file, and "),
    ):
        words = ["quantize", str(source), str(tmp_path / "out.gguf"), "--scheme", scheme]
        assert main([*words, "--bits", bits, "--calibration", missing]) == 2
        assert message in capsys.readouterr().err
