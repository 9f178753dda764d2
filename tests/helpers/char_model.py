"""A tiny model whose vocabulary is characters and the marks of chat templates."""

from __future__ import annotations

import json
import string
from pathlib import Path

import tokenizers

from helpers.trained import make_full_acceptance_checkpoint

MARKS = ("<s>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_CHARS = [c for c in string.printable[:95] if c not in "~^`|$@"]
TEMPLATE = (
    "{% for tool in (tools or []) if not hide_tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endfor %}{{ lead or '' }}"
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}</think>{% endif %}"
)
"""A chat template with Hermes' tool calls. `lead` ends the prompt, and `hide_tools` omits tools."""


def char_checkpoint(directory: Path) -> Path:
    """A checkpoint whose every draft is right: each token has one successor."""
    make_full_acceptance_checkpoint(directory)
    spelled = {" ": "Ġ", "\n": "Ċ"}
    tokens = [*MARKS, *(spelled.get(c, c) for c in [*_CHARS, "\n"])]
    assert len(tokens) == 96
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS[:2]))
    tokenizer.add_tokens(
        [tokenizers.AddedToken(mark, special=False, normalized=False) for mark in MARKS[2:]]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARKS[1]}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
