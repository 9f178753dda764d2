"""Acceptance by Triton's interpreter, against the reference op; see gpu/test_kernels.py."""

from __future__ import annotations

import pytest
import torch
from helpers.accept_cases import make_call, run
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import load_kernels

pytestmark = pytest.mark.triton

load_kernels()


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("num_stops", [1, 3, 8])
@pytest.mark.parametrize("spec_tokens", range(5))
def test_acceptance_equals_the_reference(spec_tokens: int, num_stops: int, prompts: bool) -> None:
    """K = 0 to 4; prompts beside requests that decode, some of them off."""
    for seed in range(12):
        call = make_call(seed, 1 + seed % 8, spec_tokens, num_stops, prompts)
        assert run(torch.ops.mtpc_triton, call) == run(torch.ops.mtpc, call)
