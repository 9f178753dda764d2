"""What the checker believes of operators. Nothing here is read from mtpc or from a listing."""

from __future__ import annotations

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
SUMS = ROW_BY_ROW | {"sum", "mean", "cumsum"}
FOLDS = SUMS | _words("amax amin any all max argmax topk sort")
KEPT = ROW_BY_ROW | {"cumsum", "topk", "sort"}
"""Folds whose results have the dimension that they fold."""
DIVIDES = _words("select flip unbind split split_with_sizes chunk repeat_interleave")
"""Views of parts of a dimension, or of another order, which must not be rows."""
VIEWS = DIVIDES | _words(
    "view reshape flatten unflatten unsqueeze squeeze transpose t slice expand alias "
    "detach _unsafe_view"
)
CONSTANTS = _words(
    "arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full"
)
_ROWS = """
rms_norm: x; add_rms_norm: x added; silu_and_mul: gate_up; packed_linear: x; row_sum: x; topk: x
packed_linear_max: x; packed_gated_linear: x; float32_linear: x; grouped_linear: x; row_max: x
grouped_linear_max: x; grouped_gated_linear: x; linear_chain: x residual; all_reduce: part
packed_experts: x expert_ids expert_weights; experts: x expert_ids expert_weights; group_topk: x
grouped_experts: x expert_ids expert_weights; relu2_experts: x expert_ids expert_weights
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
WHOLE = _words("accept count_tokens write_logprobs gated_delta_rule mamba2_scan")
"""Kernels in which a row may read later rows of its request."""
ANCHORED = frozenset({"copy_drafts"})
"""Kernels in which a request reads its rows up to the one that `anchors` names."""


def _lemmas(text: str) -> tuple[tuple[str, ...], ...]:
    """Operator, left, right and result of each."""
    return tuple(re.findall(r"(\w+) (\S+) (\S+) = (\S+)", text))


LEMMAS = _lemmas("""
add cnt:C row:L = pos+:C:L           sub pos+:C:L start:L = pos*:C:L  sub pos:C:L col:n = pos:C:L
add start:L pos:C:L = past+:C:L      sub past+:C:L cnt:C = past:C:L   sub len:C:L cnt:L = head:C
sub end:L start:L = cnt:L            sub end:L cnt:L = start:L        sub end:L cnt:C = tail:L:C
add tail:L:C row:C = tail+:L:C       sub tail+:L:C start:C = some:L   sub end:L 1 = last:L
add wins:C:n row:W = wins+:C:n:W     sub row:L start:L = off:L        add start:P off:L = into:P:L
sub row:M end:E = fresh:M:E          add anchor:L end:M = anchor:L+M  add start:L col:n = start+:L:n
minimum start+:L:n last:L = some:L   add start:M capped:L:n = into:M:L:n
sub anchor:L desc:n = back:L         maximum back:L start:L = anchor:L
add cnt:L cnt:M = len:L:M            add request 1 = next             sub slot 1 = slot-
mul slot- n = ring-:n                add ring-:n 1 = ring:n           add ring:n mod:n = page:n
mul page:X n = page*:X:n             add page*:X:n mod:n = place:X:n  mul slot n = page*:S:n
add start:L taken:n = start+:L:n     mul window:C:L:n n = opens:C:L:n
add start:L anchor:M = shift:L:M     sub shift:L:M start:M = anchor:L
floor_divide cnt:C n = wins:C:n      floor_divide len:C:L n = wine:C:L:n
sub wine:C:L:n wins:C:n = news:C:L:n sub wins+:C:n:W start:W = window:C:n:W
add opens:C:L:n col:n = pos:C:L      add opens:C:L:n under:n = pos:C:L
add page*:X:m window:C:L:n = spill:X:m
""")
"""What integers name, by operator: operator, left, right = result; the first that fits.

`start`, `end`: where the rows of a request begin and end in a layout, and `cnt`: their number;
`row`: the row that holds the number; `some`: one of the request's; `anchor`: the last accepted one,
or one before it; `off`: a number below `cnt`; `col:n`, `mod:n`: below n; `desc:n`: n - 1 and down;
`under:n`: -n and up, below n; `taken:n`: drafts that are accepted, below n; `tail:L:C`: where the
last C rows of L begin; `into:P:L`: a row of P if L has no more; `fresh:M:E`: a row of M less E,
unless it is one of E; `last`: the last row; `len`: a length with that many rows; `ring:n`: the
first of n pages of a slot; `place`: of a row in pages; `pos:C:L`: C and a row's offset, or less,
and 0 where the request is off, as in `pos*` it need not be; `past:C:L`: the row that is there, if C
is no more; `head:C`: C where the request is on; `capped:L:n`: `off:L`, or n - 1 if that is less;
`into:M:L:n`: so far into M; `shift:L:M`: a row of L and where M begins; `wins`, `wine`: how many
windows of n positions are closed before and after the rows of L; `news`: the difference;
`window:C:L:n`: the number of one that the rows close; `opens`: its first position; `spill`: the
place of a row in pages, or behind them.
"""
FACTS = _lemmas("""
ge pos:C:L cnt:C = inside:C:L        lt off:L cnt:C = below:L:C       lt col:n cnt:L = within:L
ge off:L n = from:n:L                le end:L n = fits:L              lt window:C:L:r n = fewer
gt len:C:L 0 = on                    ne slot 0 = null                 eq slot 0 = null
ge page:X 0 = null                   ne page:X 0 = null               eq page:X 0 = null
""")
"""What comparisons say where they are true: a position is that of a row, an offset is below C, a
column below the number of rows, an offset n or more, the rows fit, a window below a number; a
request is on, a place is the null page or scratch slot, or is not."""
PLACES = _words(
    "bounds start end tail tail+ row some into fresh anchor start+ last back request next nth "
    "slot slot- ring- ring page page* place used pos+ past+ past shift wins+ spill"
)
"""Tags of integers that depend on company, and may only be used as the rules say."""
