"""The algorithms `MTPC` and `MTPC_STEP`, as SGLang's scheduler, pools and options use them.

SGLang imports this module in each of its processes, even if neither is used. So it imports little,
and imports a worker only when SGLang makes one.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_platform
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from mtpc.errors import OptionError

NAME = "MTPC"
STEP_NAME = "MTPC_STEP"


class MTPCAlgorithm(CustomSpecAlgo):
    """The algorithm. SGLang's scheduler and pools treat it like SGLang's own EAGLE."""

    # SGLang calls these on every algorithm. SGLang's own versions rely on methods like `is_eagle`.
    supports_grammar_overlap = SpeculativeAlgorithm.supports_grammar_overlap
    carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
    build_disagg_draft_input = SpeculativeAlgorithm.build_disagg_draft_input
    create_future_map = SpeculativeAlgorithm.create_future_map
    need_topk = SpeculativeAlgorithm.need_topk

    def is_eagle(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Set the defaults that SGLang sets only for its own EAGLE, by name."""
        if server_args.speculative_draft_model_path is None:
            server_args.speculative_draft_model_path = server_args.model_path
            server_args.speculative_draft_model_revision = server_args.revision
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False
        if get_platform().is_hip:
            # Without it SGLang's verification takes the argmax on ROCm, whatever a request asks.
            server_args.speculative_use_rejection_sampling = True


class StepAlgorithm(MTPCAlgorithm):
    """The algorithm whose iterations are whole steps of mtpc."""

    def handle_server_args(self, server_args: Any) -> None:
        """As `MTPC`. Iterations are synchronous, and mtpc captures its own graphs."""
        super().handle_server_args(server_args)
        server_args.disable_overlap_schedule = True
        server_args.disable_cuda_graph = True


def check_arguments(server_args: Any, name: str = NAME) -> None:
    """Refuse options that a chain of a fixed number of drafts does not support.

    Raises:
        OptionError: the drafts are not a chain of fixed length, or an unsupported option is on.
    """
    steps = server_args.speculative_num_steps
    drafts = server_args.speculative_num_draft_tokens
    wrong = None
    if steps is None or server_args.speculative_eagle_topk != 1:
        wrong = f"steps {steps}, topk {server_args.speculative_eagle_topk}"
    elif drafts != steps + 1:
        wrong = f"{drafts} draft tokens for {steps} steps"
    for option in ("speculative_adaptive", "speculative_token_map", "enable_multi_layer_eagle"):
        if getattr(server_args, option):
            wrong = option
    if server_args.speculative_use_rejection_sampling or get_platform().is_hip:
        for option in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if getattr(server_args, option) != 1.0:
                wrong = f"{option} {getattr(server_args, option)} with rejection sampling"
    if wrong:
        raise OptionError(
            f"--speculative-algorithm {name}: found {wrong}; expected --speculative-num-steps N, "
            "--speculative-eagle-topk 1, --speculative-num-draft-tokens N+1, and none of adaptive "
            "speculation, a token map, multi-layer EAGLE, nor thresholds of acceptance with "
            "rejection sampling, which ROCm always needs"
        )


def check_step_arguments(server_args: Any) -> None:
    """Refuse options that mtpc's whole steps do not support.

    Raises:
        OptionError: see `check_arguments`; or SGLang would share work among ranks, move pages out
            of its pool, or have them in another dtype.
    """
    check_arguments(server_args, STEP_NAME)
    served = {
        **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size"), (1,)),
        **dict.fromkeys(("enable_hierarchical_cache", "enable_lora"), (False, None)),
        "enable_watermark": (False,),
        "disaggregation_mode": ("null",),
        "kv_cache_dtype": ("auto",),
        "quantization": (None,),
    }
    for option, values in served.items():
        found = getattr(server_args, option)
        if found not in values:
            raise OptionError(
                f"--speculative-algorithm {STEP_NAME}: found {option} {found}; expected "
                f"{values[0]}: use {NAME} or NEXTN"
            )


def register_algorithm() -> None:
    """Register the algorithms' names with SGLang."""
    for name, kind, check, worker in (
        (NAME, MTPCAlgorithm, check_arguments, _worker),
        (STEP_NAME, StepAlgorithm, check_step_arguments, _step_worker),
    ):
        register = SpeculativeAlgorithm.register(
            name, supports_overlap=True, validate_server_args=check, spec_class=kind
        )
        register(worker)


def _step_worker(server_args: Any) -> type:
    from mtpc.integrations.sglang.step_worker import StepWorker

    return StepWorker


def _worker(server_args: Any) -> type:
    from mtpc.integrations.sglang.worker import MTPCWorker

    return MTPCWorker
