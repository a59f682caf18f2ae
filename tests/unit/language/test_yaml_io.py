"""Writing and reading config.yaml: exact values, with locations, and no construction from tags."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.language.load import load, load_text
from dslpar.language.load_session import Session
from dslpar.language.source import Source
from dslpar.language.yaml_io import dump, dump_plain, read_names

TEXT = """\
from dslpar import LazyCall as L
from torch.optim import AdamW
n = 8
model = L('my.Model')(layers=n, parts=[L(AdamW)(lr=1e-4)], shape=(2, 2, 2))
train = dict(steps=10, output_dir='1e-4', note='yes', cls=AdamW, none=None, inf=float('inf'))
"""


def read(text: str, name: str = "cfg.yaml") -> dict[str, Any]:
    config = load_text(text, name)
    assert not config.findings, config.findings
    found: dict[str, Any] = config.root.plain()
    return found


def test_round_trip() -> None:
    first = load_text(TEXT, "cfg.py", ["train.steps=20"])
    text = dump(first.root, {"data": 2, "ids": (0, 1)}, ["model", "train"])
    again = load_text(text, "config.yaml")
    assert not again.findings
    assert list(again.root.value) == ["model", "train", "resolved"]
    assert again.root.get("model").target.name == "my.Model"  # type: ignore[union-attr]
    assert again.root.get("model.parts.0").target.name == "torch.optim.AdamW"  # type: ignore[union-attr]
    assert again.root.get("model.shape").plain() == [2, 2, 2]  # type: ignore[union-attr]
    assert again.root.get("model.parts.0.lr").value == 1e-4  # type: ignore[union-attr]
    assert again.root.get("train").plain() == {  # type: ignore[union-attr]
        "steps": 20,
        "output_dir": "1e-4",
        "note": "yes",
        "cls": "torch.optim.AdamW",
        "none": None,
        "inf": float("inf"),
    }
    assert again.root.get("resolved").plain() == {"data": 2, "ids": [0, 1]}  # type: ignore[union-attr]
    assert dump(again.root, {}, ["model", "train", "resolved"]) == text


def test_all_names_without_a_choice_of_sections() -> None:
    assert read(dump(load_text("a = 1\nb = dict(c=2)", "cfg.py").root, {})) == {"a": 1, "b": {"c": 2}}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["1e-4", "yes", "on", "010", "1:30", "2001-01-01", "null", "~", "1_000", "0x1f", "0o7", ".inf", "=", "<<"]
    )
    | st.from_regex(r"[-+]?[0-9.]{1,4}([eE][-+]?[0-9]{1,2})?", fullmatch=True)
)
KEYS = st.text(max_size=6).filter(lambda key: key != "<<") | st.integers(-9, 9)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def printable(value: object) -> bool:
    return repr(value).encode("utf-8", "ignore").decode() == repr(value)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), VALUES, max_size=4))
def test_any_values(values: dict[str, object]) -> None:
    assert repr(read(dump_plain(values))) == repr(values)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), VALUES, max_size=4))
def test_other_readers_see_the_same_strings(values: dict[str, object]) -> None:
    theirs = yaml.safe_load(dump_plain(values))
    strings = {key: value for key, value in values.items() if isinstance(value, str)}
    assert {key: theirs[key] for key in strings} == strings


READINGS = {
    "floats": (
        "a: 1e-4\nb: 3.\nc: .5\nd: 1E5\ne: -1.5e+3\nf: .inf\ng: -.inf",
        [1e-4, 3.0, 0.5, 1e5, -1500.0, float("inf"), float("-inf")],
    ),
    "ints": ("a: 10\nb: -3\nc: 0x1f\nd: 0o17\ne: 010\nf: +4", [10, -3, 31, 15, 10, 4]),
    "strings": (
        "a: yes\nb: 1:30\nc: 2001-01-01\nd: '4'\ne: \"\\u00e4\"\nf: 1_000\ng: 2.5d",
        ["yes", "1:30", "2001-01-01", "4", "ä", "1_000", "2.5d"],
    ),
    "constants": ("a:\nb: ~\nc: null\nd: true\ne: False", [None, None, None, True, False]),
    "blocks": ("a: |\n  x\n  y\nb: >\n  x\n  y\nc: [1, [2]]\nd: {e: 1}", ["x\ny\n", "x y\n", [1, [2]], {"e": 1}]),
    "anchors": ("a: &a [1, 2]\nb: *a\nc: &c 5\nd: *c", [[1, 2], [1, 2], 5, 5]),
    "tags of strings": ("a: !!str 4\nb: ! 5", ["4", 5]),
}


@pytest.mark.parametrize("case", READINGS)
def test_reading(case: str) -> None:
    text, expected = READINGS[case]
    assert repr(list(read(text).values())) == repr(expected)


def test_json() -> None:
    text = '{"parallel": {"pipeline": 2, "ids": [0, 1.5e-3, null, true, "a\\/b\\u00e4"]},\n\t"train": {}}'
    assert read(text, "cfg.json") == {"parallel": {"pipeline": 2, "ids": [0, 1.5e-3, None, True, "a/bä"]}, "train": {}}


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\r", "\r\n"])
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_places_behind_other_ends_of_lines(end: str, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some line ends of YAML 1.1 are none to an editor or a finding. A carriage return is one to all."""
    monkeypatch.setattr(yaml, "CSafeLoader", getattr(yaml, loader))
    starts = 2 if "\r" in end else 1
    source = Source("cfg.yaml", f"# a{end}one: 1\n\U0001f600: '2'\n")
    names = read_names(source, Session({}, lambda parsed, session: {}))
    assert names is not None
    at = names["one"].name_location
    assert (at.line, at.column) == (starts, 1 if starts == 2 else 5)
    assert names["\U0001f600"].location[1:] == (starts + 1, 4, starts + 1, 7)
    (item,) = load_text(f"# a{end}one: ]1\n", "cfg.yaml").findings
    assert (item.code, item.location.line, item.location.column) == ("CFG001", starts, 6 if starts == 2 else 10)


def test_places() -> None:
    config = load_text("größe: ä\nparallel:\n  tensor: {size: 42}\n  ids:\n    - 7\n", "cfg.yaml")
    assert config.at("parallel.tensor.size")[1:] == (3, 18, 3, 20)
    assert config.key_at("parallel.tensor.size")[1:] == (3, 12, 3, 16)
    assert config.at("parallel.ids.0")[1:] == (5, 7, 5, 8)
    assert config.key_at("größe")[1:] == (1, 1, 1, 6)


def test_overrides_of_yaml() -> None:
    config = load_text("parallel: {tensor: 4}", "cfg.yml", ["parallel.tensor.mode=2d"], {"parallel.tensor": "size"})
    assert config.root.plain() == {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}


BAD = {
    "syntax": ("a: [1", "CFG001", 1),
    "tab": ("a:\n\t- 1", "CFG001", 2),
    "a list": ("- 1", "CFG001", 1),
    "undefined anchor": ("a: *b", "CFG001", 1),
    "tag": ("a: 1\nb: !!python/name:os.system ''", "CFG002", 2),
    "own tag": ("a: !thing 1", "CFG002", 1),
    "merge": ("a: &a {b: 1}\nc:\n  <<: *a", "CFG002", 3),
    "two documents": ("a: 1\n---\nb: 1", "CFG002", 2),
    "duplicate": ("a: 1\nb:\n  c: 1\n  c: 2", "CFG012", 4),
    "a list as key": ("a: 1\n? [1]\n: 2", "CFG013", 2),
    "a number as name": ("a: 1\n2: 3", "CFG013", 2),
    "deep": ("a: " + "[" * 80 + "]" * 80, "CFG005", 1),
    "in itself": ("a: &a [*a]", "CFG005", 1),
}


@pytest.mark.parametrize("case", BAD)
def test_bad(case: str) -> None:
    text, code, line = BAD[case]
    config = load_text(text, "cfg.yaml")
    assert [(item.code, item.location.line, item.severity) for item in config.findings] == [(code, line, "error")]
    assert config.findings[0].help


def test_from_a_file(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\ufeffa: 1\nb: 2\n", encoding="utf-8-sig")  # two marks, as editors leave them
    assert load(str(path)).root.value["b"].location[1:3] == (2, 4)
    path.write_text("a: 1\n", encoding="utf-8-sig")
    assert load(str(path)).root.plain() == {"a": 1}
    path.write_bytes(b"a: \xff\n")
    assert [item.code for item in load(str(path)).findings] == ["CFG009"]
