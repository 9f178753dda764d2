"""`--speculative-algorithm MTPC`: SGLang's EAGLE worker, with one replay for the draft phase."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context

from mtpc.integrations.sglang.propose import ProposeRunner
from mtpc.integrations.sglang.requests import end_sampled


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
        """Run one forward of SGLang's scheduler; see `end_sampled`."""
        if self.device == "cpu":
            end_sampled(batch.reqs)
        return super().forward_batch_generation(batch, *arguments, **named)
