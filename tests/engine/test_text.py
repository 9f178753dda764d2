"""Text as it comes: stop strings and characters over any borders; pieces make the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.cli.demo import demo_checkpoint
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.text import MAX_WAITS, Decode, StopStrings, TextAssembler, stop_strings
from mtpc.errors import RequestError
from mtpc.weights.served_model import ServedModel

SERVED = ServedModel("demo", 2048, (), demo_checkpoint())
MANY = "ein Löwe – 狮子 🦁 👩‍🚀!"


@st.composite
def cut(draw: st.DrawFn, items: Any) -> list[Any]:
    """A list cut into pieces of 1 to 5, as steps emit tokens."""
    pieces, rest = [], list(items)
    while rest:
        count = draw(st.integers(1, 5))
        pieces.append(rest[:count])
        rest = rest[count:]
    return pieces


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(0, 2047), max_size=25))
@example(None, SERVED.encode(MANY))
def test_pieces_make_the_whole(data: Any, ids: list[int]) -> None:
    """Random ids are full of bytes that are no characters; none is given out half."""
    wanted = SERVED.decode(ids).rstrip("\ufffd")
    pieces = data.draw(cut(ids)) if data else [[i] for i in ids]
    assembler, found = TextAssembler(SERVED.decode), []
    for index, piece in enumerate(pieces):
        found.append(assembler.push(piece, last=index == len(pieces) - 1))
        assert not found[-1].endswith("\ufffd")
        assert wanted.startswith("".join(found))
    assert "".join(found) == wanted


def test_a_character_of_four_bytes_comes_in_one_piece() -> None:
    ids = SERVED.encode("🦁")
    assembler = TextAssembler(SERVED.decode)
    assert len(ids) >= 4
    assert [assembler.push([i]) for i in ids][-1].strip() == "🦁"


BYTES = tokenizers.Tokenizer(
    tokenizers.models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True)
)
BYTES.decoder = tokenizers.decoders.Sequence(
    [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
)
"""Bytes as Llama's and Gemma's tokenizers have them: one more byte makes a whole run invalid."""
CUT = [
    list(text.encode()[:end])
    for text in ("é", "a狮", "🦁🦁", "🦁 👩‍🚀")
    for end in range(1, len(text.encode()) + 1)
]
INVALID = [
    [0xFF] * 7,
    [*b"ab", 0x80, 0xF0],
    [*"🦁".encode(), 0xF0, *b"a", 0xF0],
    [0xF0] * (MAX_WAITS + 9),
    [*[0x80] * (MAX_WAITS - 2), *"🦁".encode(), *b"a", 0xE7],
]


@pytest.mark.parametrize("decode", [BYTES.decode, lambda ids: bytes(ids).decode(errors="replace")])
@pytest.mark.parametrize("ids", [*CUT, *INVALID], ids=lambda ids: bytes(ids).hex()[:24])
def test_a_text_ends_in_no_half_character(decode: Decode, ids: list[int]) -> None:
    """However many tokens come at once; all before the half character is there."""
    whole = TextAssembler(decode).push(ids, last=True)
    if ids in CUT:
        assert whole == bytes(ids).decode(errors="ignore")
    assert not whole.endswith("\ufffd") or len(ids) > MAX_WAITS
    for size in (1, 2, 3, 4, 5):
        assembler = TextAssembler(decode)
        pieces = [assembler.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join([*pieces, assembler.push([], last=True)]) == whole
        assert assembler.num_tokens == len(ids)


class Counted:
    """A decoder of words with spaces between them; 0 is a special token, 1 half a character."""

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return " ".join("\ufffd" if i == 1 else f"w{i}" for i in ids if i)


@pytest.mark.parametrize("ids", [[0], [1], [0, 0, 1]], ids=str)
def test_what_is_no_text_costs_no_more_than_its_length(ids: list[int]) -> None:
    """Special tokens or broken bytes for ever, and a word before and behind them."""
    count = 4096
    whole = [*[5] * count, *(ids * count)[:count], 6, 7]
    decode = Counted()
    assembler = TextAssembler(decode)
    pieces = [assembler.push(whole[:count])]  # Of a consumer that was late.
    for k in range(count, len(whole)):
        pieces.append(assembler.push(whole[k : k + 1], last=k == len(whole) - 1))
    assert decode.decoded < 5 * MAX_WAITS * count
    assert "".join(pieces) == decode(whole)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 200])
def test_a_late_consumers_character_is_whole(length: int) -> None:
    """However many tokens came at once before it."""
    ids = SERVED.encode("a lion " * length + "🦁")
    assembler = TextAssembler(SERVED.decode)
    pieces = [assembler.push(ids[:-3]), *(assembler.push([i]) for i in ids[-3:])]
    assert "".join(pieces) == SERVED.decode(ids)


def stopped(text: str, strings: tuple[str, ...]) -> str:
    """What must remain, told one character at a time: the first string to be complete ends it."""
    for end in range(1, len(text) + 1):
        ends = [s for s in strings if text[:end].endswith(s)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    st.data(),
    st.text("ab\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_stop_strings(data: Any, text: str, strings: tuple[str, ...]) -> None:
    """The same cut for every way the text can come; what was handed out is never taken back."""
    wanted, stops, found = stopped(text, strings), StopStrings(strings), ""
    pieces = ["".join(piece) for piece in data.draw(cut(text))]
    for index, piece in enumerate(pieces):
        found += stops.push(piece, last=index == len(pieces) - 1)
        assert wanted.startswith(found), "handed out what belongs to a stop string"
        if not stops.found:
            # And held back no more than what may become one.
            seen = "".join(pieces[: index + 1])
            assert len(seen) - len(found) < max((len(s) for s in strings), default=1)
    assert found == wanted
    assert stops.found == (wanted != text)


def test_half_a_character_at_the_end_completes_no_stop_string() -> None:
    """But what is held back with it until the end is searched."""

    def decode(ids: list[int]) -> str:
        return "".join(["a", "\ufffd", "b\ufffd"][i] for i in ids)

    for stop, text in (("\ufffd", "ab"), ("b", "a"), ("\ufffda", "ab")):
        assembler = TextAssembler(decode, (stop,))
        assert assembler.push([0, 2]) == "a"
        assert assembler.push([1], last=True) == text[1:]
        assert assembler.is_stopped == (stop == "b")
    assembler = TextAssembler(decode, ("\ufffd",))
    assert (assembler.push([0, 1, 0, 0]), assembler.num_tokens) == ("a", 3)


@pytest.mark.parametrize("stop", ["", ["a", ""], 5, [5], {"a"}])
def test_what_is_no_stop_string(stop: Any) -> None:
    with pytest.raises(RequestError, match="stop is"):
        stop_strings(stop)


PROMPT = "The with statement is used to"


def test_streamed_text_is_generated_text(text_model: Callable[[int], mtpc.SpecModel]) -> None:
    """Pieces of two prompts at once; all but the last output of each has its tokens at once."""
    spec = text_model(3)
    prompts = [PROMPT, "If the class defines"]
    wanted = spec.generate(prompts, 24)
    texts, ids = ["", ""], [[], []]
    for output in spec.stream(prompts, 24):
        texts[output.index] += output.text or ""
        ids[output.index] += output.token_ids
    assert texts == wanted
    assert [spec.served.decode(one) for one in ids] == wanted
    assert spec.generate(spec.served.encode(PROMPT), 24) == ids[0]
    assert [one.token_ids for one in wanted] == ids
    cut = spec.generate(PROMPT, 24, stop=wanted[0][5:9])
    assert (cut.text, cut.finish_reason) == (wanted[0][: wanted[0].index(wanted[0][5:9])], "stop")
    assert 0 < cut.first_token_s <= cut.total_s


def test_stop_strings_do_not_depend_on_drafts(text_model: Callable[[int], mtpc.SpecModel]) -> None:
    """Any string of the text, K = 0 and 3, streamed or not: cut at the same place."""
    whole = text_model(0).generate(PROMPT, 24)
    assert len(whole) > 30
    for begin in range(3, 24, 10):
        for length in (1, 3, 7):
            stop = whole[begin : begin + length]
            wanted = whole[: whole.index(stop)]
            for spec in (text_model(0), text_model(3)):
                free = spec.engine.pages.num_free
                assert spec.generate(PROMPT, 24, stop=stop) == wanted
                outputs = list(spec.stream(PROMPT, 24, stop=["never\0", stop]))
                assert "".join(output.text or "" for output in outputs) == wanted
                assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["stop"]
                assert spec.engine.pages.num_free == free
                assert not spec.engine.has_work
    with pytest.raises(RequestError, match="need text prompts"):
        text_model(3).stream([5, 6], 3, stop="a")
    with pytest.raises(RequestError, match="empty string would end"):
        text_model(3).stream(PROMPT, 3, stop="")


def test_stop_strings_under_asyncio(text_model: Callable[[int], mtpc.SpecModel]) -> None:
    """The same text, the same cut; the request ends, and its pages come back."""
    spec = text_model(3)
    whole = spec.generate(PROMPT, 24)
    stop = whole[12:15]

    async def text_of(engine: AsyncEngine, **options: Any) -> str:
        outputs = [o async for o in engine.generate(PROMPT, 24, **options)]
        return "".join(output.text or "" for output in outputs)

    async def main() -> list[str]:
        async with AsyncEngine(spec) as engine:
            return await asyncio.gather(text_of(engine), text_of(engine, stop=[stop, "never\0"]))

    assert asyncio.run(main()) == [whole, whole[: whole.index(stop)]]
    assert not spec.engine.has_work
    assert spec.engine.pages.num_free == spec.engine.pages.count
