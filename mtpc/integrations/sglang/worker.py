"""`--speculative-algorithm MTPC`: SGLang's EAGLE worker, with one replay for the draft phase."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context

from mtpc.integrations.sglang.algorithm import NAME
from mtpc.integrations.sglang.propose import ProposeRunner


class MTPCWorker(EAGLEWorkerV2):
    """SGLang's worker. It keeps SGLang's verification, acceptance and pass over verified rows."""

    def init_cuda_graphs(self) -> None:
        """Capture SGLang's graphs, and the draft phase's graph if there is more than one draft."""
        super().init_cuda_graphs()
        if self.speculative_num_steps > 1:
            # As SGLang's own capture of drafts has it: its layers may run here.
            with (
                draft_tp_context(self.draft_worker.parallel_layout),
                speculative_moe_backend_context(),
                speculative_moe_a2a_backend_context(),
            ):
                self.draft_worker.cuda_graph_runner = ProposeRunner(self.draft_worker)

    def forward_batch_generation(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        """Run one forward of SGLang's scheduler; see `refuse_sampling`."""
        if self.device == "cpu":
            refuse_sampling(batch.reqs)
        return super().forward_batch_generation(batch, *arguments, **named)


def refuse_sampling(requests: Any) -> None:
    """End requests that ask for sampling, where SGLang's verification takes the argmax only.

    SGLang reads temperature 0 as a top_k of 1. Its verification samples on a GPU, and on a CPU it
    takes the argmax whatever a request asks. A client gets the message as SGLang's own for a bad
    request.
    """
    for request in requests:
        if request.sampling_params.top_k > 1 and not request.finished():
            request.to_finish = FINISH_ABORT(
                f"--speculative-algorithm {NAME} on a CPU takes the most probable token: found a "
                "request with sampling, expected temperature 0 (or start SGLang without "
                "speculation)",
                HTTPStatus.BAD_REQUEST,
                "BadRequestError",
            )
