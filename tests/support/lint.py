"""Lint configs given as text."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.cluster.filter import filter_hosts
from dslpar.cluster.hostfile import parse
from dslpar.core.errors import Finding
from dslpar.linter.check import lint, load_text

MODEL = "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"
BATCH = "batch = dict(micro_size=16)\n"
PATH = "cfg.py"
TOO_SMALL = ("PERF103", "PERF104", "PERF105", "PERF106")
"""Findings that the tests' small sizes always cause. Few micro-batches here are large enough for modes beyond '1d', and
few pipelines have several micro-batches, or enough layers for an even partition.
"""


def findings(
    text: str,
    world: int | None = 8,
    overrides: Sequence[str] = (),
    hostfile: str | None = None,
    ignored: Sequence[str] = TOO_SMALL,
    include: str = "",
    exclude: str = "",
    path: str = PATH,
) -> list[Finding]:
    """Return lint's findings for a config's text."""
    cluster = parse(hostfile, "hosts") if hostfile is not None else None
    if cluster is not None and (include or exclude):
        cluster = filter_hosts(cluster, include or exclude, "--include" if include else "--exclude")
    return [
        found for found in lint(load_text(text, path, overrides), world, cluster=cluster) if found.code not in ignored
    ]


def codes(text: str, world: int | None = 8, overrides: Sequence[str] = (), hostfile: str | None = None) -> list[str]:
    """Return only the codes."""
    return [finding.code for finding in findings(text, world, overrides, hostfile)]


def marked(text: str, finding: Finding) -> str:
    """Return the characters that a finding in `text` points at, on its first line."""
    place = finding.location
    line = text.splitlines()[place.line - 1]
    end = place.end_column if place.end_line == place.line else len(line) + 1
    return line[place.column - 1 : end - 1]


def wrong(text: str, world: int | None = 8) -> list[Finding]:
    """Return lint's findings without those about speed."""
    return [finding for finding in findings(text, world) if not finding.code.startswith("PERF")]
