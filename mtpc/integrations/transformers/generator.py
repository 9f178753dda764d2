"""`model.generate` with mtpc's steps instead of transformers' decoding loop.

transformers offers the argument `custom_generate` of `generate` for this: a callable that gets the
model, the ids, and everything that `generate` has prepared. transformers (5.17 to 5.24) does not
pass four of the user's arguments to the callable: `streamer`, `tokenizer`, `assistant_model` and
`synced_gpus`. `Generator.generate` passes the first two in other ways, and refuses the third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, generation
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.continuous_batching.requests import GenerationOutput

from mtpc import SamplingParams, SpecModel, compile
from mtpc.engine.request import Request
from mtpc.errors import OptionError, RequestError
from mtpc.integrations.transformers.batching import (
    batch_arguments,
    decode_batch,
    refuse_host_criteria,
    refuse_manager,
)
from mtpc.integrations.transformers.decoding import Columns, decode
from mtpc.integrations.transformers.fields import check_fields
from mtpc.integrations.transformers.inputs import check_model_arguments, padding_lengths
from mtpc.integrations.transformers.processors import Wanted, sampling_params
from mtpc.integrations.transformers.stopping import StopPlan, stop_plan
from mtpc.layout.progress import Listener
from mtpc.plan import DEFAULT_MAX_LEN
from mtpc.sampling_params import MAX_SEED

_ATTACHED = ("generate", "generate_batch", "init_continuous_batching")
LARGEST_BUCKET = 8
"""The most requests per step that `generate` compiles for one call. Further rows wait."""


class Job:
    """One call of `generate`. It is checked as far as possible without a compiled model.

    Args:
        input_ids: int64 [rows, length], including padding, with one row per returned sequence.
        prepared: the arguments that `generate` passes to a decoding loop.
        streamer: transformers' streamer, or None.

    Raises:
        RequestError: an argument cannot be honoured. The message names it.
    """

    def __init__(self, input_ids: Tensor, prepared: Mapping[str, Any], streamer: Any | None):
        arguments = dict(prepared)
        self.config: GenerationConfig = arguments.pop("generation_config")
        processors = arguments.pop("logits_processor")
        criteria = arguments.pop("stopping_criteria")
        check_fields(self.config)
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise RequestError(
                f"input_ids has shape {tuple(input_ids.shape)}; expected [rows, length] with at "
                "least one token per row: give input_ids (inputs_embeds alone are not supported)"
            )
        self.input_ids, self.streamer = input_ids, streamer
        padding = padding_lengths(input_ids, arguments.pop("attention_mask", None))
        check_model_arguments(arguments, padding)
        rows = zip(input_ids.tolist(), padding.tolist(), strict=True)
        self.prompts: list[list[int]] = [row[skip:] for row, skip in rows]
        pad: Tensor | None = getattr(self.config, "_pad_token_tensor", None)
        self.plan: StopPlan = stop_plan(criteria, pad, input_ids.shape[1])
        wanted = Wanted(input_ids.shape[1], padding, self.plan.stop_ids)
        self.sampling: SamplingParams = sampling_params(
            processors, wanted, bool(self.config.do_sample), self.plan.max_new_tokens
        )

    def run(self, spec: SpecModel) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode on a compiled model; see `decode` for the errors.

        Returns:
            int64 [rows, length + new tokens], or transformers' output object with
            `return_dict_in_generate`.
        """
        columns = Columns(self.input_ids, self.plan, self.streamer)
        sequences: Any = decode(spec.engine, self.requests(), columns)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def requests(self) -> list[Request]:
        """The rows as requests, not added yet."""
        return [
            Request(-1, prompt, self.plan.max_new_tokens, self.plan.stop_ids, sampling=params)
            for prompt, params in zip(self.prompts, self._seeded(), strict=True)
        ]

    def _seeded(self) -> list[SamplingParams]:
        """Each row's parameters. torch's generator gives the seeds, so `manual_seed` applies."""
        if not self.config.do_sample:
            return [self.sampling] * len(self.prompts)
        seeds = torch.randint(0, MAX_SEED, (len(self.prompts),), dtype=torch.int64)
        return [replace(self.sampling, seed=seed) for seed in seeds.tolist()]


class Generator:
    """Compiled steps of one model, for its `generate`.

        generator = mtpc.transformers.Generator(model, spec_tokens=3)
        model.generate(**inputs, custom_generate=generator)
        generator.generate(**inputs, streamer=streamer)     # The same, with all arguments.
        generator.attach()                                  # model.generate is it from here on.

    It owns the compiled steps, and only `attach` changes the model. If the model's weights change
    in place later, make a new Generator: packed copies and pages of the prefix cache keep the old
    weights.

    Args:
        model: a transformers model, loaded from a local checkpoint directory that has MTP layers.
        spec: a compiled model of the same checkpoint; None compiles one.
        progress: see `mtpc.compile`.
        **options: options of `mtpc.compile`, if `spec` is None.

    Raises:
        OptionError: both `spec` and options are given, or an option is invalid.
        RequestError: `spec` was compiled for another model.
        MtpcError: see `mtpc.compile`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        spec: SpecModel | None = None,
        progress: Listener | None = None,
        **options: Any,
    ):
        if spec is not None and options:
            raise OptionError(
                f"{next(iter(options))} was given together with spec, which is compiled already; "
                "give one of them"
            )
        if spec is None:
            spec = compile(model, progress=progress, **options)
        _check_same_model(spec, model)
        self.model, self.spec = model, spec

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        token_streamer: Any | None = None,
        **prepared: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode a batch. transformers' `generate` calls this instead of its own loop.

        Args:
            model: the model that was compiled.
            input_ids: int64 [rows, length].
            token_streamer: a streamer, or None. transformers' `generate` passes on this argument,
                but not `streamer`.
            **prepared: generation_config, logits_processor, stopping_criteria, and arguments of
                the model's forward.

        Returns:
            int64 [rows, length + new tokens], or transformers' output object with
            `return_dict_in_generate`.

        Raises:
            RequestError: an argument cannot be honoured, or a row is too long. Nothing has run.
            CapacityError: a row needs more pages than the pool has. Nothing has run.
            NumericsError: the model produced non-finite logits.
            ServingError: another caller aborted a row.
        """
        if model is not self.model:
            raise RequestError(
                "custom_generate is a Generator of another model object; make one for this model"
            )
        return Job(input_ids, prepared, token_streamer).run(self.spec)

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        streamer: Any | None = None,
        tokenizer: Any | None = None,
        **arguments: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Call `model.generate`. Every argument is honoured, or refused by name.

        Args:
            inputs: see `model.generate`.
            streamer: receives the prompt, then one token of each row at a time, then the end.
            tokenizer: needed with `stop_strings`.
            **arguments: all other arguments of `model.generate`.

        Returns:
            See `__call__`.

        Raises:
            RequestError: `assistant_model`, `assistant_tokenizer` or `custom_generate` is given, or
                transformers' paged cache.
            MtpcError: see `__call__`.
        """
        for name in ("assistant_model", "assistant_tokenizer", "custom_generate"):
            if arguments.pop(name, None) is not None:
                raise RequestError(
                    f"{name} was given; mtpc drafts with the model's own MTP layers: leave it out"
                )
        if arguments.get("cache_implementation") == "paged":
            raise RequestError(
                "cache_implementation is 'paged', with which transformers decodes by itself and "
                "never calls mtpc; leave it out (mtpc's steps have a paged cache of their own), or "
                "call generate_batch"
            )
        places = (arguments.get("generation_config"), self.model.generation_config)
        if arguments.get("use_mtp") or any(getattr(place, "use_mtp", None) for place in places):
            # The step uses MTP anyway. Of a call with `use_mtp` transformers would refuse what its
            # own loop cannot do: recurrent models, several returned sequences.
            arguments["use_mtp"] = False
        if tokenizer is not None:
            arguments = self._with_stop_strings(arguments, tokenizer)
        model_class: Any = type(self.model)
        return model_class.generate(
            self.model, inputs, custom_generate=self, token_streamer=streamer, **arguments
        )

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> dict[str, GenerationOutput]:
        """Decode prompts of any lengths together, as the model's own continuous batching does.

        Args:
            inputs: token ids of each prompt, without padding.
            generation_config: None: the model's.
            **arguments: of `model.generate_batch`: max_new_tokens, and those that change no token.

        Returns:
            By transformers' names ("req_0", and "req_0__child#0" before it where a prompt has
            several sequences), the requests' outputs, in the order of the prompts.

        Raises:
            RequestError: an argument cannot be honoured, or a prompt is too long. Nothing has run.
            MtpcError: see `__call__`.
        """
        limit = batch_arguments(arguments)
        jobs = [self._prepared(list(ids), generation_config, limit) for ids in inputs]
        refuse_host_criteria(job.plan for job in jobs)
        return decode_batch(self.spec.engine, [job.requests() for job in jobs])

    def _prepared(
        self, ids: list[int], config: GenerationConfig | None, limit: dict[str, int]
    ) -> Job:
        """A call of `generate` for one prompt, as transformers prepares it, that has not run."""

        def job(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Job:
            return Job(input_ids, prepared, None)

        model_class: Any = type(self.model)
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        # As `generate`: a step uses MTP anyway. Padding is what the mask says, none.
        options = {"custom_generate": job, "attention_mask": torch.ones_like(prompt), **limit}
        found: Job = model_class.generate(
            self.model, prompt, generation_config=config, use_mtp=False, **options
        )
        return found

    def attach(self) -> None:
        """Make the model's `generate` and `generate_batch` this generator's, until `detach`.

        Then whatever calls them (a pipeline, `generate(use_mtp=True)`) decodes with mtpc's steps,
        or gets an error. So does what makes transformers' own batching, `init_continuous_batching`.
        transformers sets a model's `generate` in the same way for a checkpoint that has a loop of
        its own. The attributes are of this model object alone.
        """
        own = (self.generate, self.generate_batch, refuse_manager)
        vars(self.model).update(zip(_ATTACHED, own, strict=True))

    def detach(self) -> None:
        """Give the model its own methods back. Does nothing if it has them."""
        for name in _ATTACHED:
            vars(self.model).pop(name, None)

    def _with_stop_strings(self, arguments: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Replace stop strings, of an argument or a config, with transformers' own criterion."""
        places = (arguments.get("generation_config"), self.model.generation_config)
        found = [arguments.get("stop_strings")]
        found += [getattr(place, "stop_strings", None) for place in places]
        strings = next((strings for strings in found if strings is not None), None)
        if strings is None:
            return arguments
        criterion = generation.StopStringCriteria(tokenizer, strings)
        criteria = [*(arguments.get("stopping_criteria") or ()), criterion]
        # None as an argument keeps transformers from asking for the tokenizer again.
        return {
            **arguments,
            "stop_strings": None,
            "stopping_criteria": generation.StoppingCriteriaList(criteria),
        }


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    spec: SpecModel | None = None,
    spec_tokens: int | str = 3,
    compile_options: Mapping[str, Any] | None = None,
    token_streamer: Any | None = None,
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """One call of `generate`: `model.generate(**inputs, custom_generate=generate, spec_tokens=3)`.

    Without `spec` it compiles steps for this call alone, which takes seconds to minutes. It takes
    less time if the graph cache has the steps (backend cpu). For several calls give `spec`, or use
    `Generator`.

    Args:
        model: the model whose `generate` calls this function.
        input_ids: int64 [rows, length].
        spec: a compiled model of the same checkpoint; None compiles one.
        spec_tokens: drafts per step, if `spec` is None.
        compile_options: further options of `mtpc.compile`. The call determines the batch bucket,
            and a max_len above 4096, unless they are given here.
        token_streamer: see `Generator.__call__`.
        **prepared: see `Generator.__call__`.

    Returns:
        See `Generator.__call__`.

    Raises:
        RequestError: `spec` was compiled for another model.
        MtpcError: see `Generator.__call__` and `mtpc.compile`.
    """
    job = Job(input_ids, prepared, token_streamer)
    if spec is None:
        options = {"spec_tokens": spec_tokens, **_options_for(job), **(compile_options or {})}
        spec = compile(model, **options)
    _check_same_model(spec, model)
    return job.run(spec)


def _options_for(job: Job) -> dict[str, Any]:
    """Options that one call needs. They take few values, so that the graph cache has hits."""
    rows, length = len(job.prompts), job.input_ids.shape[1] + job.plan.max_new_tokens
    bucket = min(1 << (rows - 1).bit_length(), LARGEST_BUCKET)
    limit = {"max_len": length} if length > DEFAULT_MAX_LEN else {}
    return {"batch_buckets": (bucket,), **limit}


def _check_same_model(spec: SpecModel, model: PreTrainedModel) -> None:
    """Check that `spec` was compiled for this model, as far as possible.

    A SpecModel from the cache holds no model object, so only its vocabulary size is compared.

    Raises:
        RequestError: `spec` was compiled for another model.
    """
    embedding: Any = model.get_input_embeddings().weight
    vocab = embedding.shape[0]
    if spec.served.vocab_size != vocab:
        raise RequestError(
            f"spec was compiled for {spec.served.vocab_size} token ids, the model has {vocab}; "
            "compile this model's checkpoint"
        )
    adopted = spec.loaded if spec.loaded is not None and not spec.loaded.owned else None
    if adopted and adopted.target.get_input_embeddings().weight is not embedding:
        raise RequestError("spec was compiled from another model object; compile this one")
