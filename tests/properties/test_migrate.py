"""`dslpar import` drops nothing silently: random sources of each kind, with unknown keys, and their reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.language.load import load_text
from dslpar.migrate.convert import Import, convert
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.migrate.table import FATES, Table
from dslpar.migrate.writer import file_of
from dslpar.schema.sections_reader import SECTIONS

WORDS = (
    "auto",
    "cpu",
    "nvme",
    "cuda",
    "1d",
    "2.5d",
    "GPT",
    "gpt2_small",
    "AdamW",
    "my.own.Model",
    "",
    "it's # 'x'",
    "a\nb",
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(WORDS),
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from(WORDS)), max_size=3),
    st.lists(st.fixed_dictionaries({"type": st.sampled_from(("ZeROGradientHandler", "my.Handler"))}), max_size=2),
    st.builds(dict),
)
STRANGE = ("hidden_sizes", "nheads", "levle", "xyz", "steps", "Name2")


def keys_of(table: Table) -> list[str]:
    """Return a key per row, some for rows that take any rest, and unknown keys."""
    made = []
    for row in table.rows:
        if "_target_" in row.pattern:
            continue
        if not row.pattern.endswith("**"):
            made.append(row.pattern)
        else:
            prefix = row.pattern.removesuffix("**")
            made += [prefix + name for name in (*tuple(row.among)[:6], "xyz")]
    sections = sorted({key.partition(".")[0] for key in made if "." in key} | set(SECTIONS))
    strange = [f"{section}.{name}" for section in sections for name in STRANGE]
    return sorted({*made, *strange, *STRANGE, *(f"CONFIG.{key}" for key in made[:20])})


def tree_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted keys; a key below a value that is no mapping is left out."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        level = tree
        for part in above:
            level = level.setdefault(part, {}) if isinstance(level, dict) else None
        if isinstance(level, dict) and last not in level:
            level[last] = value
    return tree


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaf keys of a tree, found independently for the test."""
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def text_of(name: str, tree: Mapping[str, Any]) -> tuple[str, str]:
    """Return the source as a file of that framework, and its name."""
    if name == "deepspeed":
        return json.dumps(tree, indent=1), "ds.json"
    return "".join(f"{key} = {value!r}\n" for key, value in tree.items()), "source.py"


def wrong(made: Import, tree: Mapping[str, Any]) -> list[str]:
    """Return errors of a report."""
    expected, text = dict(leaves(dict(tree))), file_of(made)
    counts = Counter(entry.key for entry in made.entries if entry.key)
    said = [f"{key}: {counts[key]} times" for key in expected if counts[key] != 1]
    said += [f"{key}: not of the source" for key in counts if key not in expected]
    written = load_text(text, "made.py")
    said += [f"the file: {finding.message}" for finding in written.findings if finding.severity == "error"]
    for entry in made.entries:
        if entry.fate not in FATES:
            said.append(f"no fate {entry.fate}")
        if entry.fate in ("kept", "renamed"):
            node = written.root.get(entry.to)
            value = expected[entry.key]
            if node is None or node.plain() != value or type(node.plain()) is not type(value):
                said.append(f"{entry.key} -> {entry.to}: {value!r} is not in the file")
            if (entry.to == entry.key.removeprefix("CONFIG.")) != (entry.fate == "kept"):
                said.append(f"{entry.key} -> {entry.to}: {entry.fate}")
        elif not entry.why:
            said.append(f"{entry.key}: {entry.fate} without a reason")
        if entry.fate in ("changed", "needed") and entry.to and words(entry.why) not in words(text):
            said.append(f"{entry.key}: no comment says {entry.why}")
    return said


def words(text: str) -> str:
    """Return a text without comment signs and line ends."""
    return " ".join(word for word in text.split() if word != "#")


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_key_is_in_the_report_once(name: str, data: st.DataObject) -> None:
    flat = data.draw(st.dictionaries(st.sampled_from(keys_of(TABLES[name])), VALUES, max_size=14))
    if name == "colossalai" and data.draw(st.booleans()):
        flat = {"model.type": "gpt2_small"} | flat
    tree = tree_of(flat)
    text, path = text_of(name, tree)
    source = read_text(text, path, name)
    assert wrong(convert(source), tree) == [], text


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_step_of_colossalai_takes_the_samples_that_it_took(size: int, pieces: int, steps: int, stages: int) -> None:
    tree = {
        "BATCH_SIZE": size,
        "NUM_MICRO_BATCHES": pieces,
        "gradient_accumulation": steps,
        "parallel": {"pipeline": stages},
    }
    made = convert(read_text(*text_of("colossalai", tree), "colossalai"))
    assert wrong(made, tree) == []
    needs = [entry.key for entry in made.entries if entry.key and entry.fate == "needed"]
    assert needs == (["BATCH_SIZE"] if stages > 1 and size % pieces else [])
    if not needs:
        assert made.values["batch.micro_size"] * made.values["batch.accumulation"] == size * steps
        assert made.values["batch.accumulation"] == steps * (pieces if stages > 1 else 1)


@pytest.mark.parametrize("name", TABLES)
def test_a_silent_drop_would_be_seen(name: str) -> None:
    tree = (
        {"zero_optimization": {"stage": 1, "levle": 2}} if name == "deepspeed" else {"zero": {"stage": 1, "levle": 2}}
    )
    text, path = text_of(name, tree)
    made = convert(read_text(text, path, name))
    assert wrong(made, tree) == []
    for number, entry in enumerate(made.entries):
        if entry.key:
            assert wrong(made._replace(entries=made.entries[:number] + made.entries[number + 1 :]), tree)
        if entry.fate in ("kept", "renamed"):
            assert wrong(made._replace(values={**made.values, entry.to: 3}), tree)
    lost = made._replace(entries=(*made.entries, made.entries[0]._replace(key="", fate="changed", to="x", why="a b")))
    assert wrong(lost, tree) == [": no comment says a b"]


def test_a_value_of_another_type_needs_the_author() -> None:
    tree = {"normalization": []}
    made = convert(read_text(*text_of("megatron", tree), "megatron"))
    assert wrong(made, tree) == []
    assert [entry.fate for entry in made.entries if entry.key == "normalization"] == ["needed"]
