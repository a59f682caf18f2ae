"""Completion in an editor: sections, keys and values at a cursor.

    for item in completions(analysis, place, texts, around):
        item.label, item.insert, item.detail, item.help

Keys come from the reference (`dslpar.provenance.reference`), those of the section's type alone; required ones first.
Numbers of ranks are offered if the config is legal with them in its first world, by lint itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import isqrt
from typing import Literal, NamedTuple

from dslpar.forecast.device import DEVICES
from dslpar.language.load import YAML_ENDINGS, load_text
from dslpar.language.recovery import recovered
from dslpar.language.tree import Node
from dslpar.linter import check
from dslpar.lsp.analysis import Analysis
from dslpar.lsp.cursor import Place
from dslpar.provenance.reference import Row, rows
from dslpar.schema import datasets, families, sections
from dslpar.schema.keys import declared, shorthands, type_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.types import ValueType

Kind = Literal["section", "key", "value", "class", "file", "name"]


class Item(NamedTuple):
    """One thing that may be written at a cursor."""

    label: str
    insert: str
    """The text in place of the word at the cursor; `$0` stands for the cursor afterwards."""
    kind: Kind
    detail: str = ""
    help: str = ""
    rank: int = 1
    """Items of smaller rank come first."""


def completions(
    analysis: Analysis,
    place: Place,
    texts: Mapping[str, str],
    around: tuple[str, str],
    is_assigned: bool = False,
) -> list[Item]:
    """Return all items at a place, whatever the word before the cursor: an editor filters them.

    texts: the texts in the editor by real path. around: the file's text before and after the word at the cursor.
    is_assigned: a name or key that has its value already is replaced alone. There are no items for YAML, which other
    servers complete from `dslpar schema`.
    """
    if analysis.path.endswith(YAML_ENDINGS):
        return []
    if place.kind == "name":
        return [*_sections(analysis, is_assigned)]
    if place.kind == "import":
        return [*_imported(analysis, place, texts)]
    if place.kind == "key":
        return [*_keys(analysis, place, is_assigned)]
    return [*_values(analysis, place, texts, around)]


# ---- the first comment ----

_COMMENT = re.compile(r"#\s*(?P<settings>dslpar:(?:\s+[\w-]+=\S+)*\s+)?(?:(?P<name>[\w-]+)=)?(?P<word>[\w:,-]*)\Z")
_SETTINGS = {
    "world-size": "Number of ranks; several, separated by commas, are linted at once.",
    "device": "Device of all ranks, as in cluster.device.",
}


def settings_at(text: str, line: int, column: int) -> tuple[str, list[Item]] | None:
    """Return the word before the cursor and what may be written in the comment of settings; None elsewhere.

    Such a comment stands before the first statement (`dslpar.lsp.settings`).
    """
    lines = text.split("\n")[:line]
    if not lines or any(each.strip() and not each.startswith("#") for each in lines):
        return None
    match = _COMMENT.match(lines[-1][: column - 1])
    if match is None:
        return None
    word, name = match["word"], match["name"]
    if match["settings"] is None:
        return (
            (word, [Item("dslpar:", "dslpar: world-size=$0", "value", help=_SETTINGS["world-size"])])
            if not name
            else None
        )
    if name == "device":
        return word, [Item(each, each, "value") for each in DEVICES]
    if name is not None:
        return None
    return word, [Item(f"{each}=", f"{each}=$0", "key", help=help) for each, help in _SETTINGS.items()]


# ---- keys ----


def _sections(analysis: Analysis, is_assigned: bool) -> Iterator[Item]:
    for row in rows():
        if "." not in row.key and not analysis.config.has(row.key):
            rank = 0 if row.default == "required" else 1
            insert = row.key if is_assigned else f"{row.key} = dict($0)"
            yield Item(row.key, insert, "section", row.type, row.help, rank)


def _keys(analysis: Analysis, place: Place, is_assigned: bool) -> Iterator[Item]:
    kinds = _types(analysis, place.path[0] if place.path else "")
    above = ".".join(place.path)
    seen = set(place.given)
    for row in rows():
        section, _, name = row.key.rpartition(".")
        if section != above or name in seen or name == "*" or (row.of and not _is_of(row, kinds)):
            continue
        seen.add(name)
        rank = 0 if row.default == "required" or name == "type" else 1
        detail = row.type if name != "type" else ""
        if row.default not in ("", "required"):
            detail += f"; default: {row.default}"
        is_dict = row.type.startswith("a dict") and row.key not in shorthands()
        opening = "dict($0)" if is_dict else "$0"
        written = f"{name}{place.quote}"
        insert = written if is_assigned else f"{written}: {opening}" if place.quote else f"{written}={opening}"
        yield Item(name, insert, "key", detail, row.help, rank)


def _is_of(row: Row, kinds: frozenset[str]) -> bool:
    """Return whether a key belongs to one of the types of its section, or to any if the type is not known."""
    return not kinds or any(f"{kind!r}" in row.of for kind in kinds)


def _types(analysis: Analysis, section: str) -> frozenset[str]:
    """Return the names of a section's type, with the default; empty if there is none or it is unknown."""
    node = analysis.config.root.child(section)
    given = node.child("type") if isinstance(node, Node) else None
    if given is not None and isinstance(given.value, str):
        return frozenset([given.value])
    default = {"optimizer": "AdamW", "data": "text"}.get(section)
    return frozenset([default]) if default else frozenset()


# ---- values ----


@cache
def _value_types() -> Mapping[str, ValueType]:
    """Return the type of each declared key that is not a section."""
    found: dict[str, ValueType] = {}
    for item in declared():
        try:
            found.setdefault(item.key, type_of(item.field))
        except KeyError:
            continue  # a section, or any value
    return found


def _values(analysis: Analysis, place: Place, texts: Mapping[str, str], around: tuple[str, str]) -> Iterator[Item]:
    key = place.dotted
    if key in _TYPES_OF:
        for name, help in _TYPES_OF[key]():
            yield _string(place, name, "class", help)
        return
    known = _value_types().get(key)
    if known is not None:
        for choice in known.choices:
            yield _string(place, choice, "value", "")
        if bool in known.python_types and not place.quote:
            yield from (Item(text, text, "value", "") for text in ("True", "False"))
        if not place.quote:
            yield from (Item(f"{number}", f"{number}", "value", "") for number in _few_numbers(known))
    world = analysis.settings.worlds[0]
    if key in _SIZES and not place.quote and world is not None:
        yield from _legal_sizes(analysis, world, texts, around)
    if known is not None and (known.description == "a path" or key in _PATHS):
        yield from _paths(place)
    if known is None and _is_section(key) and not place.quote:
        yield Item("dict()", "dict($0)", "section")


_MOST_NUMBERS = 16


def _few_numbers(known: ValueType) -> list[int]:
    """Return the whole numbers of a type that has only a few, such as ZeRO's stages."""
    if int not in known.python_types or known.holds(_MOST_NUMBERS):
        return []
    return [number for number in range(_MOST_NUMBERS) if known.holds(number)]


_PATHS = ("model.pretrained", "train.output_dir", "checkpoint.resume_from")
"""Keys of other types that take a path."""


def _paths(place: Place) -> Iterator[Item]:
    """Yield the files and folders of the folder that the word before the cursor is in.

    Paths are relative to the working folder, which is where a run starts.
    """
    folder, slash, _ = place.word.rpartition("/")
    try:
        with os.scandir((folder or "/") if slash else ".") as entries:
            found = sorted((each.name, each.is_dir()) for each in entries if not each.name.startswith("."))
    except OSError:
        return  # no such folder, which lint reports
    for name, is_folder in found:
        yield _string(place, f"{folder}{slash}{name}" + ("/" if is_folder else ""), "file", "")


def _is_section(key: str) -> bool:
    return any(row.key.startswith(f"{key}.") for row in rows())


def _string(place: Place, name: str, kind: Kind, help: str) -> Item:
    """Return an item of a string; without quotation marks they are inserted too."""
    return Item(name, name if place.quote else f"'{name}'", kind, "", help)


def _models() -> Iterable[tuple[str, str]]:
    yield from ((name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in families.sections().items())
    yield "Sequential", "A list of layers: layers_cfg."
    from dslpar.schema.transformers_policies import DERIVED, POLICIES

    yield from (
        (f"transformers.{name}", "A class of transformers, which a policy shards.")
        for name in sorted({*POLICIES, *DERIVED})
    )


_TYPES_OF: Mapping[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "model.type": _models,
    "optimizer.type": lambda: [
        *((name, "") for name in sections.OPTIMIZERS),
        *((name, row.refused) for name, row in OPTIMIZERS.items() if not row.refused),
    ],
    "lr_scheduler.type": lambda: [
        *((name, "") for name in sections.LR_SCHEDULERS),
        *((name, "") for name, row in LR_SCHEDULERS.items() if not row.refused),
    ],
    "cluster.device": lambda: [(name, f"{device.memory_gib} GiB") for name, device in DEVICES.items()],
    "data.type": lambda: [(name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in datasets.DATASETS.items()],
}
_SIZES = (
    *("parallel.tensor", "parallel.tensor.size", "parallel.pipeline", "parallel.pipeline.size", "parallel.data"),
    *("parallel.data.size", "parallel.context", "parallel.context.size", "parallel.expert", "parallel.expert.size"),
)
"""Keys whose values divide the number of ranks."""
_MOST_SIZES = 16
_NO_MODE = ("TEN101", "parallel.tensor.size")
"""The author may write the size first; such sizes are tried in mode '1d'."""


def _legal_sizes(analysis: Analysis, world: int, texts: Mapping[str, str], around: tuple[str, str]) -> Iterator[Item]:
    """Yield the sizes with which the config has no error that it has not as it stands.

    They are written into the text: as it stands, a statement with `size=` does not parse, and is unknown as a whole.
    """

    def with_value(value: str) -> set[tuple[str, str]] | None:
        text = recovered(f"{around[0]}{value}{around[1]}", analysis.path).text
        return _errors(analysis, world, text, texts)

    as_it_stands = _errors(analysis, world, analysis.made.text, texts) or set()
    for size in _divisors(world)[:_MOST_SIZES]:
        found = with_value(f"{size}")
        if found is not None and _NO_MODE in found:
            found = with_value(f"{size}, mode='1d'")
        if found is not None and not found - as_it_stands:
            yield Item(f"{size}", f"{size}", "value", f"legal on {world} ranks", rank=0)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _errors(analysis: Analysis, world: int, text: str, texts: Mapping[str, str]) -> set[tuple[str, str]] | None:
    """Return the errors of a text of the config; None if it cannot be evaluated."""
    config = check.load(analysis.path, (), {**texts, os.path.realpath(analysis.path): text})
    if not config.complete or any(item.location.path.startswith("<") for item in config.findings):
        return None
    found = check.check(config, world, errors_only=True, forecasts=False).findings
    return {(item.code, item.key) for item in found if item.severity == "error"}


# ---- imports ----


def _imported(analysis: Analysis, place: Place, texts: Mapping[str, str]) -> Iterator[Item]:
    """Yield the names that another config defines."""
    level = len(place.module) - len(place.module.lstrip("."))
    if not level:
        return
    folder = os.path.dirname(analysis.path)
    for _ in range(level - 1):
        folder = os.path.dirname(folder)
    path = os.path.join(folder, *place.module.lstrip(".").split(".")) + ".py"
    real = os.path.realpath(path)
    try:
        text = texts.get(real)
        if text is None:
            with open(path, encoding="utf-8") as file:
                text = file.read()
    except OSError:
        return  # lint reports it
    for name, node in load_text(text, path).root.value.items():
        yield Item(name, name, "name", "a section" if node.is_mapping else repr(node.value))
