"""Lint of blends, saved data sets and a user's classes: each mistake at its place; nothing is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.core.errors import Finding
from dslpar.data.tokenize import Request, tokenize
from dslpar.linter import check
from dslpar.linter.imported_classes import targets_of
from tests.support.lint import MODEL, findings, marked

TWO = "dict(type='blend', parts=[dict(type='text'{}), dict(eval_fraction=0.1{})]{})"


def of_data(data: str) -> list[tuple[str, str, str]]:
    text = f"{MODEL}data = {data}\n"
    return [(item.code, marked(text, item), item.message) for item in findings(text, 1) if item.severity != "info"]


@pytest.mark.parametrize(
    ("data", "code", "place", "message"),
    [
        (TWO.format(", weight=0", ", weight=1", ""), "CFG103", "0", "must be a number above 0"),
        (TWO.format(", weight=-1.5", ", weight=1", ""), "CFG103", "-1.5", "must be a number above 0"),
        (TWO.format("", "", ", temperature=0"), "CFG103", "0", "must be a number above 0"),
        (TWO.format(", weight=0.7", "", ""), "BAT121", "dict(eval_fraction=0.1)", "part 1 has no weight, but part 0"),
        (TWO.format(", weight=1", ", weight=1", ", temperature=2"), "BAT121", "2", "parts have weights"),
        (TWO.format(", seq_len=8", "", ", seq_len=16"), "BAT121", "8", "those of the blend have 16"),
        (TWO.format(", seq_len=8", "", ""), "BAT121", "8", "samples of 8 tokens"),
        (TWO.format(", weight=0.5", ", weight=0.4", ""), "BAT122", "[dict(", "weights sum up to 0.9"),
        ("dict(type='blend', parts=[dict(type='text')])", "BAT122", "[dict(type='text')]", "only one part"),
        ("dict(type='blend', parts=[])", "CFG102", "[]", "must be a list of dicts"),
        ("dict(type='blend', parts=[3])", "CFG102", "3", "data.parts.0 must be a dict"),
        ("dict(type='blend')", "CFG104", "dict(type='blend')", "missing key 'parts'"),
        ("dict(type='blend', parts=[dict(type='blend', parts=[])])", "CFG108", "'blend'", "cannot be a blend"),
        ("dict(type='blend', parts=[dict(type='txt')])", "CFG108", "'txt'", "unknown data.parts.0 'txt'"),
        ("dict(type='blend', parts=[dict(type='tokens')])", "CFG104", "dict(type='tokens')", "missing key 'path'"),
        ("dict(type='blend', parts=[dict(fils=['a'])])", "CFG101", "fils", "unknown key 'fils' in data.parts.0"),
        (TWO.format(", files=['gone']", "", ""), "BAT111", "'gone'", "no such file or folder 'gone'"),
        (TWO.format("", ", type='images', path='.'", ""), "BAT113", "dict(eval_fraction", "are images"),
        ("dict(type='huggingface', path='.', tokenizer='configs')", "BAT123", "'configs'", "no text_column"),
        ("dict(type='huggingface', path='.')", "BAT123", "'.'", "it has no state.json"),
        ("dict(type='os.path')", "CFG122", "'os.path'", "standard library has no data"),
        ("dict(type='my.Data', eval=3)", "CFG102", "3", "is 3, which is not a dict"),
        ("dict(type='my.Data', files=['a'], tokenizer=3, eval=dict(type='os.x'))", "CFG122", "'os.x'", "no data"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_at_its_place(data: str, code: str, place: str, message: str) -> None:
    found = of_data(data)
    assert [each for each in found if each[0] == code and each[1].startswith(place) and message in each[2]], found
    allowed = {"BAT122"} if "parts=[dict(t" in data or "fils" in data else set()
    assert {each[0] for each in found} - {code} <= allowed, found


@pytest.mark.parametrize(
    "data",
    [
        TWO.format(", weight=0.7", ", weight=0.3", ""),
        TWO.format(", weight=7", ", weight=3", ""),
        TWO.format(", weight=0.333", ", weight=0.666", ""),
        TWO.format("", "", ", temperature=3.3"),
        "dict(type='my.Data', files=['a'], tokenizer=3, eval=dict(files=['b']))",
        "dict(type='blend', parts=[dict(type='my.Data', weight=1.0, n=3), dict(weight=2.0)])",
    ],
)
def test_what_is_right_has_no_findings(data: str) -> None:
    assert of_data(data) == []


def test_weights_can_be_set_on_the_command_line() -> None:
    config = check.load_text(
        f"{MODEL}data = {TWO.format(', weight=1', ', weight=1', '')}\n", "a.py", ["data.parts.1.weight=-3"]
    )
    (found,) = [item for item in check.check(config, 1).findings if item.code == "CFG103"]
    assert "data.parts.1.weight is -3" in found.message


def write_tokenizer(folder: Path, name: str, *tokens: str) -> None:
    (folder / name).mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": tokens[0]}
    values = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}
    values |= {"truncation": None, "padding": None, "post_processor": None, "decoder": None, "model": model}
    (folder / name / "tokenizer.json").write_text(json.dumps(values))


def of_parts(folder: Path, *parts: str) -> list[Finding]:
    config = check.load_text(f"{MODEL}data = dict(type='blend', parts=[{', '.join(parts)}])\n", str(folder / "cfg.py"))
    return [item for item in check.check(config, 1).findings if item.code == "BAT121"]


def test_parts_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x y z " * 400)
    write_tokenizer(tmp_path, "one", "x", "y", "z")
    write_tokenizer(tmp_path, "two", "x", "z", "y")
    for name in ("one", "two"):
        tokenize(Request([str(tmp_path / "a.txt")], str(tmp_path / f"by_{name}"), str(tmp_path / name)))
    tokenize(Request([str(tmp_path / "a.txt")], str(tmp_path / "bytes")))
    one, two, plain = (f"dict(type='tokens', path='{name}')" for name in ("by_one", "by_two", "bytes"))
    (found,) = of_parts(tmp_path, one, one, two)
    assert found.key == "data.parts.2.path"
    assert "'by_two'" in found.message
    assert "'by_one'" in found.message
    (found,) = of_parts(tmp_path, plain, "dict(files=['a.txt'])", "dict(files=['a.txt'], tokenizer='two')")
    assert found.key == "data.parts.2.tokenizer"
    assert "bytes" in found.message
    assert of_parts(tmp_path, one, "dict(files=['a.txt'], tokenizer='one')") == []
    assert of_parts(tmp_path, plain, "dict(files=['a.txt'])") == []


def test_classes_of_data_are_listed_as_targets() -> None:
    data = (
        "dict(type='blend', parts=[dict(files=['a']), "
        "dict(type='my.Data', eval=dict(type='my.Held'), lines=LazyCall(Reader)(path='a'))])"
    )
    lines = f"from dslpar import LazyCall\nfrom their import Reader\n{MODEL}data = {data}\n"
    config = check.load_text(lines, "cfg.py")
    found = {(item.name, item.key, item.purpose): item.allowed_by for item in targets_of(config.root, ())}
    assert found["my.Data", "data.parts.1", "data"].startswith("its section: imported, and called only if")
    assert found["my.Held", "data.parts.1.eval", "data"]
    assert found["their.Reader", "data.parts.1.lines", "argument"] == ""
    assert {"CFG122"} == {item.code for item in check.check(config, 1).findings if item.severity == "error"}
