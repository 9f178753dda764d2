"""The public surface: `compile` and the `SpecModel` it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mtpc.acceptance import settle
from mtpc.config import CompileOptions
from mtpc.engine.admission import usable_ends
from mtpc.engine.completion import Collector
from mtpc.engine.engine import Engine
from mtpc.engine.forced import score, scoring_request
from mtpc.engine.grammar import Grammar
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.prompts import (
    Prompt,
    encode,
    end_ids,
    grammar_each,
    is_conversation,
    is_single,
    is_text,
    sampling_each,
    token_ids,
)
from mtpc.engine.request import Request
from mtpc.engine.rows import write_synthetic_draws
from mtpc.engine.stats import Stats
from mtpc.engine.stream import Output, check_all, stream
from mtpc.engine.text import TextAssembler, stop_strings
from mtpc.engine.vision import Messages, Vision, split_images
from mtpc.errors import OptionError, RequestError
from mtpc.layout import PROMPT_EMBEDS
from mtpc.layout.display import show_compiling
from mtpc.layout.progress import Listener
from mtpc.program.background import Background
from mtpc.program.binding import bind_program
from mtpc.program.cost_entry import CostEntry
from mtpc.program.follow import FollowingProgram, LeadingProgram, ranked
from mtpc.program.open_steps import Assembler, open_steps
from mtpc.program.program import Program
from mtpc.sampling_params import SamplingParams, TokenLogprobs
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.models.load import LoadedModel


def compile(model: Any, progress: Listener | None = None, **options: Any) -> SpecModel:
    """Compile a model with MTP layers into captured propose-and-verify steps.

    Steps that the graph cache holds are loaded, all others are compiled and kept there; see
    docs/cache.md.

    Args:
        model: a checkpoint directory (str or Path), an id of the local hub cache, or a transformers
            model loaded from one; a model object is shared, not copied, and left as it was.
        progress: called with a `mtpc.Progress` at each stage of each bucket, and meanwhile where a
            stage is long. By default the logger `mtpc` gets a line a stage; where it is not on for
            level INFO, a terminal (stderr) or a notebook shows the stage, a bar and the time left.
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
        RankError: with `tensor_parallel_size`, another rank fails or has other inputs.
        CacheError: another user could have written the cache; or it is frozen, and lacks a step.
    """
    with show_compiling(progress) as listener:
        bind = partial(bind_program, listener=listener)
        assembler = Assembler("fused", True, bind, lambda compiler: compiler.compile())
        opened = open_steps(model, options, assembler, listener)
    opened.made.identity = opened.identity
    if opened.cache is not None and opened.options.spec_tiers:
        opened.made.costs = CostEntry(opened.cache)
    program = opened.made if opened.ranks is None else ranked(opened.made, opened.ranks)
    spec = SpecModel(opened.served, opened.options, program, opened.loaded)
    spec.stats.fallbacks.update(opened.fallbacks)
    if opened.rest is not None:
        background = Background(opened.rest, program, listener)
        spec._end_building = weakref.finalize(spec, background.close)
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
        vision: turns images into what the engine takes; None without `images=True`.
    """

    def __init__(
        self,
        served: ServedModel,
        options: CompileOptions,
        program: Program,
        loaded: LoadedModel | None = None,
    ):
        self.options, self.program, self.loaded = options, program, loaded
        self.engine = Engine(program, options, served.vocab_size)
        self.served = usable_ends(served, self.stats.fallbacks)
        self.vision: Vision | None = None
        if options.images:
            rows = program.shared[PROMPT_EMBEDS]
            self.vision = Vision(self.served, rows.dtype, rows.device, self.stats)
        self._end_building: Callable[[], object] = lambda: None

    def follow(self) -> None:
        """In a rank other than 0: run what rank 0 runs, until it calls `close`.

        Raises:
            RankError: rank 0, or another rank, has ended.
            RequestError: no other rank leads this one.
        """
        if not isinstance(self.program, FollowingProgram):
            raise RequestError("follow() is for ranks other than 0 of tensor_parallel_size > 1")
        self.program.follow()

    def __repr__(self) -> str:
        """One line: the model, what it was compiled with, and its number of steps."""
        options = self.options
        drafts = ",".join(map(str, options.tiers))
        buckets = ",".join(map(str, options.batch_buckets))
        return (
            f"<SpecModel {self.served.name!r}: spec_tokens {drafts}, batch_buckets {buckets}, "
            f"max_len {options.max_len}, backend {options.backend}, {len(self.program.steps)} "
            f"steps, vocabulary of {self.served.vocab_size}>"
        )

    def close(self) -> None:
        """End a build in the background; the model goes on with the steps that it has.

        Pages and snapshots are written to `kv_offload_dir`, if there is one, and the costs of steps
        to the graph cache, if the engine chooses K.

        Rank 0 of several lets the others return from `follow`. Nothing runs there afterwards.
        """
        self._end_building()
        self.engine.close()
        if isinstance(self.program, LeadingProgram):
            self.program.close()

    def set_synthetic_acceptance(self, rates: Sequence[float]) -> None:
        """Change how many drafts the next steps accept.

        Args:
            rates: as the option `synthetic_acceptance_rates`, one for each of the most drafts.

        Raises:
            OptionError: the model was compiled without synthetic acceptance, or these are no rates.
        """
        settled = settle(self.options.spec_tokens, rates, None)
        if not (settled and self.options.synthetic_acceptance_rates):
            raise OptionError(
                f"rates are {rates!r}; expected some, and a model that was compiled with "
                "synthetic_acceptance_rates"
            )
        write_synthetic_draws(self.program, settled)
        self.stats.synthetic_acceptance_rates = settled

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
                tokenizer), token ids, or a list of messages for the checkpoint's chat template. A
                message's content is text, or a list of parts: {"type": "text", "text": ...} and,
                with `images=True` of `compile`, {"type": "image", "image": ...}, with a path,
                bytes or a Pillow image.
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
            Per prompt, a `mtpc.Completion` for text and messages, which is the new text as a `str`;
            else a `mtpc.TokenCompletion`, which is a list of the new ids (a stop token included).
            Both have the token ids, the finish reason, log-probabilities and times. A single prompt
            gives a single result.

        Raises:
            RequestError: a prompt is empty, out of range or too long, or text without tokenizer;
                an image cannot be opened; `stop` is given for ids; a sampling parameter is out of
                range or was not compiled for; a grammar cannot be served; or the engine still has
                requests added by hand. Nothing has run then.
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
        collectors = [Collector(is_text(prompt)) for prompt in batch]
        for output in outputs:
            collectors[output.index].add(output)
        results = [collector.completion() for collector in collectors]
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
        batch: Sequence[Any] = [prompts] if is_single(prompts) else list(prompts)
        ends = end_ids(self.served, stop_ids, ignore_eos)
        each = sampling_each(sampling, params, len(batch))
        grammars = grammar_each(grammar, len(batch))
        strings = stop_strings(stop)
        if strings and not all(map(is_text, batch)):
            raise RequestError("stop strings need text prompts; give stop_ids for token ids")
        rows = zip(map(self._encode, batch), each, grammars, strict=True)
        requests = [
            Request(-1, ids, max_new_tokens, ends, chosen, grammar=rules, images=images)
            for (ids, images), chosen, rules in rows
        ]
        check_all(self.engine, requests)
        decode = self.served.decode
        texts = [TextAssembler(decode, strings) if is_text(p) else None for p in batch]
        return stream(self.engine, requests, texts)

    def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None, top: int = 1
    ) -> list[list[TokenLogprobs]]:
        """Log-probabilities of given tokens, each by what stands before it.

        Args:
            prompts: token ids, two or more each.
            starts: for each prompt the first token to score, at least 1; None scores all but the
                first token, which nothing predicts.
            top: how many of the most probable tokens to report beside each, up to `max_logprobs`.

        Returns:
            For each prompt an entry for each token from its start on.

        Raises:
            RequestError: the model was compiled without `sampling=True, token_mask=True`; or a
                prompt or start is out of range.
            NumericsError: the model produced non-finite logits.
        """
        firsts = [1] * len(prompts) if starts is None else list(starts)
        rows = [token_ids("prompts", prompt) for prompt in prompts]
        size = self.served.vocab_size
        requests = [scoring_request(*row, top, size) for row in zip(rows, firsts, strict=True)]
        return score(self.engine, requests)

    def _encode(self, prompt: Prompt) -> tuple[list[int], PromptImages | None]:
        """The token ids of one prompt, and its images, which are opened and embedded here."""
        if not is_conversation(prompt):
            return encode(self.served, prompt), None
        messages, images = split_images(cast("Messages", prompt))
        if images and self.vision is None:
            raise RequestError("the messages have images; compile the model with images=True")
        ids = self.served.encode_messages(messages)
        if images and self.vision is not None:
            return self.vision.place(ids, images, self.engine.longest)
        return ids, None
