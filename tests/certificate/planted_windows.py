"""Planted dependences in attention to compressed windows (DeepSeek-V4) and blocks (Qwen4-Exp)."""

from __future__ import annotations

from typing import Any

from certificate.planted import first_row, made_of, planted, rolled
from helpers.listings import Edit

V4, QWEN4 = "deepseek_v4", "qwen4_exp"


def _written(edit: Edit) -> Any:
    """The line of places of compressed entries."""
    line = edit.find("write_cache", has=lambda one: "entries" in one[2]["cache"])
    return edit.line(line[2]["slot_mapping"])


def _sum(edit: Edit) -> Any:
    """The line that adds a window's number to where its slot begins."""
    return edit.line(_written(edit)[2]["self"])


def _form(line: Any) -> tuple[Any, Any]:
    return line[3][0], line[4][0]


# ---- Windows, and the entries that are made of them --------------------------------------------


@planted(V4)
def entries_past_a_slot(edit: Edit) -> None:
    """A window after the last one that a slot has room for is written to the next slot."""
    line = _written(edit)
    line[2]["condition"] = edit.line(line[2]["condition"])[2]["self"]


@planted(V4)
def entries_of_no_window(edit: Edit) -> None:
    """What lies behind the last window is written, too."""
    line = _written(edit)
    line[2]["condition"] = edit.line(line[2]["condition"])[2]["other"]


@planted(V4)
def entries_of_wider_slots(edit: Edit) -> None:
    """Slots are taken to have room for one window more."""
    edit.line(_sum(edit)[2]["self"])[2]["other"] += 1


@planted(V4)
def entries_by_number(edit: Edit) -> None:
    """A window's slot is its number in the batch."""
    product = edit.line(_sum(edit)[2]["self"])
    shape, dtype = _form(product)
    product[2]["self"] = edit.add(product, "aten::arange.default", {"end": shape[0]}, shape, dtype)


@planted(V4)
def windows_of_the_next_request(edit: Edit) -> None:
    slot = edit.line(edit.line(_sum(edit)[2]["self"])[2]["self"])
    request = edit.line(slot[2]["indices"][0])
    at = edit.lines[edit.lines.index(request) + 1]
    args = {"self": f"%{request[0]}", "other": 1, "alpha": 1}
    edit.redirect(f"%{request[0]}", edit.add(at, "aten::add.Tensor", args, *_form(request)), at)


@planted(V4)
def windows_of_another_width(edit: Edit) -> None:
    """Windows are counted by another number of tokens before a step than after it."""
    number = edit.line(edit.line(_sum(edit)[2]["other"])[2]["self"])
    closed = edit.line(edit.line(number[2]["self"])[2]["self"])
    assert closed[1] == "aten::floor_divide.default"
    closed[2]["other"] += 1


@planted(V4)
def windows_with_rows_of_others(edit: Edit) -> None:
    """Tokens that a ring holds are looked for among the step's rows."""
    taken = [
        line
        for line in edit.lines
        if line[1] == "aten::where.self" and len(line[3][0]) == 3 and "index" in line[2]["other"]
    ]
    edit.redirect(f"%{taken[0][0]}", taken[0][2]["self"], taken[0])


@planted(V4)
def weights_over_windows(edit: Edit) -> None:
    """A token's weight is one among windows, not among the tokens of its window."""
    edit.find("aten::softmax.int")[2]["dim"] = 0


# ---- Which keys rows see ------------------------------------------------------------------------


@planted(V4)
def rows_see_requests_before_theirs(edit: Edit) -> None:
    edit.find("aten::eq.Tensor", has=lambda line: len(line[3][0]) == 2)[1] = "aten::ge.Tensor"


@planted(V4)
def rings_of_the_first_row(edit: Edit) -> None:
    made_of(edit, edit.find("slot_attention"), "row_slots", first_row)


@planted(V4)
def rings_as_the_next_row_sees_them(edit: Edit) -> None:
    made_of(edit, edit.find("slot_attention"), "sees_ring", rolled)


@planted(V4)
def counts_of_entries_of_the_next_row(edit: Edit) -> None:
    line = edit.find("slot_attention", has=lambda one: one[2]["entry_counts"] is not None)
    made_of(edit, line, "entry_counts", rolled)


@planted(V4)
def entries_that_the_first_row_chose(edit: Edit) -> None:
    line = edit.find("slot_attention", has=lambda one: one[2]["chosen_entries"] is not None)
    made_of(edit, line, "chosen_entries", first_row)


@planted(V4)
def entries_chosen_among_those_of_slots_by_number(edit: Edit) -> None:
    line = edit.find("choose_slots")
    shape = edit.line(line[2]["block_table"])[3][0]
    rows = edit.add(line, "aten::arange.default", {"end": shape[0]}, shape[:1], "int32")
    args = {"self": rows, "dim": 1}
    line[2]["block_table"] = edit.add(line, "aten::unsqueeze.default", args, shape, "int32")


@planted(V4)
def products_over_rows(edit: Edit) -> None:
    """Every row gets products of all rows, in one batch for each head."""
    line = edit.find("slot_attention")
    follower = edit.lines[edit.lines.index(line) + 1]
    (rows, heads, width), dtype = _form(line)

    def add(op: str, args: dict[str, Any], shape: list[Any]) -> str:
        return edit.add(follower, f"aten::{op}", args, shape, dtype)

    args = {"self": f"%{line[0]}", "dim0": 0, "dim1": 1}
    turned = add("transpose.int", args, [heads, rows, width])
    across = add("transpose.int", {"self": turned, "dim0": 1, "dim1": 2}, [heads, width, rows])
    mixed = add("matmul.default", {"self": turned, "other": across}, [heads, rows, rows])
    mixed = add("matmul.default", {"self": mixed, "other": turned}, [heads, rows, width])
    new = add("transpose.int", {"self": mixed, "dim0": 0, "dim1": 1}, [rows, heads, width])
    edit.redirect(f"%{line[0]}", new, follower)


@planted(QWEN4, "decode")
def blocks_across_pages(edit: Edit) -> None:
    """Blocks of a number of tokens that does not divide a page."""
    shape = edit.find("aten::copy_.default", 1)[3][0]
    line = edit.find("aten::floor_divide.default", has=lambda one: "slot_map" in one[2]["self"])
    assert line[3][0] == shape
    line[2]["other"] = 3


@planted(QWEN4, "decode")
def open_blocks_of_the_next_row(edit: Edit) -> None:
    line = edit.find("aten::where.self", has=lambda one: "cat" in one[2]["other"])
    made_of(edit, line, "self", rolled)
