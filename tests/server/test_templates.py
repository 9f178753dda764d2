"""Chat templates: rendered as transformers renders them, found where it finds them, boxed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from helpers.word_model import TEMPLATE

import mtpc
from mtpc.errors import CheckpointError, RequestError
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
    with pytest.raises(CheckpointError, match="broken in line 1"):
        load_chat_template(tmp_path, tmp_path / "own")
    config.write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        load_chat_template(tmp_path, None)


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
