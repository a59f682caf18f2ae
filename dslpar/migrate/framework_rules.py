"""The checks of other frameworks, and dslpar's rules that hold there, too: dslpar/migrate/rules/SOURCE.txt.

    error | zero_optimization.stage                          # severity, and the key at which the finding is
      when   zero_optimization.stage == 3 and pipeline.stages > 1     # a condition, see `dslpar.migrate.expression`
      says   stage {zero_optimization.stage} ...             # {key}: the key's value
      help   choose stage 1                                  # optional
      bad    {"zero_optimization": {"stage": 3}, ...}        # an example that breaks this rule only, for the tests
      good   {"zero_optimization": {"stage": 1}, ...}        # the example, corrected
      world  8                                               # optional: the number of ranks of both examples
      source DeepSpeed 0.19.8 deepspeed/runtime/pipe/engine.py:76

    judged | TEN201 BAT101                                   # codes of dslpar's rules that hold there, too
      why    heads are sharded over tensor ranks
      source Megatron-LM d98e8a6 megatron/core/...:12

    unjudged | BAT101                                        # codes of common.txt that do not hold there
      why    ...

    unknown | parallel                                       # dslpar's keys that the source cannot tell
      why    the program sets it

    partial | .yaml .yml                                     # endings of files that override another config
      why    ...

    include | megatron                                       # the checks of another file hold as well
      why    ...

Examples are JSON, the arguments of a script, or a ConfigContainer of Python; in TOML, ` ; ` separates lines. Entries
are separated by empty lines, and lines that begin with # are comments. common.txt holds for every source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import NamedTuple

SEVERITIES = ("error", "warning", "info")
KINDS = (*SEVERITIES, "judged", "unjudged", "unknown", "include", "partial")
COMMON = "common"


class Entry(NamedTuple):
    """One entry of a file."""

    kind: str
    """One of KINDS."""
    subject: str
    """The source's key, or codes or keys of dslpar."""
    when: str = ""
    says: str = ""
    help: str = ""
    why: str = ""
    source: str = ""
    bad: str = ""
    good: str = ""
    world: str = "8"
    """Ranks of the examples."""


class Rules(NamedTuple):
    """The rules for one source."""

    checks: tuple[Entry, ...]
    """The framework's own checks."""
    judged: dict[str, Entry]
    """Code of a rule of dslpar that holds in the framework, too -> the entry that says why."""
    unknown: tuple[Entry, ...]
    """Keys of dslpar that the source cannot tell."""
    partial: tuple[str, ...] = ()
    """Endings of files that override another config: what they leave out has no known value."""


@cache
def rules_of(name: str) -> Rules:
    """Return the rules for the source `name`: those of its file, and those of common.txt that it does not exclude."""
    own, common = entries_of(name), entries_of(COMMON)
    own += tuple(each for entry in own if entry.kind == "include" for each in entries_of(entry.subject))
    excluded = {code for entry in own if entry.kind == "unjudged" for code in entry.subject.split()}
    judged = {
        code: entry
        for entry in (*common, *own)
        if entry.kind == "judged"
        for code in entry.subject.split()
        if code not in excluded
    }
    checks = tuple(entry for entry in own if entry.kind in SEVERITIES)
    partial = tuple(ending for entry in own if entry.kind == "partial" for ending in entry.subject.split())
    return Rules(checks, judged, tuple(entry for entry in own if entry.kind == "unknown"), partial)


def entries_of(name: str) -> tuple[Entry, ...]:
    """Read the file of a source; a source without a file has no entries."""
    file = resources.files("dslpar.migrate").joinpath(f"rules/{name}.txt")
    return tuple(_entries(file.read_text(encoding="utf-8"))) if file.is_file() else ()


def _entries(text: str) -> Iterator[Entry]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip()):
        first, *rest = block.splitlines() or [""]
        if not first:
            continue
        kind, _, subject = first.partition(" | ")
        assert kind in KINDS, f"no entry: {first!r}"
        fields = dict(re.split(r" +", line.strip(), maxsplit=1) for line in rest)
        yield Entry(kind, subject, **fields)
