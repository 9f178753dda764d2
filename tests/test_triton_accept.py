"""Acceptance by Triton's interpreter, against the reference op; see test_triton_kernels."""

from __future__ import annotations

import os
from importlib import util

import pytest
import torch
from helpers.accept_cases import make_call, run

if util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: tests/run_triton.sh", allow_module_level=True)

from mtpc.backends.triton_kernels import load_kernels

load_kernels()


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("num_stops", [1, 3, 8])
@pytest.mark.parametrize("spec_tokens", range(5))
def test_acceptance_equals_the_reference(spec_tokens: int, num_stops: int, prompts: bool) -> None:
    """K = 0 to 4; prompts beside requests that decode, some of them off."""
    for seed in range(12):
        call = make_call(seed, 1 + seed % 8, spec_tokens, num_stops, prompts)
        assert run(torch.ops.mtpc_triton, call) == run(torch.ops.mtpc, call)
