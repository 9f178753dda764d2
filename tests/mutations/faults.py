"""Faults of the kinds that MTP engines have had, each with a default test that must fail.

A fault replaces text of one file of mtpc. `plant` plants one at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what goes wrong.
        file: in mtpc/.
        right: what stands there once; how its lines are broken does not matter.
        wrong: what replaces it.
        test: a test of the default run, below tests/, that must fail.
    """

    name: str
    file: str
    right: str
    wrong: str
    test: str

    @property
    def is_compiled(self) -> bool:
        """Whether it lies in a kernel, which is compiled with it."""
        return self.file.endswith((".cpp", ".h"))

    @property
    def anchor(self) -> re.Pattern[str]:
        """Finds `right` by its words and signs, whatever the space between them."""
        inner = r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", self.right)))
        before, after = re.split(re.escape(self.right.strip()), self.right)
        return re.compile(re.escape(before) + inner + re.escape(after))


_MIMO = "test_theorem.py::test_speculative_output_equals_plain_decoding[mimo-3]"
_CODES = "engine/test_kv_cache_dtype.py::test_the_theorem_with_pages_of_codes[mimo-int8-3]"
_QWEN = "test_theorem.py::test_speculative_output_equals_plain_decoding[qwen3_next-3]"
_V2 = "test_theorem.py::test_speculative_output_equals_plain_decoding[mimo_v2-3]"
_V4 = "test_theorem.py::test_speculative_output_equals_plain_decoding[deepseek_v4-3]"
_V32 = "test_theorem.py::test_speculative_output_equals_plain_decoding[deepseek_v32-3]"
_GLM = "test_theorem.py::test_speculative_output_equals_plain_decoding[glm4_moe-3]"
_DRAFTS = "models/test_drafts.py::test_drafts_equal_the_wiring"
_CHAINS = "models/test_drafts.py::test_drafts_after_rejections_at_every_position[step3p7@3-4]"
_PLANTED = "models/test_drafts.py::test_drafts_after_rejections_at_every_position[gemma4-3]"
_REFUSED = "certificate/test_checker.py::test_planted_dependences_are_refused"
_WIRING = "models/test_wiring.py::test_rows_equal_the_released_wiring"
_IMAGE_DRAFTS = "models/test_images.py::test_drafts_after_images[qwen3_5]"
_STEP_IMAGES = "models/test_images.py::test_rows_at_the_edges_of_chunks[step3p7]"
_CHOICE = "models/test_shared_choice.py::"
_ACCEPT = "ops/test_accept.py"
_SCHEDULES = "engine/test_schedules.py"
_LONGCAT = "test_theorem.py::test_speculative_output_equals_plain_decoding[longcat_flash-3]"
_QWEN4 = "models/test_qwen4_exp.py::test_rows_equal_transformers_uncached[4-8-3-3-4]"
_REUSE = "test_theorem.py::test_reuse_changes_no_text_and_no_draft"
_RANKS = "ranks/test_tensor_parallel.py::"
_RANK_DRAFTERS = "ranks/test_drafters.py::test_text_and_drafts_are_those_of_one_rank"
_FAILURES = "engine/test_failures.py"
_SGLANG = "integrations/test_sglang_seams.py"
_SGLANG_V4 = "integrations/test_sglang_v4.py"
_SGLANG_STEPS = "integrations/test_sglang_steps.py"
_VLLM_STEPS = "integrations/test_vllm_steps.py"
_EACH = f"{_FAILURES}::test_each_instruction"
_EVERY_FILE = "engine/test_offload.py::test_every_file_of_weights_counts"
_LATE_TURN = "test_theorem.py::test_a_turn_after_decoded_text_when_steps_are_read_late"
_LEVELS = "engine/test_tiers.py::test_every_layer_keeps_its_kv_at_any_k"
_COPIES = "ops/test_copy_drafts.py"
_COPIED_TEXTS = "engine/test_copies.py"
_BUDGETS = "engine/test_budgets.py"
_RESTART = "test_theorem.py::test_restarts_change_no_text_and_no_draft"
_DERIVED_MTP = "models/test_derived_mtp.py::test_rows_are_transformers_own"
_DERIVED_DRAFTS = "models/test_derived_mtp.py::test_drafts_and_text_are_transformers_own"

_SAMPLE = "sampling/test_kernels.py"
_DELTA = "ops/test_gated_delta.py"
_ROTATE = "passes/test_fuse_cache_write.py"
_FUSED = "passes/test_fuse_elementwise.py"

METADATA = "step/metadata.py"
COPIES = "ops/copy_drafts.py"
ACCEPT = "ops/accept.py"
STEP = "step/step.py"
DRAFTING = "step/drafting.py"
CHAINING = "step/chaining.py"
CACHES = "models/caches.py"
HF = "models/hf.py"
EAGLE3 = "models/eagle3.py"
GEMMA4 = "models/families/gemma4.py"
LONGCAT = "models/families/longcat_flash.py"
QWEN4 = "models/qwen4_exp_layers.py"
QWEN4_FAMILY = "models/families/qwen4_exp.py"
ASSISTANT = "models/gemma4_assistant.py"
SHARD = "passes/shard.py"
SINGLE = "step/single_position.py"
DFLASH2 = "models/dflash2.py"
BLOCKS, DFLASH, DRAFTER = "step/blocks.py", "models/dflash.py", "models/drafter.py"
_DFLASH2 = "models/test_block_drafters.py::test_rows_of_dflash2"
_BLOCK_DRAFTS = "models/test_block_drafters.py::test_drafts_equal_the_authors_code"
SEAMS = "models/seams.py"
HEADS = "models/heads.py"
DERIVED_MTP = "models/derived_mtp.py"
GRAMMAR = "engine/grammar_rows.py"
KERNELS = "backends/cpu_kernels"
RECURRENCE = "ops/recurrence.py"

FAULTS = (
    # Lengths and positions.
    Fault(
        "positions are one too high",
        METADATA,
        "+ token - query_start_loc[request].long()",
        "+ token - query_start_loc[request].long() + 1",
        f"{_WIRING}[glm4_moe]",
    ),
    Fault(
        "sequence lengths are one too short",
        METADATA,
        "torch.where(active, context_lens + query_lens, 0)",
        "torch.where(active, context_lens + query_lens - 1, 0)",
        _MIMO,
    ),
    Fault(
        "the chain stays at one position",
        METADATA,
        "Chained(positions, slots, seq_lens, starts, lens + 1)",
        "Chained(positions, slots, seq_lens, starts, lens)",
        f"{_DRAFTS}[glm4_moe-random]",
    ),
    Fault(
        "the logits of a prompt are those of its first row",
        METADATA,
        "first = query_start_loc[1:] - counts",
        "first = query_start_loc[:-1]",
        _MIMO,
    ),
    Fault(
        "a prompt's tokens are counted behind those of decoding requests",
        METADATA,
        "before = packed.cumsum(0) - packed",
        "before = counts.cumsum(0) - counts",
        _MIMO,
    ),
    Fault(
        "a decode step counts all rows as committed",
        ACCEPT,
        "certain = torch.where(decodes, accepted + 1, starts[1:] - starts[:-1])",
        "certain = starts[1:] - starts[:-1]",
        _MIMO,
    ),
    Fault(
        "the budget of tokens falls by one a step",
        ACCEPT,
        "left = torch.where(emits & (reason == RUNNING), remaining - num, 0)",
        "left = torch.where(emits & (reason == RUNNING), remaining - 1, 0)",
        _ACCEPT,
    ),
    # Sizes that a step leaves open.
    Fault(
        "a number of a step is that of one max_len",
        METADATA,
        "blocks = torch.ones_like(block_table[0]).sum(0)",
        "blocks = block_table.shape[1]",
        "cache/test_other_sizes.py::test_which_sizes_are_open[mimo]",
    ),
    Fault(
        "a size that a step computes with is said to be open",
        "capture/step_mode.py",
        "return {s: n for s, n in least.items() if self._open[s] not in fixed}",
        "return least",
        "program/test_open_sizes.py::test_what_fixes_a_size",
    ),
    Fault(
        "a step is opened for sizes that it is not right for",
        "backends/package.py",
        "if refusal is not None:",
        "if False:",
        "cache/test_other_sizes.py::test_what_is_bound_is_compared",
    ),
    # Rows without a slot, padding, pages.
    Fault(
        "rows of requests that are off write the cache",
        METADATA,
        "live = active[request] & in_batch & (position < blocks * page_size)",
        "live = in_batch & (position < blocks * page_size)",
        "step/test_step.py",
    ),
    Fault(
        "padded rows write the cache of the last request",
        METADATA,
        "live = active[request] & in_batch & (position < blocks * page_size)",
        "live = active[request] & (position < blocks * page_size)",
        "step/test_step.py",
    ),
    Fault(
        "rows without a page write the null page",
        METADATA,
        "has_page = live & (page != NULL_PAGE)",
        "has_page = live",
        "step/test_step.py",
    ),
    Fault(
        "rows behind the last page write another request's",
        METADATA,
        "& (position < blocks * page_size)\n    position",
        "\n    position",
        "step/test_step.py",
    ),
    Fault(
        "offsets within a page are one too high",
        METADATA,
        "page * page_size + position % page_size, NO_SLOT",
        "page * page_size + (position + 1) % page_size, NO_SLOT",
        _MIMO,
    ),
    Fault(
        "rows without a slot write over the null page",
        "ops/attention.py",
        "values = torch.where(live.view(shape), rows.to(cache.dtype), flat[0])",
        "values = rows.to(cache.dtype)",
        "cpu/test_kernels.py",
    ),
    Fault(
        "a finished request goes on decoding",
        METADATA,
        """        active = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        context_lens""",
        """        active = state_indices != SCRATCH_SLOT
        context_lens""",
        "step/test_step.py::test_a_finished_request_keeps_its_row",
    ),
    Fault(
        "slot_mapping keeps one row a request",
        "passes/resize_metadata.py",
        "if demand > rows and spec.dims[0] == R:",
        "if demand > rows and spec.dims[0] == T:",
        "passes/test_whole_steps.py::test_resize_metadata",
    ),
    # Acceptance.
    Fault(
        "a draft behind a rejected one is accepted",
        ACCEPT,
        "accepted = matches.long().cumprod(1).sum(1)",
        "accepted = matches.long().sum(1)",
        _ACCEPT,
    ),
    Fault(
        "drafts are compared with the choice one row later",
        ACCEPT,
        "matches = (drafts == choices[:, :-1]) & decodes[:, None]",
        "matches = (drafts == choices[:, 1:]) & decodes[:, None]",
        _ACCEPT,
    ),
    Fault(
        "the bonus token is lost where every draft is right",
        ACCEPT,
        "torch.where(emits, accepted + 1, 0),",
        "torch.where(emits, (accepted + 1).clamp(max=max(width - 1, 1)), 0),",
        _ACCEPT,
    ),
    Fault(
        "the next round drafts from the last row, accepted or not",
        ACCEPT,
        "anchors = torch.where(active & ~decodes, starts[1:] - 1, starts[:-1] + accepted)",
        "anchors = torch.where(active & ~decodes, starts[1:] - 1, starts[1:] - 1)",
        f"{_DRAFTS}[mimo-trained]",
    ),
    Fault(
        "the stop token is not emitted",
        ACCEPT,
        "torch.minimum(wanted, first_stop + 1)",
        "torch.minimum(wanted, first_stop)",
        _ACCEPT,
    ),
    Fault(
        "tokens behind NaN logits are emitted",
        ACCEPT,
        "num = torch.minimum(torch.minimum(wanted, first_stop + 1), first_bad)",
        "num = torch.minimum(wanted, first_stop + 1)",
        _ACCEPT,
    ),
    Fault(
        "a prompt that goes on emits a token",
        ACCEPT,
        "emits = active if goes_on is None else active & ~goes_on",
        "emits = active",
        _MIMO,
    ),
    Fault(
        "what a prompt's last row chose is not what follows it",
        "step/accept.py",
        "following = torch.where(goes_on, next_prompt_id, chosen[last])",
        "following = chosen[last]",
        f"{_DRAFTS}[glm4_moe-random]",
    ),
    # What the MTP layers are fed.
    Fault(
        "drafts take each row's own token, not the next one",
        "step/accept.py",
        "torch.cat([ids[1:], ids[:1]])",
        "ids",
        f"{_DRAFTS}[glm4_moe-random]",
    ),
    Fault(
        "all drafts of a chain take the first draft",
        DRAFTING,
        "features = run(drafts[-1], features, *metadata, *handed)",
        "features = run(drafts[0], features, *metadata, *handed)",
        f"{_DRAFTS}[mimo-trained]",
    ),
    Fault(
        "the chain keeps the first features",
        DRAFTING,
        """            features = run(drafts[-1], features, *metadata, *handed)
            logits = step.pieces.draft_heads[last](features)""",
        """            new = run(drafts[-1], features, *metadata, *handed)
            logits = step.pieces.draft_heads[last](new)""",
        f"{_DRAFTS}[mimo-trained]",
    ),
    Fault(
        "the last token is the row's own",
        STEP,
        "last_token = aten.index_select.default(accepted.next_ids, 0, accepted.anchors)",
        "last_token = aten.index_select.default(begun.ids, 0, accepted.anchors)",
        _MIMO,
    ),
    Fault(
        "state rows are written one column to the right",
        "step/advance.py",
        "torch.cat([next_token_ids, unused], 1)",
        "torch.cat([next_token_ids.roll(1, 1), unused], 1)",
        _MIMO,
    ),
    Fault(
        "the final norm is applied before features that precede it",
        HF,
        """    if wiring.first_features == "before":
        others["norm"]""",
        """    if wiring.first_features == "after":
        others["norm"]""",
        f"{_WIRING}[mimo]",
    ),
    Fault(
        "features and embedding are joined in the other order",
        HF,
        "if self.wiring.hidden_first:",
        "if not self.wiring.hidden_first:",
        f"{_WIRING}[mimo]",
    ),
    Fault(
        "the norms of features and embedding are exchanged",
        HF,
        "parts = [self.embedding_norm(embedding), self.hidden_norm(features)]",
        "parts = [self.hidden_norm(embedding), self.embedding_norm(features)]",
        f"{_WIRING}[deepseek_v3]",
    ),
    Fault(
        "the embedding at position 0 is kept",
        HF,
        "if self.wiring.zero_first_embedding:",
        "if self.wiring.zero_first_embedding is None:",
        f"{_WIRING}[mimo]",
    ),
    Fault(
        "an MTP layer's features are those before its norm",
        HF,
        """        if self.layer.wiring.next_features == "before":
            return hidden, more
""",
        """        if self.layer.wiring.next_features != "":
            return hidden, more
""",
        f"{_DRAFTS}[glm4_moe-random]",
    ),
    Fault(
        "an MTP layer's own head is left out",
        HEADS,
        'own = layer.head if layer.wiring.head == "own" else None',
        'own = layer.head if layer.wiring.head == "other" else None',
        f"{_WIRING}[step3p7]",
    ),
    # Several MTP layers.
    Fault(
        "one row too few is computed again",
        CHAINING,
        "context_lens.clamp(max=self.window)",
        "context_lens.clamp(max=self.window - 1)",
        _CHAINS,
    ),
    Fault(
        "the earlier rows of a short text are read from the wrong end",
        CHAINING,
        "kept = (self.window - earlier[request] + row).clamp(0, self.window - 1)",
        "kept = row.clamp(0, self.window - 1)",
        "step/test_step.py",
    ),
    Fault(
        "earlier rows stand at later positions",
        CHAINING,
        "first = (context_lens - earlier).int()",
        "first = context_lens.int()",
        _CHAINS,
    ),
    Fault(
        "the rows that are kept end one row early",
        CHAINING,
        "rows = anchors[:, None] - back[None]",
        "rows = anchors[:, None] - back[None] - 1",
        _CHAINS,
    ),
    Fault(
        "every MTP layer is fed the target's features",
        CHAINING,
        "if not self.feeds_target:",
        "if self.feeds_target:",
        _CHAINS,
    ),
    Fault(
        "a layer's rows keep the tokens of the layer before",
        CHAINING,
        "inputs = replace(inputs, ids=ids)",
        "inputs = replace(inputs, ids=inputs.ids)",
        _CHAINS,
    ),
    # A drafter in a checkpoint of its own.
    Fault(
        "a drafter is fed what enters the layer before",
        DRAFTER,
        "layers[index] = self._watched(layers[index])",
        "layers[index - 1] = self._watched(layers[index - 1])",
        f"{_DRAFTS}[llama-trained]",
    ),
    Fault(
        "a drafter's rows stand for the tokens after theirs",
        DRAFTER,
        "return rows + self.offsets[rows]",
        "return rows + self.offsets[rows] + 1",
        f"{_DRAFTS}[llama-trained]",
    ),
    Fault(
        "a drafter is fed its own output after the norm",
        EAGLE3,
        'next_features="after" if config.norm_output else "before",',
        'next_features="after",',
        f"{_DRAFTS}[llama-trained]",
    ),
    Fault(
        "a drafter adds its attention to the normed features",
        EAGLE3,
        "residual = normed if self.config.norm_first else features",
        "residual = normed",
        f"{_DRAFTS}[llama-trained]",
    ),
    Fault(
        "a drafter attends with the features before the embedding",
        EAGLE3,
        "rows = torch.cat([self.embedding_norm(embedding), normed], -1)[None]",
        "rows = torch.cat([normed, self.embedding_norm(embedding)], -1)[None]",
        f"{_DRAFTS}[llama-trained]",
    ),
    # Drafters that make all drafts in one pass over a block.
    Fault(
        "a block stands one position late",
        BLOCKS,
        "lens, active, block_table, starts, num_reqs * self.rows, self.page_size",
        "lens + 1, active, block_table, starts, num_reqs * self.rows, self.page_size",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "rows of a block see earlier ones only",
        DFLASH,
        "seen = context if is_causal else alone",
        "seen = context",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "rows of a causal layer see the whole block",
        DFLASH,
        "seen = context if is_causal else alone",
        "seen = alone",
        f"{_BLOCK_DRAFTS}[llama-7-changes2]",
    ),
    Fault(
        "a block drafter is fed what enters its layers, not what they give",
        DFLASH,
        "[i + 1 for i in ids]",
        "list(ids)",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "the row of the last token gives the first draft",
        BLOCKS,
        "aten.slice.Tensor(features, 1, 1, rows)",
        "aten.slice.Tensor(features, 1, 0, rows - 1)",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "a block begins with a mask",
        BLOCKS,
        "if self.opens else masks",
        "if not self.opens else masks",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "keys of the context are not turned",
        DFLASH,
        "write(turned, values, context)",
        "write(keys, values, context)",
        f"{_BLOCK_DRAFTS}[qwen3-3-changes1]",
    ),
    Fault(
        "a block's last row has no page after all drafts are accepted",
        "engine/scheduler.py",
        "self._pages_for(request.most_committed + 1)",
        "self._pages_for(request.most_committed)",
        "models/test_block_drafters.py::test_a_block_has_pages_after_all_drafts_are_accepted",
    ),
    Fault(
        "a Markov head reads the last token for every draft",
        BLOCKS,
        "pieces.draft_bias(*row, found[-1])",
        "pieces.draft_bias(*row, found[0])",
        f"{_BLOCK_DRAFTS}[llama-3-changes5]",
    ),
    Fault(
        "a convolution reaches into the block before",
        DFLASH2,
        "within = (place >= tap)",
        "within = (place >= 0)",
        f"{_DFLASH2}[SECOND]",
    ),
    Fault(
        "candidates are chosen by features before the norm",
        DFLASH2,
        "self.selector(logits, self.norm(features), before)",
        "self.selector(logits, features, before)",
        f"{_DFLASH2}[SECOND]",
    ),
    Fault(
        "a window that is seen both ways ends within the block",
        SEAMS,
        'options["sliding_window"] += mtpc_context.ahead',
        'options["sliding_window"] += 0 * mtpc_context.ahead',
        f"{_DFLASH2}[SECOND]",
    ),
    Fault(
        "masked rows of P-EAGLE are fed nothing",
        EAGLE3,
        "masked.expand(ids.shape[0], -1)",
        "0 * masked.expand(ids.shape[0], -1)",
        "models/test_block_drafters.py::test_drafts_of_p_eagle[3-2]",
    ),
    # Copies beside another drafter.
    Fault(
        "the drafter's drafts are counted as the copies'",
        "step/copying.py",
        "torch.where(takes, kind, 0).int())",
        "kind.int())",
        "engine/test_copies.py::test_copies_beside_mtp_layers[3]",
    ),
    Fault(
        "a slot keeps the counts of its last request",
        "engine/rows.py",
        "write(shared[name][slot], 0)",
        "write(shared[name][slot], shared[name][slot])",
        "engine/test_copies.py::test_copies_beside_mtp_layers[3]",
    ),
    # A drafter that reads the target's keys and values.
    Fault(
        "an assistant's queries stand one position early",
        ASSISTANT,
        "places = context.positions[None] + 1",
        "places = context.positions[None]",
        f"{_DRAFTS}[gemma4-trained]",
    ),
    Fault(
        "an assistant sees the row after the last accepted one",
        SINGLE,
        "last = aten.sub.Tensor(inputs.accepted.lens, 1)",
        "last = aten.sub.Tensor(inputs.accepted.lens, 0)",
        _PLANTED,
    ),
    Fault(
        "all drafts of an assistant are fed the target's features",
        SINGLE,
        "features = results[0]",
        "results[0]",
        f"{_DRAFTS}[gemma4-trained]",
    ),
    Fault(
        "layers that share keys read the first ones of their type",
        GEMMA4,
        "return max((layer for",
        "return min((layer for",
        "test_theorem.py::test_speculative_output_equals_plain_decoding[gemma4-3]",
    ),
    Fault(
        "the clusters of a head hold the tokens in order",
        ASSISTANT,
        'self.register_buffer("ordering", clusters.token_ordering)',
        'self.register_buffer("ordering", clusters.token_ordering.sort().values)',
        f"{_DRAFTS}[gemma4-trained]",
    ),
    Fault(
        "logits are not capped",
        HEADS,
        "for each in called} <= _ALONE",
        "for each in called} <= _ALONE or True",
        "models/test_gemma4.py::test_logits_are_capped",
    ),
    # Layers with two attentions, and experts without weights.
    Fault(
        "longcat: the first zero expert adds nothing",
        LONGCAT,
        "expert_ids >= self.num_routed_experts",
        "expert_ids > self.num_routed_experts",
        _LONGCAT,
    ),
    Fault(
        "longcat: zero experts add the row unweighted",
        LONGCAT,
        "self.num_routed_experts, expert_weights, 0)",
        "self.num_routed_experts, 1.0, 0.0)",
        _LONGCAT,
    ),
    Fault(
        "longcat: the MTP layer has the target's first cache",
        LONGCAT,
        "whole = layer(config, index // 2)",
        "whole = layer(config, 0)",
        _LONGCAT,
    ),
    Fault(
        "longcat: the MTP layer's feed-forward is fed what is not normed",
        LONGCAT,
        "self.mlps[0](self.post_attention_layernorm(hidden_states))",
        "self.mlps[0](hidden_states)",
        f"{_WIRING}[longcat_flash]",
    ),
    Fault(
        "longcat: the MTP layer's norms are exchanged",
        LONGCAT,
        'embedding_norm="layers.0.enorm.m",\n        hidden_norm="layers.0.hnorm.m"',
        'embedding_norm="layers.0.hnorm.m",\n        hidden_norm="layers.0.enorm.m"',
        f"{_WIRING}[longcat_flash]",
    ),
    # Blocks and n-grams.
    Fault(
        "qwen4: rejected token ids overwrite those that n-grams read",
        QWEN4_FAMILY,
        "ids = (S, config.ngram_size - 1 + K_MAX, 1)",
        "ids = (S, config.ngram_size - 1, 1)",
        _QWEN4,
    ),
    Fault(
        "qwen4: n-grams reach over an end of a sequence",
        QWEN4,
        "token = torch.where(last == table.eos_token_id, table.eos_token_id, token)",
        "token = token + 0",
        _QWEN4,
    ),
    Fault(
        "qwen4: rejected rows overwrite those that the convolution of n-grams reads",
        QWEN4_FAMILY,
        "sympy.Max(1, past + K_MAX)",
        "sympy.Max(1, past)",
        _QWEN4,
    ),
    Fault(
        "qwen4: rows do not attend to their open block",
        QWEN4,
        "lens = taken * self.ratio + left.int()",
        "lens = taken * self.ratio",
        _QWEN4,
    ),
    Fault(
        "qwen4: a block's key is the mean of the block before",
        QWEN4,
        "[self._block_of(context).clamp(min=0)]",
        "[(self._block_of(context) - 1).clamp(min=0)]",
        _QWEN4,
    ),
    Fault(
        "qwen4: a block's key is rotated as its last token is",
        QWEN4,
        "first = positions - positions % self.ratio",
        "first = positions",
        _QWEN4,
    ),
    Fault(
        "qwen4: the MTP layer is fed the streams in another order",
        HF,
        "streams = parts[1].unflatten(-1, (-1, embedded.shape[-1]))",
        "streams = parts[1].unflatten(-1, (-1, embedded.shape[-1])).flip(-2)",
        f"{_WIRING}[qwen4_exp]",
    ),
    # Caches.
    Fault(
        "every layer attends to the first layer's cache",
        SEAMS,
        "cache: LayerCache = mtpc_context.layers[module.layer_idx]",
        "cache: LayerCache = mtpc_context.layers[0]",
        _MIMO,
    ),
    Fault(
        "every MTP layer writes the last target layer's cache",
        SEAMS,
        "self.layers[layer_idx].write(first, second, self)",
        "self.layers[min(layer_idx, 1)].write(first, second, self)",
        f"{_DRAFTS}[mimo-trained]",
    ),
    Fault(
        "a row does not attend to itself",
        "ops/attention.py",
        "(key[None] <= position[:, None])",
        "(key[None] < position[:, None])",
        _MIMO,
    ),
    Fault(
        "a window is one position too wide",
        "ops/attention.py",
        "visible &= key[None] > position[:, None] - sliding_window",
        "visible &= key[None] >= position[:, None] - sliding_window",
        _V2,
    ),
    Fault(
        "a ring takes the place of another request's",
        CACHES,
        "first = torch.where(slots == SCRATCH_SLOT, 0, (slots - 1) * pages + 1)",
        "first = torch.where(slots == SCRATCH_SLOT, 0, (slots - 1) * (pages - 1) + 1)",
        _V2,
    ),
    Fault(
        "padded rows write rings",
        CACHES,
        "slot = torch.where(metadata.slot_mapping == NO_SLOT, NO_SLOT, slot)",
        "slot = slot.clone()",
        "models/test_ring_cache.py",
    ),
    Fault(
        "attention sinks are left out",
        CACHES,
        'options.get("s_aux"),',
        "None,",
        _V2,
    ),
    # State that is no page.
    Fault(
        "a recurrent state takes in drafts that are rejected",
        RECURRENCE,
        "certain = live & (index < slots.certain_lens[request])",
        "certain = live",
        "ops/test_gated_delta.py",
    ),
    Fault(
        "a recurrent state counts rejected drafts as seen",
        RECURRENCE,
        "seen = committed + torch.minimum(slots.certain_lens.long(), lens)",
        "seen = committed + lens",
        _QWEN,
    ),
    Fault(
        "a new request starts from the state of the last one",
        RECURRENCE,
        "stood = torch.where(on & (committed > 0), slots.standing[slots.state_slots].long(), 0)",
        "stood = torch.where(on, slots.standing[slots.state_slots].long(), 0)",
        _QWEN,
    ),
    Fault(
        "a convolution reads what a slot held before",
        RECURRENCE,
        "older = torch.where((there >= 0)[:, None], older, 0)",
        "older = older + 0",
        _QWEN,
    ),
    Fault(
        "a decode step takes its drafts for certain",
        METADATA,
        "Begun(*fresh, starts, blocks, slots, active.int(), ids, context_lens, active)",
        "Begun(*fresh, starts, blocks, slots, active.int() * query_len, ids, context_lens, active)",
        _QWEN,
    ),
    Fault(
        "decoding requests in a prefill step take their drafts for certain",
        METADATA,
        "certain = torch.where(decodes, active.int(), counts)",
        "certain = counts",
        _QWEN,
    ),
    Fault(
        "a compressed entry is seen one token late",
        "models/deepseek_v4_attention.py",
        "(rows.position + 1) // ratio",
        "rows.position // ratio",
        _V4,
    ),
    Fault(
        "a sparse attention chooses positions that it does not see",
        "ops/choose_slots.py",
        'chosen = torch.where(visible, total, float("-inf")).topk',
        "chosen = total.topk",
        _V32,
    ),
    Fault(
        "attention to slots sees an entry whose window is not closed",
        "ops/slot_attention.py",
        "place[None] < entry_counts",
        "place[None] <= entry_counts",
        _V4,
    ),
    Fault(
        "attention to slots reads the neighbour's ring",
        "ops/slot_attention.py",
        "[ring[row_slots]]",
        "[ring[row_slots - 1]]",
        _V4,
    ),
    Fault(
        "codes of keys hold what the bias adds to all of them",
        "models/caches.py",
        "            keys = keys - self.k_shift()",
        "            keys = keys + 0 * self.k_shift()",
        "engine/test_kv_cache_dtype.py::test_the_theorem_with_pages_of_codes[mimo-int8-3]",
    ),
    Fault(
        "one row that becomes several is not selected",
        "passes/select_head_rows.py",
        "return None if is_single and count != 1 else (rows, dim)",
        "return rows, dim",
        "passes/test_passes.py::test_select_head_rows_keeps_one_row_that_becomes_several",
    ),
    Fault(
        "dictated acceptance forgets where logits are",
        "step/synthetic.py",
        "return replace(verdict, chosen=chosen, ids=results[1])",
        "return Verdict(chosen, results[1], verdict.logits)",
        "step/test_synthetic.py::test_no_acceptance_is_plain_decoding",
    ),
    Fault(
        "GLM-5.2: each draft chooses anew",
        "models/families/glm_moe_dsa.py",
        "is None else mtpc_handed",
        "is None else None",
        f"{_CHOICE}test_drafts_equal_the_wiring[3]",
    ),
    Fault(
        "GLM-5.2: later drafts take the choice of a request's first row",
        DRAFTING,
        "(aten.index_select.default(x, 0, inputs.anchors) for x in given)",
        "(aten.index_select.default(x, 0, i) for x, i in zip(given, (inputs.anchors, aten.slice."
        "Tensor(inputs.metadata.query_start_loc, 0, 0, -1))))",
        "models/test_shared_choice.py::test_drafts_equal_the_wiring[3]",
    ),
    Fault(
        "GLM-5.2: later drafts write keys of the indexer",
        "models/families/deepseek_v32.py",
        "        if slots is None:\n            self._write_keys",
        "        if self.indexer is not None:\n            self._write_keys",
        f"{_CHOICE}test_drafts_equal_the_wiring[3]",
    ),
    # The engine.
    Fault(
        "a page is reused whatever follows it",
        "engine/prefix.py",
        "return Block(parent, tokens, tuple(request.keys(end, end + self.lookahead)))",
        "return Block(parent, tokens, ())",
        _SCHEDULES,
    ),
    Fault(
        "a page is reused whatever precedes it",
        "engine/prefix.py",
        "return Block(parent, tokens,",
        "return Block(ROOT, tokens,",
        "engine/test_pages.py",
    ),
    Fault(
        "in SGLang: each model of a chain is the first MTP layer",
        "integrations/sglang/draft.py",
        "index=draft_model_idx or 0",
        "index=0",
        f"{_SGLANG}::test_a_layer_of_a_chain_has_its_own_head_and_features",
    ),
    Fault(
        "in SGLang: a chain is fed what is behind the final norm",
        "integrations/sglang/draft.py",
        "before, hidden = hidden, self.draft.final_norm(hidden)",
        "hidden = self.draft.final_norm(hidden)",
        f"{_SGLANG}::test_a_layer_of_a_chain_has_its_own_head_and_features",
    ),
    Fault(
        "in SGLang: residual streams are joined before the next draft is fed",
        "integrations/draft.py",
        'if hosted.width(text) == text.hidden_size else "before"',
        'if hosted.width(text) == text.hidden_size else "after"',
        f"{_SGLANG_V4}::test_rows_are_the_oracles",
    ),
    Fault(
        "in SGLang: sinks of DeepSeek-V4's window are left out",
        "integrations/sglang/attention.py",
        "attn_sink=self.sinks.to(",
        "attn_sink=(self.sinks - torch.inf).to(",
        f"{_SGLANG_V4}::test_rows_are_the_oracles",
    ),
    Fault(
        "in SGLang: the limit of DeepSeek-V4's experts bounds what is behind the activation",
        "integrations/layer_sites.py",
        "limit_input=gate.limit_input",
        "limit_input=False",
        f"{_SGLANG_V4}::test_rows_are_the_oracles",
    ),
    Fault(
        "in SGLang: a default of another config class is the width of experts",
        "integrations/draft_config.py",
        "for name, value in fields.items() if name not in twice",
        "for name, value in fields.items()",
        f"{_SGLANG_V4}::test_sglangs_config_is_read_as_the_checkpoints",
    ),
    Fault(
        "in SGLang: codes of FP8 are weights without their scales",
        "integrations/layer_weights.py",
        "found[name] = codes.float() * each",
        "found[name] = codes.float()",
        f"{_SGLANG_V4}::test_fp8_blocks_as_released",
    ),
    Fault(
        "in SGLang: a grouped projection is the host's plain one",
        "integrations/layer_sites.py",
        "if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward",
        "if isinstance(module, nn.Linear)",
        f"{_SGLANG_V4}::test_rows_are_the_oracles",
    ),
    Fault(
        "in SGLang: a chain of quantised weights takes them for plain ones",
        "integrations/sglang/draft.py",
        "if is_chained() and quant_config is None and",
        "if is_chained() and",
        f"{_SGLANG}::test_a_quantised_draft_is_chained_as_one_graph",
    ),
    Fault(
        "in SGLang: a rank drafts from its own rows of the head",
        "integrations/sglang/propose.py",
        "whole: Tensor = get_parallel().tp_group.all_gather(part, -1)",
        "whole: Tensor = part",
        f"{_SGLANG}::test_a_head_that_ranks_share_is_gathered",
    ),
    Fault(
        "whole steps in SGLang: the block table has KV slots in the place of pages",
        "integrations/sglang/step_worker.py",
        "req_to_token[slots, :: self.page_size] // self.page_size",
        "req_to_token[slots, :: self.page_size]",
        f"{_SGLANG_STEPS}::test_texts_are_those_of_plain_decoding[mimo]",
    ),
    Fault(
        "whole steps in SGLang: drafts after a prompt are written to another request's pages",
        "integrations/sglang/step_worker.py",
        "self._set_tables(slots, batch.seq_lens)\n",
        "self._set_tables(slots, batch.seq_lens + 2 * self.steps.model.options.spec_tokens + 1)\n",
        f"{_SGLANG_STEPS}::test_texts_are_those_of_plain_decoding[mimo]",
    ),
    Fault(
        "whole steps in SGLang: its scheduler learns a length without the last token",
        "integrations/sglang/step_worker.py",
        "new_seq_lens=batch.seq_lens + lengths,",
        "new_seq_lens=batch.seq_lens + lengths - 1,",
        f"{_SGLANG_STEPS}::test_texts_are_those_of_plain_decoding[mimo]",
    ),
    Fault(
        "whole steps in SGLang: a request that begins with cached pages begins at 0",
        "integrations/host_steps.py",
        'self.state["state.committed_lens"][chunk.slot] = chunk.begin',
        'self.state["state.committed_lens"][chunk.slot] = 0',
        f"{_SGLANG_STEPS}::test_a_prefix_of_another_request[mimo]",
    ),
    Fault(
        "whole steps in SGLang: recurrent state of a cached beginning is another request's",
        "integrations/sglang/step_worker.py",
        "check_prefixes(hosted, not self.server_args.disable_radix_cache)",
        "check_prefixes(hosted, False)",
        f"{_SGLANG_STEPS}::test_what_pages_do_not_carry_is_not_shared",
    ),
    Fault(
        "whole steps in SGLang: a request that asks for a grammar gets text without it",
        "integrations/sglang/requests.py",
        '"a grammar": req.grammar,',
        '"a grammar": None,',
        f"{_SGLANG_STEPS}::test_what_a_request_may_not_ask",
    ),
    Fault(
        "whole steps in SGLang: a request samples as the last one in its slot did",
        "integrations/sglang/step_worker.py",
        "self.steps.set_sampling(slot, sampling_or_end(req), (), req.output_ids)",
        "sampling_or_end(req)",
        f"{_SGLANG_STEPS}::test_sampled_texts_are_those_of_the_engine[0]",
    ),
    Fault(
        "whole steps in SGLang: the repetition penalty counts the prompt",
        "integrations/sglang/step_worker.py",
        "sampling_or_end(req), (), req.output_ids",
        "sampling_or_end(req), list(text), req.output_ids",
        f"{_SGLANG_STEPS}::test_sglangs_repetition_penalty_counts_the_output_alone",
    ),
    Fault(
        "whole steps in SGLang: filters that it orders otherwise are served in mtpc's order",
        "integrations/sglang/requests.py",
        '"min_p together with top_p": is_cut_twice,',
        '"min_p together with top_p": None,',
        f"{_SGLANG_STEPS}::test_what_a_request_may_not_ask",
    ),
    Fault(
        "whole steps in vLLM: drafts that its scheduler has not scheduled are verified",
        "integrations/vllm/step_batch.py",
        "if wanted != request.drafts:",
        "if not wanted:",
        f"{_VLLM_STEPS}::test_drafts_that_vllm_chooses_are_verified",
    ),
    Fault(
        "whole steps in vLLM: a preempted request goes on where its slot's former state ended",
        "integrations/vllm/step_batch.py",
        "request.slot, request.drafts = 0, None",
        "request.slot = 0",
        f"{_VLLM_STEPS}::test_preempted_requests_come_again[mimo-v1]",
    ),
    Fault(
        "whole steps in vLLM: a resumed request reads the blocks that it had before",
        "integrations/vllm/step_batch.py",
        "request.pages.clear()\n",
        "pass\n",
        f"{_VLLM_STEPS}::test_preempted_requests_come_again[mimo-v1]",
    ),
    Fault(
        "whole steps in vLLM: a finished request keeps its slot",
        "integrations/vllm/step_batch.py",
        "self._leave(self.requests.pop(name))",
        "self.requests.pop(name)",
        f"{_VLLM_STEPS}::test_texts_are_those_of_plain_decoding[mimo]",
    ),
    Fault(
        "whole steps in vLLM: logits that are no numbers emit nothing, without a word",
        "integrations/vllm/step_batch.py",
        "found[request.slot] = row[:count] or None",
        "found[request.slot] = row[:count]",
        f"{_VLLM_STEPS}::test_logits_that_are_no_numbers",
    ),
    Fault(
        "whole steps in vLLM: the pool has as many pages as the steps were first compiled for",
        "integrations/vllm/step_worker.py",
        "if kv_cache_config.num_blocks != self._hosted.options.num_pages:",
        "if not kv_cache_config.num_blocks:",
        f"{_VLLM_STEPS}::test_the_pool_is_as_large_as_vllm_says",
    ),
    Fault(
        "whole steps in vLLM: recurrent state of a cached beginning is another request's",
        "integrations/vllm/step_worker.py",
        "check_prefixes(self._hosted, self.cache_config.enable_prefix_caching)",
        "check_prefixes(self._hosted, False)",
        f"{_VLLM_STEPS}::test_what_pages_do_not_carry_is_not_shared",
    ),
    Fault(
        "whole steps in vLLM: a request that asks for sampling gets greedy text",
        "integrations/vllm/step_requests.py",
        "**{name: getattr(params, name) for name in FLOATS},\n",
        "\n",
        f"{_VLLM_STEPS}::test_sampled_texts_are_those_of_the_engine[0]",
    ),
    Fault(
        "whole steps in vLLM: what a preempted request had emitted counts as its prompt",
        "integrations/vllm/step_batch.py",
        "request.sampling, text[:begin], text[begin:]",
        "request.sampling, text, ()",
        f"{_VLLM_STEPS}::test_a_preempted_request_samples_on[v1]",
    ),
    Fault(
        "whole steps in vLLM: steps are compiled for a pool of another size first",
        "host/compile.py",
        "return state_bytes(compiler)[1]",
        "return 2 * state_bytes(compiler)[1]",
        f"{_VLLM_STEPS}::test_steps_are_compiled_once[mimo]",
    ),
    Fault(
        "a chain takes what a host stores of an expansion for its weight",
        "integrations/host_calls.py",
        "weight = hosted.module(units).T.contiguous()",
        "weight = hosted.module.weight",
        "integrations/test_draft_chain.py::test_a_chain_over_the_hosts_layers",
    ),
    Fault(
        "transformers: an attached model batches by itself",
        "integrations/transformers/generator.py",
        "vars(self.model).update(zip(_ATTACHED, own, strict=True))",
        "vars(self.model).update(generate=self.generate)",
        "integrations/test_transformers_calls.py::test_use_mtp_never_runs_the_hosts_loop",
    ),
    Fault(
        "DeepSeek-V4: the MTP layer's stream head is rounded to the model's dtype",
        "models/mtp_layers.py",
        'kept |= {"stream_head"} if stored.rstrip("._") in kept else set()',
        "kept |= set()",
        "integrations/test_traced_draft.py::test_a_stream_head_is_as_wide_as_the_targets",
    ),
    Fault(
        "pages are learned before the draft layers' rows are final",
        "engine/prefix.py",
        "final = request.num_committed - max(self.lookahead - 1, 0)",
        "final = request.num_committed + 1",
        "engine/test_pages.py",
    ),
    Fault(
        "a shared page can be evicted while it is used",
        "engine/pages.py",
        "            self._idle.pop(page, None)\n            self._users[page] += 1",
        "            self._users[page] += 1",
        "engine/test_pages.py",
    ),
    Fault(
        "an evicted page is still known",
        "engine/pages.py",
        "del self._idle[page]\n                self.index.forget(page)\n",
        "del self._idle[page]\n",
        "engine/test_pages.py",
    ),
    Fault(
        "a request that reuses pages starts at length 0",
        "engine/rows.py",
        'write(shared["state.committed_lens"][slot], request.num_prefilled)',
        'write(shared["state.committed_lens"][slot], 0)',
        _SCHEDULES,
    ),
    Fault(
        "every chunk of a prompt is taken for its last",
        "engine/rows.py",
        "following += ids[count:] or [-1]",
        "following += [-1]",
        _MIMO,
    ),
    Fault(
        "a preempted request keeps its old prompt",
        "engine/scheduler.py",
        """        self._release(request)
        request.num_input, request.num_prefilled = request.num_tokens, 0
""",
        """        self._release(request)
        request.num_prefilled = 0
""",
        "engine/test_scheduler.py",
    ),
    # Snapshots.
    Fault(
        "a stale snapshot: one that was evicted is still its page's",
        "engine/prefix.py",
        "            self.forget(next(iter(self._attached)))\n            self.num_evicted += 1\n",
        "            self.num_evicted += 1\n"
        "            return next(iter(self._attached.values()))\n",
        f"{_REUSE}[qwen3_next]",
    ),
    Fault(
        "a stale snapshot: an evicted page keeps it for its next content",
        "engine/prefix.py",
        "            del self._entries[block]\n            self.snapshots.forget(page)\n",
        "            del self._entries[block]\n",
        f"{_REUSE}[qwen3_next]",
    ),
    Fault(
        "a snapshot of a prompt is one page off",
        "engine/snapshots.py",
        "                self._save(request, end, self.prefixes.index.snapshots)",
        "                at = end + self.prefixes.page_size\n"
        "                self._save(request, at, self.prefixes.index.snapshots)",
        f"{_REUSE}[step3p7]",
    ),
    Fault(
        "a snapshot of decoded text is one page off",
        "engine/snapshots.py",
        "            self._save(request, end, prefixes.index.snapshots)",
        "            self._save(request, end + prefixes.page_size, prefixes.index.snapshots)",
        f"{_REUSE}[qwen3_next]",
    ),
    Fault(
        "snapshots of two layers are exchanged",
        "engine/snapshots.py",
        "        if request.restored is not None:\n"
        "            for slots, snapshots in self._pairs:\n",
        "        if request.restored is not None:\n"
        "            for (slots, _), (_, snapshots) in zip(\n"
        "                self._pairs, [*self._pairs[2:4], *self._pairs[:2], *self._pairs[4:]]\n"
        "            ):\n",
        f"{_REUSE}[step3p7]",
    ),
    Fault(
        "snapshots lack what chained MTP layers keep",
        "layout/slot_state.py",
        "if name.startswith(_OF_REQUESTS) and not (spec.is_paged or spec.is_rebuilt)",
        'if name.startswith("kv.") and not (spec.is_paged or spec.is_rebuilt)',
        f"{_REUSE}[step3p7]",
    ),
    Fault(
        "a snapshot is restored into the neighbour's slot",
        "engine/snapshots.py",
        "slots[request.slot - 1], snapshots[request.restored]",
        "slots[request.slot - 2], snapshots[request.restored]",
        f"{_REUSE}[deepseek_v4]",
    ),
    Fault(
        "in files: a page is one block off",
        "engine/prefix.py",
        "digest = self.offload.block(request, own)",
        "digest = self.offload.block(request, max(own - 1, 0))",
        f"{_RESTART}[mimo]",
    ),
    Fault(
        "in files: a page is what was read or written before",
        "engine/offload.py",
        "        form.gather(row)\n",
        "",
        f"{_RESTART}[mimo]",
    ),
    Fault(
        "in files: layers are exchanged",
        "engine/offload.py",
        "        for _, target, view in self._views:\n            target[row].copy_(view)\n",
        "        for (_, target, _), (_, _, view) in zip(\n"
        "            self._views, [*self._views[2:], *self._views[:2]]\n"
        "        ):\n"
        "            target[row].copy_(view)\n",
        f"{_RESTART}[mimo]",
    ),
    Fault(
        "in files: the tokens behind a page do not count",
        "engine/offload.py",
        "keys = request.keys(end - self._page_size, end + self._lookahead)",
        "keys = request.keys(end - self._page_size, end)",
        "engine/test_offload.py::test_a_block_is_its_whole_past",
    ),
    Fault(
        "in files: a state goes to the neighbour's slot",
        "engine/prefix.py",
        "request, end - 1, request.slot - 1)",
        "request, end - 1, request.slot - 2)",
        f"{_RESTART}[qwen3_next]",
    ),
    Fault(
        "in files: a page without its state counts",
        "engine/prefix.py",
        '            if is_known or files.has("state", request, end - 1):\n',
        '            if is_known or files.has("page", request, end - 1):\n',
        f"{_RESTART}[qwen3_next]",
    ),
    Fault(
        "in files: pages of other models are taken over",
        "engine/offload.py",
        "root = json.dumps([FORMAT, identity, page_size,",
        "root = json.dumps([FORMAT, page_size,",
        "engine/test_offload.py::test_other_models_and_forms_find_nothing",
    ),
    Fault(
        "in files: damage is taken over",
        "engine/offload.py",
        "return is_whole and bytes(self._found) == self.header(block)",
        "return is_whole",
        "engine/test_offload.py::test_damage_is_refused_and_mended",
    ),
    Fault(
        "pages for the chained drafts are not reserved",
        "engine/engine.py",
        "options.blocks_per_request(num_committed + 1)",
        "options.blocks_per_request(num_committed + 1 - options.spec_tokens)",
        _SCHEDULES,
    ),
    Fault(
        "rows of codes share the scale of the largest",
        "ops/attention.py",
        "_write_rows(scales, steps, slot_mapping)",
        "_write_rows(scales, steps.amax(0, keepdim=True).expand_as(steps), slot_mapping)",
        _CODES,
    ),
    Fault(
        "keys of int8 are spread by all of their width, no power of two",
        "ops/attention.py",
        "block, apart = rows.shape[-1] & -rows.shape[-1], 1",
        "block, apart = rows.shape[-1] & -2, 1",
        "cpu/test_cache_codes.py::test_rows_spread_by_blocks",
    ),
    Fault(
        "what attention adds up of int8 stays spread",
        "ops/attention.py",
        "rows = (unspread(rows) if is_spread else rows).to(q.dtype)",
        "rows = rows.to(q.dtype)",
        "cpu/test_cache_codes.py::test_attention_to_codes_equals_the_reference",
    ),
    Fault(
        "codes of values have the scales of keys",
        "ops/attention.py",
        "weights * _by_head(v_scale,",
        "weights * _by_head(k_scale,",
        _CODES,
    ),
    Fault(
        "auto: a pause of the machine counts in full as lost to plain decoding",
        "engine/tiers.py",
        "seconds = min(seconds, cell.seconds(tier) * exp(SPIKE))",
        "seconds = max(seconds, 0.0)",
        "engine/test_tiers.py::test_a_pause_of_the_machine_is_no_loss_to_plain_decoding",
    ),
    # Images.
    Fault(
        "images: the MTP layer embeds tokens in the place of images' rows",
        HF,
        "images.embed_next(self.embedding, ids, context)",
        "self.embedding(ids.clamp(max=95))",
        _IMAGE_DRAFTS,
    ),
    Fault(
        "images: the MTP layer numbers rows as text",
        HF,
        "rotated = images.positions(context)",
        "rotated = None",
        _IMAGE_DRAFTS,
    ),
    Fault(
        "images: text after an image is numbered as if there were none",
        "engine/prompt_images.py",
        "self.offsets.shape[1]), self.delta)",
        "self.offsets.shape[1]), 0)",
        "models/test_images.py::test_text_is_transformers[qwen3_5-3]",
    ),
    Fault(
        "images: the token after a chunk is embedded as text",
        "engine/rows.py",
        "following += ids[count:] or [-1]",
        "following += request.token_ids(end, min(end + 1, request.num_input)) or [-1]",
        "models/test_images.py::test_rows_at_the_edges_of_chunks[qwen3_5]",
    ),
    Fault(
        "images: what a slot keeps is looked up in the next chunk's rows",
        "step/chaining.py",
        "kept = torch.where(place >= 0, names, kept)",
        "kept = torch.where(place >= 0, kept, kept)",
        _STEP_IMAGES,
    ),
    Fault(
        "images: rows that a slot keeps once more are looked up in the chunk's",
        "step/chaining.py",
        "torch.where((place >= count)[:, :, None], old, fresh)",
        "torch.where((place >= count)[:, :, None], fresh, fresh)",
        "models/test_images.py::test_what_a_slot_keeps",
    ),
    Fault(
        "images: a slot's rows are written before the layers read those of the round before",
        "step/chaining.py",
        "        if not keeps_embeds:\n            _keep_last(step, widened)\n",
        "        _keep_last(step, widened, step.state.prompt_embeds, step.state.chain_embeds)\n"
        "        keeps_embeds = False\n",
        _STEP_IMAGES,
    ),
    Fault(
        "images: an image is known by its size",
        "engine/vision.py",
        "found.update(tensor.contiguous().numpy().data)",
        "tensor.contiguous()",
        "models/test_images.py::test_pages_are_reused_by_image[qwen3_5]",
    ),
    Fault(
        "images: pages are known by tokens alone",
        "engine/request.py",
        "return list(ids) if self.images is None else self.images.keys(ids, begin)",
        "return list(ids)",
        "models/test_images.py::test_pages_are_reused_by_image[qwen3_5]",
    ),
    # Interrupts.
    Fault(
        "an output is dropped by an interrupt before its callback is called",
        "engine/outbox.py",
        "deque(each for each in self.requests.values() if each.has_news)",
        "deque[Request]()",
        f"{_EACH}[telling]",
    ),
    Fault(
        "a callback is called again after an interrupt",
        "engine/outbox.py",
        "            elif request.on_output is not None:\n",
        "            elif False:\n",
        f"{_EACH}[telling]",
    ),
    Fault(
        "a request has half an output after an interrupt",
        "engine/engine.py",
        "        for request in self._outbox.requests.values():\n            request.settle()\n",
        "",
        f"{_EACH}[emit]",
    ),
    Fault(
        "slots and pages stay taken after a step that failed",
        "engine/scheduler.py",
        "        self.slots.reset()\n        self.pages.reset()\n",
        "",
        f"{_FAILURES}::test_a_grammar_survives_a_replay_that_fails",
    ),
    Fault(
        "a grammar that was interrupted goes on",
        "engine/engine.py",
        "if request.is_walking and request.finish_reason is None:",
        "if False:",
        f"{_FAILURES}::test_a_grammar_that_is_interrupted_ends_its_own_request",
    ),
    # Several ranks.
    Fault(
        "a rank reads the scales of keys as those of values",
        SHARD,
        "if name in caches:",
        'node.target = name = name.replace("v_scale", "k_scale")\n        if name in caches:',
        f"{_RANKS}test_each_rank_has_the_codes_of_its_heads[mimo-int8-1]",
    ),
    Fault(
        "the checker takes a single result for several",
        "certificate/moves.py",
        'return found[c.args["index"]] if isinstance(found, list) else found',
        'return found[c.args["index"]]',
        "engine/test_copies.py::test_one_draft_in_bfloat16",
    ),
    Fault(
        "the checker takes -1 for 0 or more",
        "certificate/sums.py",
        "return bool(constant > -1)",
        "return bool(constant > -2)",
        "certificate/test_sums.py::test_what_holds_is_true[2]",
    ),
    Fault(
        "the checker forgets that places were clamped",
        "certificate/arithmetic.py",
        'one.those("most") | other.those("most")',
        "set[Any]()",
        f"{_REFUSED}[starts_that_are_clamped]",
    ),
    Fault(
        "the checker knows what both of two conditions say where not both hold",
        "certificate/arithmetic.py",
        'isinstance(fact, str) or fact[0] == "if"',
        "True",
        f"{_REFUSED}[earlier_rows_where_a_flag_is_set]",
    ),
    Fault(
        "the checker lets tokens say which rows of a request are read",
        "certificate/moves.py",
        "and not rest.places and not loose(rest)",
        "and not rest.places",
        f"{_REFUSED}[rows_by_a_token]",
    ),
    Fault(
        "a sampled draft may be a token that is not listed",
        "passes/trim_draft_head.py",
        'shape, float("-inf")',
        'shape, float("inf")',
        "passes/test_trim_draft_head.py::test_drafts_are_listed_and_what_is_emitted_stays",
    ),
    Fault(
        "sampled drafts read the whole head although tokens are listed",
        "passes/trim_draft_head.py",
        "logits, dim = node.args[0], -1",
        "return None",
        "passes/test_trim_draft_head.py::test_the_target_keeps_its_head[decode-True]",
    ),
    Fault(
        "every rank has the first rank's rows of a trimmed head",
        SHARD,
        "ids[self.sharding.rank * step :]",
        "ids[0:]",
        f"{_RANKS}test_drafts_from_a_part_of_the_vocabulary[False-mimo-1]",
    ),
    Fault(
        "a rank's places in the vocabulary are without its offset",
        "ops/collectives.py",
        "ids = place + group_of(group).rank() * step",
        "ids = place",
        f"{_RANKS}test_drafts_from_a_part_of_the_vocabulary[False-mimo-1]",
    ),
    Fault(
        "the scale of a whole weight multiplies where it divides",
        "weights/formats/nvfp4.py",
        "(1 / whole if divides else whole)",
        "whole",
        "weights/test_float_formats.py::test_two_levels_of_scales_are_rounded_once[compressed-tensors]",
    ),
    Fault(
        "rounding: errors of a half of the inputs do not reach the other",
        "weights/rounding.py",
        "self.errors[:, start:middle], alpha=-1)",
        "self.errors[:, start:middle], alpha=0)",
        "weights/test_rounding.py::test_feedback_is_that_of_input_after_input",
    ),
    Fault(
        "rounding: each of its threads has PyTorch's beside it",
        "weights/quantise.py",
        "partial(torch.set_num_threads, 1)",
        "partial(torch.set_num_threads, count)",
        "weights/test_write_quantised.py::test_no_threads_that_wait_for_each_other",
    ),
    Fault(
        "rounding: of the scales that are tried the first is taken",
        "weights/rounding.py",
        "fitted.gather(0, at[None])[0]",
        "fitted[0]",
        "weights/test_write_quantised.py::test_the_search[iq4_nl]",
    ),
    Fault(
        "a derived family: a recurrence beside attention is forgotten",
        "models/observe.py",
        "self.states[layer] = replace(state, beside=before)",
        "self.states[layer] = state",
        "models/test_derived_recurrent.py::test_rows_are_those_of_transformers[FalconH1ForCausalLM]",
    ),
    Fault(
        "a derived family: Falcon-H1's projection has no scales",
        "models/mamba2.py",
        "self.in_proj(rows * self.ssm_in_multiplier) * self.mup_vector[0]",
        "self.in_proj(rows * self.ssm_in_multiplier)",
        "models/test_derived_recurrent.py::test_rows_are_those_of_transformers[FalconH1ForCausalLM]",
    ),
    Fault(
        "a derived family: the head loses the decoder's numbers",
        "models/heads.py",
        "vars(self).update({n: v for n, v in vars(decoder).items() if isinstance(v, int | float)})",
        "self.lm_head_multiplier = 1.0",
        "models/test_derived_recurrent.py::test_rows_are_those_of_transformers[FalconH1ForCausalLM]",
    ),
    Fault(
        "GGUF: Falcon-H1's norm comes before its gate",
        "weights/gguf/derived.py",
        '"mamba_norm_before_gate": False',
        '"mamba_norm_before_gate": True',
        "weights/test_gguf_derived.py::test_a_file_is_the_model_it_was_written_from[falcon-h1]",
    ),
    Fault(
        "calibration: all tokens count alike",
        "models/calibrate.py",
        "rows = inputs.float() * of_token.sqrt()[:, None]",
        "rows = inputs.float()",
        "weights/test_mixture.py::test_sensitivities_are_those_of_the_layers[False]",
    ),
    Fault(
        "calibration: what tokens cost together is what they cost apart",
        "models/calibrate.py",
        "scale = self.weight * self._together / self._apart / tokens",
        "scale = self.weight / tokens",
        "weights/test_mixture.py::test_losses_are_in_nats",
    ),
    Fault(
        "calibration: the middle token is drawn, always",
        "models/calibrate.py",
        "at = torch.rand(len(some), 1, generator=draws) * up_to[:, -1:]",
        "at = 0.5 * up_to[:, -1:]",
        "weights/test_mixture.py::test_a_loss_is_that_of_tokens_that_the_model_draws",
    ),
    Fault(
        "calibration: inputs that were written over are taken for those of before",
        "models/calibrate.py",
        "if inputs._version != version:",
        "if inputs._version < version:",
        "weights/test_mixture.py::test_inputs_that_are_written_over_are_refused",
    ),
    Fault(
        "a mixture of schemes: an error's later corrections are forgotten",
        "weights/mixture.py",
        "left = root_of(known.moments).diagonal(dim1=1, dim2=2).flatten().square()",
        "left = known.moments.diagonal(dim1=1, dim2=2).flatten()",
        "weights/test_mixture.py::test_an_expected_loss_is_what_rounding_costs[iq4_nl]",
    ),
    Fault(
        "a mixture of schemes: large matrices come first",
        "weights/mixture.py",
        "((of[chosen[name]] - loss) / spent, spent, name, scheme)",
        "(of[chosen[name]] - loss, spent, name, scheme)",
        "weights/test_mixture.py::test_bits_go_where_they_gain_most",
    ),
    Fault(
        "a mixture of schemes: each matrix has the budget of all",
        "weights/mixture.py",
        "chosen[name], left = scheme, left - spent",
        "chosen[name] = scheme",
        "weights/test_mixture.py::test_bits_go_where_they_gain_most",
    ),
    Fault(
        "packing: blocks of gpt-oss's GGUF stacks are taken apart first",
        "weights/formats/gguf.py",
        "kept = None if block.is_rounded else block",
        "kept = None",
        "weights/test_gpt_oss.py::test_text_of_a_gguf_file",
    ),
    Fault(
        "packing: of two codes in a byte the second comes first",
        "weights/formats/stored.py",
        "pairs |= pairs << 4",
        "pairs = pairs << 8 | pairs >> 4",
        "weights/test_float_formats.py::test_a_stack_of_experts_is_what_transformers_makes_of_it",
    ),
    Fault(
        "gpt-oss's stacks of experts keep their inputs last",
        "weights/formats/stored.py",
        "return out.transpose(-2, -1).contiguous() if self.is_transposed else out",
        "return out.reshape(self.own_shape)",
        "weights/test_gpt_oss.py::test_logits_are_those_of_the_dequantised_weights",
    ),
    Fault(
        "features of a stack with inputs first are taken as its codes' inputs",
        "weights/recipes.py",
        "not (spec.turned and recipe.dim) and",
        "",
        "weights/test_float_formats.py::test_a_stack_of_experts_is_what_transformers_makes_of_it",
    ),
    Fault(
        "gates and ups of a GGUF file of gpt-oss change places",
        "weights/formats/gguf.py",
        'parts = {"codes": name, "ups": other}',
        'parts = {"codes": other, "ups": name}',
        "weights/test_gpt_oss.py::test_logits_of_a_gguf_file[False]",
    ),
    Fault(
        "kernel: gates and ups of gpt-oss's experts change places",
        f"{KERNELS}/grouped_experts.cpp",
        "const int gate = 2 * f, up = gate + 1;",
        "const int up = 2 * f, gate = up + 1;",
        "weights/test_gpt_oss.py::test_logits_are_near_those_of_the_dequantised_weights",
    ),
    Fault(
        "kernel: every expert has the first one's bias",
        f"{KERNELS}/grouped_experts.cpp",
        "biased_->narrow, choice.expert * features + begin, count",
        "biased_->narrow, begin, count",
        "cpu/test_biased_experts.py::test_values",
    ),
    Fault(
        "shapes of joined weights are asked of torch's meta device",
        "weights/recipes.py",
        "    if isinstance(recipe, str):\n        held = tensor_of(recipe)\n"
        "        return [*held.shape], held.dtype\n",
        "    if isinstance(recipe, str):\n        held = tensor_of(recipe)\n"
        "        return [*held.shape], held.dtype\n"
        "    if isinstance(recipe, Join):\n"
        '        form = Held(lambda n: torch.empty_like(tensor_of(n), device="meta"))\n'
        "        made = _plain(recipe, form.read)\n"
        "        return [*made.shape], made.dtype\n",
        "weights/test_packing_memory.py::test_room_for_weights_is_planned_without_compilers",
    ),
    Fault(
        "memory that is taken early and not used stays",
        "weights/early_pages.py",
        "self._memory.madvise(mmap.MADV_DONTNEED, start, len(self._memory) - start)",
        "pass",
        "weights/test_packing_memory.py::"
        "test_memory_that_is_taken_early_is_used_and_the_rest_given_back",
    ),
    Fault(
        "parts of inputs lose the factor of their row",
        "weights/grouped_recipes.py",
        "row, each = tensor[..., : form.row_bytes]",
        "row, each = tensor[..., form.row_bytes : 2 * form.row_bytes]",
        "cpu/test_two_levels.py::test_parts_of_inputs_stay_at_four_bits[runs0]",
    ),
    Fault(
        "a model of which the hub cache has a part counts as whole",
        "weights/hub.py",
        "not _is_whole(here)",
        "not here.exists()",
        "weights/test_download.py::test_what_a_checkpoint_needs",
    ),
    Fault(
        "config.json is downloaded before the weights",
        "weights/download.py",
        "apart = (CONFIG,) if weights",
        "apart = () if weights",
        "weights/test_download.py::test_a_download_that_is_killed",
    ),
    Fault(
        "a rank has the scales of the first inputs",
        "weights/grouped_recipes.py",
        "[tensor.narrow(dim, a // step, (b - a) // step) for a, b in runs]",
        "[tensor.narrow(dim, a if step == 1 else 0, (b - a) // step) for a, b in runs]",
        "ranks/test_codes.py::test_slices_have_the_values_of_the_whole[int4-32-zeros]",
    ),
    Fault(
        "minima of the last groups of a super-block have the bits of scales",
        "weights/grouped.py",
        "(rest >> 4) | (high >> 2 & 48)",
        "(rest & 15) | (high >> 2 & 48)",
        "cpu/test_blocks.py::test_values_are_those_of_the_library[sizes0-Q4_K]",
    ),
    Fault(
        "a minimum of a super-block that is no number goes unnoticed",
        "weights/grouped.py",
        "blocks[..., : 1 + self.form.has_mins]",
        "blocks[..., :1]",
        "cpu/test_blocks.py::test_steps_that_are_no_numbers_are_found",
    ),
    Fault(
        "kernels take minima of the last groups of a super-block from the bits of scales",
        f"{KERNELS}/unpack.cpp",
        "return words.bits<4>(last + byte / 2, place + shift) |",
        "return words.bits<4>(last + byte / 2, place) |",
        "cpu/test_blocks.py::test_values_are_those_of_the_library[sizes0-Q4_K]",
    ),
    Fault(
        "the second part of a tile that is unpacked begins its sums anew",
        f"{KERNELS}/grouped_products.cpp",
        "goes_on_(tile.first > 0),",
        "goes_on_(false),",
        "cpu/test_blocks.py::test_products[1-sizes2-Q4_K]",
    ),
    Fault(
        "products go on with the next row's block where their own next one follows",
        f"{KERNELS}/grouped_products.cpp",
        "step / kBlockSteps * all.stride_",
        "step / kBlockSteps * kBlockGroups",
        "cpu/test_blocks.py::test_products[9-sizes2-Q4_K]",
    ),
    Fault(
        "a rounded register that crosses blocks is written to the first alone",
        f"{KERNELS}/grouped_rows.h",
        "if (here >= count) {",
        "if (here >= 0) {",
        "cpu/test_grouped.py::test_kernel_against_float64_and_the_reference",
    ),
    Fault(
        "codes that products look up lose their upper halves",
        f"{KERNELS}/grouped_products.cpp",
        "look_up(Int4Codes::part<kPart>(codes), kTable)",
        "look_up(Int4Codes::part<0>(codes), kTable)",
        "cpu/test_blocks.py::test_products[9-sizes2-IQ4_NL]",
    ),
    Fault(
        "an embedding of codes takes the row beside",
        f"{KERNELS}/grouped_embedding.cpp",
        "numbers[i] % kFeatures, to",
        "(numbers[i] ^ 1) % kFeatures, to",
        "cpu/test_blocks.py::test_an_embedding_is_read_by_row[Q6_K]",
    ),
    Fault(
        "a rank rounds its part of a row by a scale of its own",
        "passes/pack_groups.py",
        "spec_by_scheme(scheme, whole, graph.weights[whole])",
        "spec_by_scheme(scheme, whole, weight)",
        "ranks/test_codes.py::test_each_rank_has_its_part_of_the_codes[mimo-int8-False]",
    ),
    Fault(
        "ranks cut an assistant's head of which single rows are read",
        "models/gemma4_assistant.py",
        '{"head": "replicate"}',
        "{}",
        f"{_RANK_DRAFTERS}[gemma4]",
    ),
    Fault(
        "ranks cut a drafter by the rules of its target alone",
        "models/shards.py",
        'rules |= {f"mtp.*.{name}": style for name, style in self._drafter.items()}',
        "rules |= {}",
        f"{_RANK_DRAFTERS}[gemma4]",
    ),
    Fault(
        "a rank reads the weights of which it has a part",
        "ranks/share.py",
        "_placeholder(tensor, device) if name in cut else parts.make(same)[same]",
        "parts.make(same)[same]",
        "ranks/test_part_memory.py::test_a_start_takes_the_rank_s_part[bfloat16]",
    ),
    Fault(
        "ranks add from the last one",
        "backends/gpu/passes/spell_collectives.py",
        "for rank in range(1, emit.ranks):",
        "for rank in range(emit.ranks - 1, 0, -1):",
        "ranks/test_spelled.py::test_large_sums_are_made_by_blocks[3-dtype1]",
    ),
    Fault(
        "a drafter's map of its vocabulary is ignored in whole logits",
        DRAFTER,
        "ids = self.offsets + torch.arange(self.offsets.shape[0], device=logits.device)",
        "ids = torch.arange(self.offsets.shape[0], device=logits.device)",
        "models/test_drafts.py::test_drafts_of_a_part_of_the_vocabulary",
    ),
    Fault(
        "masks ahead are all written to a request's first row",
        GRAMMAR,
        "self._look_ahead(walk, rows[row], ahead[row])",
        "self._look_ahead(walk, rows[row], ahead[0])",
        "engine/test_grammar.py::test_each_row_has_the_masks_of_the_drafts_after_it",
    ),
    Fault(
        "the tokenizer is loaded when the weights are there",
        "program/open_steps.py",
        "if is_first and self.wanted.reads_text and served.load_kept():",
        "if is_first and not self.wanted.reads_text and served.load_kept():",
        "cache/test_warm_starts.py::test_who_reads_text_has_the_tokenizer_before_the_weights",
    ),
    Fault(
        "eight-bit floats are taken for plain weights",
        "weights/checkpoint.py",
        "each.is_wide and",
        "each.is_floating_point and",
        "weights/test_block_scales.py::test_codes_that_nothing_announces_are_refused",
    ),
    Fault(
        "a copy that builds keeps its caller's end of the pipe",
        "program/processes.py",
        "ours.close()\n        os.setsid()",
        "os.setsid()",
        "program/test_apart.py::test_a_caller_that_gives_up_leaves_nothing_running[a copy]",
    ),
    Fault(
        "a process of several threads is copied",
        "program/processes.py",
        'len(os.listdir("/proc/self/task")) == 1',
        'len(os.listdir("/proc/self/task")) > 0',
        "program/test_apart.py::test_a_process_of_one_thread_is_copied",
    ),
    Fault(
        "counts of rows that nothing reads stay in a step",
        "backends/cpu/passes/skip_idle_rows.py",
        "if not counted:",
        "if counted:",
        "passes/test_whole_steps.py::test_a_pass_without_rewrites_leaves_the_graph[glm4_moe-0]",
    ),
    Fault(
        "a family of another name serves an architecture",
        "models/families/__init__.py",
        "if not set(family.architectures).isdisjoint(architectures)",
        "if True",
        "cli/test_models.py::test_an_architecture_opens_the_module_of_its_family",
    ),
    Fault(
        "in files: the first file of weights alone identifies a model",
        "program/identity.py",
        "content_digest(checkpoint.paths, directory / MEMORY)",
        "content_digest(checkpoint.paths[:1], directory / MEMORY)",
        f"{_EVERY_FILE}[mimo]",
    ),
    Fault(
        "in files: pages of another drafter are taken over",
        "weights/paired_checkpoint.py",
        "return (*super().paths, *self.draft.paths)",
        "return super().paths",
        f"{_EVERY_FILE}[llama]",
    ),
    Fault(
        "deeper MTP layers skip their KV where K is under their number",
        CHAINING,
        "for index in range(1, self.num_layers):",
        "for index in range(1, min(self.num_layers, step.key.spec_tokens)):",
        _LEVELS,
    ),
    Fault(
        "a snapshot of decoded text is taken when the next step has moved on",
        "engine/snapshots.py",
        "not prefixes.distance or self._options.async_scheduling:",
        "not prefixes.distance:",
        f"{_LATE_TURN}[qwen3_next]",
    ),
    # Copies of a request's own text.
    Fault(
        "copies are of another request's text",
        COPIES,
        "_continue(text_ids[state_slots], torch.where",
        "_continue(text_ids[state_slots.roll(1)], torch.where",
        _COPIES,
    ),
    Fault(
        "rejected tokens become part of the text",
        COPIES,
        "is_certain = active[request] & (row <= anchors[request])",
        "is_certain = active[request] & (row < query_start_loc[request + 1])",
        _COPIES,
    ),
    Fault(
        "a copy begins one token too early",
        COPIES,
        "source = begin + columns %",
        "source = begin - 1 + columns %",
        _COPIES,
    ),
    Fault(
        "the last emitted token is not compared",
        COPIES,
        "torch.where(active, ends + 1, 0)",
        "torch.where(active, ends, 0)",
        _COPIES,
    ),
    Fault(
        "a copy reads on behind the end of its text",
        COPIES,
        "columns % (lens - begin).clamp(min=1)",
        "columns",
        _COPIES,
    ),
    Fault(
        "the first of equal matches is copied, not the last",
        COPIES,
        "best = (matched.long() * width + place)",
        "best = (matched.long() * width + width - 1 - place)",
        _COPIES,
    ),
    Fault(
        "two equal tokens are enough",
        COPIES,
        "SHORTEST, LONGEST = 3, 32",
        "SHORTEST, LONGEST = 2, 32",
        _COPIES,
    ),
    Fault(
        "a request that is off writes its text",
        COPIES,
        "torch.cat([is_certain, active])",
        "torch.cat([is_certain, active | True])",
        _COPIES,
    ),
    Fault(
        "a resumed request's text lacks what it had emitted",
        "engine/rows.py",
        "reused = request.token_ids(0, request.num_prefilled)",
        "reused = request.prompt_ids[: request.num_prefilled]",
        f"{_COPIED_TEXTS}::test_a_resumed_request_has_its_whole_text",
    ),
    Fault(
        "a slot's last text stays where pages are reused",
        "engine/rows.py",
        "if TEXT_IDS in shared and request.num_prefilled:",
        "if TEXT_IDS in shared and not request.num_prefilled:",
        f"{_COPIED_TEXTS}::test_a_resumed_request_has_its_whole_text",
    ),
    Fault(
        "a draft that does not exist has a row",
        "step/budget.py",
        "is_useful = is_draft & active",
        "is_useful = active",
        f"{_COPIED_TEXTS}::test_a_draft_that_does_not_exist_has_no_row",
    ),
    # A budget of rows.
    Fault(
        "a budget verifies the least likely drafts",
        "step/budget.py",
        "flat[None, :] > flat[:, None]",
        "flat[None, :] < flat[:, None]",
        f"{_BUDGETS}::test_the_likeliest_drafts_are_chosen",
    ),
    Fault(
        "a packed row has the token of another request",
        "step/budget.py",
        "token_ids[state_indices[request], place",
        "token_ids[state_indices[request * 0], place",
        f"{_BUDGETS}::test_the_text_is_that_of_plain_decoding[mimo]",
    ),
    Fault(
        "drafts take the rows of the requests' last tokens",
        "step/budget.py",
        "num_tokens - active.long().sum()",
        "torch.tensor(num_tokens)",
        f"{_BUDGETS}::test_the_text_is_that_of_plain_decoding[mimo]",
    ),
    Fault(
        "a draft that has no row is accepted",
        "step/budget.py",
        "torch.where(is_row, given.ids[rows], NO_TOKEN)",
        "given.ids[rows]",
        f"{_BUDGETS}::test_the_next_request_has_no_draft_of_this_one",
    ),
    Fault(
        "drafts that were not proposed are judged",
        "step/budget.py",
        "torch.minimum(lens - 1, exist)",
        "(lens - 1)",
        f"{_BUDGETS}::test_what_is_judged",
    ),
    Fault(
        "drafts behind one that was refused are judged",
        "step/budget.py",
        "(column < verified[:, None]) & (column <= accepted)",
        "(column < verified[:, None])",
        f"{_BUDGETS}::test_what_is_judged",
    ),
    Fault(
        "drafts of an earlier step stay drafts",
        "capture/trace.py",
        "SYNTHETIC_DRAWS in layout or DRAFT_COUNTS in layout",
        "SYNTHETIC_DRAWS in layout",
        f"{_BUDGETS}::test_what_was_not_proposed_is_no_draft",
    ),
    Fault(
        "a request has the chances of the one before it in its slot",
        "engine/rows.py",
        "{COPY_COUNTS, DRAFT_SOURCE, DRAFT_COUNTS} & shared.keys()",
        "{COPY_COUNTS, DRAFT_SOURCE} & shared.keys()",
        f"{_BUDGETS}::test_what_was_not_proposed_is_no_draft",
    ),
    Fault(
        "a smaller K is worth the chances of the largest",
        "engine/budgets.py",
        "for c in row[:k]",
        "for c in row",
        f"{_BUDGETS}::test_the_policy_takes_the_best_rate",
    ),
    Fault(
        "numbers of the command line stay text",
        "cli/compile_arguments.py",
        '"N,N": ids,',
        "",
        "cli/test_cli.py::test_options_of_several_numbers_are_numbers",
    ),
    Fault(
        "a step without copies counts K drafts",
        "step/copying.py",
        "torch.where(matched > 0, self.num_drafts, 0)",
        "torch.where(matched >= 0, self.num_drafts, 0)",
        f"{_COPIED_TEXTS}::test_a_step_without_copies_verifies_none",
    ),
    Fault(
        "the token after each row is the row's own",
        "step/copying.py",
        "rows = (begun.ids, inputs.ids, inputs.metadata.query_start_loc)",
        "rows = (begun.ids, begun.ids, inputs.metadata.query_start_loc)",
        f"{_COPIED_TEXTS}::test_drafts_equal_the_rule[3]",
    ),
    Fault(
        "kernel: a copy begins one token too late",
        f"{KERNELS}/copy_drafts.cpp",
        "text[match.begin + i %",
        "text[match.begin + 1 + i %",
        _COPIES,
    ),
    Fault(
        "kernel: a rejected token becomes part of the text",
        f"{KERNELS}/copy_drafts.cpp",
        "row <= anchor &&",
        "row < starts(r + 1) &&",
        _COPIES,
    ),
    # MTP layers by derivation.
    Fault(
        "a derived MTP layer reads the embedding first, whatever its config says",
        DERIVED_MTP,
        'hidden_first=bool(entries.get("mtp_hidden_states_first"))',
        "hidden_first=False",
        f"{_DERIVED_MTP}[rules]",
    ),
    Fault(
        "derived MTP layers have no norm where they have one in common",
        DERIVED_MTP,
        'norm = _COMMON_NORM if entries["chain_hidden_post_norm"] else None',
        "norm = None",
        f"{_DERIVED_MTP}[rules]",
    ),
    Fault(
        "each derived MTP layer is fed the target's features",
        DERIVED_MTP,
        "final_norm=norm,",
        'final_norm=norm, chaining="target",',
        f"{_DERIVED_DRAFTS}[rules-2]",
    ),
    Fault(
        "a derived MTP layer is fed features after the final norm, which its model feeds before",
        DERIVED_MTP,
        '"before" if entries.get("tie_last_hidden_states") is False else "after"',
        '"after"',
        f"{_DERIVED_MTP}[rules]",
    ),
    Fault(
        "a derived MTP layer drafts tokens that pad the vocabulary",
        DERIVED_MTP,
        "min(size, head.out_features)",
        "head.out_features",
        f"{_DERIVED_MTP}[rules]",
    ),
    Fault(
        "a derived MTP layer is of the kind that the decoder's first layer is",
        DERIVED_MTP,
        "kind(_mtp_config(config), number - config.num_hidden_layers)",
        "kind(config, number - config.num_hidden_layers)",
        f"{_DERIVED_MTP}[mellum]",
    ),
    Fault(
        "a derived MTP layer rotates by the angles of full attention",
        DERIVED_MTP,
        "str(kinds[index]) if any",
        '"full_attention" if any',
        f"{_DERIVED_MTP}[mellum]",
    ),
    # Kernels in C++.
    Fault(
        "kernel: a draft is compared with the choice after it",
        f"{KERNELS}/accept.cpp",
        "draft(r, count) == chosen(r * width + count)",
        "draft(r, count) == chosen(r * width + count + 1)",
        _ACCEPT,
    ),
    Fault(
        "kernel: a stop token is not emitted",
        f"{KERNELS}/accept.cpp",
        "return {j + 1, 0, kToken};",
        "return {j, 0, kToken};",
        _ACCEPT,
    ),
    Fault(
        "kernel: a request that goes on loses its budget",
        f"{KERNELS}/accept.cpp",
        "if (goes_on) stopped.remaining",
        "if (false) stopped.remaining",
        _ACCEPT,
    ),
    Fault(
        "kernel: rows of a joint projection are read side by side",
        f"{KERNELS}/write_cache.cpp",
        "row += dense.stride(0) * width",
        "row += row_bytes",
        "cpu/test_kernels.py::test_write_cache_from_a_slice_of_a_joint_projection",
    ),
    Fault(
        "kernel: codes of all heads are those of the first",
        f"{KERNELS}/write_cache.cpp",
        "row + (i * heads + h) * width, width",
        "row + i * heads * width, width",
        "cpu/test_cache_codes.py::test_codes_and_scales_have_the_bits_of_the_reference",
    ),
    Fault(
        "kernel: queries of spread keys are not spread",
        f"{KERNELS}/attention_split.h",
        "        unspread(query, width);\n",
        "",
        "cpu/test_cache_codes.py::test_attention_to_codes_equals_the_reference",
    ),
    Fault(
        "kernel: a mask's bits are read from the other end",
        f"{KERNELS}/sampling.cpp",
        ">> (token % 32) & 1",
        ">> (31 - token % 32) & 1",
        f"{_SAMPLE}::test_sample_with_a_mask_of_its_own_for_each_row",
    ),
    Fault(
        "kernel: the logits of another place are read",
        f"{KERNELS}/sampling.cpp",
        "const int64_t place = (*places_)(row);",
        "const int64_t place = (*places_)(row) * 0;",
        f"{_SAMPLE}::test_logits_are_read_by_place",
    ),
    Fault(
        "kernel: a token that is not emitted is reported",
        f"{KERNELS}/sampling.cpp",
        "j >= emitted(r) ||",
        "j > emitted(r) ||",
        f"{_SAMPLE}::test_counts_and_reports_equal_the_reference",
    ),
    Fault(
        "kernel: noise has one round too few",
        f"{KERNELS}/philox.h",
        "round < 10",
        "round < 9",
        f"{_SAMPLE}::test_sample_equals_the_reference",
    ),
    Fault(
        "kernel: a round divides columns alone",
        f"{KERNELS}/sinkhorn.cpp",
        "if (round > 0)",
        "if (round > 1)",
        "ops/test_hyper_connections.py::test_kernel_equals_reference",
    ),
    Fault(
        "kernel: a row does not see itself",
        f"{KERNELS}/choose_slots.cpp",
        "length - (end - t) + 1, c.context",
        "length - (end - t), c.context",
        "ops/test_choose_slots.py::test_edges_of_pages_and_splits",
    ),
    Fault(
        "kernel: of equal scores the later position is chosen",
        f"{KERNELS}/choose_slots.cpp",
        "totals[a] > totals[b] : a < b",
        "totals[a] > totals[b] : a > b",
        "ops/test_choose_slots.py::test_of_equal_scores_the_kernel_chooses_the_earlier_positions",
    ),
    Fault(
        "kernel: the state that is kept has seen rows that are not certain",
        f"{KERNELS}/gated_delta.cpp",
        "b < blocks && request.certain >= request.count",
        "b < blocks",
        f"{_DELTA}::test_rejected_rows_leave_no_trace",
    ),
    Fault(
        "kernel: the delta is one of the state before its decay",
        f"{KERNELS}/gated_delta.cpp",
        "state[k * kRegisters + r] * row.decay * row.key[k]",
        "state[k * kRegisters + r] * row.key[k]",
        f"{_DELTA}::test_the_kernel_equals_the_reference",
    ),
    Fault(
        "kernel: a scan's query is its key",
        f"{KERNELS}/mamba2.cpp",
        "offset + keys, row.c",
        "offset, row.c",
        f"{_DELTA}::test_the_kernel_equals_the_reference",
    ),
    Fault(
        "aiter: latent attention gets a row more than its kernel has",
        "backends/aiter/limits.py",
        "rows <= found.rows)",
        "rows <= found.rows + 1)",
        "gpu/test_aiter_limits.py::test_every_part_has_one_kernel",
    ),
    Fault(
        "aiter: heads are filled up with zeros where parts take less time",
        "backends/aiter/limits.py",
        "max(1.0, parts.heads * rows / _BALANCE)",
        "1.0",
        "gpu/test_aiter_limits.py::test_parts_by_hand",
    ),
    Fault(
        "aiter: each part of the heads has the queries of the first",
        "backends/aiter/around.py",
        "attend(part, *given) for part in _cut(q, parts)",
        "attend(_cut(q, parts)[0], *given) for part in _cut(q, parts)",
        "gpu/test_aiter.py::test_latent_attention_is_translated",
    ),
    Fault(
        "aiter: the verifier does not know that prompts read the cache",
        "backends/aiter/ops.py",
        "share_traits(name, reference)",
        "pass",
        "gpu/test_aiter.py::test_operators_have_the_traits_of_what_they_compute",
    ),
    Fault(
        "a frozen cache lets a GPU's step be compiled",
        "store/entries.py",
        "self.root, self.frozen = root, frozen",
        "self.root, self.frozen = root, False",
        "gpu/test_kept_steps.py::test_a_frozen_cache_serves_what_it_has_and_compiles_nothing",
    ),
    Fault(
        "aiter: a prompt's grid is that of the average request",
        "backends/aiter/ops.py",
        "max_seqlen_q=q.shape[0],",
        "max_seqlen_q=q.shape[0] // block_table.shape[0],",
        "gpu/test_aiter.py::test_prompts_are_translated",
    ),
    Fault(
        "aiter: memory of splits that aiter does not take is counted",
        "backends/aiter/sizes.py",
        "heads in few)",
        "heads in ())",
        "gpu/test_aiter_limits.py::test_latent_scratch_by_hand",
    ),
    Fault(
        "aiter: nothing is behind the lists of tokens",
        "backends/aiter/token_lists.py",
        "torch.arange(num_reqs * longest + BEHIND,",
        "torch.arange(num_reqs * longest,",
        "gpu/test_aiter.py::test_latent_attention_is_translated",
    ),
    Fault(
        "pack-groups: experts with biases are dequantised for GPUs",
        "passes/pack_groups.py",
        "_place_biased_experts(graph, lambda stored: stored.widened())",
        "0",
        "weights/test_gpt_oss.py::test_codes_stay_codes[backend1]",
    ),
    Fault(
        "pack-groups: GPUs get codes of experts with biases that are places in a table",
        "passes/pack_groups.py",
        "_place_biased_experts(graph, lambda stored: stored.widened())",
        "_place_biased_experts(graph, lambda stored: stored)",
        "weights/test_gpt_oss.py::test_codes_stay_codes[backend1]",
    ),
    Fault(
        "aiter: the last check of batch_invariant passes its kernels",
        "backends/gpu/passes/check_invariance.py",
        "return of_aiter",
        "return None",
        "gpu/test_aiter_steps.py::test_no_step_whose_rows_are_apart_calls_it",
    ),
    Fault(
        "hidden states of one layer stand for those of all",
        "models/drafter.py",
        "self.captured.append(args[0]",
        "self.captured.append(self.captured[0] if self.captured else args[0]",
        "engine/test_hidden_states.py::test_they_are_what_enters_the_layers",
    ),
    Fault(
        "hidden states are those of the first pages of the pool",
        "engine/runner.py",
        "self._hidden[request.pages]",
        "self._hidden[1 : len(request.pages) + 1]",
        "engine/test_hidden_states.py::test_they_outlive_reused_pages_and_preemption",
    ),
    Fault(
        "drafts learn what the target says one token later",
        "tuning/train.py",
        "said = start + depth + 1 - silent",
        "said = start + depth - silent",
        "tuning/test_tune_head.py::test_what_the_target_does_not_say_does_not_count",
    ),
    Fault(
        "what is kept of a written text begins with its last token",
        "tuning/store.py",
        "new = length - known.shape[1] + 1",
        "new = length - known.shape[1] + 2",
        "tuning/test_train_draft.py::test_the_target_writes_and_says_at_once",
    ),
    Fault(
        "kernel: of a block of logits only what beats the most probable is reported",
        f"{KERNELS}/sampling.cpp",
        "held < count || value > to.logprobs[held - 1]",
        "held == 0 || value > to.logprobs[0]",
        "sampling/test_kernels.py",
    ),
    Fault(
        "kernel: every head has the first one's inputs",
        f"{KERNELS}/head_linear.cpp",
        "from + row * x.stride(0) + head * x.stride(1)",
        "from + row * x.stride(0)",
        "ops/test_row_linears.py::test_head_linear_against_float64",
    ),
    Fault(
        "kernel: a tile of features has the bias of the first",
        f"{KERNELS}/plain_linear.cpp",
        "sums[w][i] + call.bias[begin + w]",
        "sums[w][i] + call.bias[w]",
        "ops/test_row_linears.py::test_float32_linear_against_float64",
    ),
    Fault(
        "kernel: a rotation turns the other way",
        f"{KERNELS}/rotary.cpp",
        "turned(a, -b, i);",
        "turned(a, b, i);",
        f"{_ROTATE}::test_it_is_what_it_stands_for",
    ),
    Fault(
        "kernel: features that are not rotated are the first ones",
        f"{KERNELS}/rotary.cpp",
        "std::copy(head + 2 * half, head + width, to + 2 * half)",
        "std::copy(head, head + width - 2 * half, to + 2 * half)",
        f"{_ROTATE}::test_it_is_what_it_stands_for",
    ),
    Fault(
        "kernel: gate and up are exchanged",
        f"{KERNELS}/fused.cpp",
        "activate(take(gate + i, count), take(gate + width + i, count))",
        "activate(take(gate + width + i, count), take(gate + i, count))",
        f"{_FUSED}::test_kernels_are_their_references",
    ),
    Fault(
        "kernel: all rows add what the first row adds",
        f"{KERNELS}/fused.cpp",
        "norm.of_sum(lefts(r), rights(r),",
        "norm.of_sum(lefts(r), rights(0),",
        f"{_FUSED}::test_kernels_are_their_references",
    ),
    Fault(
        "kernel: all experts end with the first one's weights",
        f"{KERNELS}/packed_experts.cpp",
        "down_ + (choice.expert * tiles + tile)",
        "down_ + tile",
        "passes/test_packed_weights.py",
    ),
    Fault(
        "kernel: experts without gates are not squared",
        f"{KERNELS}/experts.cpp",
        "up > 0 ? up * up :",
        "up > 0 ? up :",
        "cpu/test_kernels.py::test_experts_without_gates",
    ),
)
