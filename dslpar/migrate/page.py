"""Generate docs/import.md from the tables: `python -m dslpar.migrate.page > docs/import.md`. A test compares them."""

from __future__ import annotations

import sys
from importlib import resources
from itertools import groupby

from dslpar.migrate.defaults import Default
from dslpar.migrate.framework_rules import rules_of
from dslpar.migrate.registry import TABLES
from dslpar.migrate.table import FATES, Row, Table


def page() -> str:
    """Return the whole page."""
    head = resources.files("dslpar.migrate").joinpath("data/page.md").read_text(encoding="utf-8")
    return head.replace("{sources}", _sources()) + "".join(_section(table) for table in TABLES.values())


def _sources() -> str:
    """Return the table that says what lint judges in each source, and how many files were tried."""
    rows = ""
    for table in TABLES.values():
        rules = rules_of(table.framework.name)
        link = "".join(letter for letter in table.title.lower() if letter.isalnum() or letter in " -").replace(" ", "-")
        endings = " ".join(f"`{ending}`" for ending in table.framework.endings)
        own = len(rules.checks)
        own_text = f"{own}, and DeepSpeed's {len(rules_of('deepspeed').checks)}" if table.under else str(own)
        tried = f"{table.tried}, and {table.tried_there}" if table.tried_there else str(table.tried)
        rows += f"| [{table.title}](#{link}) | {endings} | {len(rules.judged)} | {own_text} | {tried} |\n"
    head = "| source | endings | rules of dslpar | checks of its own | files |\n|---|---|---|---|---|\n"
    return (head + rows).rstrip("\n")


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
    head = f"\n## {table.title}\n\n| key | fate | becomes | |\n|---|---|---|---|\n{rows}\n"
    return head + last + _defaults(table) + _judged(table)


def _defaults(table: Table) -> str:
    """Return the table of the framework's defaults that have a place in dslpar."""
    rows = ""
    for default in table.defaults:
        row = next((row for row in table.rows if row.rest(default.key) is not None), None)
        if default.value is None or row is None or not row.to or row.fate in ("dropped", "dead"):
            continue
        place = f"{default.path}:{default.line or default.symbol}"
        rows += f"| `{default.key}` | `{default.value!r}` | {_conditions(default)} | {place} |\n"
    head = f"Where the source is silent, {table.title}'s defaults are added:"
    return f"\n{head}\n\n| key | default | if | {table.title}'s code |\n|---|---|---|---|\n{rows}" if rows else ""


def _judged(table: Table) -> str:
    """Return what `dslpar lint` judges in a config of the framework, and the framework's own checks."""
    rules = rules_of(table.framework.name)
    codes = ", ".join(f"[{code}](rules/{code[:3]}.md)" for code in sorted(rules.judged))
    text = f"\n`dslpar lint` judges {table.title}'s configs by {codes}"
    unknown = [f"`{entry.subject}` ({entry.why})" for entry in rules.unknown]
    text += f"; unknown are {' and '.join(unknown)}.\n" if unknown else ".\n"
    if not rules.checks:
        return text
    rows = "".join(
        f"| `{check.subject}` | {check.kind} | `{check.when}` | {check.source} |\n" for check in rules.checks
    )
    head = f"\nIt also knows these checks of {table.title}'s own:\n\n"
    return f"{text}{head}| key | severity | if | checked by |\n|---|---|---|---|\n{rows}"


def _conditions(default: Default) -> str:
    made = []
    for condition in default.conditions:
        names = " or ".join(condition.names)
        made.append(f"{condition.key} is " + ("not set" if condition.absent else names or "set"))
    return ", ".join(made)


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
