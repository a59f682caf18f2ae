"""Generate docs/import.md from the tables: `python -m dslpar.migrate.page > docs/import.md`. A test compares them."""

from __future__ import annotations

import sys
from importlib import resources
from itertools import groupby

from dslpar.migrate.registry import TABLES
from dslpar.migrate.table import FATES, Row, Table


def page() -> str:
    """Return the whole page."""
    head = resources.files("dslpar.migrate").joinpath("data/page.md").read_text(encoding="utf-8")
    return head + "".join(_section(table) for table in TABLES.values())


def _section(table: Table) -> str:
    rows = ""
    own_rows = len(table.rows) - (len(table.includes.rows) if table.includes else 0)
    for row, group in groupby(table.rows[:own_rows], _without_pattern):
        keys = ", ".join(f"`{row.pattern}`" for row in group)
        to = f"`{row.to}`" if row.to and row.fate not in ("dropped", "dead") else ""
        why = (row.why + _condition(row)).replace("|", "\\|")
        rows += f"| {keys} | {FATES[row.fate]} | {to} | {why} |\n"
    own = "Other names of the file's own are dropped; " if table.own_names else ""
    own += f"{table.includes.title}'s keys are as there; " if table.includes else ""
    last = f"{own}{'o' if own else 'O'}ther keys need you.\n"
    if table.defaults:
        given = ", ".join(f"`{key}={value!r}`" for key, value in table.defaults.items())
        last += f"\nWhere the source is silent, these count, as they do in {table.title}: {given}.\n"
    return f"\n## {table.title}\n\n| key | fate | becomes | |\n|---|---|---|---|\n{rows}\n{last}"


def _without_pattern(row: Row) -> Row:
    """Return a row that is equal for keys with the same fate and reason, which share a line."""
    return row._replace(pattern="")


def _condition(row: Row) -> str:
    """Describe which values a row's conversion handles, and what happens to other values."""
    value = f" ({row.argument.partition(' else ')[0]}); " if " else " in row.argument else "; " if row.why else ""
    if row.conversion.startswith("titans"):
        return f"{value}an argument of titans' GPT; of a class of the author's own it stays"
    if " else " not in row.argument:
        return ""
    stays = "of other optimizers it stays"
    needs_you = "any other value needs you" if row.conversion in ("only", "only_of_gpt") else ""
    return value + (stays if row.conversion == "only_of_their_adam" else needs_you)


if __name__ == "__main__":
    sys.stdout.write(page())
