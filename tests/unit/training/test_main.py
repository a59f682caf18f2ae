"""Start of a rank before it imports torch: the config is read once and linted once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dslpar
from dslpar.cli.main import main as command
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.linter import engine
from dslpar.schema import sections_reader
from dslpar.training import main as training

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)
idle = dict(a=1)
"""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the sections are read, and the rules run."""
    counted: Counter[str] = Counter()
    for module, name in ((sections_reader, "read"), (engine, "run_rules")):
        function = getattr(module, name)

        def counting(*args: Any, name: str = name, function: Any = function) -> Any:
            counted[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counting)
    return counted


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cfg.py"
    path.write_text(CONFIG)
    return str(path)


def test_a_rank_reads_and_lints_its_config_once(config: str, counts: Counter[str]) -> None:
    status, request = training.load_and_lint(["--config", config], DistributedEnv())
    assert (status, request is not None) == (0, True)
    assert counts == {"read": 1, "run_rules": 1}


@pytest.mark.parametrize("linted", [False, True])
def test_a_launched_rank_does_not_repeat_warnings(
    config: str, linted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dslpar launch` has printed them. A rank still prints errors, since the launcher starts no rank after one."""
    training.load_and_lint(["--config", config], DistributedEnv(), linted)
    assert ("CFG106" in capsys.readouterr().err) is not linted
    training.load_and_lint(["--config", config, "train.steps=0"], DistributedEnv(), linted)
    assert "CFG103" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["show", "--world-size", "1"], ["lint"], ["config"], ["launch", "--print"]])
def test_a_command_reads_and_lints_its_config_once(
    words: list[str], config: str, counts: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = words
    more = ["--world-size", "1"] if name == "launch" else []
    assert command([name, config, *flags, *more]) == 0
    assert "CFG106" in "".join(capsys.readouterr()) or name == "config"
    assert counts == {"read": 1, "run_rules": 1}


def test_lint_and_resolve_of_a_program_read_and_lint_once_each(config: str, counts: Counter[str]) -> None:
    assert [finding.code for finding in dslpar.lint(config, 1)] == ["CFG106"]
    assert dslpar.resolve(config, 1).mesh.world_size == 1
    assert counts == {"read": 2, "run_rules": 2}
