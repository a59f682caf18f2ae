"""Configs as text, linted for a world."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.errors import Finding
from dslpar.flow import load_text
from dslpar.hostfile import parse
from dslpar.linter.book import lint

MODEL = "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"
BATCH = "batch = dict(micro_size=16)\n"
PATH = "cfg.py"


def findings(
    text: str, world: int | None = 8, overrides: Sequence[str] = (), hostfile: str | None = None
) -> list[Finding]:
    """What lint says of a config's text."""
    cluster = parse(hostfile, "hosts") if hostfile is not None else None
    return lint(load_text(text, PATH, overrides), world, cluster)


def codes(text: str, world: int | None = 8, overrides: Sequence[str] = (), hostfile: str | None = None) -> list[str]:
    """The codes alone."""
    return [finding.code for finding in findings(text, world, overrides, hostfile)]


def marked(text: str, finding: Finding) -> str:
    """The characters that a finding in `text` points at, on its first line."""
    place = finding.location
    line = text.splitlines()[place.line - 1]
    end = place.end_column if place.end_line == place.line else len(line) + 1
    return line[place.column - 1 : end - 1]
