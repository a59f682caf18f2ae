"""The report of an import: every key of the source and its fate, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dslpar.core.errors import Finding
from dslpar.language.tree import Reference
from dslpar.migrate.convert import Entry, Import
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
        if entries:
            lines += ["", f"{title}:", *map(_line, entries)]
    return "\n".join(lines) + "\n\n"


def _line(entry: Entry) -> str:
    place = f"{entry.location.path}:{entry.location.line}"
    moved = f"{entry.key} -> {entry.to}" if entry.key and entry.to not in ("", entry.key) else entry.key or entry.to
    return f"  {place}: {moved}" + (": " if moved and entry.why else "") + entry.why


def as_json(made: Import, out: str | None, findings: Sequence[Finding]) -> str:
    """Write one object: the source, the entries in the source's order, and the findings of the result."""
    import json

    record = {
        "source": made.source.path,
        "from": made.source.name,
        "out": out,
        "entries": [_record(entry) for entry in made.entries],
        "findings": [finding.as_json() for finding in findings],
    }
    return json.dumps(record, indent=2) + "\n"


def _record(entry: Entry) -> Mapping[str, Any]:
    value = _portable(entry.value) if entry.fate in ("kept", "renamed", "changed", "added") else None
    record = {"key": entry.key, "fate": entry.fate, "to": entry.to, "value": value, "why": entry.why}
    return record | entry.location._asdict()


def _portable(value: Any) -> Any:
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    return value
