"""The benchmark of quality: a model in another basis is the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import rebase
from mtpc.weights.checkpoint import Checkpoint

FILES = Path(__file__).parents[1] / "weights" / "gguf"


def test_the_function_is_the_same() -> None:
    """In float64, with biases and heads that share keys; each matrix of a layer has changed."""
    sizes: dict[str, Any] = dict(num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2)
    config = Qwen2Config(vocab_size=50, hidden_size=48, intermediate_size=40, **sizes)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    ids = torch.randint(0, 50, (2, 30))
    wanted = model(ids).logits
    random = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        made = rebase.rebased(before, 2, random)
        layer.load_state_dict(made)
        for name in (n for n in before if n.endswith("proj.weight")):
            off = (made[name] / before[name] - 1).abs()
            assert float(off.mean()) > 0.1
            assert float((made[name] / before[name]).std(1).min()) > 0.05, name
    assert float(wanted.std()) > 0.1
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-9, atol=1e-9)


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the layers is what it was; another family is refused."""
    source, out = FILES / "qwen3.gguf", tmp_path / "out.gguf"
    assert rebase.main([str(source), str(out)]) == 0
    before, after = Checkpoint(source), Checkpoint(out)
    random, prefix = torch.Generator().manual_seed(0), "model.layers.0."
    layer = {name.removeprefix(prefix): before.tensor(name) for name in before.names(prefix)}
    made = rebase.rebased(layer, before.text_config["num_key_value_heads"], random)
    for name in before.tensors:
        if not name.startswith("model.layers."):
            assert torch.equal(before.tensor(name), after.tensor(name)), name
        elif name.startswith(prefix):
            assert torch.equal(made[name.removeprefix(prefix)], after.tensor(name)), name
    with pytest.raises(SystemExit):
        rebase.main([str(FILES / "llama.gguf"), str(tmp_path / "no.gguf")])
    assert "a model of llama; expected one of qwen2" in capsys.readouterr().err
