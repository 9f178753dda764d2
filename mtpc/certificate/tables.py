"""What the checker believes of operators. Nothing here is read from mtpc or from a listing."""

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXACT = _words(
    "add sub rsub mul div neg abs sign sqrt square reciprocal relu clamp clamp_min clamp_max "
    "minimum maximum where eq ne lt le gt ge __and__ __or__ __xor__ bitwise_and bitwise_or "
    "bitwise_xor bitwise_not logical_not logical_and logical_or "
    "floor_divide remainder isfinite to _to_copy type_as masked_fill clone contiguous"
)
"""Elementwise operators whose bits are the same wherever an element stands in a tensor."""
INTERPRETED = _words("exp cos sin rsqrt sigmoid silu gelu tanh softplus")
"""So in the tape's interpreter. PyTorch computes what fills no vector in another way."""
THREADS = INTERPRETED | _words("log log1p pow erf")
"""So on GPUs, where every element has a thread of its own."""
ROW_BY_ROW = frozenset({"softmax", "layer_norm"})
"""PyTorch's CPU kernels take one row after the other, along dimensions behind those of rows."""
COMPARISONS = _words("eq ne lt le gt ge")
SUMS = ROW_BY_ROW | {"sum", "mean", "cumsum"}
FOLDS = SUMS | _words("amax amin any all max argmax topk sort")
KEPT = ROW_BY_ROW | {"cumsum", "topk", "sort"}
"""Folds whose results have the dimension that they fold."""
DIVIDES = _words("select flip unbind split split_with_sizes chunk repeat_interleave")
"""Views of parts of a dimension, or of another order, which must not be rows."""
FOLLOWED = _words("transpose unsqueeze view reshape expand")
"""Views of which integers are followed."""
VIEWS = DIVIDES | FOLLOWED | _words("flatten unflatten squeeze t slice alias detach _unsafe_view")
CARRIERS = VIEWS | {"where"}
"""What may take a value that is known under a condition, which `where` has; or a request's rows as
columns, which a view may make rows again."""
REPORTS = frozenset({"count_tokens", "write_logprobs"})
"""What may read the rows of a request as columns: it takes those that were emitted."""
CONSTANTS = _words(
    "arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full"
)
_ROWS = """
rms_norm: x; add_rms_norm: x added; silu_and_mul: gate_up; packed_linear: x; row_sum: x; topk: x
packed_linear_max: x; packed_gated_linear: x; float32_linear: x; grouped_linear: x; row_max: x
grouped_linear_max: x; grouped_gated_linear: x; linear_chain: x residual; all_reduce: part
packed_experts: x expert_ids expert_weights; experts: x expert_ids expert_weights; group_topk: x
grouped_experts: x expert_ids expert_weights; relu2_experts: x expert_ids expert_weights
grouped_biased_experts: x expert_ids expert_weights; biased_experts: x expert_ids expert_weights
batch_invariant_linear: x; draft_entry: left right; vocab_max: logits; clear_idle_rows: x
sum_ranks: part; vocab_embedding: ids / 0; rotate: x cos sin / -1; packed_head_linear: x / -1
grouped_embedding: ids / 0; slot_attention: query fresh sees_ring entry_counts / -1
write_cache: rows slot_mapping / -1; rotate_and_write: q k v cos sin slot_mapping / -1
paged_attention: q / -1; latent_attention: q / -1; expanded_latent_attention: q / -1
choose_slots: query weights / -1; gated_delta_rule: rows / -1; mamba2_scan: rows / -1
sample: logits ids positions token_mask / -1; accept: chosen finite / -1; sinkhorn: logits / -1
count_tokens: ids / -1; write_logprobs: ids / -1; copy_drafts: ids next_ids / -1
"""
KERNELS = {
    name: (tuple(rows.split()), int(features or 1))
    for name, rows, features in re.findall(r"(\w+): ([\w ]+?)(?: / (-?\d))?(?:;|\n)", _ROWS)
}
"""Kernels that keep the order of a row's sums -> their arguments with rows, and how many last
dimensions belong to one row (-1: all but the first). A test holds it against their declarations."""
OWNED = _words(
    "query_start_loc state_slots state_indices block_table seq_lens rows row_slots sees_fresh "
    "chosen_entries"
)
"""Arguments of kernels that say what belongs to a request, or to a row."""
WRITES = {
    "write_cache": ("cache", "scales"),
    "rotate_and_write": ("k_cache", "v_cache", "k_scale", "v_scale"),
    "gated_delta_rule": ("recurrent", "history", "standing"),
    "mamba2_scan": ("recurrent", "history", "standing"),
    "count_tokens": ("output_counts",),
    "accept": ("out_token_ids", "num_accepted", "num_emitted", "stop_reason"),
    "copy_drafts": ("text_ids",),
    "write_logprobs": ("logprobs", "top_ids", "top_logprobs"),
}
OUTPUTS = frozenset({*WRITES["accept"], *WRITES["write_logprobs"]})
WHOLE = _words("accept count_tokens write_logprobs gated_delta_rule mamba2_scan")
"""Kernels in which a row may read later rows of its request."""
ANCHORED = frozenset({"copy_drafts"})
"""Kernels in which a request reads its rows up to the one that `anchors` names."""
NATURAL = frozenset({"committed_lens"})
"""State that is a number of tokens, and so not negative."""
GIVEN = _words(
    "state_indices num_input is_decoding next_prompt_id prompt_ids token_mask draft_mask"
)
"""What the host gives, by request or row."""
PACKED = (
    r"where\(__and__\((.+), bitwise_not\(__and__\(\1, ne\(batch\.is_decoding, 0\)\)\)\), "
    r"clamp\(batch\.num_input, \w+, \w+\), 0\)"
)
"""How many rows of `prompt_ids` a request has: none where it is off, or decodes."""
