"""Chat templates, which write a conversation as text: the tokenizer's own, a file's, or ChatML. No torch, no Jinja.

    found = template_of(spec.data, "configs/chat.py")
    found.text, found.special                    # what Jinja runs, and {"bos_token": "<s>", ...}

A tokenizer's template is in chat_template.jinja beside tokenizer.json, or in `chat_template` of tokenizer_config.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dslpar.core.regular_file import read_bounded
from dslpar.schema.datasets import CHATML, ChatData, absolute_path, names_template_file
from dslpar.schema.tokenizer_file import TOKENIZER_CONFIG

TEMPLATE_FILE = "chat_template.jinja"
_MAX_BYTES = 16 << 20
"""Limit for a template or a tokenizer_config.json, which have some hundred KiB even with thousands of tokens."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""OpenAI's ChatML, in the form that Qwen and others use."""


class Template(NamedTuple):
    """A template, or the reason why there is none."""

    text: str = ""
    special: Mapping[str, str] = {}
    """Special tokens that a template may use, name -> text: bos_token, eos_token and the like."""
    path: str = ""
    """The template's file; empty if it is written in the config, or is ChatML."""
    problem: str = ""
    """Reason why the template cannot be used; empty if it can."""

    @property
    def marks_answers(self) -> bool:
        """Return whether the template marks what the assistant says, with {% generation %}."""
        return _MARKED.search(self.text) is not None


def template_of(data: ChatData, config_path: str) -> Template:
    """Return the template of a config's conversations; a mistake is in the result's `problem`."""
    folder = None
    if data.tokenizer is not None:
        tokenizer = absolute_path(config_path, data.tokenizer)
        folder = tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)
    values = {} if folder is None else _config_in(folder)
    special = {name: text for name, value in values.items() if name.endswith("_token") and (text := _text(value))}
    if data.template == CHATML or (data.template is None and folder is None):
        return Template(_CHATML, special)
    if data.template is not None and not names_template_file(data.template):
        return Template(data.template, special)
    if data.template is not None:
        return _read(absolute_path(config_path, data.template))._replace(special=special)
    assert folder is not None
    path = os.path.join(folder, TEMPLATE_FILE)
    if os.path.exists(path):
        return _read(path)._replace(special=special)
    text = _of_config(values.get("chat_template"))
    if not text:
        return Template(problem=f"the tokenizer in {folder!r} has no chat template")
    return Template(text, special, os.path.join(folder, TOKENIZER_CONFIG))


def _config_in(folder: str) -> Mapping[str, Any]:
    try:
        values = json.loads(read_bounded(os.path.join(folder, TOKENIZER_CONFIG), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _text(token: object) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _of_config(value: object) -> str:
    """Return the template from the value in tokenizer_config.json: a string, or the "default" of a list."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _read(path: str) -> Template:
    try:
        data = read_bounded(path, _MAX_BYTES)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return Template(path=path, problem=f"cannot read the template {path!r}: {reason}")
    if len(data) > _MAX_BYTES:
        return Template(path=path, problem=f"the template {path!r} is longer than {_MAX_BYTES:,} bytes")
    return Template(text, path=path) if text.strip() else Template(path=path, problem=f"the template {path!r} is empty")
