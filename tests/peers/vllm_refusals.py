"""What the vLLM plugin does when it is not asked for, and what draft model and worker refuse.

    VENV/bin/python tests/peers/vllm_refusals.py CHECKPOINT DIST

Runs under vLLM's interpreter, over real configs of vLLM's; no engine is started. CHECKPOINT is a
MiMo checkpoint (`tests/helpers/tiny.py` makes one), DIST where mtpc is installed. Exits with 1 at
the first check that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ASK = """
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
print(ModelRegistry.models["MiMoMTPModel"].module_name)
"""


def main(directory: str, dist: str) -> None:
    """All checks."""
    check_switch(dist)
    sys.path.insert(0, dist)
    check_refusals(directory)
    check_steps(directory)
    print("all as it should be")


def check_switch(dist: str) -> None:
    """Which class an architecture leads to, by VLLM_PLUGINS."""
    own, ours = "vllm.model_executor.models.mimo_mtp", "mtpc.integrations.vllm.draft_model"
    for plugins, expected in ((None, own), ("", own), ("other", own), ("mtpc,other", ours)):
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
        environment["PYTHONPATH"] = dist
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        done = subprocess.run(
            [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
        )
        found = done.stdout.splitlines()[-1]
        print(f"VLLM_PLUGINS={plugins!r}: {found}", flush=True)
        assert found == expected, (plugins, found)


def check_refusals(directory: str) -> None:
    """Configs that the draft model cannot serve, and options that do not exist."""
    from vllm.engine.arg_utils import EngineArgs

    from mtpc.errors import OptionError, UnsupportedModelError
    from mtpc.integrations.vllm.draft_model import TracedMTP

    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    usual = dict(model=directory, skip_tokenizer_init=True, speculative_config=drafts)
    cases = (
        ({"pipeline_parallel_size": 2}, UnsupportedModelError, "pipeline_parallel_size=2"),
        ({"enable_lora": True}, UnsupportedModelError, "LoRA"),
        ({"hf_overrides": lambda config: config}, UnsupportedModelError, "takes overrides as a"),
        ({"additional_config": {"mtpc": {"draft_rules": "x"}}}, OptionError, "'host', 'model'"),
        ({"additional_config": {"mtpc": {"rules": "host"}}}, OptionError, "'host', 'model'"),
    )
    for change, kind, message in cases:
        config = EngineArgs(**(usual | change)).create_engine_config()
        assert_refused(change, kind, message, partial(TracedMTP, vllm_config=config))


def assert_refused(
    asked: Any, kind: type[Exception], message: str, check: Callable[[], object]
) -> None:
    """Check that `check` raises an error of a kind, with such a message, and print it."""
    try:
        check()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{asked} was accepted")
    print(f"{asked}: {said}", flush=True)
    assert message in said, said


def check_steps(directory: str) -> None:
    """Options that `StepWorker` does not take, and what vLLM answers to requests then."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    from mtpc.errors import OptionError
    from mtpc.integrations.vllm.step_worker import CHECK, check_config

    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    usual = dict(model=directory, skip_tokenizer_init=True, speculative_config=drafts)
    usual |= dict(kv_cache_memory_bytes=1 << 24, logits_processors=[CHECK])
    check_config(EngineArgs(**usual).create_engine_config())
    cases = (
        ({"speculative_config": None}, "set speculative_config"),
        ({"logits_processors": None}, "set logits_processors"),
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"enable_lora": True}, "LoRA"),
        ({"load_format": "dummy"}, "load_format dummy"),
        ({"max_model_len": -1}, "max_model_len -1"),
    )

    def start(change: dict[str, Any]) -> None:
        check_config(EngineArgs(**(usual | change)).create_engine_config())

    for change, message in cases:
        assert_refused(change, OptionError, message, partial(start, change))
    validate_logits_processors_parameters([CHECK], SamplingParams(temperature=0, max_tokens=4))
    for asked in ({"min_tokens": 2}, {"temperature": 0, "logprobs": 1}, {"seed": -5}):
        check = partial(validate_logits_processors_parameters, [CHECK], SamplingParams(**asked))
        assert_refused(asked, VLLMValidationError, "", check)


if __name__ == "__main__":
    main(*(str(Path(argument).absolute()) for argument in sys.argv[1:]))
