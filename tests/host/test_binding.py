"""What a host binds: wrong tensors and options are refused, and calls come in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import host as example
import pytest
import torch
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.watched_host import finish, tensors_for

import mtpc
from mtpc.errors import HostError, OptionError
from mtpc.layout import StepKey

DECODE, PREFILL = StepKey.decode(3, 3), StepKey.prefill(4, 2, 3)


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Changes one tensor of those that are handed over."""

    def apply(shared: Any, steps: Any) -> None:
        owner = shared if name in shared else steps[DECODE]
        owner[name] = change(owner[name])

    return apply


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "missing": (
        lambda shared, steps: shared.pop("state.block_table"),
        r"1 problem.*\n  state.block_table is missing; expected int32 \[4, 18\]",
    ),
    "unknown": (
        lambda shared, steps: shared.update({"state.blocktable": torch.zeros(1)}),
        r"state.blocktable is no buffer of this program; did you mean state.block_table\?",
    ),
    "dtype": (
        replaced("state.block_table", lambda t: t.long()),
        "state.block_table is int64; expected int32",
    ),
    "shape": (
        replaced("kv.0.k", lambda t: t[1:]),
        r"kv.0.k has shape \[13, 4, 2, 16\]; expected \[14, 4, 2, 16\]",
    ),
    "strides": (
        replaced("kv.0.k", lambda t: torch.stack([t, t], 1)[:, 0]),
        r"kv.0.k has strides \(256, 32, 16, 1\); expected \(128, 32, 16, 1\); pass whole pages",
    ),
    "device": (
        replaced("kv.0.k", lambda t: t.to("meta")),
        "kv.0.k is on meta; expected cpu",
    ),
    "gradient": (
        replaced("kv.0.k", lambda t: t.requires_grad_()),
        "kv.0.k requires a gradient",
    ),
    "no tensor": (
        replaced("state.stop_ids", lambda t: t.tolist()),
        r"state.stop_ids is a list; expected int64 \[4, 8\]",
    ),
    "of a step": (
        replaced("batch.out_token_ids", lambda t: t.int()),
        r"decode\[R=3,Q=4,K=3\] batch.out_token_ids is int32; expected int64",
    ),
    "one for two": (
        lambda shared, steps: shared.update({"kv.0.k": shared["kv.1.k"]}),
        "kv.0.k and kv.1.k share memory",
    ),
    "memory within a step": (
        lambda shared, steps: steps[DECODE].update(
            {"batch.seq_lens": steps[DECODE]["batch.num_emitted"]}
        ),
        "share memory; each needs its own",
    ),
    "no such step": (
        lambda shared, steps: steps.update({StepKey.decode(9, 3): {}}),
        r"decode\[R=9,Q=4,K=3\] is no step of this program; "
        r"expected decode\[R=3,Q=4,K=3\], prefill",
    ),
    "step forgotten": (
        lambda shared, steps: steps.pop(PREFILL),
        r"prefill\[R=4,Q=2,K=3\] batch.state_indices is missing",
    ),
    "no mapping": (
        lambda shared, steps: steps.update({DECODE: None}),
        "is a NoneType; expected a mapping from names to tensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused(case: str, hosted: Callable[..., Any]) -> None:
    """Each by one error that says what was found, and what was expected."""
    change, message = WRONG[case]
    shared, steps = tensors_for(hosted("mimo", 3))
    change(shared, steps)
    with pytest.raises(HostError, match=message):
        hosted("mimo", 3).bind(shared, steps)


def test_all_that_is_wrong_is_said_at_once(hosted: Callable[..., Any]) -> None:
    shared, steps = tensors_for(hosted("mimo", 3))
    shared["state.stop_ids"] = shared["state.stop_ids"].int()
    del shared["kv.2.v"]
    steps[PREFILL]["batch.num_input"] = None
    with pytest.raises(HostError) as raised:
        hosted("mimo", 3).bind(shared, steps)
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert "3 problem(s)" in lines[0]
    with pytest.raises(HostError, match=r"and \d+ more"):
        hosted("mimo", 3).bind({}, {})
    with pytest.raises(HostError, match="steps is a NoneType; expected a mapping from step keys"):
        hosted("mimo", 3).bind(shared, None)


def test_steps_may_share_memory_with_each_other(
    hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """One arena for what is a step's own: two steps never run at once."""

    class Sharing(example.Host):
        def __init__(self, model: mtpc.HostedModel):
            super().__init__(model)
            arena = {
                name: buffer.allocate()
                for key in (DECODE, PREFILL)
                for name, buffer in model.step_buffers(key).items()
            }
            for own in self.steps.values():
                for name, tensor in own.items():
                    flat = arena[name].flatten()
                    if flat.numel() >= tensor.numel() and flat.dtype == tensor.dtype:
                        own[name] = flat[: tensor.numel()].view(tensor.shape)
            self.program = model.bind(self.shared, self.steps)

    server = Sharing(hosted("mimo", 3))
    own = server.steps
    name = "batch.state_indices"
    assert own[DECODE][name].data_ptr() == own[PREFILL][name].data_ptr()
    requests = [server.add(prompt, 9) for prompt in PROMPTS[6:9]]
    finish(server)
    for request in requests:
        assert request.output == oracle("mimo").generate(request.prompt, 9, stop=False)


def test_the_order_of_calls_is_held(hosted: Callable[..., Any]) -> None:
    model = hosted("mimo", 3)
    program = model.bind(*tensors_for(model))
    with pytest.raises(HostError, match=r"the last call was not a verify; expected verify\("):
        program.propose(DECODE)
    program.verify(PREFILL)
    with pytest.raises(HostError, match=r"the last call was verify\(prefill.*; expected verify\("):
        program.propose(DECODE)
    program.verify(DECODE)
    program.propose(DECODE)
    with pytest.raises(HostError, match=r"expected verify\(.* right before it"):
        program.propose(DECODE)
    program.verify(DECODE)
    program.step(DECODE)
    with pytest.raises(HostError, match=r"expected verify\(.* right before it"):
        program.propose(DECODE)
    with pytest.raises(
        HostError, match=r"decode\[R=7,Q=4,K=3\] is no step of this program; expected decode\[R=3"
    ):
        program.verify(StepKey.decode(7, 3))
    with pytest.raises(HostError, match="no decode step has 4 rows and K = 3"):
        model.decode_key(4)
    with pytest.raises(HostError, match="K = 1"):
        model.decode_key(1, 1)
    assert program.replays[DECODE, "propose"] == 1
    assert [row.token_ids for row in program.results(DECODE)] == [[], [], []]


def test_a_half_that_was_not_compiled(hosted: Callable[..., Any]) -> None:
    model = hosted("mimo", 3)
    steps = {k: step for k, step in model._built.steps.items() if k[1] == "step"}
    fused = replace(model, form="fused", _built=replace(model._built, steps=steps))
    program = fused.bind(*tensors_for(fused))
    program.step(DECODE)
    with pytest.raises(
        HostError, match=r"verify was not compiled; use compile_host\(form='both'\)"
    ):
        program.verify(DECODE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "halves"}, "form is 'halves'; expected one of split, fused, both"),
        ({"prefix_caching": False}, "prefix_caching belongs to mtpc.compile"),
        ({"busy_prefill_chunk": 8}, "busy_prefill_chunk belongs to mtpc.compile"),
        ({"async_scheduling": True}, "async_scheduling belongs to mtpc.compile"),
        ({"require_sha256": "0" * 64}, "require_sha256 belongs to mtpc.compile"),
        ({"spec_token": 3}, "did you mean 'spec_tokens'"),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        mtpc.compile_host(tmp_path, **options)
