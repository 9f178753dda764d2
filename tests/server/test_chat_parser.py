"""Calls and reasoning in text, however it is cut into pieces; and the endpoints of tokens."""

from __future__ import annotations

import json
import random
import time

import httpx
import pytest
from helpers.served import serving
from helpers.small_server import NAME

import mtpc
from mtpc.cli.arguments import parse
from mtpc.errors import GrammarError
from mtpc.server.chat_parser import ChatParser
from mtpc.server.errors import api_error
from mtpc.server.lark import Lark
from mtpc.server.tool_formats import FORMATS, find_format

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {}},
    "required": ["city"],
}
ARGUMENTS = {"city": 'R"} o\nme', "days": 3, "at": {"x": [1]}}
TEXT = json.dumps(ARGUMENTS)
SCHEMAS = {"weather": SCHEMA, "stop": {}}
XML = '<parameter=city>\nR"} o\nme\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
XML += '<parameter=at>\n{"x": [1]}\n</parameter>\n'
PAIRS = (("city", 'R"} o\nme'), ("days", "3"), ("at", '{"x": [1]}'))
GLM = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in PAIRS)
FENCE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TWO: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "qwen3_xml": f"<tool_call>\n<function=weather>\n{XML}</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm45": f"<tool_call>weather\n{GLM}</tool_call>\n<tool_call>stop\n</tool_call>",
    "deepseek_v3": f"{OPEN}{FENCE.format('weather', TEXT)}\n{FENCE.format('stop', '{}')}{CLOSE}",
    "deepseek_v31": f"{OPEN}{BARE.format('weather', TEXT)}{BARE.format('stop', '{}')}{CLOSE}",
}
"""The calls weather(...) and stop() as templates of each format write them."""


def cut(text: str, chance: random.Random) -> list[str]:
    """The text in random pieces."""
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 40))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def run(parser: ChatParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    content, reasoning, calls = "", "", list[list[str]]()
    for i, piece in enumerate(pieces):
        delta = parser.push(piece, last=i == len(pieces) - 1)
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for part in delta.calls:
            if part.id is not None:
                calls.append([part.name or "", ""])
            calls[part.index][1] += part.arguments
    return content, reasoning, [(name, text) for name, text in calls]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("thinks", [False, True])
def test_calls_in_random_pieces(form, thinks: bool) -> None:  # type: ignore[no-untyped-def]
    """Text before the calls is content, their arguments are JSON, reasoning is told apart."""
    chance = random.Random(7)
    text = ("<think>\nIs it <tool?\n</think>\n\n" if thinks else "") + f"Well <,\n{TWO[form.name]}"
    for _ in range(60):
        parser = ChatParser(form, SCHEMAS, thinks, False)
        content, reasoning, calls = run(parser, cut(text, chance))
        assert content == "Well <,"
        assert reasoning == ("Is it <tool?" if thinks else "")
        assert [name for name, _ in calls] == ["weather", "stop"]
        assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS, {}]
    one = ChatParser(form, SCHEMAS, thinks, False, is_single=True)
    assert [name for name, _ in run(one, cut(text, chance))[2]] == ["weather"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("thinks", [False, True])
def test_forced_calls_that_are_cut(form, thinks: bool) -> None:  # type: ignore[no-untyped-def]
    """After any character: no mark of a call is content, and no name is a part of one."""
    text = ("<think>\nWell\n</think>\n\n" if thinks else "") + TWO[form.name]
    counts = set()
    for end in range(1, len(text) + 1):
        for pieces in ([text[:end]], [*text[:end]]):
            parser = ChatParser(form, SCHEMAS, thinks, False, is_forced=True)
            content, reasoning, calls = run(parser, pieces)
            assert content == ""
            assert "Well\n</think>".startswith(reasoning)
            assert [name for name, _ in calls] == ["weather", "stop"][: len(calls)], text[:end]
            counts.add(len(calls))
            free = run(ChatParser(form, SCHEMAS, thinks, False), pieces)
            assert [name for name, _ in free[2]] == [name for name, _ in calls]
    assert counts == {0, 1, 2}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_template_shows_its_format(form) -> None:  # type: ignore[no-untyped-def]
    assert find_format("auto", TWO[form.name]) is form
    assert find_format(form.name, "") is form
    assert find_format("none", TWO[form.name]) is None


def test_a_grammar_that_cannot_go_on_says_so() -> None:
    error = api_error(GrammarError("the grammar allows no token after 3 new ones"))
    assert (error.status, error.code) == (500, "grammar_error")
    assert "allows no token" in str(error)


LONG = 60_000
LONG_TEXTS = {
    "spaces in content": " " * LONG + "x",
    "spaces in a call": f'<tool_call>{{"name": "weather", "arguments": {{{" " * LONG}x',
    "spaces in a fence": f"{OPEN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + " " * LONG + "x",
    "open parameters": "<tool_call><function=weather>" + "<parameter=a>" * (LONG // 13),
    "open brackets": "<tool_call><function=weather>" + "<parameter=" * (LONG // 11),
    "open keys": "<tool_call>weather\n" + "<arg_key>" * (LONG // 9),
    "keys without values": "<tool_call>weather\n" + "<arg_key>a</arg_key>" * (LONG // 20),
    "spaces in keys": "<tool_call>weather\n<arg_key>" + " " * LONG + "x",
    "open calls": "<tool_call>" * (LONG // 11),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("what", LONG_TEXTS)
def test_long_texts_take_time_in_proportion(form, what: str) -> None:  # type: ignore[no-untyped-def]
    """Whatever a model writes: the parser runs in the event loop, and a regex may backtrack."""
    start = time.thread_time()
    ChatParser(form, SCHEMAS, True, False).push(LONG_TEXTS[what], last=True)
    assert time.thread_time() - start < 0.5


def test_texts_that_are_no_calls_stay_content() -> None:
    hermes = find_format("hermes", "")
    for text in ("a <tool_call>no JSON</tool_call> b", "a <tool_cal", " \n a\n ", "<tool_call>{"):
        for pieces in ([text], [*text]):
            content, _, calls = run(ChatParser(hermes, {}, False, False), pieces)
            assert calls == []
            assert content.replace(" ", "") == text.replace(" ", "")
    assert run(ChatParser(None, {}, True, True), ["a", "b </thi", "nk>\n c \n"])[:2] == (
        "c \n",
        "ab",
    )


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammars_take_what_templates_write(form) -> None:  # type: ignore[no-untyped-def]
    """And what the grammar takes, the parser reads."""
    llguidance = pytest.importorskip("llguidance")
    from mtpc.server.conversation import NO_ARGUMENTS, _Writer

    schemas = {"weather": SCHEMA, "stop": NO_ARGUMENTS}
    writer = _Writer(Lark({}), form, schemas, False)
    body, _ = writer.body("required", {})
    characters = sorted({*TWO[form.name], *"abc"})
    tokens = [*(c.encode() for c in characters), b"<eos>"]

    class Characters:
        eos_token_id, bos_token_id = len(characters), None
        special_token_ids = (len(characters),)

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: str) -> list[int]:
            return [characters.index(c) for c in text]

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()))
    grammar = llguidance.LLMatcher.grammar_from_lark(writer.lark.grammar(body or ""))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert matcher.get_error() == ""
    ids = [characters.index(c) for c in TWO[form.name]]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_tokens_and_pages(word_spec: mtpc.SpecModel) -> None:
    """/tokenize and /detokenize as vLLM's; CORS for the allowed origins; the key for all."""
    page = {"origin": "https://app.example"}
    with serving(word_spec, model_name=NAME, api_key="k", allowed_origins=(page["origin"],)) as one:
        key = {"authorization": "Bearer k"}
        with httpx.Client(base_url=one.url, headers=key, trust_env=False) as client:
            made = client.post("/tokenize", json={"model": NAME, "prompt": "w7 w8"}).json()
            assert made.pop("tokens") == [0, 7, 8]
            assert made == {"count": 3, "max_model_len": 64, "token_strs": None}
            plain = {"prompt": "w7", "add_special_tokens": False, "return_token_strs": True}
            made = client.post("/tokenize", json=plain).json()
            assert (made["tokens"], made["token_strs"]) == ([7], ["w7"])
            chat = {"messages": [{"role": "user", "content": "w7 w8"}]}
            assert client.post("/tokenize", json=chat).json()["tokens"] == [5, 11, 7, 8, 91]
            text = client.post("/detokenize", json={"tokens": [5, 7]}).json()
            assert text == {"prompt": "w5 w7"}
            wrong = client.post("/detokenize", json={"tokens": [96]})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
            assert client.post("/tokenize", json={**plain, **chat}).status_code == 400
            answer = client.get("/v1/models", headers=page)
            assert answer.headers["access-control-allow-origin"] == page["origin"]
            other = client.get("/v1/models", headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
        asks = {**page, "access-control-request-method": "POST"}
        asks["access-control-request-headers"] = "authorization,content-type"
        with httpx.Client(base_url=one.url, trust_env=False) as client:
            asked = client.options("/v1/chat/completions", headers=asks)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == page["origin"]
            refused = client.get("/v1/models", headers=page)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == page["origin"]


def test_names_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM's users type them."""
    config = '{"method": "deepseek_mtp", "num_speculative_tokens": 2}'
    line = (
        "serve x --max-model-len 99 --max-num-seqs 6 --served-model-name me --allowed-origins "
        '["*"] --block-size 8 --enable-auto-tool-choice --tool-call-parser hermes '
        "--reasoning-parser qwen3 --max-num-batched-tokens 48 --speculative-config"
    )
    args = parse([*line.split(), config])
    assert (args.max_len, args.batch_buckets, args.spec_tokens) == (99, [1, 2, 4, 6], 2)
    assert (args.model_name, args.allowed_origins, args.page_size) == ("me", ("*",), 8)
    assert (args.tool_call_parser, args.reasoning_parser, args.prefill_chunk) == (
        *("hermes", "qwen3"),
        48,
    )
    assert parse(["bench", "x", "--speculative-config", config]).spec_tokens == [2]
    for wrong, message in (
        ('{"method": "ngram", "num_speculative_tokens": 2}', "expected 'mtp'; a drafter in"),
        ('{"method": "mtp"}', "expected a JSON object with num_speculative_tokens"),
        ('{"num_speculative_tokens": 2, "model": "x"}', "'model' is not supported"),
    ):
        with pytest.raises(SystemExit):
            parse(["run", "x", "--speculative-config", wrong])
        assert message in capsys.readouterr().err
