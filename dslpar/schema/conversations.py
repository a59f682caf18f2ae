"""Read and check conversations in JSON Lines files, without torch.

    for line in read_lines("chat.jsonl"):
        conversation = parse(line.text)            # raises ValueError with the reason if the line is not valid

A line has OpenAI's and TRL's form, {"messages": [{"role": ..., "content": ...}, ...]}, or ShareGPT's,
{"conversations": [{"from": ..., "value": ...}, ...]}.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dslpar.core.json_values import parse as parse_json

SUFFIXES = (".jsonl", ".jsonl.gz")
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
_ROLES: Mapping[str, str] = {role: role for role in ROLES}
_SPEAKERS: Mapping[str, str] = {
    **_ROLES,
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "observation": "tool",
}
"""Speaker in ShareGPT's form -> role."""
_EXPECTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
HINT = f"write one conversation per line: {_EXPECTED}"


class Conversation(NamedTuple):
    """A conversation in the form that chat templates take."""

    messages: list[dict[str, Any]]
    """Each message has the keys role and content, and its other keys as written, such as tool_calls."""
    tools: list[Any] | None = None
    """Descriptions of functions that the assistant may call."""


class Line(NamedTuple):
    """A non-empty line of a file."""

    path: str
    number: int
    """Counts from 1."""
    text: bytes

    @property
    def place(self) -> str:
        """Location for messages: path:line."""
        return f"{self.path}:{self.number}"


def read_lines(path: str, max_bytes: int = -1) -> Iterator[Line]:
    """Yield the non-empty lines that end within a file's first `max_bytes` (-1: all lines). Raises: OSError."""
    read = 0
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        lines = enumerate(file, 1)
        while True:
            try:
                number, text = next(lines)
            except StopIteration:
                return
            except zlib.error as error:  # gzip's other errors are OSErrors, this one is not
                raise OSError(f"it is not a gzip file, or is corrupted: {error}") from None
            read += len(text)
            if 0 <= max_bytes < read:
                return
            if text.strip():
                yield Line(path, number, text)


def parse(text: bytes) -> Conversation:
    """Parse the conversation in a line.

    Raises:
        ValueError: not a conversation, an unknown role, no answer, or an empty one; the message says which.
    """
    value = parse_json(text)
    if isinstance(value, list) or text.lstrip().startswith(b"["):
        raise ValueError(
            "a list, but each line must be a conversation: `jq -c '.[]' FILE` writes a list's items as lines"
        )
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if "messages" not in value and "conversations" not in value:
        keys = ", ".join(map(repr, value)) or "no keys"
        raise ValueError(f"no 'messages' (nor ShareGPT's 'conversations') among {keys}")
    is_sharegpt = "messages" not in value
    found = value["conversations" if is_sharegpt else "messages"]
    if not isinstance(found, list) or not found:
        raise ValueError(f"its messages are {'an empty list' if found == [] else f'a {type(found).__name__}'}")
    messages = [_message(item, number, is_sharegpt) for number, item in enumerate(found, 1)]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("the assistant says nothing")
    tools = value.get("tools")
    if is_sharegpt and isinstance(tools, str) and tools.strip():
        tools = parse_json(tools.encode("utf-8", "replace"))
        if not isinstance(tools, list):
            raise ValueError("its 'tools' are a text that is not a JSON list")
    system = value.get("system") if is_sharegpt else None
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, tools if isinstance(tools, list) and tools else None)


def _message(item: Any, number: int, is_sharegpt: bool) -> dict[str, Any]:
    """Return a message with its role and content. Raises: ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"message {number} is not a JSON object")
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    role, content = item.get(role_key), item.get(content_key)
    known = _SPEAKERS if is_sharegpt else _ROLES
    if not isinstance(role, str) or role not in known:
        raise ValueError(f"message {number}: {role_key!r} is {role!r}, not one of {', '.join(known)}")
    rest = {key: value for key, value in item.items() if key not in (role_key, content_key)}
    # An answer may consist of tool calls only.
    if content is None and item.get("tool_calls"):
        return {**rest, "role": known[role], "content": None} if is_sharegpt else item
    if not isinstance(content, str):
        raise ValueError(f"message {number}: {content_key!r} is {_described(content)}, not a text")
    if known[role] == ASSISTANT and not content.strip() and not item.get("tool_calls"):
        raise ValueError(f"message {number}: an answer is empty")
    return {**rest, "role": known[role], "content": content} if is_sharegpt else item


def _described(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
