"""Recurrences with state: against transformers, rolled back, padded; their C++ kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from helpers import tiny
from helpers.compiled import run_on
from helpers.deltas import (
    CHANNELS,
    DELTA,
    DRAFTS,
    HEADS,
    MAMBA,
    TOLERANCE,
    Layer,
    Rule,
    close,
    make_rows,
    plain,
    two_steps,
)

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.errors import UnsupportedModelError
from mtpc.layout import SCRATCH_SLOT, Layout
from mtpc.layout.buffers import K_MAX, S
from mtpc.models.seams import StepContext, share_model

load_kernels()
OPS = {"reference": torch.ops.mtpc, "kernel": torch.ops.mtpc_cpu}
Round: TypeAlias = tuple[int, int, int]
"""Rows of a step, how many of them are certain, and how many are right."""
RULES = pytest.mark.parametrize("rule", [DELTA, MAMBA], ids=lambda rule: rule.name)


@RULES
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
@pytest.mark.parametrize("prompt", [1, 2, 5, 9])
def test_rejected_rows_leave_no_trace(ops: str, accepted: int, prompt: int, rule: Rule) -> None:
    """Five rounds of drafts, of which `accepted` are right: each row as in one plain pass."""
    layer, truth = Layer(OPS[ops], rule=rule), make_rows(40)
    wanted = plain(layer, truth)
    (found,) = layer.run([truth[:prompt]], [2], [0], [prompt])
    close(found, wanted[:prompt])
    length = prompt
    for round_ in range(5):
        wrong = make_rows(DRAFTS - accepted, seed=100 + round_)
        rows = torch.cat([truth[length : length + 1 + accepted], wrong])
        (found,) = layer.run([rows], [2], [length], [1])
        close(found[: 1 + accepted], wanted[length : length + 1 + accepted])
        length += 1 + accepted


@RULES
@pytest.mark.parametrize("ops", OPS)
def test_rounds_of_any_width(ops: str, rule: Rule) -> None:
    """K may change from step to step, and steps may pass a request by."""
    layer, truth = Layer(OPS[ops], rule=rule), make_rows(40)
    wanted, length = plain(layer, truth), 0
    for count, certain, accepted in (
        (3, 3, 3),
        (5, 1, 4),
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 2),
        (3, 1, 3),
    ):
        rows = torch.cat([truth[length : length + accepted], make_rows(count - accepted, seed=9)])
        (found,) = layer.run([rows], [1], [length], [certain])
        close(found[:accepted], wanted[length : length + accepted])
        length += accepted


@RULES
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 17])
def test_prompts_in_chunks(ops: str, chunk: int, rule: Rule) -> None:
    layer, rows = Layer(OPS[ops], rule=rule), make_rows(17)
    wanted = plain(layer, rows)
    for start in range(0, 17, chunk):
        part = rows[start : start + chunk]
        (found,) = layer.run([part], [3], [start], [len(part)])
        close(found, wanted[start : start + chunk])


@RULES
@pytest.mark.parametrize("ops", OPS)
def test_padded_rows_change_nothing(ops: str, rule: Rule) -> None:
    """Requests that are off, NaN in their rows and behind the last: live rows, slots as before."""
    alone, padded = Layer(OPS[ops], rule=rule), Layer(OPS[ops], rule=rule)
    nan = torch.full((3, CHANNELS + 2 * HEADS), torch.nan)
    rows = [make_rows(5, seed=1), make_rows(2, seed=2)]
    lens = [0, 0]
    for certain in ([5, 2], [1, 1], [1, 1]):
        wanted = alone.run(rows, [3, 1], lens, certain)
        found = padded.run(
            [nan, rows[0], nan[:1], rows[1]],
            [SCRATCH_SLOT, 3, SCRATCH_SLOT, 1],
            [0, lens[0], 0, lens[1]],
            [0, certain[0], 0, certain[1]],
            padding=2,
        )
        for one, other in ((found[1], wanted[0]), (found[3], wanted[1])):
            close(one, other)
        assert not found[0].any()
        lens = [a + b for a, b in zip(lens, certain, strict=True)]
        rows = [make_rows(4, seed=certain[0]), make_rows(3, seed=certain[1])]
    for one, other in zip(alone.state, padded.state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert all(torch.isnan(state[[0, 2, 4]]).all() for state in padded.state[:2])


def recurrent_layer(model: Any) -> tuple[int, Any]:
    """The index of a model's first recurrent layer, and its module."""
    index = model.config.layer_types.index("linear_attention")
    layer = model.get_decoder().layers[index]
    return index, getattr(layer, "linear_attn", None) or layer.mixer


def run_canonical(
    family: str, model: Any, text: torch.Tensor, rounds: Sequence[Round]
) -> torch.Tensor:
    """The accepted rows [L, H] of mtpc's module over a text [L, H], beside a neighbour's rows.

    Rows of a round that are not accepted are wrong.
    """
    known = tiny.family_of(family)
    index, theirs = recurrent_layer(model)
    _, ours = recurrent_layer(share_model(model, known.canonical))
    assert {id(p) for p in ours.parameters()} == {id(p) for p in theirs.parameters()}
    layout = Layout(known.cache_specs(model.config, index, torch.float32), {S: 3, K_MAX: 2})
    tensors = {name.split(".")[2]: layout.allocate(name) for name in layout}
    (kind,) = known.cache_kinds
    state = kind(**{name: t.fill_(7) for name, t in tensors.items()})
    found, committed, other = [], 0, torch.randn(2, text.shape[1])
    for rows, certain, accepted in rounds:
        wrong = 9 * torch.ones(rows - accepted, text.shape[1])
        x = torch.cat([other, text[committed : committed + accepted], wrong])
        context = StepContext(
            layers={index: state},
            positions=torch.empty(0),
            slot_mapping=torch.empty(0),
            block_table=torch.empty(0),
            seq_lens=torch.tensor([2, committed + rows]),
            query_start_loc=torch.tensor([0, 2, 2 + rows]),
            state_slots=torch.tensor([1, 2]),
            certain_lens=torch.tensor([2, certain]),
        )
        found.append(ours(x[None], cache=context)[0, 2 : 2 + accepted])
        committed += accepted
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"])
def test_the_module_equals_transformers(family: str) -> None:
    """Chunks, rejected rows and a neighbour against transformers' own layer on the whole text."""
    model = tiny.build_target(family)
    text = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    rounds = [(5, 5, 5), (3, 1, 1), (3, 1, 3), (3, 1, 2), (1, 1, 1)]
    close(run_canonical(family, model, text, rounds), recurrent_layer(model)[1](text[None])[0])


@torch.no_grad()
def test_time_steps_have_no_floor() -> None:
    """Mamba-2: transformers has one for prompts, and none for the tokens after them."""
    model = tiny.build_target("nemotron_h")
    _, theirs = recurrent_layer(model)
    text = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    theirs.dt_bias.fill_(-9.0)
    floored = theirs(text[None])[0]
    theirs.time_step_limit = (0.0, float("inf"))
    wanted = theirs(text[None])[0]
    assert not torch.allclose(floored, wanted, rtol=1e-3)
    close(run_canonical("nemotron_h", model, text, [(9, 9, 9)]), wanted)
    model.config.time_step_limit = (0.0, 0.1)
    with pytest.raises(UnsupportedModelError, match=r"time_step_limit \(0.0, 0.1\)"):
        run_canonical("nemotron_h", model, text, [])


@RULES
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernel_equals_the_reference(dtype: torch.dtype, rule: Rule) -> None:
    wanted, reference = two_steps(OPS["reference"], dtype, rule)
    found, kernel = two_steps(OPS["kernel"], dtype, rule)
    for one, other in zip(found, wanted, strict=True):
        assert torch.isfinite(other).all()
        close(one, other)
    for one, other in zip(kernel.state, reference.state, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_same_bits(dtype: torch.dtype, rule: Rule) -> None:
    """Replayed or not, alone or beside others, on one thread or two: speculation rounds alike."""
    truth, kernel = make_rows(16), OPS["kernel"]
    with run_on(2):
        wanted = plain(Layer(kernel, dtype, rule), truth)
    layer = Layer(kernel, dtype, rule)
    layer.run([make_rows(3, seed=4), truth[:5]], [1, 2], [0, 0], [3, 5])
    length = 5
    for accepted in (2, 0, 3, 1):
        rows = torch.cat([truth[length : length + 1 + accepted], make_rows(3 - accepted, seed=8)])
        (found,) = layer.run([rows], [2], [length], [1])
        assert torch.equal(found[: 1 + accepted], wanted[length : length + 1 + accepted])
        length += 1 + accepted


@RULES
@pytest.mark.parametrize("ops", OPS)
def test_the_schema_and_the_fake_hold(ops: str, rule: Rule) -> None:
    """What is written is declared, and nothing else."""
    layer = Layer(OPS[ops], rule=rule)
    layer.run([make_rows(4), make_rows(2)], [1, 2], [0, 0], [4, 2])
    state = tuple(t.nan_to_num() if t.is_floating_point() else t.clone() for t in layer.state)
    arguments = (
        make_rows(5)[:, : rule.inputs],
        *layer.weights,
        *state,
        torch.tensor([2, 1]),
        torch.tensor([4, 7], dtype=torch.int32),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
        *rule.options,
    )
    op = getattr(OPS[ops], rule.name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    before = copy.deepcopy(state)
    op(*arguments)
    assert all(not torch.equal(a, b) for a, b in zip(before, state, strict=True))


@RULES
def test_what_the_kernel_refuses(rule: Rule) -> None:
    layer = Layer(OPS["kernel"], rule=rule)
    layer.run([make_rows(4)], [1], [0], [4])
    with pytest.raises(RuntimeError, match="stands at 4 of 9 positions; 4 can be replayed"):
        layer.run([make_rows(1)], [1], [9], [1])
    with pytest.raises(RuntimeError, match="request 0 has slot 5 of 5"):
        layer.run([make_rows(1)], [5], [0], [1])
    layer.weights = (layer.weights[0][:, :, None], *layer.weights[1:])
    with pytest.raises(RuntimeError, match=r"expected rows \[T, ...\]"):
        layer.run([make_rows(1)], [1], [4], [1])
