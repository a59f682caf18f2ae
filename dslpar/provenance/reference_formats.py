"""Formats of the reference: text, JSON and Markdown, for `dslpar config --reference` and docs/config.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from dslpar.core.visible import json_text
from dslpar.provenance.reference import Row

Rows = Sequence[Row]


def as_text(rows: Rows) -> str:
    """Return each key with its type and default, and its help on the next line."""
    return "\n".join(line for row in rows for line in _lines(row)) + "\n"


def _lines(row: Row) -> Iterator[str]:
    default = "" if not row.default else "; required" if row.default == "required" else f"; default {row.default}"
    yield f"{row.key}: {row.type}{default}" + (f" ({row.of})" if row.of else "")
    yield f"    {row.help}"
    if row.aliases:
        yield f"    also {', '.join(row.aliases)}"


def as_json(rows: Rows) -> str:
    """Return a JSON list of records."""
    return json_text([row._asdict() | {"aliases": list(row.aliases)} for row in rows])


def as_markdown(rows: Rows) -> str:
    """Return a heading and a table per section; keys of torch and DeepSpeed have tables of their own."""
    parts = [_section(name, list(members)) for name, members in groupby(rows, lambda row: row.key.partition(".")[0])]
    return "\n".join(parts)


FORMATS: Mapping[str, Callable[[Rows], str]] = {"text": as_text, "json": as_json, "markdown": as_markdown}


def _section(name: str, rows: Rows) -> str:
    own = [row for row in rows if row.field or (row.key == f"{name}.type" and not row.of)]
    theirs = [row for row in rows if row not in own]
    top = [row for row in own if row.key == name]
    lines = [f"## {name}", "", *(line for row in top for line in (row.help, ""))]
    for of, members in _by_type(row for row in own if row.key != name):
        lines += [f"### {name}, {of}", ""] if of else []
        lines += [*_table(members), ""]
    return "\n".join([*lines, *_theirs(name, theirs)])


def _by_type(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    return [(of, list(members)) for of, members in groupby(rows, lambda row: row.of)]


def _table(rows: Rows) -> list[str]:
    lines = ["| key | takes | default | what it is |", "|---|---|---|---|"]
    for row in rows:
        also = f" Also {', '.join(f'`{name}`' for name in row.aliases)}." if row.aliases else ""
        default = "required" if row.default == "required" else f"`{row.default}`" if row.default else ""
        lines.append(f"| `{row.key}` | {cell(row.type)} | {cell(default)} | {cell(row.help + also)} |")
    return lines


def _theirs(name: str, rows: Rows) -> list[str]:
    """Return the tables of torch's and DeepSpeed's keys; optimizers and schedulers have one line per class."""
    if not rows:
        return []
    if name not in ("optimizer", "lr_scheduler"):
        lines: list[str] = []
        for of, members in _by_type(rows):
            lines += [f"### {name}, DeepSpeed's keys" + (f" with {of}" if of else ""), "", *_table(members), ""]
        return lines
    lines = [f"### {name}, types of torch's and DeepSpeed's", "", "| type | is | arguments |", "|---|---|---|"]
    for _, members in _by_type(rows):
        first, *arguments = members
        listed = ", ".join(
            f"`{row.key.rpartition('.')[2]}`" + (" (required)" if row.default == "required" else "")
            for row in arguments
        )
        lines.append(f"| `{first.type}` | {cell(first.help)} | {listed} |")
    return [*lines, ""]


def cell(text: str) -> str:
    """Escape text for a table."""
    return escaped(text).replace("|", "\\|")


def escaped(text: str) -> str:
    """Escape `*` and `<` for Markdown, except between backquotes."""
    return re.sub(r"(`[^`]*`)|([*<])", lambda found: found[1] or f"\\{found[2]}", text)
