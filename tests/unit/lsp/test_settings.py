"""The comment of settings, and the project's table, in an editor: what is wrong in them is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslpar.lsp.analysis import Analysis, analysed

CONFIG = """\
parallel = dict(pipeline=1)
model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
batch = dict(global_size=16, micro_size=2)
"""


def of(folder: Path, text: str) -> Analysis:
    path = str(folder / "cfg.py")
    return analysed(path, {os.path.realpath(path): text})


@pytest.mark.parametrize(
    ("settings", "message", "help", "columns"),
    [
        ("world_size=8", "unknown setting 'world_size'", "did you mean 'world-size'?", (11, 21)),
        ("wolrd-size=8", "unknown setting 'wolrd-size'", "did you mean 'world-size'?", (11, 21)),
        ("ranks=8", "unknown setting 'ranks'", "the settings are world-size, device", (11, 16)),
        ("world-size=0", "world-size is '0'", "from 1 and below 2147483648", (22, 23)),
        ("world-size=4294967296", "world-size is '4294967296'", "numbers of ranks", (22, 32)),
        ("world-size=abc", "world-size is 'abc'", "numbers of ranks", (22, 25)),
        ("world-size=", "world-size is ''", "numbers of ranks", (11, 22)),
        ("world-size=8,", "world-size is '8,'", "numbers of ranks", (22, 24)),
        ("world-size=" + "9" * 5000, "world-size is '" + "9" * 40 + "...'", "numbers of ranks", (22, 5022)),
        ("world-size=8 64", "'64' is no setting", "without blanks: world-size=8,64", (24, 26)),
        ("device=a100", "device is 'a100'", "did you mean 'a100-80g'?", (18, 22)),
        ("world-size=8 device=nope-80g", "device is 'nope-80g'", "", (31, 39)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_in_the_comment(
    tmp_path: Path, settings: str, message: str, help: str, columns: tuple[int, int]
) -> None:
    found = [each.finding for each in of(tmp_path, f"# dslpar: {settings}\n{CONFIG}").findings]
    (item,) = [each for each in found if each.code == "CFG230"]
    assert item.message == f"{message} in the comment of settings"
    assert help in item.help
    assert item.severity == "warning"
    assert (item.location.line, item.location.column, item.location.end_column) == (1, *columns)


def test_two_sizes_with_a_blank_between_them_are_two_mistakes(tmp_path: Path) -> None:
    made = of(tmp_path, f"# dslpar: world-size=8, 64\n{CONFIG}")
    found = [each.finding for each in made.findings if each.finding.code == "CFG230"]
    assert [each.location.column for each in found] == [22, 25]
    assert made.settings.worlds == (None,)


@pytest.mark.parametrize(("comment", "count"), [("this is for 64 GPUs", 0), ("64 ranks", 2), ("word-size of 64", 3)])
def test_a_sentence_is_no_mistake(tmp_path: Path, comment: str, count: int) -> None:
    made = of(tmp_path, f"# dslpar: {comment}\n{CONFIG}")
    assert len([each for each in made.findings if each.finding.code == "CFG230"]) == count


def test_a_misspelt_setting_claims_the_file_too(tmp_path: Path) -> None:
    made = of(tmp_path, "# dslpar: world_size=8\n")
    assert made.is_config
    assert "CFG230" in [each.finding.code for each in made.findings]


def test_a_pattern_of_the_project_claims_a_file_without_sections(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dslpar]\nconfigs = ['runs/*']\n")
    (tmp_path / "runs").mkdir()
    assert of(tmp_path / "runs", "").is_config
    assert not of(tmp_path, "").is_config


@pytest.mark.parametrize("comment", ["# dslpar: ignore-file[PERF101] why=not", "# dslpar: one config file says it all"])
def test_other_comments_claim_nothing(tmp_path: Path, comment: str) -> None:
    made = of(tmp_path, f"{comment}\nimport os\n")
    assert not made.is_config
    assert made.findings == ()


def test_a_remark_behind_the_settings(tmp_path: Path) -> None:
    made = of(tmp_path, f"# dslpar: world-size=8  # two nodes\n{CONFIG}")
    assert made.settings.worlds == (8,)
    assert made.findings == ()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("device = 'nope'", "unknown device 'nope' in [tool.dslpar]"),
        ("world-size = 'x'", "world-size is 'x'"),
        ("select = ['XYZ']", "unknown rule 'XYZ'"),
    ],
)
def test_mistakes_in_the_project_are_shown_in_each_config(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.dslpar]\n{table}\n")
    made = of(tmp_path, f"# dslpar: world-size=8\n{CONFIG}")
    (item,) = [each.finding for each in made.findings]
    assert message in item.message
    assert "pyproject.toml:2:1: " in item.message
    assert item.location.path.startswith("<"), "a place that the server publishes for the config"
    assert made.settings.worlds == (8,), "the comment counts nevertheless"
