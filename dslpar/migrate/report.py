"""The report of an import: every key of the source and its fate, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from dslpar.core.errors import Finding
from dslpar.language.tree import Reference
from dslpar.migrate.convert import Import
from dslpar.migrate.registry import TABLES
from dslpar.migrate.table import FATES


def text(made: Import, out: str | None) -> str:
    """Write what became of each key, by fate: what needs the author first."""
    counts = Counter(entry.fate for entry in made.entries)
    summary = ", ".join(f"{counts[fate]} {title}" for fate, title in FATES.items() if counts[fate])
    lines = [
        f"{made.source.path} ({TABLES[made.source.name].title}) -> {out or 'standard output'}: {summary or 'nothing'}"
    ]
    for fate, title in FATES.items():
        entries = [entry for entry in made.entries if entry.fate == fate]
        lines += ["", f"{title}:"] if entries else []
        for key, _, to, _, why, location in entries:
            moved = f"{key} -> {to}" if key and to not in ("", key) else key or to
            lines.append(f"  {location.path}:{location.line}: {moved}" + (": " if moved and why else "") + why)
    return "\n".join(lines) + "\n\n"


def as_json(made: Import, out: str | None, findings: Sequence[Finding]) -> str:
    """Write one object: the source, the entries in the source's order, and the findings of the result."""
    entries = []
    for key, fate, to, value, why, location in made.entries:
        value = _portable(value) if fate in ("kept", "renamed", "changed", "added") else None
        entries.append({"key": key, "fate": fate, "to": to, "value": value, "why": why, **location._asdict()})
    record = {
        "source": made.source.path,
        "from": made.source.name,
        "out": out,
        "entries": entries,
        "findings": [finding.as_json() for finding in findings],
    }
    return json.dumps(record, indent=2) + "\n"


def _portable(value: object) -> object:
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    return value
