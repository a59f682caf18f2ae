"""Report of an import: every key of the source and its fate, as text or as JSON.

The text joins keys of one section that have the same fate and reason into one line. JSON has one entry per key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dslpar.core.errors import Finding
from dslpar.core.visible import json_text, visible
from dslpar.language.tree import Reference
from dslpar.migrate.convert import Entry, Import
from dslpar.migrate.registry import TABLES
from dslpar.migrate.table import FATES


def text(made: Import, out: str | None) -> str:
    """Return the report as text, grouped by fate; keys that need the author come first."""
    counts = Counter(entry.fate for entry in made.entries)
    summary = ", ".join(f"{counts[fate]} {title}" for fate, title in FATES.items() if counts[fate])
    lines = [
        f"{made.source.path} ({TABLES[made.source.name].title}) -> {out or 'standard output'}: {summary or 'nothing'}"
    ]
    for fate, title in FATES.items():
        entries = [entry for entry in made.entries if entry.fate == fate]
        lines += ["", f"{title}:", *_folded(entries)] if entries else []
    return "".join(visible(line) + "\n" for line in lines) + "\n"


MAX_LISTED = 12


def _folded(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield one line per key, or one line for several keys of a section with the same reason."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_group(entry), []).append(entry)
    for group in groups.values():
        key, to, why, location = _all_of([entry.key for entry in group]), group[0].to, group[0].why, group[0].location
        if to and len(group) > 1:
            to = to.rpartition(".")[0] + key[key.rindex(".{") :]
        moved = f"{key} -> {to}" if key and to not in ("", key) else key or to
        yield f"  {location.path}:{location.line}: {moved}" + (": " if moved and why else "") + why


def _group(entry: Entry) -> object:
    """Return the grouping key of a line: the reason, and the section in which the keys keep their names."""
    (above, _, name), (to_above, _, to_name) = entry.key.rpartition("."), entry.to.rpartition(".")
    keeps_its_name = not entry.to or (above and to_name == name)
    if not (entry.key and keeps_its_name and (above or entry.why)):
        return entry.key, entry.to, entry.why, entry.location
    section = entry.key.partition(".")[0] if above and not entry.to else above
    return entry.location.path, entry.why, section, to_above


def _all_of(keys: Sequence[str]) -> str:
    """Return several keys as one: `train.{seed, amp.enabled}`, or a list of top-level keys."""
    if len(keys) == 1:
        return keys[0]
    above = keys[0].split(".")[:-1]
    while above and not all(key.startswith(".".join(above) + ".") for key in keys):
        above.pop()
    names = [key.removeprefix(".".join(above) + ".") for key in keys]
    more = f", and {len(names) - MAX_LISTED} more (--format json lists them)" if len(names) > MAX_LISTED else ""
    listed = ", ".join(names[:MAX_LISTED]) + more
    return ".".join(above) + ".{" + listed + "}" if above else listed


def as_json(made: Import, out: str | None, findings: Sequence[Finding]) -> str:
    """Return one JSON object: the source, the entries in the order of the conversion, and the result's findings."""
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
    return json_text(record)


def _portable(value: object) -> object:
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    return value
