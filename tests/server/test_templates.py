"""Chat templates: rendered as transformers renders them, found where it finds them, boxed in."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.hostile import DOUBLING, MESSAGE, SLOWER, SWELLING, random_template, rendered
from helpers.word_model import TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.errors import CheckpointError, RequestError, ServingError
from mtpc.server.chat import ChatTemplate, load_chat_template

QWEN_LIKE = (
    "{%- if messages[0].role == 'system' %}\n    {{- '<s>' + messages[0].content + '\\n' }}\n"
    "{%- endif %}\n{%- set ns = namespace(n=0) %}\n{%- for message in messages %}\n"
    "    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
    "    {%- set ns.n = ns.n + 1 %}\n"
    "    {{- '<|im_start|>' ~ message.role ~ ns.n ~ '\\n' ~ message.content | trim }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if not enable_thinking is defined %}{{ 'no thought' }}{% endif %}\n{%- endif %}\n"
    "{{ {'a': ['<é>', 1]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(indent=2) }}{{ eos_token }}"
)
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  say {{ 7 * 7 }} <b> "},
    {"role": "assistant", "content": "49"},
]

WITH_TOOLS = (
    "{% if tools is none %}no tools {% endif %}{% if documents is none %}none {% endif %}"
    "{{ eos_token }}{{ image_token }}{% if add_bos_token is defined %}bos{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [TEMPLATE, QWEN_LIKE, WITH_TOOLS])
def test_rendered_as_transformers_renders(word_spec: mtpc.SpecModel, source: str) -> None:
    """Message texts are data: nothing in them is run."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        word_spec.served.directory, eos_token="w1", extra_special_tokens={"image_token": "w9"}
    )
    ours = ChatTemplate(source, {"bos_token": "w5", "eos_token": "w1", "image_token": "w9"})
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(messages, {}) == expected
        assert "{{ 7 * 7 }}" in expected


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "a{{ bos_token }}"}]
    config.write_text(json.dumps({"chat_template": named, "bos_token": "<s>"}))
    assert load_chat_template(tmp_path, None).render([], {}) == "a<s>"
    config.write_text(json.dumps({"chat_template": "b{{ x }}", "bos_token": {"content": "<s>"}}))
    assert load_chat_template(tmp_path, None).render([], {"x": 1, "messages": 2}) == "b1"
    tokens = {"image_token": {"content": "<i>"}, "eos_token": "</s>", "add_bos_token": True,
              "pad_token": None, "chat_template": WITH_TOOLS}  # fmt: skip
    config.write_text(json.dumps(tokens))
    assert load_chat_template(tmp_path, None).render([], {}) == "no tools none </s><i>"
    assert load_chat_template(tmp_path, None).render([], {"tools": [1]}) == "none </s><i>"
    (tmp_path / "chat_template.jinja").write_text("c{{ messages[0].content }}")
    assert load_chat_template(tmp_path, None).render(MESSAGES, {}) == "cbe brief"
    (tmp_path / "own").write_text("d{{ add_generation_prompt }}")
    assert load_chat_template(tmp_path, tmp_path / "own").render([], {}) == "dTrue"
    with pytest.raises(CheckpointError, match="cannot read the chat template"):
        load_chat_template(tmp_path, tmp_path / "none")
    (tmp_path / "own").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="broken: line 1"):
        load_chat_template(tmp_path, tmp_path / "own")
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (
        "{",
        "[]",
        '{"chat_template": 3}',
        '{"chat_template": [{"name": "default", "template": []}]}',
    ):
        config.write_text(wrong)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            load_chat_template(tmp_path, None)
    for entry in ([], [3], [{"name": "default"}], None):
        config.write_text(json.dumps({"chat_template": entry}))
        assert load_chat_template(tmp_path, None) is None
    (tmp_path / "own").write_text("x" * (2**20 + 1))
    with pytest.raises(CheckpointError, match="more than 1048576 bytes"):
        load_chat_template(tmp_path, tmp_path / "own")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].nothing.more }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('not so') }}",
        "{{ messages[0].content + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_templates_are_boxed_in(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        ChatTemplate(source, {}).render(MESSAGES, {})


@pytest.mark.parametrize("source", SWELLING)
def test_templates_that_swell(source: str) -> None:
    """Whichever filter, method or operator it is that grows, the system sets the limit."""
    assert rendered(source)


@pytest.mark.slow
@pytest.mark.parametrize("source", SLOWER)
def test_templates_that_take_seconds(source: str) -> None:
    assert rendered(source)


@pytest.mark.slow
@pytest.mark.parametrize("end", DOUBLING)
def test_values_that_double(end: str) -> None:
    source = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    assert "of the processor's time" in rendered(source + "{% endfor %}" + end)


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_templates(chance: random.Random) -> None:
    rendered(random_template(chance, size=20))


def test_a_template_that_goes_too_far_harms_no_other() -> None:
    """The next text comes from a new process; what waits meanwhile waits for no more than that."""
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = (
        "{% for m in messages %}{% if m.content == 'long' %}" + forever + "{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    found = dict[str, Any]()

    def render(content: str) -> None:
        try:
            found[content] = template.render([{"role": "user", "content": content}], {})
        except RequestError as error:
            found[content] = str(error)

    threads = [threading.Thread(target=render, args=(text,)) for text in ("long", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "it takes more than 2 s of the processor's time" in found.pop("long")
    assert found == {"a": "a", "b": "b"}


def test_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed by the system: another takes its place; if that cannot start, one error says so."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    child = template._child._process
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert template.render([MESSAGE], {}) == MESSAGE["content"]
    template._child.end()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mtpc.server.chat.subprocess.Popen", refuse)
    with pytest.raises(ServingError, match=r"cannot start the process.*Cannot allocate memory"):
        template.render([MESSAGE], {})
    monkeypatch.undo()
    assert template.render([MESSAGE], {}) == MESSAGE["content"]


def test_messages_that_are_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        ChatTemplate("{{ x }}", {}).render([MESSAGE], {"x": deep})


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("a", {})
    process = template._child._process
    del template
    assert process.returncode is not None


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link to a pipe", "device"])
def test_files_that_are_none(tmp_path: Path, name: str, kind: str) -> None:
    """To open a pipe waits for a writer, and a device may never end: neither is opened."""
    place = tmp_path / name
    if kind == "directory":
        place.mkdir()
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        os.mkfifo(place if kind == "pipe" else tmp_path / "pipe")
        if kind != "pipe":
            place.symlink_to(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        load_chat_template(tmp_path, None)
