"""Completion as an editor applies it: the text after an item is chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslpar.lsp.analysis import analysed
from dslpar.lsp.completion import Item, completions, settings_at
from dslpar.lsp.cursor import place_at, rest_at, rest_of_setting

CONFIG = """\
# dslpar: world-size=8
parallel = dict(pipeline=1)
model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
batch = dict(global_size=16, micro_size=2)
"""


def offered(path: Path, marked: str, others: dict[str, str] | None = None) -> tuple[list[Item], str, str]:
    """Return the items at the `|` of a text, and what stands before and after the text that they replace."""
    before, _, after = marked.partition("|")
    lines = before.split("\n")
    line, column = len(lines), len(lines[-1]) + 1
    text = before + after
    texts = {os.path.realpath(path): text, **(others or {})}
    place = place_at(text, line, column)
    if place is None:
        return [], before, after
    rest, is_assigned = rest_at(text, line, column, place)
    items = completions(analysed(str(path), texts), place, texts, is_assigned)
    return items, before.removesuffix(place.word), after[rest:]


@pytest.mark.parametrize(
    ("line", "label", "expected"),
    [
        ("zero = dict(|)", "stage", "zero = dict(stage=)"),
        ("zero = dict(sta|ge=2)", "stage", "zero = dict(stage=2)"),
        ("zero = dict(sta|g = 2)", "stage", "zero = dict(stage = 2)"),
        ("zero = dict(sta|, elastic=True)", "stage", "zero = dict(stage=, elastic=True)"),
        ("zero = {'sta|ge': 2}", "stage", "zero = {'stage': 2}"),
        ("zero = {'sta|ge' : 2}", "stage", "zero = {'stage' : 2}"),
        ("zero = {'|'}", "stage", "zero = {'stage': }"),
        ("zero = {'sta|", "stage", "zero = {'stage': "),
        ('zero = {"sta|"}', "stage", 'zero = {"stage": }'),
        ("ze|rro = dict(stage=1)", "zero", "zero = dict(stage=1)"),
        ("ze|", "zero", "zero = dict()"),
        ("zero = dict(stage=|)", "3", "zero = dict(stage=3)"),
        ("zero = dict(stage=|2)", "3", "zero = dict(stage=3)"),
        ("optimizer = dict(type='Ad|amW')", "Adam", "optimizer = dict(type='Adam')"),
        ("optimizer = dict(type='torch.op|tim.AdamW')", "Adam", "optimizer = dict(type='Adam')"),
        ("lr_scheduler = dict(type='|2.5d')", "WarmupLR", "lr_scheduler = dict(type='WarmupLR')"),
        ("cluster = dict(device='h1|00-80g-pcie')", "h100-80g", "cluster = dict(device='h100-80g')"),
        ("train = dict(steps=1, see|d=3)", "seed", "train = dict(steps=1, seed=3)"),
    ],
)
def test_the_rest_of_the_word_is_replaced_and_a_value_is_kept(
    tmp_path: Path, line: str, label: str, expected: str
) -> None:
    items, before, after = offered(tmp_path / "cfg.py", CONFIG + line)
    (item,) = [each for each in items if each.label == label]
    assert (before + item.insert.replace("$0", "") + after).removeprefix(CONFIG) == expected


def test_the_stages_of_zero_are_offered(tmp_path: Path) -> None:
    items, _, _ = offered(tmp_path / "cfg.py", CONFIG + "zero = dict(stage=|")
    assert [each.label for each in items] == ["0", "1", "2", "3"]


def test_many_numbers_are_not_offered(tmp_path: Path) -> None:
    items, _, _ = offered(tmp_path / "cfg.py", CONFIG + "train = dict(steps=|")
    assert items == []


@pytest.mark.parametrize("marked", ["|", "model:\n  type: GPT\n  |\n", "model:\n  type: |\n", "zero: {'|'}\n"])
def test_yaml_gets_no_python(tmp_path: Path, marked: str) -> None:
    assert offered(tmp_path / "cfg.yaml", marked)[0] == []


def test_legal_sizes_are_those_of_unsaved_imports(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("heads = 3\n")
    common = os.path.realpath(tmp_path / "common.py")
    text = CONFIG.replace("num_heads=4", "num_heads=heads").replace(
        "parallel = dict(pipeline=1)", "from .common import heads\nparallel = dict(tensor=dict(mode='1d', size=|1))"
    )
    on_disk, _, _ = offered(tmp_path / "cfg.py", text)
    unsaved, _, _ = offered(tmp_path / "cfg.py", text, {common: "heads = 4\n"})
    assert [each.label for each in on_disk] == ["1"]
    assert [each.label for each in unsaved] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("parallel = dict(pipeline=2, tensor=dict(mode='1d', size=|))", ["1", "2", "4"]),
        ("parallel = dict(pipeline=2, tensor=dict(mode='1d', size=|", ["1", "2", "4"]),  # not even closed
        ("parallel = dict(pipeline=4, tensor=dict(size=|, mode='1d'))", ["1", "2"]),
        ("parallel = dict(pipeline=2, tensor=dict(size=|))", ["1", "2", "4"]),  # the mode comes later
        ("parallel = dict(pipeline=|)", ["1", "2", "4", "dict()"]),  # there are four layers
    ],
)
def test_sizes_that_are_legal_beside_what_the_statement_says_so_far(
    tmp_path: Path, line: str, expected: list[str]
) -> None:
    items, _, _ = offered(tmp_path / "cfg.py", CONFIG.replace("parallel = dict(pipeline=1)", line))
    assert [each.label for each in items] == expected


def test_sizes_of_a_hundred_million_ranks(tmp_path: Path) -> None:
    text = CONFIG.replace("world-size=8", "world-size=100000007").replace("pipeline=1", "pipeline=|")
    text = text.replace("batch = dict(global_size=16, micro_size=2)\n", "")
    items, _, _ = offered(tmp_path / "cfg.py", text)
    assert [each.label for each in items] == ["1", "dict()"], "a prime has no other divisor that is below the layers"


WIDE = CONFIG.replace("world-size=8", "world-size=64").replace("num_heads=4", "num_heads=16")
WIDE = WIDE.replace("global_size=16, micro_size=2", "micro_size=8")
LEGAL = [(size, "legal on 64 ranks") for size in ("1", "2", "4", "8", "16")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("parallel = dict(pipeline=4, tensor=dict(size=|, mode='1d'))", LEGAL),
        ("parallel = dict(pipeline=4, tensor=dict(mode='1d', size=|", LEGAL),
        ("parallel = dict(pipeline=4, , tensor=dict(mode='1d', size=|))", LEGAL),
        ("parallel = {'pipeline': 4, 'tensor': {'mode': '1d', 'size': |}}", LEGAL),
        ("parallel = dict(pipeline=4, tensor=dict(mode='3d', size=|", [LEGAL[0], LEGAL[3]]),
        ("parallel = dict(tensor=dict(mode='1d', size=16), pipeline=|", LEGAL[:3]),
    ],
)
def test_sizes_are_legal_with_what_is_written_of_their_statement(
    tmp_path: Path, line: str, expected: list[tuple[str, str]]
) -> None:
    items, _, _ = offered(tmp_path / "cfg.py", WIDE.replace("parallel = dict(pipeline=1)", line))
    assert [(each.label, each.detail) for each in items if each.label != "dict()"] == expected


def test_a_tensor_size_before_its_mode_is_legal_in_one_of_them(tmp_path: Path) -> None:
    text = WIDE.replace("num_heads=16", "num_heads=4").replace("pipeline=1", "pipeline=4, tensor=dict(size=|)")
    items, _, _ = offered(tmp_path / "cfg.py", text)
    assert [(each.label, each.detail) for each in items] == [
        ("1", "legal on 64 ranks"),
        ("2", "legal on 64 ranks in mode '1d'"),
        ("4", "legal on 64 ranks in mode '1d'"),
        ("8", "legal on 64 ranks in mode '3d'"),
        ("16", "legal on 64 ranks in mode '2d'"),
    ]


@pytest.mark.parametrize("pipeline", ["", "3"])
def test_a_size_is_not_said_to_be_legal_beside_an_unknown_or_a_wrong_one(tmp_path: Path, pipeline: str) -> None:
    line = f"parallel = dict(pipeline={pipeline}, tensor=dict(size=|, mode='1d'))"
    items, _, _ = offered(tmp_path / "cfg.py", WIDE.replace("parallel = dict(pipeline=1)", line))
    assert {each.detail for each in items} == {"divides 64 ranks"}


@pytest.mark.parametrize(
    ("line", "label", "expected"),
    [
        ("# dslpar: wor|ld-size=8", "world-size=", "# dslpar: world-size=8"),
        ("# dslpar: dev|", "device=", "# dslpar: device="),
        ("# dslpar: device=h1|00-80g-pcie world-size=8", "h100-80g", "# dslpar: device=h100-80g world-size=8"),
    ],
)
def test_the_rest_of_a_setting_is_replaced(line: str, label: str, expected: str) -> None:
    before, _, after = line.partition("|")
    found = settings_at(before + after, 1, len(before) + 1)
    assert found is not None
    word, items = found
    item = next(item for item in items if item.label == label)
    rest = rest_of_setting(before + after, 1, len(before) + 1)
    assert before.removesuffix(word) + item.insert.replace("$0", "") + after[rest:] == expected
