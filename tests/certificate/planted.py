"""Planted dependences: edits of real listings after which a request depends on others.

Each is what a wrong pass, kernel or step could do. `PLANTED` has them by name: of which step, and
the edit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.listings import Edit

DFLASH2 = "dflash2"
"""In place of a family: llama with DFlash2, whose rows are mixed, and a budget of rows."""
Plant = Callable[[Edit], None]
PLANTED: dict[str, tuple[str, str, Plant]] = {}
"""Name -> family, phase, edit."""


def planted(family: str = "mimo", phase: str = "prefill") -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = (family, phase, plant)
        return plant

    return keep


# ---- Values of rows: the same edits where rows are embeddings, attention, logits, a router's ----


def _spoil(edit: Edit, ref: str, axis: int, make: Callable[..., str]) -> None:
    """Put what `make` makes of a value in its place, from the next line on."""
    line = edit.line(ref)
    at = next(n for n, one in enumerate(edit.lines) if one is line)
    follower = edit.lines[at + 1]
    new = make(edit, follower, ref, axis, line[3][0], line[4][0])
    edit.redirect(ref, new, follower)


def made_of(edit: Edit, line: Any, argument: str, make: Callable[..., str]) -> None:
    """A line takes what `make` makes of an argument's rows."""
    ref = line[2][argument]
    line[2][argument] = make(edit, line, ref, 0, *_form(edit.line(ref)))


def _fold(name: str) -> Callable[..., str]:
    """Every row gets a fold of all rows, subtracted."""

    def make(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
        folded = [1 if n == axis else size for n, size in enumerate(shape)]
        args = {"self": ref, "dim": [axis], "keepdim": True}
        total = edit.add(at, f"aten::{name}", args, folded, dtype)
        given = {"self": ref, "other": total, "alpha": 1}
        return edit.add(at, "aten::sub.Tensor", given, shape, dtype)

    return make


def _along(name: str, **args: Any) -> Callable[..., str]:
    """An operator along the rows."""

    def make(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
        return edit.add(at, f"aten::{name}", {"self": ref, "dim": axis, **args}, shape, dtype)

    return make


def first_row(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """The first row for all."""
    one = [size for n, size in enumerate(shape) if n != axis]
    row = edit.add(at, "aten::select.int", {"self": ref, "dim": axis, "index": 0}, one, dtype)
    kept = [1 if n == axis else size for n, size in enumerate(shape)]
    row = edit.add(at, "aten::unsqueeze.default", {"self": row, "dim": axis}, kept, dtype)
    return edit.add(at, "aten::expand.default", {"self": row, "size": shape}, shape, dtype)


def rolled(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """Each row is the next one."""
    parts = []
    for start, end, size in ((1, 2**63 - 1, shape[axis] - 1), (0, 1, 1)):
        args = {"self": ref, "dim": axis, "start": start, "end": end, "step": 1}
        part = [size if n == axis else other for n, other in enumerate(shape)]
        parts.append(edit.add(at, "aten::slice.Tensor", args, part, dtype))
    return edit.add(at, "aten::cat.default", {"tensors": parts, "dim": axis}, shape, dtype)


def _by_number(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """A row is taken by its number in the batch."""
    rows = edit.add(at, "aten::arange.default", {"end": shape[axis]}, [shape[axis]], "int64")
    args = {"self": rows, "other": shape[axis] - 1}
    rows = edit.add(at, "aten::rsub.Scalar", {**args, "alpha": 1}, [shape[axis]], "int64")
    args = {"self": ref, "dim": axis, "index": rows}
    return edit.add(at, "aten::index_select.default", args, shape, dtype)


def _by_place(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """A tile rounds by where a row is: a number of the row is added."""
    rows = edit.add(at, "aten::arange.default", {"end": shape[axis]}, [shape[axis]], "int64")
    for _ in range(len(shape) - 1 - axis):
        line = edit.line(rows)
        rows = edit.add(
            at, "aten::unsqueeze.default", {"self": rows, "dim": -1}, [*line[3][0], 1], "int64"
        )
    return edit.add(at, "aten::add.Tensor", {"self": ref, "other": rows, "alpha": 1}, shape, dtype)


def _masked(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """A mask over all rows."""
    live = edit.add(at, "aten::gt.Scalar", {"self": ref, "other": 0}, shape, "bool")
    folded = [1 if n == axis else size for n, size in enumerate(shape)]
    args = {"self": live, "dim": axis, "keepdim": True}
    live = edit.add(at, "aten::any.dim", args, folded, "bool")
    args = {"condition": live, "self": ref, "other": 0}
    return edit.add(at, "aten::where.ScalarOther", args, shape, dtype)


def _split(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """The batch is divided in halves, which trade places."""
    half = [size // 2 if n == axis else size for n, size in enumerate(shape)]
    both = edit.add(at, "aten::chunk.default", {"self": ref, "chunks": 2, "dim": axis}, half, dtype)
    line = edit.line(both)
    line[3], line[4] = [half, half], [dtype, dtype]
    parts = [
        edit.add(at, "getitem", {"self": both, "index": index}, half, dtype) for index in (1, 0)
    ]
    return edit.add(at, "aten::cat.default", {"tensors": parts, "dim": axis}, shape, dtype)


def _atomics(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """Rows are added to each other by atomic additions."""
    rows = edit.add(at, "aten::arange.default", {"end": shape[axis]}, [shape[axis]], "int64")
    args = {"self": ref, "dim": axis, "index": rows, "source": ref, "alpha": 1}
    return edit.add(at, "aten::index_add.default", args, shape, dtype)


def _random(edit: Edit, at: Any, ref: str, axis: int, shape: list[Any], dtype: str) -> str:
    """Random numbers of a generator that all requests share."""
    return edit.add(at, "aten::bernoulli.default", {"self": ref, "generator": None}, shape, dtype)


MAKERS: dict[str, Callable[..., str]] = {
    "mean_of_the_batch": _fold("mean.dim"),
    "largest_of_the_batch": _fold("amax.default"),
    "running_sum_over_rows": _along("cumsum.default"),
    "softmax_over_rows": _along("softmax.int", dtype=None),
    "first_row_for_all": first_row,
    "next_row": rolled,
    "row_by_number": _by_number,
    "place_of_the_row": _by_place,
    "mask_over_all_rows": _masked,
    "halves_trade_places": _split,
    "atomic_additions": _atomics,
    "shared_random_numbers": _random,
}


def _embedded(edit: Edit) -> tuple[str, int]:
    return f"%{edit.find('aten::embedding.default')[0]}", 1


def _attended(edit: Edit) -> tuple[str, int]:
    return f"%{edit.find('paged_attention')[0]}", 0


def _logits(edit: Edit) -> tuple[str, int]:
    return edit.find("sample")[2]["logits"], 0


SITES = {"embedding": _embedded, "attention": _attended, "logits": _logits}


def _at_site(site: Callable[[Edit], tuple[str, int]], make: Callable[..., str]) -> Plant:
    def plant(edit: Edit) -> None:
        ref, axis = site(edit)
        _spoil(edit, ref, axis, make)

    return plant


for _phase, _site in (("prefill", "embedding"), ("decode", "attention"), ("prefill", "logits")):
    for _name, _make in MAKERS.items():
        PLANTED[f"{_name}_{_site}"] = ("mimo", _phase, _at_site(SITES[_site], _make))


# ---- Kernels that are chosen by rows, or given other rows --------------------------------------


@planted()
def product_by_pytorch(edit: Edit) -> None:
    """PyTorch chooses a kernel by the number of rows."""
    line = edit.find("packed_linear")
    line[1], line[2] = "aten::linear.default", {"input": line[2]["x"], "weight": line[2]["weight"]}


@planted(phase="decode")
def norm_by_pytorch(edit: Edit) -> None:
    line = edit.find("rms_norm")
    line[1], line[2] = "aten::rms_norm.default", {"input": line[2]["x"], "normalized_shape": [64]}


@planted()
def kernel_for_few_rows(edit: Edit) -> None:
    edit.find("packed_linear")[1] = "skinny_linear"


@planted()
def kernel_that_nobody_knows(edit: Edit) -> None:
    edit.find("linear_chain")[1] = "fast_chain"


@planted()
def fewer_rows_in_use(edit: Edit) -> None:
    """A kernel leaves out rows by the number of requests."""
    used = edit.find("aten::amax.default")
    edit.find("packed_linear")[2]["rows"] = f"%{used[0]}"


@planted()
def rows_in_use_of_another_forward(edit: Edit) -> None:
    edit.find("rms_norm")[2]["rows"] = edit.find("rms_norm", 1)[2]["rows"]


@planted("glm4_moe")
def router_over_the_batch(edit: Edit) -> None:
    """The best tokens of an expert, not the best experts of a token."""
    edit.find("aten::topk.default")[2]["dim"] = 0


@planted("glm4_moe")
def experts_weights_over_the_batch(edit: Edit) -> None:
    line = edit.find("aten::sum.dim_IntList", has=lambda one: "float" in one[4][0])
    line[2]["dim"] = [0]


@planted("glm4_moe")
def experts_of_the_next_row(edit: Edit) -> None:
    line = edit.find("packed_experts")
    ids = line[2]["expert_ids"]
    shape, dtype = edit.line(ids)[3][0], edit.line(ids)[4][0]
    line[2]["expert_ids"] = rolled(edit, line, ids, 0, shape, dtype)


# ---- Where rows, requests, slots and pages are -------------------------------------------------


def _column(edit: Edit) -> Any:
    """The line of each row's number in its request."""
    return edit.find("aten::sub.Tensor", has=lambda line: "arange" in str(line[2]["self"]))


@planted()
def unshifted_rows(edit: Edit) -> None:
    """A row's number in the batch is taken for its number in the request."""
    column = _column(edit)
    edit.redirect(f"%{column[0]}", column[2]["self"], column)


@planted()
def next_request(edit: Edit) -> None:
    """A row belongs to the request after its own."""
    request = edit.find("aten::clamp.default", has=lambda line: "sum" in line[2]["self"])
    at = edit.lines[edit.lines.index(request) + 1]
    args = {"self": f"%{request[0]}", "other": 1, "alpha": 1}
    edit.redirect(f"%{request[0]}", edit.add(at, "aten::add.Tensor", args, *_form(request)), at)


def _form(line: Any) -> tuple[Any, Any]:
    return line[3][0], line[4][0]


@planted()
def prompts_are_not_packed(edit: Edit) -> None:
    """A prompt is read from the first row on, whatever stands before it."""
    line = edit.find("aten::index.Tensor", has=lambda one: one[2]["self"] == "%batch_prompt_ids")
    clamp = edit.line(line[2]["indices"][0])
    clamp[2]["self"] = f"%{_column(edit)[0]}"


@planted()
def prompts_are_packed_with_decoding_requests(edit: Edit) -> None:
    """Rows of requests that decode count as if the host had packed them."""
    packed = edit.find("aten::cumsum.default", 2)
    packed[2]["self"] = edit.find("aten::cumsum.default", 1)[2]["self"]
    follower = edit.lines[edit.lines.index(packed) + 1]
    follower[2]["other"] = packed[2]["self"]


@planted()
def prompts_of_requests_that_decode(edit: Edit) -> None:
    """A request that decodes reads `prompt_ids`, and a prompt its drafts."""
    line = edit.find("aten::where.self")
    line[2]["self"], line[2]["other"] = line[2]["other"], line[2]["self"]


@planted()
def every_block_table_is_the_first(edit: Edit) -> None:
    made_of(edit, edit.find("paged_attention"), "block_table", first_row)


@planted()
def block_tables_of_slots_by_number(edit: Edit) -> None:
    line = edit.find("aten::index.Tensor", has=lambda one: one[2]["self"] == "%state_block_table")
    rows = edit.add(line, "aten::arange.default", {"end": 4}, [4], "int64")
    line[2]["indices"] = [rows]


@planted()
def padding_writes_pages(edit: Edit) -> None:
    """Rows of no request write to the last request's pages."""
    line = edit.find("aten::copy_.default", 1)
    place = edit.line(line[2]["src"])
    line[2]["src"] = place[2]["self"]


@planted()
def requests_that_are_off_write_pages(edit: Edit) -> None:
    """Only rows of no request are masked."""
    live = edit.find("aten::lt.Scalar")
    place = edit.line(edit.find("aten::copy_.default", 1)[2]["src"])
    place[2]["condition"] = f"%{live[0]}"


@planted("mimo_v2")
def rings_of_other_sizes(edit: Edit) -> None:
    """The pages of two rings overlap."""
    edit.find("aten::mul.Tensor", has=lambda line: line[2]["other"] == 5)[2]["other"] = 4


@planted("mimo_v2")
def rings_written_by_pages(edit: Edit) -> None:
    line = edit.find("rotate_and_write")
    paged = edit.find("rotate_and_write", has=lambda one: "ring" not in one[2]["k_cache"])
    line[2]["slot_mapping"] = paged[2]["slot_mapping"]


@planted("mimo_v2")
def rings_read_by_pages(edit: Edit) -> None:
    tables = [line[2]["block_table"] for line in edit.lines if line[1] == "paged_attention"]
    edit.find("paged_attention")[2]["block_table"] = next(t for t in tables if t != tables[0])


@planted("mimo_v2")
def earlier_rows_are_never_kept_apart(edit: Edit) -> None:
    """True chaining takes a row of this step where an earlier one is due."""
    kept = edit.find("aten::index.Tensor", has=lambda line: line[2]["self"] == "%state_chain_ids")
    line = edit.find("aten::where.self", has=lambda one: one[2]["self"] == f"%{kept[0]}")
    edit.redirect(f"%{line[0]}", line[2]["other"], line)


@planted("mimo_v2")
def rows_before_a_request(edit: Edit) -> None:
    """What is kept for the next step begins in the rows of the request before."""
    line = edit.find("aten::maximum.default")
    args = {"self": line[2]["self"], "other": 1, "alpha": 1}
    before = edit.add(line, "aten::sub.Tensor", args, *_form(line))
    edit.redirect(f"%{line[0]}", before, line)


@planted("mimo_v2")
def earlier_rows_where_a_flag_is_set(edit: Edit) -> None:
    """Where it is not, a row before the request's first one is taken."""
    kept = edit.find("aten::index.Tensor", has=lambda line: line[2]["self"] == "%state_chain_ids")
    line = edit.find("aten::where.self", has=lambda one: one[2]["self"] == f"%{kept[0]}")
    shape, dtype = _form(edit.line(line[2]["condition"]))
    flag = edit.add(line, "aten::gt.Scalar", {"self": line[2]["self"], "other": 5}, shape, "bool")
    args = {"self": line[2]["condition"], "other": flag}
    line[2]["condition"] = edit.add(line, "aten::__and__.Tensor", args, shape, dtype)


@planted()
def starts_that_are_clamped(edit: Edit) -> None:
    """Rows of requests far behind are counted from a row of another one."""
    column = _column(edit)
    args = {"self": column[2]["other"], "min": 0, "max": 1}
    start = edit.add(column, "aten::clamp.default", args, *_form(column))
    column[2]["other"] = start


@planted(phase="decode")
def rows_by_a_token(edit: Edit) -> None:
    """A token says which of its request's rows is read: text depends on drafts."""
    embedded = edit.find("aten::embedding.default")
    shape, dtype = _form(embedded)
    at = edit.lines[edit.lines.index(embedded) + 1]
    rows = shape[1:2]
    start = edit.line(edit.line(edit.find("aten::copy_.default")[2]["src"])[2]["self"])[2]["other"]
    ids = edit.line(embedded[2]["indices"])[2]["self"]
    given: dict[str, Any] = {"self": ids, "other": 3}
    place = edit.add(at, "aten::remainder.Scalar", given, rows, "int64")
    args = {"self": start, "other": place, "alpha": 1}
    place = edit.add(at, "aten::add.Tensor", args, rows, "int64")
    args = {"self": f"%{embedded[0]}", "dim": 1, "index": place}
    new = edit.add(at, "aten::index_select.default", args, shape, dtype)
    edit.redirect(f"%{embedded[0]}", new, at)


@planted()
def lengths_of_the_longest(edit: Edit) -> None:
    line = edit.find("paged_attention")
    ref = line[2]["seq_lens"]
    folded = edit.add(line, "aten::amax.default", {"self": ref, "dim": [0], "keepdim": True}, [1],
                      "int32")  # fmt: skip
    line[2]["seq_lens"] = edit.add(
        line, "aten::expand.default", {"self": folded, "size": [4]}, [4], "int32"
    )


@planted()
def bounds_are_shifted(edit: Edit) -> None:
    line = edit.find("paged_attention")
    ref = line[2]["query_start_loc"]
    args = {"self": ref, "other": 1, "alpha": 1}
    line[2]["query_start_loc"] = edit.add(line, "aten::add.Tensor", args, *_form(edit.line(ref)))


@planted()
def angles_by_place(edit: Edit) -> None:
    """Positions are rows' numbers."""
    line = edit.find("aten::copy_.default")
    at = edit.lines[edit.lines.index(line) + 1]
    rows = edit.add(at, "aten::arange.default", {"end": 64}, [64], "int64")
    edit.redirect("%batch_positions", rows, at)


@planted()
def logits_past_a_row(edit: Edit) -> None:
    """A prefetch reads the row after the one that gets logits, and it is used."""
    line = edit.find("aten::index_select.default", has=lambda one: "bfloat16" in one[4][0])
    rows = line[2]["index"]
    args = {"self": rows, "other": 1, "alpha": 1}
    line[2]["index"] = edit.add(line, "aten::add.Tensor", args, *_form(edit.line(rows)))


@planted()
def logits_from_the_batch(edit: Edit) -> None:
    """The first rows of the batch get logits, not the last rows of each request."""
    line = edit.find("aten::index_select.default", has=lambda one: "bfloat16" in one[4][0])
    rows = edit.line(line[2]["index"])
    line[2]["index"] = edit.add(line, "aten::arange.default", {"end": 12}, *_form(rows))


@planted()
def choices_of_the_next_row(edit: Edit) -> None:
    made_of(edit, edit.find("accept"), "chosen", rolled)


@planted()
def parameters_of_the_first_slot(edit: Edit) -> None:
    made_of(edit, edit.find("sample"), "state_slots", first_row)


@planted()
def random_numbers_by_place(edit: Edit) -> None:
    """The noise of a row is a function of its number in the batch."""
    line = edit.find("sample")
    shape, dtype = _form(edit.line(line[2]["positions"]))
    line[2]["positions"] = edit.add(line, "aten::arange.default", {"end": shape[0]}, shape, dtype)


@planted()
def masks_of_the_first_row(edit: Edit) -> None:
    """The tokens that the first row may be are those that every row may be."""
    made_of(edit, edit.find("sample"), "token_mask", first_row)


@planted()
def logits_of_the_next_place(edit: Edit) -> None:
    made_of(edit, edit.find("sample"), "places", rolled)


@planted()
def logits_by_number(edit: Edit) -> None:
    """A row chooses from the logits at its own number, though these are packed."""
    edit.find("sample")[2]["places"] = None


@planted()
def reports_of_the_first_place(edit: Edit) -> None:
    made_of(edit, edit.find("write_logprobs"), "places", first_row)


@planted()
def stop_ids_by_number(edit: Edit) -> None:
    line = edit.find("accept")
    line[2]["state_indices"] = edit.add(line, "aten::arange.default", {"end": 4}, [4], "int64")


@planted()
def row_after_the_accepted_one(edit: Edit) -> None:
    """Drafts begin from the row behind the last accepted one."""
    anchors = edit.find("getitem", has=lambda line: line[2]["self"] == "%accept_default")
    at = edit.lines[edit.lines.index(anchors) + 1]
    args = {"self": f"%{anchors[0]}", "other": 1, "alpha": 1}
    edit.redirect(f"%{anchors[0]}", edit.add(at, "aten::add.Tensor", args, *_form(anchors)), at)


@planted()
def anchors_take_the_next_token(edit: Edit) -> None:
    """The token after a request's last row is the first one of the next request."""
    line = edit.find("aten::where.self", 2)
    edit.redirect(f"%{line[0]}", line[2]["other"], line)


@planted()
def state_of_slots_by_number(edit: Edit) -> None:
    line = edit.find("aten::index_copy_.default")
    line[2]["index"] = edit.add(line, "aten::arange.default", {"end": 4}, [4], "int64")


@planted()
def state_of_the_next_request(edit: Edit) -> None:
    made_of(edit, edit.find("aten::index_copy_.default", 1), "source", rolled)


def _add_to_state(edit: Edit, number: str) -> None:
    """What is kept for a request has a number added."""
    line = edit.find("aten::index_copy_.default")
    args = {"self": line[2]["source"], "other": number, "alpha": 1}
    line[2]["source"] = edit.add(line, "aten::add.Tensor", args, *_form(edit.line(args["self"])))


@planted()
def state_by_the_number_of_a_request(edit: Edit) -> None:
    line = edit.find("aten::index_copy_.default")
    args = {"start": 1, "end": 5}
    _add_to_state(edit, edit.add(line, "aten::arange.start", args, [4], "int64"))


@planted()
def state_by_the_number_of_a_request_that_is_on(edit: Edit) -> None:
    """A number that only counts the rows in use."""
    numbers = edit.find("aten::arange.start", has=lambda one: one[2]["start"] == 1)
    used = edit.find("aten::mul.Tensor", has=lambda one: one[2]["self"] == f"%{numbers[0]}")
    _add_to_state(edit, f"%{used[0]}")


@planted()
def state_by_the_number_of_a_slot(edit: Edit) -> None:
    """As an integer and a flag are ANDed."""
    line = edit.find("aten::index_copy_.default")
    flag = edit.find("aten::__and__.Tensor")
    args = {"self": line[2]["index"], "other": f"%{flag[0]}"}
    _add_to_state(edit, edit.add(line, "aten::__and__.Tensor", args, [4], "int64"))


@planted()
def state_by_the_rows_of_requests_before(edit: Edit) -> None:
    """Whether few rows stand before."""
    line, ends = edit.find("aten::index_copy_.default"), edit.find("aten::cumsum.default")
    args = {"self": f"%{ends[0]}", "other": 8}
    _add_to_state(edit, edit.add(line, "aten::le.Scalar", args, [4], "bool"))


@planted()
def state_by_where_a_request_begins(edit: Edit) -> None:
    """Whether a place is 0, as a condition."""
    line, ends = edit.find("aten::index_copy_.default"), edit.find("aten::cumsum.default")
    args = {"self": f"%{ends[0]}", "dtype": "torch.bool"}
    flag = edit.add(line, "aten::to.dtype", args, [4], "bool")
    given: dict[str, Any] = {"condition": flag, "self": 1, "other": 0}
    _add_to_state(edit, edit.add(line, "aten::where.Scalar", given, [4], "int64"))


@planted()
def state_by_slots_where_tokens_are_due(edit: Edit) -> None:
    """What each request adds at its last accepted row is the number of its slot."""
    folded = edit.find("aten::any.dim", has=lambda one: len(one[3][0]) == 1)
    line = edit.find("aten::mul.Tensor", has=lambda one: one[2]["self"] == folded[2]["self"])
    slots, at = edit.find("aten::index_copy_.default")[2]["index"], [1, *_form(line)[0][1:]]
    args = {"self": slots, "dim": 0}
    line[2]["other"] = edit.add(line, "aten::unsqueeze.default", args, at, "int64")


@planted()
def counts_of_the_batch(edit: Edit) -> None:
    """The tokens that one request has emitted are counted for all."""
    made_of(edit, edit.find("count_tokens"), "ids", first_row)


# ---- Rows before a row, as n-grams take them ----------------------------------------------------


def earlier_rows(
    edit: Edit, positions: str = "", context: str = "", sign: str = "sub", guard: bool = True
) -> None:
    """Embeddings are those of the row before, where the request has one in this step.

    Args:
        edit: of a step's listing.
        positions: of the rows; "": the step's own, which are 0 where a row is no request's.
        context: positions of the requests' first rows; "": by each row, as the step has them.
        sign: "add" takes the row after.
        guard: whether a request's first row keeps its own.
    """
    kept = edit.line(edit.find("aten::copy_.default")[2]["src"])
    raw = edit.line(kept[2]["self"])
    start, first = raw[2]["other"], edit.line(raw[2]["self"])[2]["self"]
    embedded = edit.find("aten::embedding.default")
    rows, at = kept[3][0], edit.lines[edit.lines.index(embedded) + 1]

    def add(op: str, args: dict[str, Any], shape: list[Any], dtype: str = "int64") -> str:
        return edit.add(at, f"aten::{op}", args, shape, dtype)

    columns = add("arange.default", {"end": 2}, [2])
    held = add("unsqueeze.default", {"self": positions or f"%{kept[0]}", "dim": 1}, [*rows, 1])
    moved = add(f"{sign}.Tensor", {"self": held, "other": columns, "alpha": 1}, [*rows, 2])
    start, first = (
        add("unsqueeze.default", {"self": ref, "dim": 1}, [*rows, 1])
        for ref in (start, context or first)
    )
    row = add("add.Tensor", {"self": start, "other": moved, "alpha": 1}, [*rows, 2])
    row = add("sub.Tensor", {"self": row, "other": first, "alpha": 1}, [*rows, 2])
    row = add("clamp.default", {"self": row, "min": 0, "max": rows[0] - 1}, [*rows, 2])
    shape, dtype = embedded[3][0], embedded[4][0]
    table = add("select.int", {"self": f"%{embedded[0]}", "dim": 0, "index": 0}, shape[1:], dtype)
    wide = [*rows, 2, shape[-1]]
    taken = add("index.Tensor", {"self": table, "indices": [row]}, wide, dtype)
    if guard:
        known = add("ge.Tensor", {"self": moved, "other": first}, [*rows, 2], "bool")
        known = add("unsqueeze.default", {"self": known, "dim": 2}, [*rows, 2, 1], "bool")
        own = add("unsqueeze.default", {"self": table, "dim": 1}, [*rows, 1, shape[-1]], dtype)
        taken = add("where.self", {"condition": known, "self": taken, "other": own}, wide, dtype)
    taken = add("select.int", {"self": taken, "dim": 1, "index": 1}, shape[1:], dtype)
    taken = add("unsqueeze.default", {"self": taken, "dim": 0}, shape, dtype)
    edit.redirect(f"%{embedded[0]}", taken, at)


@planted()
def earlier_rows_of_the_request_before(edit: Edit) -> None:
    earlier_rows(edit, guard=False)


@planted()
def later_rows(edit: Edit) -> None:
    earlier_rows(edit, sign="add")


@planted()
def earlier_rows_of_requests_that_are_off(edit: Edit) -> None:
    """Their lengths are 0, their positions are not."""
    kept = edit.line(edit.find("aten::copy_.default")[2]["src"])
    earlier_rows(edit, positions=kept[2]["self"])


@planted()
def earlier_rows_counted_from_another_length(edit: Edit) -> None:
    other = edit.find("aten::index.Tensor", has=lambda line: line[2]["self"] == "%gt_scalar_1")
    earlier_rows(edit, context=f"%{other[0]}")


@planted(phase="decode")
def rows_after_a_row(edit: Edit) -> None:
    """Each row gets the maximum of its request's rows: text depends on drafts, and so on K."""
    embedded = edit.find("aten::embedding.default")
    ref, shape, dtype = f"%{embedded[0]}", embedded[3][0], embedded[4][0]
    at = edit.lines[edit.lines.index(embedded) + 1]
    requests = edit.find("get", has=lambda line: line[2]["name"] == "batch.state_indices")[3][0][0]
    apart = [requests, shape[1] // requests, shape[2]]
    new = edit.add(at, "aten::view.default", {"self": ref, "size": apart}, apart, dtype)
    args = {"self": new, "dim": [1], "keepdim": True}
    new = edit.add(at, "aten::amax.default", args, [requests, 1, shape[2]], dtype)
    new = edit.add(at, "aten::expand.default", {"self": new, "size": apart}, apart, dtype)
    new = edit.add(at, "aten::reshape.default", {"self": new, "shape": shape}, shape, dtype)
    edit.redirect(ref, new, at)


@planted(phase="decode")
def rows_after_a_row_by_number(edit: Edit) -> None:
    """The same, where a request's rows are found by their numbers."""
    embedded = edit.find("aten::embedding.default")
    ref, shape, dtype = f"%{embedded[0]}", embedded[3][0], embedded[4][0]
    at = edit.lines[edit.lines.index(embedded) + 1]
    starts = edit.find("aten::slice.Tensor", has=lambda line: line[2]["end"] == -1)
    requests = starts[3][0][0]
    width, wide = shape[1] // requests, [requests, shape[1] // requests, shape[2]]

    def add(op: str, args: dict[str, Any], shape: list[Any], dtype: str = dtype) -> str:
        return edit.add(at, f"aten::{op}", args, shape, dtype)

    rows = add("unsqueeze.default", {"self": f"%{starts[0]}", "dim": 1}, [requests, 1], "int64")
    columns = add("arange.default", {"end": width}, [width], "int64")
    args = {"self": rows, "other": columns, "alpha": 1}
    rows = add("add.Tensor", args, [requests, width], "int64")
    new = add("select.int", {"self": ref, "dim": 0, "index": 0}, shape[1:])
    new = add("index.Tensor", {"self": new, "indices": [rows]}, wide)
    new = add("amax.default", {"self": new, "dim": [1], "keepdim": True}, [requests, 1, shape[2]])
    new = add("expand.default", {"self": new, "size": wide}, wide)
    edit.redirect(ref, add("reshape.default", {"self": new, "shape": shape}, shape), at)
