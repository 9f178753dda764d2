"""`--speculative-algorithm MTPC`: SGLang's EAGLE worker, with one replay for the draft phase."""

from __future__ import annotations

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from mtpc.integrations.sglang.propose import ProposeRunner


class MTPCWorker(EAGLEWorkerV2):
    """SGLang's worker. It keeps SGLang's verification, acceptance and pass over verified rows."""

    def init_cuda_graphs(self) -> None:
        """Capture SGLang's graphs, and the draft phase's graph if there is more than one draft."""
        super().init_cuda_graphs()
        if self.speculative_num_steps > 1:
            self.draft_worker.cuda_graph_runner = ProposeRunner(self.draft_worker)
