"""The public surface: `compile` and the `SpecModel` it returns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from torch import Tensor

from mtpc.config import CompileOptions
from mtpc.engine.admission import usable_ends
from mtpc.engine.engine import Engine
from mtpc.engine.request import Request
from mtpc.engine.rows import write_synthetic_draws
from mtpc.engine.stats import Stats
from mtpc.errors import OptionError, RequestError
from mtpc.layout import PROMPT_EMBEDS
from mtpc.layout.display import show_compiling
from mtpc.layout.progress import Listener
from mtpc.plan import Plan
from mtpc.program.open_steps import Prepared, Wanted, open_steps
from mtpc.program.program import Program, bind_program
from mtpc.sampling_params import SamplingParams, TokenLogprobs
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.arguments import CompileArguments, SamplingArguments
    from mtpc.engine.completion import Completion, TokenCompletion
    from mtpc.engine.grammar import Grammar
    from mtpc.engine.prompt_images import PromptImages
    from mtpc.engine.prompts import GenerateArguments, Prompt
    from mtpc.engine.stream import Output
    from mtpc.engine.vision import Messages, Vision
    from mtpc.models.load import LoadedModel
    from mtpc.program.child_process import Background


def compile(
    model: Any,
    progress: Listener | None = None,
    *,
    reads_text: bool = False,
    **options: Unpack[CompileArguments],
) -> SpecModel:
    """Compile a model with MTP layers into captured steps that verify and propose drafts.

    Steps that are in the graph cache are loaded. The others are compiled and added to it; see
    docs/cache.md.

    Args:
        model: a checkpoint directory (str or Path), an id of the hub (ORG/NAME), or a transformers
            model loaded from one; a model object is shared, not copied, and left as it was.
        progress: called with a `mtpc.Progress` at each stage of each bucket, and repeatedly during
            a long stage. By default the logger `mtpc` gets one line per stage. If it does not show
            INFO, a terminal (stderr) or a notebook shows the stage, a bar and the time left.
        reads_text: load the tokenizer before the weights. That lowers the peak of memory where
            prompts will be text; by default it is loaded when the first text comes.
        **options: fields of `mtpc.CompileOptions`, which `help(mtpc.compile)` lists, or their
            aliases (`num_speculative_tokens` for `spec_tokens`).

    Returns:
        A `SpecModel`.

    Raises:
        OptionError: an option is unknown or out of range.
        CheckpointError: the checkpoint is incomplete or damaged; or K is given, and nothing drafts.
        UnsupportedModelError: the architecture is not supported.
        CapacityError: the page pool is too small for any request.
        BackendError: the backend cannot run here.
        RankError: with `tensor_parallel_size`, another rank fails or was given other inputs.
        CacheError: another user can write the cache; or it is frozen, and lacks a step.
    """
    asked = CompileOptions.parse({**options})
    with show_compiling(progress) as listener:

        def bind(found: Prepared) -> Program:
            costs = None
            if found.cache and found.plan.spec_tiers:
                from mtpc.store.costs import CostEntry

                costs = CostEntry(found.cache.store, found.cache.program, found.plan.frozen)
            return bind_program(found.built, listener, found.identity, costs)

        opened = open_steps(model, asked, Wanted("fused", True, bind, reads_text), listener)
    found = opened.model
    program = opened.made
    if opened.ranks is not None:
        from mtpc.program.follow import ranked

        program = ranked(program, opened.ranks)
    rest = None
    if opened.rest is not None:
        from mtpc.program.child_process import Background

        rest = Background(opened.rest, program, listener)
    of_model = (found.served, found.plan, program, found.loaded)
    return SpecModel(*of_model, opened.fallbacks, rest)


if compile.__doc__ and CompileOptions.__doc__:  # Not with `python -OO`.
    _listed = CompileOptions.__doc__.partition("Attributes:")[2].partition("Raises:")[0]
    compile.__doc__ += f"\n    Options:{_listed}"


class SpecModel:
    """A compiled model: generates text, and keeps statistics.

    Attributes:
        served: vocabulary, end-of-sequence ids, tokenizer.
        options: what it was compiled with, as a `mtpc.plan.Plan`: nothing in it is open.
        program: the captured steps.
        loaded: the model's modules. None where the weights come from a checkpoint's files, as on
            the cpu backend, whether the steps were in the graph cache or not.
        engine: schedules requests on the program.
        vision: opens and embeds images for the engine; None without `images=True`.
    """

    def __init__(
        self,
        served: ServedModel,
        options: Plan,
        program: Program,
        loaded: LoadedModel | None = None,
        fallbacks: Mapping[str, int] | None = None,
        background: Background | None = None,
    ):
        self.options, self.program, self.loaded = options, program, loaded
        self.engine = Engine(program, options, served.vocab_size)
        self.served = usable_ends(served, self.stats.fallbacks)
        self.vision: Vision | None = None
        if options.images:
            from mtpc.engine.vision import Vision  # Not above: few programs need it.

            rows = program.shared[PROMPT_EMBEDS]
            self.vision = Vision(self.served, rows.dtype, rows.device, self.stats)
        self.stats.fallbacks.update(fallbacks or {})
        close = background.close if background is not None else lambda: None
        self._end_building = weakref.finalize(self, close)

    def follow(self) -> None:
        """On a rank other than 0: run the steps that rank 0 runs, until it calls `close`.

        Raises:
            RankError: rank 0, or another rank, has ended.
            RequestError: this is rank 0, or the only rank.
        """
        from mtpc.program.follow import FollowingProgram

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
        """End a background build, and write what later processes reuse.

        Pages and snapshots go to `kv_offload_dir`, if it is set. If the engine chooses K, the costs
        of steps go to the graph cache. The model can still generate with the steps that it has. On
        rank 0 of several, the other ranks return from `follow`, and no step can run afterwards.
        """
        self._end_building()
        self.engine.close()
        self.program.close()

    def set_synthetic_acceptance(self, rates: Sequence[float]) -> None:
        """Change how many drafts the next steps accept.

        Args:
            rates: as the option `synthetic_acceptance_rates`, one for each of the K drafts.

        Raises:
            OptionError: the model was compiled without synthetic acceptance, or a rate is invalid.
        """
        from mtpc.acceptance import settle

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

    @overload
    def generate(  # type: ignore[overload-overlap]  # A text is a sequence of texts, too.
        self,
        prompts: str | Messages,
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int],
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> TokenCompletion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Messages],
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> list[TokenCompletion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> list[Completion | TokenCompletion]: ...

    @overload
    def generate(
        self,
        prompts: Tensor,
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> TokenCompletion | list[TokenCompletion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        **arguments: Unpack[GenerateArguments],
    ) -> Any:
        """Continue prompts, by greedy decoding unless sampling parameters are given.

        Args:
            prompts: one prompt or several. A prompt is text (if the checkpoint has a tokenizer),
                token ids, or a list of messages for the checkpoint's chat template. A message's
                content is text, or a list of parts: {"type": "text", "text": ...} and, if the
                model was compiled with `images=True`, {"type": "image", "image": ...}, with a
                path, bytes or a Pillow image.
            max_new_tokens: new tokens per prompt.
            stop_ids: ids that end a continuation; None takes the model's end-of-sequence ids.
            ignore_eos: do not stop at the model's end-of-sequence ids.
            stop: strings that end a text, for text prompts. The string that is complete first
                counts, and the text ends before it.
            sampling: how tokens are chosen: one value for all prompts, or one per prompt. What is
                not greedy needs `sampling`, a default of `compile`. All prompts use the same seed.
            grammar: limits what the text may be: a grammar for one prompt, or a list with a grammar
                or None for each of several. Needs `token_mask`, a default of `compile`.
            **arguments: those above, after `max_new_tokens`, and fields of `mtpc.SamplingParams`
                in place of `sampling`, as temperature=0.8.

        Returns:
            One result per prompt; for a single prompt, the result itself. For text and messages it
            is a `mtpc.Completion`, which is the new text as a `str`. For token ids it is a
            `mtpc.TokenCompletion`, which is a list of the new ids, a stop token included. Both have
            the token ids, the finish reason, log-probabilities and times.

        Raises:
            RequestError: a prompt is empty, out of range or too long, or is text without a
                tokenizer; an image cannot be opened; `stop` is given for ids; a sampling parameter
                is out of range, or the model was compiled without it; a grammar cannot be used; or
                the engine still has requests that the caller added. Nothing has run.
            CapacityError: a prompt needs more pages than the pool has.
            NumericsError: the model produced non-finite logits.
            GrammarError: a grammar raised, allows no token, or contradicts itself.
        """
        from mtpc.engine.completion import Collector  # Not above: engines serve without it.
        from mtpc.engine.prompts import is_single, is_text

        outputs = self.stream(prompts, max_new_tokens, **arguments)
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
        stop: str | Sequence[str] | None = (),
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        **params: Unpack[SamplingArguments],
    ) -> Iterator[Output]:
        """Yield continuations as they are decoded; takes and raises what `generate` does.

        Errors in the arguments are raised at once. The prompts are queued when the first output is
        asked for. Closing the iterator aborts unfinished requests.

        Returns:
            An iterator of `mtpc.engine.stream.Output`: which prompt, new ids, new text.
        """
        from mtpc.engine.prompts import end_ids, grammar_each, is_single, is_text, sampling_each
        from mtpc.engine.stream import check_all, stream
        from mtpc.engine.text import TextAssembler, stop_strings

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
        """Log-probabilities of given tokens, each given the tokens before it.

        Args:
            prompts: token ids, two or more each.
            starts: for each prompt the index of the first token to score, at least 1. None scores
                all tokens but the first, which has no context.
            top: how many of the most probable tokens to report with each, up to `max_logprobs`.

        Returns:
            For each prompt, one entry per scored token.

        Raises:
            RequestError: the model was compiled without `sampling` or `token_mask`; or a prompt
                or start is out of range.
            NumericsError: the model produced non-finite logits.
        """
        from mtpc.engine.admission import token_ids
        from mtpc.engine.forced import score, scoring_request

        firsts = [1] * len(prompts) if starts is None else list(starts)
        rows = [token_ids("prompts", prompt) for prompt in prompts]
        size = self.served.vocab_size
        requests = [scoring_request(*row, top, size) for row in zip(rows, firsts, strict=True)]
        return score(self.engine, requests)

    def _encode(self, prompt: Prompt) -> tuple[list[int], PromptImages | None]:
        """Tokenise a prompt, and open and embed its images."""
        from mtpc.engine.prompts import encode, is_conversation

        if not is_conversation(prompt):
            return encode(self.served, prompt), None
        from mtpc.engine.vision import split_images

        messages, images = split_images(cast("Messages", prompt))
        if images and self.vision is None:
            raise RequestError("the messages have images; compile the model with images=True")
        ids = self.served.encode_messages(messages)
        if images and self.vision is not None:
            return self.vision.place(ids, images, self.engine.longest)
        return ids, None
