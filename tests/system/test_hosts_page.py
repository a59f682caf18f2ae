"""docs/hosts.md: its commands run (those that reach hosts are only printed), and its flags and codes exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.cluster import ssh
from dslpar.cluster.launchers import LAUNCHERS
from dslpar.launch import local_facts
from dslpar.linter.registry import page_of
from tests.support.runs import ROOT

PAGES = (ROOT / "docs" / "hosts.md", ROOT / "docs" / "running.md", ROOT / "README.md")
COMMANDS = sorted(
    {
        line.partition("  #")[0].strip()
        for page in PAGES
        for line in page.read_text().splitlines()
        if line.startswith("dslpar ") and "--hostfile" in line
    }
)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launchers of this machine do not matter: pdsh may be missing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("pdsh", "ssh", "deepspeed"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    words = [word for word in shlex.split(command)[1:] if word not in ("--check", "--print")]
    assert main([*words, *(["--print"] if words[0] == "launch" else [])]) == 0
    out = capsys.readouterr().out
    assert words[0] == "lint" or out


def test_codes_and_settings_of_the_page_are_real() -> None:
    text = PAGES[0].read_text()
    assert [code for code in set(re.findall(r"HST\d{3}", text)) if page_of(code) is None] == []
    assert all(setting in text for setting in ssh.OPTIONS)
    assert all(f"`{start}`" in text for start in local_facts.FORWARDED)
    assert all(f"| `{name}` |" in text for name in LAUNCHERS)
