"""Planted dependences in a decode step with a budget of rows, whose drafts are DFlash2's."""

from __future__ import annotations

from typing import Any

from certificate.planted import DFLASH2, planted
from helpers.listings import Edit

# ---- Convolutions over the rows of a block -----------------------------------------------------


def _is_wide(line: Any) -> bool:
    return "index_select" in line[2]["self"] and len(line[3][0]) == 4


def _guard(edit: Edit) -> Any:
    """The line that asks, for each row of a block, whether the one before is of its block."""
    return edit.find("aten::where.ScalarOther", has=_is_wide)


def _tap(edit: Edit) -> Any:
    """The line that takes it."""
    return edit.line(_guard(edit)[2]["self"])


def _number(edit: Edit) -> Any:
    """The line of the rows' numbers, less one."""
    return edit.line(edit.line(_tap(edit)[2]["index"])[2]["self"])


@planted(DFLASH2, "decode")
def convolution_over_the_block_before(edit: Edit) -> None:
    """The first row of a block is mixed with the last one of another request's."""
    line = _guard(edit)
    edit.redirect(f"%{line[0]}", line[2]["self"], line)


@planted(DFLASH2, "decode")
def convolution_reaches_a_row_further(edit: Edit) -> None:
    """It takes the row two before, and asks whether there is one."""
    _number(edit)[2]["other"] = 2


@planted(DFLASH2, "decode")
def convolution_over_the_block_after(edit: Edit) -> None:
    _number(edit)[2]["other"] = -1


@planted(DFLASH2, "decode")
def convolution_by_numbers_in_the_batch(edit: Edit) -> None:
    """A row's number in the batch is taken for its place in the block."""
    place = edit.find("aten::ge.Scalar", has=lambda line: line[2]["other"] == 1)
    place[2]["self"] = edit.line(place[2]["self"])[2]["self"]


# ---- A budget: requests have as many rows as it gives them -------------------------------------


def _judged(edit: Edit) -> Any:
    """The line of what acceptance compares: the rows' tokens, and -1 behind them."""
    return edit.line(edit.line(edit.find("accept")[2]["ids"])[2]["self"])


def _anchors(edit: Edit) -> Any:
    """The line that adds where a request's rows begin to the last accepted one."""
    number = edit.find("getitem", has=lambda line: line[2] == {"self": _accept(edit), "index": 0})
    return edit.find("aten::add.Tensor", has=lambda line: line[2]["other"] == f"%{number[0]}")


def _accept(edit: Edit) -> str:
    return f"%{edit.find('accept')[0]}"


def _own_choice(edit: Edit) -> Any:
    """The line that adds a row's place to where its request's choices begin."""
    product = edit.find("aten::mul.Tensor", has=lambda line: "clamp" in str(line[2]["self"]))
    return edit.find("aten::add.Tensor", has=lambda line: line[2]["self"] == f"%{product[0]}")


@planted(DFLASH2, "decode")
def drafts_of_the_next_request_are_judged(edit: Edit) -> None:
    line = _judged(edit)
    edit.redirect(f"%{line[0]}", line[2]["self"], line)


@planted(DFLASH2, "decode")
def drafts_that_are_not_verified_may_be_accepted(edit: Edit) -> None:
    """They count as token 0, which may be the target's choice for the next request."""
    _judged(edit)[2]["other"] = 0


@planted(DFLASH2, "decode")
def verified_drafts_are_those_of_the_last_columns(edit: Edit) -> None:
    line = edit.line(_judged(edit)[2]["condition"])
    shape, dtype = edit.line(line[2]["self"])[3][0], edit.line(line[2]["self"])[4][0]
    args = {"start": shape[0] - 1, "end": -1, "step": -1}
    line[2]["self"] = edit.add(line, "aten::arange.start_step", args, shape, dtype)


@planted(DFLASH2, "decode")
def accepted_rows_of_the_next_request(edit: Edit) -> None:
    line = _anchors(edit)
    start = edit.line(line[2]["self"])
    wanted = {**start[2], "start": 1, "end": 2**63 - 1}
    line[2]["self"] = edit.add(line, "aten::slice.Tensor", wanted, start[3][0], start[4][0])


@planted(DFLASH2, "decode")
def accepted_rows_as_if_all_drafts_were_verified(edit: Edit) -> None:
    """A row's number among K + 1 for each request is taken for its number in the batch."""
    line = _anchors(edit)
    edit.redirect(f"%{line[0]}", line[2]["other"], line)


@planted(DFLASH2, "decode")
def choices_of_the_request_before(edit: Edit) -> None:
    """Rows find their request's choices as if each had three, not four."""
    edit.line(_own_choice(edit)[2]["self"])[2]["other"] = 3


@planted(DFLASH2, "decode")
def choices_past_a_request(edit: Edit) -> None:
    edit.line(_own_choice(edit)[2]["other"])[2]["max"] = 4


@planted(DFLASH2, "decode")
def attention_as_if_all_drafts_were_verified(edit: Edit) -> None:
    line = edit.find("paged_attention")
    shape, dtype = edit.line(line[2]["query_start_loc"])[3][0], "int32"
    bounds = edit.add(line, "aten::arange.default", {"end": shape[0]}, shape, dtype)
    args = {"self": bounds, "other": 4}
    line[2]["query_start_loc"] = edit.add(line, "aten::mul.Tensor", args, shape, dtype)


@planted(DFLASH2, "decode")
def rows_of_a_request_by_the_worth_of_drafts(edit: Edit) -> None:
    """What is found by comparing all requests' drafts reaches the rows themselves."""
    chances = edit.find("aten::cumprod.default", 1)
    ids = edit.line(edit.find("aten::embedding.default")[2]["indices"])
    line = edit.lines[edit.lines.index(ids) + 1]
    count = edit.add(
        line, "aten::sum.default", {"self": f"%{chances[0]}", "dtype": None}, [], "int64"
    )
    args = {"self": f"%{ids[0]}", "other": count, "alpha": 1}
    edit.redirect(f"%{ids[0]}", edit.add(line, "aten::add.Tensor", args, ids[3][0], "int64"), line)
