"""Conversation files: lines that are read, errors in the others; chat templates and their locations."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dslpar.schema.chat_templates import template_of
from dslpar.schema.conversations import parse, read_lines
from dslpar.schema.datasets import ChatData, with_absolute_paths

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def line(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": list(messages), **more}).encode()


def test_messages_are_as_they_are_written() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    tool = {"role": "tool", "content": "2", "name": "add"}
    found = parse(line(USER, called, tool, ANSWER, tools=[{"type": "function"}], source="somewhere"))
    assert found.messages == [USER, called, tool, ANSWER]
    assert found.tools == [{"type": "function"}]


def test_sharegpt_is_read_too() -> None:
    said = [("system", "Add."), ("human", "1+1?"), ("gpt", "2")]
    text = json.dumps({"conversations": [{"from": who, "value": what} for who, what in said]}).encode()
    assert parse(text).messages == [{"role": "system", "content": "Add."}, USER, ANSWER]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "too deeply"),
        (b"3", "not a JSON object"),
        (line(USER, ANSWER)[:-1], "not valid JSON"),
        (b'[{"messages": []}]', "jq -c"),
        (b'{"prompt": "1+1?", "completion": "2"}', "no 'messages' (nor ShareGPT's 'conversations') among 'prompt'"),
        (line(), "an empty list"),
        (b'{"messages": "hello"}', "a str"),
        (line("hello"), "message 1 is not a JSON object"),
        (line(USER, {"role": "bot", "content": "2"}), "message 2: 'role' is 'bot', not one of system, user"),
        (line(USER, {"role": "assistant"}), "message 2: 'content' is missing"),
        (line(USER, {"role": "assistant", "content": [{"type": "text"}]}), "'content' is a list, not a text"),
        (line(USER, {"role": "assistant", "content": " \n"}), "message 2: an answer is empty"),
        (b'{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]}', "an answer is empty"),
        (b'{"conversations": [{"role": "user", "content": "x"}]}', "'from' is None"),
        (line(USER), "the assistant says nothing"),
    ],
)
def test_what_is_no_conversation(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse(text)


def test_lines_have_their_numbers(tmp_path: Path) -> None:
    text = b"\n" + line(USER, ANSWER) + b"\n  \n" + line(USER, ANSWER)
    (tmp_path / "chat.jsonl").write_bytes(text)
    (tmp_path / "chat.jsonl.gz").write_bytes(gzip.compress(text))
    for name in ("chat.jsonl", "chat.jsonl.gz"):
        path = str(tmp_path / name)
        assert [each.place for each in read_lines(path)] == [f"{path}:2", f"{path}:4"]
        assert [each.number for each in read_lines(path, max_bytes=len(text) - 1)] == [2]


# ---- templates ----


def folder(path: Path, **config: Any) -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path.name


def found_in(tmp_path: Path, tokenizer: str | None = None, template: str | None = None) -> Any:
    return template_of(ChatData(files=("x",), tokenizer=tokenizer, template=template), str(tmp_path / "cfg.py"))


def test_where_a_template_stands(tmp_path: Path) -> None:
    eos = {"content": "</s>", "lstrip": False}
    folder(tmp_path / "one", chat_template="of config", eos_token=eos, bos_token="<s>", pad_token=None)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "by name"}]
    folder(tmp_path / "listed", chat_template=named)
    folder(tmp_path / "none")
    (tmp_path / "listed" / "chat_template.jinja").write_text("of file")
    (tmp_path / "own.jinja").write_text("own")
    one = found_in(tmp_path, "one")
    assert (one.text, dict(one.special)) == ("of config", {"eos_token": "</s>", "bos_token": "<s>"})
    assert found_in(tmp_path, "one/tokenizer.json") == one
    assert found_in(tmp_path, "listed").text == "of file"
    (tmp_path / "listed" / "chat_template.jinja").unlink()
    assert found_in(tmp_path, "listed").text == "by name"
    assert "has no chat template" in found_in(tmp_path, "none").problem
    own = found_in(tmp_path, "one", "own.jinja")
    assert (own.text, own.special) == ("own", one.special)
    assert found_in(tmp_path, "none", "{{ messages }}").text == "{{ messages }}"
    assert found_in(tmp_path).text == found_in(tmp_path, "none", "chatml").text
    assert found_in(tmp_path).marks_answers
    assert not own.marks_answers
    assert "No such file" in found_in(tmp_path, template="gone.jinja").problem


def test_only_a_file_s_name_is_a_path() -> None:
    for template, is_path in (("own.jinja", True), ("chatml", False), ("{{ messages }}", False)):
        data = ChatData(files=("x",), template=template)
        found = with_absolute_paths({"template": template}, data, "/folder/cfg.py")
        assert found["template"] == ("/folder/own.jinja" if is_path else template)


def test_sharegpt_s_lines_are_taken_whole() -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    line = {
        "system": "Be short.",
        "tools": json.dumps([{"name": "add"}]),
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "gpt", "value": None, "tool_calls": call},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2", "weight": 1},
        ],
    }
    found = parse(json.dumps(line).encode())
    assert found.tools == [{"name": "add"}]
    assert found.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "weight": 1},
    ]
    with pytest.raises(ValueError, match="not a JSON list"):
        parse(json.dumps(line | {"tools": '{"name": "add"}'}).encode())


def test_a_damaged_gz_is_an_error_of_the_file(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"messages": []}\n' * 1000)
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(whole[:20] + bytes(255 - byte for byte in whole[20:40]) + whole[40:])
    with pytest.raises(OSError, match="gzip"):
        list(read_lines(str(path)))
