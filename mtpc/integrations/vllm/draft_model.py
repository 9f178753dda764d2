"""A draft model class for vLLM: traced MTP layers with the interface of vLLM's draft models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.sequence import IntermediateTensors

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.draft_config import draft_config
from mtpc.integrations.vllm.attention import make_attention
from mtpc.integrations.vllm.layers import VllmLayers
from mtpc.integrations.vllm.rules import HOST_RULES, OWN_DRAFT

RULES = ("host", "model")
"""Values of `additional_config={"mtpc": {"draft_rules": ...}}`: "host" drafts as vLLM's class does,
"model" as mtpc and the model's authors do."""


class TracedMTP(nn.Module):
    """All MTP layers of a model, each a `TracedDraft` over vLLM's attention and linear layers.

    vLLM constructs this module, loads the target's checkpoint into it, and sets the target's
    embedding and head. The module has no embedding or head of its own.

    Args:
        vllm_config: vLLM's config for drafts, whose `model_config` is the target's.
        prefix: prefix of the names of the layers.

    Raises:
        UnsupportedModelError: the config asks for pipeline or expert parallelism, expert load
            balancing or LoRA; or `TracedDraft` refuses it.
        OptionError: `additional_config["mtpc"]` has an unknown name or value.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        refuse_unsupported(vllm_config)
        self.config = _draft_model(vllm_config).hf_config
        self.rules = HOST_RULES[self.config.architectures[0]]
        follows_host = _draft_rules(vllm_config.additional_config) == "host"
        self.head_norms = follows_host and self.rules.recycles_unnormed
        fields = read_fields(vllm_config)
        family, config = draft_config(fields, self.rules.architecture, host_loads=True)
        text = config.get_text_config(decoder=True)
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.lm_head: Any = None
        inner: Any = nn.Module()
        inner.embed_tokens = None
        self.model: Any = inner
        layers = VllmLayers(vllm_config, self.rules.quantises_joint)
        drafts = []
        for index in range(family.num_mtp_layers(text) or 1):
            options = DraftOptions(
                index=index,
                dtype=_draft_model(vllm_config).dtype,
                device=vllm_config.device_config.device,
                architecture=self.rules.architecture,
                zero_first_embedding=self.rules.zero_first_embedding if follows_host else None,
                returns="before_final_norm" if self.head_norms else "after_final_norm",
            )
            name = f"{prefix}.mtpc_draft.layers" if prefix else "mtpc_draft.layers"
            layer = f"{name}.{text.num_hidden_layers + index}"
            attention = partial(make_attention, vllm_config=vllm_config, prefix=layer)
            drafts.append(TracedDraft(fields, attention, options, layers))
        self.drafts: Any = nn.ModuleList(drafts)
        self._to_compile = vllm_config.compilation_config.mode != CompilationMode.NONE

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed token ids [T] with the target's embedding; returns [T, H]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run one draft step over flat rows.

        Args:
            input_ids: int64 [T]; may be None if `inputs_embeds` is given.
            positions: int64 [T].
            hidden_states: [T, H].
            intermediate_tensors: unused.
            inputs_embeds: [T, H], embeddings to use instead of those of `input_ids`.
            spec_step_idx: index of the draft step, which selects the MTP layer.

        Returns:
            Hidden states [T, H]; twice, as a pair, if vLLM's proposer expects one.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        # vLLM's V2 runner captures forwards of drafts. Nothing is compiled inside a capture.
        if self._to_compile and not torch.cuda.is_current_stream_capturing():
            self._compile(inputs_embeds, positions, hidden_states)
        draft = self.drafts[spec_step_idx % len(self.drafts)]
        features = draft(None, positions, hidden_states, inputs_embeds)
        return (features, features) if self.rules.returns_pair else features

    def _compile(self, *rows: Tensor) -> None:
        """Compile the graphs with torch.compile, if possible before the first request.

        vLLM's first forward is a run without requests, which measures the memory of a forward.
        """
        self._to_compile = False
        context = get_forward_context()
        is_trial = context.attn_metadata is None and context.dp_metadata is None
        for draft in self.drafts:
            draft.graph.compile(dynamic=True)
            # torch compiles one graph for a single row, and one for all other numbers of rows. The
            # sample has few rows: a number equal to a size of vLLM's buffers would be tied to it.
            for count in (3, 1):
                if is_trial and len(rows[0]) > count:
                    draft.graph(*(tensor[:count] for tensor in rows))

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor | None:
        """Logits of rows of the hidden states that `forward` returned, by the target's head."""
        if self.head_norms:
            draft = self.drafts[spec_step_idx % len(self.drafts)]
            hidden_states = draft.final_norm(hidden_states)
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the MTP layers' weights from a checkpoint, and return the parameters' names.

        Raises:
            CheckpointError: see `TracedDraft.load_weights`.
            UnsupportedModelError: see `TracedDraft.check_ends`.
        """
        loaders = [draft.loader() for draft in self.drafts]
        for name, tensor in weights:
            for loader in loaders:
                loader.take(name, tensor)
        for draft, loader in zip(self.drafts, loaders, strict=True):
            loader.finish()
            draft.check_ends()
        return {name for name, _ in self.named_parameters()}


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Refuse a config with features that a traced draft does not support in vLLM.

    Raises:
        UnsupportedModelError: the config has such features. The message lists them all.
    """
    parallel = vllm_config.parallel_config
    features = {
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}": (
            parallel.pipeline_parallel_size > 1
        ),
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_eplb": parallel.enable_eplb,
        "LoRA": vllm_config.lora_config is not None,
    }
    found = [name for name, is_on in features.items() if is_on]
    if found:
        raise UnsupportedModelError(
            f"mtpc's draft model cannot serve {', '.join(found)}; {OWN_DRAFT}"
        )


def read_fields(vllm_config: VllmConfig) -> dict[str, Any]:
    """Read the stored config.json, and apply the user's overrides.

    vLLM's own config objects cannot be used: vLLM rewrites those of drafts, and changes rotary
    parameters in those of targets.

    Raises:
        UnsupportedModelError: the overrides are a function, which takes vLLM's config object.
    """
    model = _draft_model(vllm_config)
    fields, _ = transformers.PreTrainedConfig.get_config_dict(
        model.hf_config_path or model.model, revision=model.revision, local_files_only=True
    )
    overrides = vllm_config.model_config.hf_overrides
    if callable(overrides):
        raise UnsupportedModelError(
            "hf_overrides is a function; mtpc's draft model reads config.json itself and takes "
            "overrides as a dict only: give a dict"
        )
    return {**fields, **overrides}


def _draft_model(vllm_config: VllmConfig) -> Any:
    assert vllm_config.speculative_config is not None
    return vllm_config.speculative_config.draft_model_config


def _draft_rules(additional_config: Any) -> str:
    options = additional_config.get("mtpc", {}) if isinstance(additional_config, Mapping) else {}
    unknown = sorted(set(options) - {"draft_rules"})
    rules = options.get("draft_rules", "host")
    if unknown or rules not in RULES:
        raise OptionError(
            f'additional_config["mtpc"] is {dict(options)}; expected only "draft_rules", '
            f"one of {RULES}"
        )
    return rules
