"""The public surface: `compile` and the `SpecModel` it returns."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpc.backends import choose_backend
from mtpc.config import CompileOptions
from mtpc.engine.engine import Engine
from mtpc.engine.grammar import Grammar
from mtpc.engine.prompts import Prompt, grammar_each, is_single, sampling_each
from mtpc.engine.request import Request
from mtpc.engine.stats import Stats
from mtpc.engine.stream import Output, check_all, stream
from mtpc.engine.text import TextAssembler, stop_strings
from mtpc.errors import RequestError
from mtpc.layout.progress import Listener, Progress, line_reporter
from mtpc.program.child_process import build_apart
from mtpc.program.opening import kernel_store, open_cache
from mtpc.program.program import Program
from mtpc.program.restore import restore
from mtpc.program.step_cache import StepCache
from mtpc.sampling_params import SamplingParams
from mtpc.weights.checkpoint import Checkpoint, stored_dtype
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.models.load import LoadedModel


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
        progress: called with a `mtpc.Progress` at each stage of each bucket; by default
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
    parsed, report = CompileOptions.parse(options), line_reporter(progress)
    source = Checkpoint(Path(model)) if isinstance(model, (str, Path)) else model
    parsed = parsed.for_weights(stored_dtype(source))
    cache = open_cache(source, parsed, report)
    spec = None
    if cache is not None and isinstance(source, Checkpoint):
        spec = _restored(source, parsed, cache, progress)
        if spec is None and build_apart(source, parsed, cache, progress, report):
            spec = _restored(source, parsed, cache, progress)
    if spec is None:
        spec = _compile(source, parsed, cache, progress, report)
    if cache is not None:
        spec.stats.fallbacks.update(cache.notes)
    checkpoint = spec.loaded.checkpoint if spec.loaded else source
    spec.stats.fallbacks.update(checkpoint.notes if checkpoint else ())
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
    from mtpc.backends.cpu import CpuBackend
    from mtpc.backends.cuda import CudaBackend
    from mtpc.models.load import load, place
    from mtpc.program.caching_compiler import CachingCompiler
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.memory_plan import settle_pages

    # First: that there is no GPU should not be said after minutes of loading.
    store = kernel_store(options, cache)
    backend, fallback = choose_backend(options.backend, options.strict, report, store)
    loaded = load(source, options.dtype, needs_mtp=options.spec_tokens > 0)
    loaded = place(loaded, backend.device)
    if isinstance(backend, CudaBackend):
        options = settle_pages(loaded, options, backend, report)
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
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        **params: Any,
    ) -> Any:
        """Continuations, greedy unless told otherwise.

        Args:
            prompts: one prompt or several; a prompt is text (where the checkpoint has a
                tokenizer) or token ids.
            max_new_tokens: new tokens per prompt.
            stop_ids: ids that end a continuation; None takes the model's end-of-sequence ids.
            ignore_eos: do not stop at the model's end-of-sequence ids.
            stop: strings that end a text, for text prompts; the text is cut where the one that is
                complete first begins.
            sampling: how tokens are chosen, for all prompts or one for each; what is not greedy
                needs `sampling=True` of `compile`. A seed is used as it is for every prompt.
            grammar: what the text may be: of one prompt its grammar, of several a list with one,
                or None, for each. Needs `sampling=True, token_mask=True` of `compile`.
            **params: fields of `mtpc.SamplingParams`, in place of `sampling`: temperature=0.8.

        Returns:
            Per prompt, the new text for text prompts, else the list of new ids (a stop token
            included); a single prompt gives a single result.

        Raises:
            RequestError: a prompt is empty, out of range or too long, or text without tokenizer;
                `stop` is given for ids; a sampling parameter is out of range or was not compiled
                for; a grammar cannot be served; or the engine still has requests added by hand.
                Nothing has run then.
            CapacityError: a prompt needs more pages than the pool has.
            NumericsError: the model produced non-finite logits.
            GrammarError: a grammar raised, allows no token, or contradicts itself.
        """
        outputs = self.stream(
            prompts,
            max_new_tokens,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            stop=stop,
            sampling=sampling,
            grammar=grammar,
            **params,
        )
        single = is_single(prompts)
        batch: Sequence[Any] = [prompts] if single else list(prompts)
        results: list[Any] = ["" if isinstance(prompt, str) else [] for prompt in batch]
        for output in outputs:
            results[output.index] += output.token_ids if output.text is None else output.text
        return results[0] if single else results

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        stop_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        **params: Any,
    ) -> Iterator[Output]:
        """Continuations as they come; takes and raises what `generate` does.

        What is wrong with the arguments is raised at once; the prompts are queued when the first
        output is asked for. Closing the iterator aborts what is not finished.

        Returns:
            An iterator of `mtpc.engine.stream.Output`: which prompt, new ids, new text.
        """
        if not hasattr(prompts, "__len__"):
            raise RequestError(f"prompts is {prompts!r}; expected text, token ids, or several")
        batch: Sequence[Any] = [prompts] if is_single(prompts) else list(prompts)
        stops = self._stop_ids(stop_ids, ignore_eos)
        each = sampling_each(sampling, params, len(batch))
        grammars = grammar_each(grammar, len(batch))
        return self._stream(batch, max_new_tokens, stops, stop, each, grammars)

    def _stop_ids(self, stop_ids: Sequence[int] | None, ignore_eos: bool) -> tuple[int, ...]:
        if stop_ids is not None:
            return tuple(stop_ids)
        return () if ignore_eos else self.served.stop_ids

    def _stream(
        self,
        batch: Sequence[Prompt],
        max_new_tokens: int,
        stops: tuple[int, ...],
        stop: Any,
        sampling: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
    ) -> Iterator[Output]:
        """Form and check all requests before any of them runs."""
        strings = stop_strings(stop)
        if strings and not all(isinstance(prompt, str) for prompt in batch):
            raise RequestError("stop strings need text prompts; give stop_ids for token ids")
        requests = [
            Request(-1, self._encode(p), max_new_tokens, stops, sampling=chosen, grammar=grammar)
            for p, chosen, grammar in zip(batch, sampling, grammars, strict=True)
        ]
        check_all(self.engine, requests)
        decode = self.served.decode
        texts = [TextAssembler(decode, strings) if isinstance(p, str) else None for p in batch]
        return stream(self.engine, requests, texts)

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
