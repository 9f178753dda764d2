"""The public surface: `compile` and the `SpecModel` it returns."""

from __future__ import annotations

import numbers
import operator
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpc.backends import choose_backend
from mtpc.cache.opening import open_cache
from mtpc.cache.steps import StepCache
from mtpc.capture.program import Program
from mtpc.checkpoint import Checkpoint
from mtpc.config import CompileOptions
from mtpc.engine.engine import Engine
from mtpc.engine.request import Request
from mtpc.engine.stats import Stats
from mtpc.errors import NumericsError, RequestError
from mtpc.progress import Listener, Progress
from mtpc.restore import restore
from mtpc.serving import ServedModel

if TYPE_CHECKING:
    from mtpc.models.load import LoadedModel

Prompt = str | Sequence[int] | torch.Tensor


def print_progress(progress: Progress) -> None:
    """The default listener: a line a stage on stderr, where that is a terminal."""
    if sys.stderr.isatty():
        step = f"{progress.done + 1}/{progress.total} {progress.key} " if progress.key else ""
        print(f"mtpc {progress.elapsed_s:7.1f} s  {step}{progress.stage}", file=sys.stderr)


def compile(model: Any, progress: Listener = print_progress, **options: Any) -> SpecModel:
    """Compile a model with MTP layers into captured propose-and-verify steps.

    Steps that the graph cache holds are loaded, all others are compiled and kept there; see
    docs/cache.md.

    Args:
        model: a checkpoint directory (str or Path), or a transformers model loaded from one; a
            model object is shared, not copied, and left as it was.
        progress: called with a `mtpc.progress.Progress` at each stage of each bucket; by default
            lines on stderr where that is a terminal.
        **options: fields of `mtpc.config.CompileOptions`, or their aliases
            (`num_speculative_tokens` for `spec_tokens`).

    Returns:
        A `SpecModel`.

    Raises:
        OptionError: an option is unknown or out of range.
        CheckpointError: the checkpoint is incomplete, damaged, or has no MTP layers.
        UnsupportedModelError: the architecture is not supported.
        CapacityError: the page pool is too small for any request.
        BackendError: the backend cannot run here.
        CacheError: another user could have written the cache; or it is frozen, and lacks a step.
    """
    parsed = CompileOptions.parse(options)
    start = time.perf_counter()

    def report(line: str) -> None:
        progress(Progress(line, None, 0, 0, time.perf_counter() - start))

    source = Checkpoint(Path(model)) if isinstance(model, (str, Path)) else model
    cache = open_cache(source, parsed, report)
    spec = None
    if cache is not None and isinstance(source, Checkpoint):
        spec = _restored(source, parsed, cache, progress)
    if spec is None:
        spec = _compile(source, parsed, cache, progress, report)
    if cache is not None:
        spec.stats.fallbacks.update(cache.notes)
    return spec


def _restored(
    source: Checkpoint, options: CompileOptions, cache: StepCache, progress: Listener
) -> SpecModel | None:
    """All of it from the cache, if that has all of it."""
    restored = restore(source, options, cache, progress)
    if restored is None:
        return None
    return SpecModel(restored.served, restored.options, restored.program)


def _compile(
    source: Any,
    options: CompileOptions,
    cache: StepCache | None,
    progress: Listener,
    report: Callable[[str], None],
) -> SpecModel:
    """Trace and lower what the cache does not have."""
    # Imported here: a warm start needs none of transformers, export and Inductor.
    from mtpc.ahead import CachingCompiler
    from mtpc.backends.cpu import CpuBackend
    from mtpc.compiler import StepCompiler
    from mtpc.models.load import load, place

    # First: that there is no GPU should not be said after minutes of loading.
    store = cache.store if cache else None
    backend, fallback = choose_backend(options.backend, options.strict, report, store)
    loaded = load(source, options.dtype, needs_mtp=options.spec_tokens > 0)
    loaded = place(loaded, backend.device)
    compiler = StepCompiler(loaded, options, backend, progress)
    if cache is not None and isinstance(backend, CpuBackend):
        caching = CachingCompiler(compiler, backend, cache)
        program = caching.compile()
        if isinstance(source, Checkpoint) and caching.is_restorable:
            # As any later start does it: weights that are packed are not held in plain form, too.
            del loaded, compiler, caching, program
            return _restored(source, options, cache, progress) or _compile(
                source, options, None, progress, report
            )
    else:
        program = compiler.compile()
    spec = SpecModel(loaded.served(), compiler.options, program, loaded)
    spec.stats.fallbacks.update(backend.notes)
    if fallback is not None:
        spec.stats.fallbacks[fallback] += 1
    return spec


class SpecModel:
    """A compiled model: generates text, and says how it went.

    Attributes:
        served: vocabulary, end-of-sequence ids, tokenizer.
        options: what it was compiled with, `max_len` settled.
        program: the captured steps.
        loaded: the model behind it; None where all of it came from the cache, which in the end it
            does wherever a checkpoint's steps can be kept there.
        engine: the scheduler on top of the program.
    """

    def __init__(
        self,
        served: ServedModel,
        options: CompileOptions,
        program: Program,
        loaded: LoadedModel | None = None,
    ):
        self.served, self.options, self.program, self.loaded = served, options, program, loaded
        self.engine = Engine(program, options, served.vocab_size)

    @property
    def stats(self) -> Stats:
        """Acceptance, steps, replays per bucket and fallbacks since compilation."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        stop_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> Any:
        """Greedy continuations.

        Args:
            prompts: one prompt or several; a prompt is text (where the checkpoint has a
                tokenizer) or token ids.
            max_new_tokens: new tokens per prompt.
            stop_ids: ids that end a continuation; None takes the model's end-of-sequence ids.
            ignore_eos: do not stop at the model's end-of-sequence ids.

        Returns:
            Per prompt, the new text for text prompts, else the list of new ids (a stop token
            included); a single prompt gives a single result.

        Raises:
            RequestError: a prompt is empty, out of range or too long, or text without tokenizer,
                or the engine still has requests added by hand; nothing has run then.
            CapacityError: a prompt needs more pages than the pool has.
            NumericsError: the model produced non-finite logits.
        """
        if not hasattr(prompts, "__len__"):
            raise RequestError(f"prompts is {prompts!r}; expected text, token ids, or several")
        single = _is_single(prompts)
        batch: Sequence[Any] = [prompts] if single else list(prompts)
        stops = () if ignore_eos else self.served.stop_ids
        if stop_ids is not None:
            stops = tuple(stop_ids)
        requests = [self._request(prompt, max_new_tokens, stops) for prompt in batch]
        finished = self._run(requests)
        results = [self._result(p, r) for p, r in zip(batch, finished, strict=True)]
        return results[0] if single else results

    def _request(self, prompt: Prompt, max_new_tokens: int, stops: tuple[int, ...]) -> Request:
        """Form and check a request before any of its batch runs."""
        request = Request(-1, self._encode(prompt), max_new_tokens, stops)
        self.engine.check(request)
        return request

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.served.encode(prompt)
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() != 1:
                raise RequestError(
                    f"a prompt tensor has shape {tuple(prompt.shape)}; expected [length]"
                )
            prompt = prompt.tolist()
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt is neither text nor token ids: {error}") from None

    def _run(self, requests: list[Request]) -> list[Request]:
        """Serve requests to their end; an interrupt aborts them and leaves the engine usable."""
        if self.engine.has_work:
            raise RequestError(
                "the engine holds requests added by hand, whose outputs generate() would swallow; "
                "step the engine until it has no work, or abort them"
            )
        ids = [self.engine.add(r.prompt_ids, r.max_new_tokens, r.stop_ids) for r in requests]
        mine = {r.request_id: r for r in self.engine.waiting if r.request_id in set(ids)}
        try:
            while any(r.finish_reason is None for r in mine.values()):
                self.engine.step()
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        finished = [mine[request_id] for request_id in ids]
        for index, request in enumerate(finished):
            if request.finish_reason == "nonfinite":
                raise NumericsError(
                    f"prompt {index}: the model's logits became NaN or infinite after "
                    f"{len(request.output_ids)} new tokens; check the weights or use a wider dtype"
                )
        return finished

    def _result(self, prompt: Prompt, request: Request) -> str | list[int]:
        if not isinstance(prompt, str):
            return request.output_ids
        return self.served.decode(request.output_ids)


def _is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt: text, a row of ids, or a one-dimensional tensor."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() == 1
    return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
