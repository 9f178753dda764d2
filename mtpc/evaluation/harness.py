"""Runs tasks of lm-evaluation-harness on an engine. Needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mtpc.errors import MtpcError, OptionError
from mtpc.evaluation.compare import Outcome, measured
from mtpc.evaluation.engines import AnsweringEngine

DEFAULT_NEW_TOKENS = 256
"""The default of the harness's own model classes."""


class HarnessModel(TemplateLM):
    """An engine, which answers and scores, as a model of the harness."""

    def __init__(self, engine: AnsweringEngine):
        super().__init__()
        self._engine = engine

    @property
    def eot_token_id(self) -> int:
        """The token in front of a text without context: the first end-of-sequence id, else 0."""
        return next(iter(self._engine.served.stop_ids), 0)

    @property
    def tokenizer_name(self) -> str:
        return self._engine.served.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, with the tokenizer's special tokens unless `add_special_tokens` is False."""
        return self._engine.served.encode(string, add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding gives it.

        A row that is too long for the model loses its first tokens, as in the harness's classes.
        """
        rows = [
            (context + following)[-self._engine.max_len :] for _, context, following in requests
        ]
        firsts = [
            max(len(row) - len(following), 1)
            for row, (_, _, following) in zip(rows, requests, strict=True)
        ]
        scored = self._engine.prompt_logprobs(rows, firsts)
        return [
            (sum(e.logprob for e in row), all(e.top[0][0] == e.token_id for e in row))
            for row in scored
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, scored in windows of the model's length."""
        totals = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._engine.max_len - 1,
                context_len=1,
            )
            windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(windows)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts, each ended by the task's stop strings.

        Raises:
            OptionError: a task asks for sampled text.
        """
        prompts, limits, stops = [], [], []
        for context, options in (request.args for request in requests):
            if options.get("do_sample") and options.get("temperature", 1.0):
                raise OptionError(
                    "the task asks for sampled text (do_sample); expected a greedy task, whose "
                    "texts can be compared"
                )
            until = options.get("until") or []
            stops.append(tuple(s for s in ([until] if isinstance(until, str) else until) if s))
            limit = int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS))
            limits.append(min(limit, self._engine.max_len - 1))
            ids = self.tok_encode(context) or [self.eot_token_id]
            prompts.append(ids[-(self._engine.max_len - limits[-1]) :])
        return self._engine.answer(prompts, limits, stops)


def find_tasks(name: str) -> list[Any]:
    """Look up tasks by name, or the task in a .yaml file, for the harness's `simple_evaluate`.

    Raises:
        OptionError: the harness knows no such task.
    """
    if Path(name).is_file():
        return [str(Path(name).resolve())]
    found = TaskManager().match_tasks(name.split(","))
    if not found:
        raise OptionError(
            f"task {name!r} is neither a file nor a task of lm-evaluation-harness; expected one of "
            "those that `lm-eval ls tasks` lists"
        )
    return list(found)


def run_tasks(engine: AnsweringEngine, tasks: Sequence[Any], limit: int | None) -> Outcome:
    """Run tasks of the harness.

    A question's score is the first metric that the harness has for it, by the first of its filters.

    Raises:
        OptionError: the harness cannot run the tasks.
    """
    try:
        with measured(engine) as outcome:
            found = lm_eval.simple_evaluate(
                HarnessModel(engine), tasks=list(tasks), limit=limit, bootstrap_iters=0
            )
    except MtpcError:
        raise
    except Exception as error:  # Usually a data set cannot be downloaded.
        raise OptionError(
            f"lm-evaluation-harness cannot run {', '.join(map(str, tasks))}: "
            f"{type(error).__name__}: {error}; a task file (--task FILE.jsonl) needs no network"
        ) from error
    for name, samples in found["samples"].items():
        filters = {sample["filter"]: None for sample in samples}
        for sample in samples:
            if sample["filter"] == next(iter(filters)):
                outcome.texts.append(_text(sample["filtered_resps"]))
                outcome.scores.append(_number(sample[sample["metrics"][0]]))
        outcome.more[name] = found["results"][name]
    return outcome


def _text(responses: Any) -> str:
    """The answer to a question: a text, or the number of the choice with the highest score."""
    if isinstance(responses[0], str):
        return responses[0]
    scores = [r[0] if isinstance(r, (tuple, list)) else r for r in responses]
    return f"choice {scores.index(max(scores))}"


def _number(value: Any) -> float:
    """The metric of a question. Perplexity tasks give a log-probability and a number of words."""
    return value[0] / value[1] if isinstance(value, tuple) else float(value)
