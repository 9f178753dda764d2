"""`--speculative-algorithm MTPC`: SGLang's EAGLE worker with a draft phase of one replay."""

from __future__ import annotations

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from mtpc.integrations.sglang.propose import ProposeRunner


class MTPCWorker(EAGLEWorkerV2):
    """The host's worker: verify, acceptance and the pass over verified rows are its own."""

    def init_cuda_graphs(self) -> None:
        """The host's graphs, then the draft phase's, where a draft is chained at all."""
        super().init_cuda_graphs()
        if self.speculative_num_steps > 1:
            self.draft_worker.cuda_graph_runner = ProposeRunner(self.draft_worker)
