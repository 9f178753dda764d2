"""What a caller gets back does not depend on K: every field, from every way to ask for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.served import serving

import mtpc
from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.forced import ForcedText
from mtpc.sampling_params import TokenLogprobs

Model = Callable[[int], mtpc.SpecModel]
PROMPT = "The with statement is used to"
TOLD = mtpc.SamplingParams(logprobs=3)
DRAWN = mtpc.SamplingParams(temperature=0.7, top_p=0.9, seed=11, logprobs=2)
LION = " of a 🦁 狮 ü, end"


class UpTo:
    """A grammar of one text that allows nothing after it, not even an end."""

    def __init__(self, text: list[int]):
        self._forced, self._left = ForcedText(text), len(text)

    def fill_mask(self, words: Any) -> None:
        self._forced.fill_mask(words)
        if not self._left:
            words.zero_()

    def advance(self, token_id: int) -> bool:
        is_next = self._left > 0 and self._forced.advance(token_id)
        self._left -= is_next
        return is_next

    def rollback(self, count: int) -> None:
        self._forced.rollback(count)
        self._left += count


def shown(entries: list[TokenLogprobs] | None) -> Any:
    return entries and [(one.token_id, one.logprob, one.top) for one in entries]


def same(one: Any, other: Any) -> bool:
    """Equal, but for the last bits of numbers: products of other shapes differ there."""
    if isinstance(one, dict):
        return same(sorted(one.items()), sorted(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and abs(one - other) < 1e-5)


def cases(spec: mtpc.SpecModel, whole: str) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """(prompt, max_new_tokens, options). `whole` is what the prompt leads to."""
    encode = spec.served.encode
    ids = encode(PROMPT)
    later = encode(PROMPT + whole)[len(ids) + 6]
    forced = encode(LION, special_tokens=False)
    for stop in (whole[:1], whole[4:5], whole[9:14], whole[13:15], whole[20:29]):
        yield PROMPT, 14, {"sampling": TOLD, "stop": stop}
    yield PROMPT, 14, {"sampling": TOLD, "stop": [whole[9:12], whole[8:12], whole[10:20], "\0"]}
    yield PROMPT, 14, {"sampling": DRAWN, "stop": ["e", "\n"]}
    yield PROMPT, 14, {"sampling": DRAWN, "stop": "never\0"}
    for more in ({}, {"stop": whole[14:16]}, {"ignore_eos": True}):
        yield PROMPT, 14, {"sampling": TOLD, "stop_ids": [later], **more}
    yield PROMPT, 14, {"logprobs": 3, "stop_token_ids": [later]}
    yield ids, 14, {"sampling": TOLD, "stop_ids": [later]}
    yield ids, 14, {"logprobs": 0, "min_tokens": 9, "stop_ids": [later], "frequency_penalty": 1.0}
    for most in (1, 3):
        yield PROMPT, most, {"sampling": TOLD, "stop": whole[6:8]}
    for most in range(5, 12):
        yield PROMPT, most, {"sampling": TOLD, "grammar": ForcedText(forced)}
    for stop in ("🦁", "狮", "\ufffd"):
        yield PROMPT, 16, {"sampling": TOLD, "grammar": ForcedText(forced), "stop": stop}
    # The grammar's dead end comes with the tokens behind the stop string, or with its last one.
    for stop in (LION[-4:-2], LION[-1]):
        yield PROMPT, 60, {"sampling": TOLD, "grammar": UpTo(forced), "stop": [stop, "\0"]}


def generated(spec: mtpc.SpecModel, whole: str) -> list[Any]:
    """Of `generate`."""
    found = []
    for prompt, most, options in cases(spec, whole):
        made = spec.generate(prompt, most, **options)
        text = made.text if isinstance(prompt, str) else None
        found.append((text, made.token_ids, made.finish_reason, shown(made.logprobs)))
    return found


def joined(outputs: list[Any]) -> Any:
    """The outputs of one prompt as one; only the last may say that it ended."""
    assert [o.finish_reason is None for o in outputs[:-1]] == [True] * (len(outputs) - 1)
    has_text = outputs[0].text is not None
    text = "".join(o.text for o in outputs) if has_text else None
    ids = [i for o in outputs for i in o.token_ids]
    logprobs = [entry for o in outputs for entry in o.logprobs or ()]
    assert all(len(o.token_ids) == len(o.logprobs or ()) for o in outputs)
    return text, ids, outputs[-1].finish_reason, shown(logprobs)


def streamed(spec: mtpc.SpecModel, whole: str) -> list[Any]:
    """Of `stream`."""
    rows = cases(spec, whole)
    return [joined([*spec.stream(prompt, most, **more)]) for prompt, most, more in rows]


def awaited(spec: mtpc.SpecModel, whole: str) -> list[Any]:
    """Of `AsyncEngine`, whose consumers may get several steps at once; texts alone have `stop`."""

    async def one(engine: AsyncEngine, prompt: Any, most: int, options: dict[str, Any]) -> Any:
        return joined([o async for o in engine.generate(prompt, most, **options)])

    async def main() -> list[Any]:
        async with AsyncEngine(spec) as engine:
            return await asyncio.gather(*(one(engine, *case) for case in cases(spec, whole)))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def whole(text_model: Model) -> str:
    """What the prompt leads to."""
    text = text_model(0).generate(PROMPT, 14).text
    assert len(text) > 30
    return text


@pytest.fixture(scope="module")
def plain(text_model: Model, whole: str) -> list[Any]:
    """What K = 0 gives; each case has what it is there for."""
    found = generated(text_model(0), whole)
    reasons = [reason for _, _, reason, _ in found]
    assert reasons.count("stop") > 15
    assert reasons.count("length") > 8
    assert not any(text and "\ufffd" in text for text, _, _, _ in found)
    assert all(len(ids) == len(logprobs) for _, ids, _, logprobs in found)
    return found


@pytest.mark.parametrize(
    ("ask", "spec_tokens"),
    [
        (awaited, 3),
        pytest.param(streamed, 3, marks=pytest.mark.slow),
        (generated, 3),
        *(pytest.param(awaited, k, marks=pytest.mark.slow) for k in (0, 1, 2)),
    ],
)
def test_results_do_not_depend_on_drafts(
    text_model: Model, whole: str, plain: list[Any], ask: Any, spec_tokens: int
) -> None:
    spec = text_model(spec_tokens)
    accepted = sum(spec.stats.accepted)
    for found, wanted, case in zip(ask(spec, whole), plain, cases(spec, whole), strict=True):
        assert same(found, wanted), (case, found, wanted)
    assert not spec_tokens or sum(spec.stats.accepted) > accepted
    assert spec.engine.pages.num_free == spec.engine.pages.count


OTHER = [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))]
"""K that are compared with K = 0."""


@pytest.mark.parametrize("other", OTHER)
def test_prompts_side_by_side_and_scores(text_model: Model, whole: str, other: int) -> None:
    """Of batches with an option for each prompt, and of `prompt_logprobs`."""
    rows, scores = [], []
    for spec_tokens in (0, other):
        spec = text_model(spec_tokens)
        made = spec.generate(
            [PROMPT, "If the class defines", PROMPT],
            20,
            stop=whole[8:11],
            sampling=[TOLD, DRAWN, TOLD],
        )
        rows.append([(m.text, m.token_ids, m.finish_reason, shown(m.logprobs)) for m in made])
        texts = [spec.served.encode(PROMPT + whole), spec.served.encode("the lion 🦁")]
        scores.append([shown(each) for each in spec.prompt_logprobs(texts, top=3)])
    assert same(*rows), rows
    assert same(*scores), scores


def bodies(spec: mtpc.SpecModel, whole: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, fields) of requests."""
    later = spec.served.encode(PROMPT + whole)[len(spec.served.encode(PROMPT)) + 6]
    completions: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"logprobs": 3, "stop": [whole[9:12]]},
        {"stop": [whole[3], whole[20:25]], "n": 2, "temperature": 0.8, "seed": 5, "logprobs": 1},
        {"stop_token_ids": [later], "logprobs": 2},
        {"echo": True, "logprobs": 2, "stop": whole[7:9]},
        {"max_tokens": 1, "stop": whole[:2], "logprobs": 0},
    ]
    for fields in completions:
        yield "completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 14, **fields}
    chats: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": ["e"]},
        {"stop_token_ids": [later]},
        {"response_format": {"type": "json_object"}, "max_tokens": 9, "logprobs": True},
    ]
    for fields in chats:
        message = {"role": "user", "content": PROMPT}
        yield (
            "chat/completions",
            {"messages": [message], "max_tokens": 12, "temperature": 0, **fields},
        )


def answers(spec: mtpc.SpecModel, whole: str, stream: bool) -> list[Any]:
    """Bodies without what is drawn for each answer; the events of a stream as one body."""
    found = []
    spec.engine.reset_prefix_cache()
    with serving(spec, model_name="m") as running:
        for path, fields in bodies(spec, whole):
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            url = f"{running.url}/v1/{path}"
            reply = httpx.post(url, json={"model": "m", **fields, **more}, timeout=60)
            assert reply.status_code == 200, (fields, reply.text)
            found.append(whole_stream(reply.text) if stream else settled(reply.json()))
    return found


def settled(value: Any) -> Any:
    """JSON without ids and times."""
    if isinstance(value, dict):
        return {k: settled(v) for k, v in value.items() if k not in ("id", "created")}
    if isinstance(value, list):
        return [settled(each) for each in value]
    return value


def whole_stream(text: str) -> Any:
    """A stream's events: each choice's texts, log-probabilities and reason, and the usage."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [settled(json.loads(line)) for line in lines]
    choices: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        parts = choices.setdefault(choice["index"], ["", [], None])
        parts[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        given = choice["logprobs"] or {}
        columns = [
            given[k]
            for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            if k in given
        ]
        parts[1] += given.get("content") or [*zip(*columns, strict=True)]
        parts[2] = choice["finish_reason"] or parts[2]
    return choices, events[-1]["usage"]


@pytest.mark.parametrize("other", OTHER)
def test_answers_of_a_server_do_not_depend_on_drafts(
    text_model: Model, whole: str, other: int
) -> None:
    """Texts, log-probabilities, usage and finish reasons; in one body and streamed."""
    for stream in (False, True):
        wanted = answers(text_model(0), whole, stream)
        assert "stop" in str(wanted)
        assert "length" in str(wanted)
        found = answers(text_model(other), whole, stream)
        for one, plain, case in zip(found, wanted, bodies(text_model(0), whole), strict=True):
            assert same(one, plain), (case, one, plain)
