"""Write the converted file: sections in a fixed order, one line per section if it fits, comments if needed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dslpar.core.visible import visible, visible_lines
from dslpar.language.source_text import has_plain_names, source_text
from dslpar.language.tree import Reference
from dslpar.migrate.convert import IMPLIED, Entry, Import
from dslpar.migrate.registry import TABLES
from dslpar.schema.sections_reader import SECTIONS

WIDTH = 120
ORDER = (
    "parallel", "model", "data", "optimizer", "lr_scheduler", "zero", "precision", "batch", "train",
    "activation_checkpoint", "checkpoint", "monitor", "gradient_handler", "schedule", "cluster",
    "deepspeed",
)  # fmt: skip
FIRST = ("type", "size", "stage", "dtype", "device", "enabled")
"""Keys that come first in their section."""
SHORT = (bool, int, float, str, Reference)
Notes = Mapping[str, list[str]]
"""Comments, by the dslpar key that they belong to."""
assert set(ORDER) == set(SECTIONS), "a section without a place in the file"
MARK = "needs you"
_MODEL_PLACE = (
    "# model = dict(type='GPT', num_layers=..., hidden_size=..., num_heads=..., vocab_size=..., max_seq_len=...)\n"
)


def file_of(made: Import) -> str:
    """Return the text of the dslpar file."""
    tree = nested(made.values)
    notes = _notes(made.entries)
    name = made.source.path.replace("\\", "/").rpartition("/")[2]
    head = [f"# From {visible(name)} ({TABLES[made.source.name].title}), by dslpar import."]
    if made.needs_you:
        head.append(f'# What is left to be written is marked "{MARK}".')
    text = "\n".join(head) + "\n\n" + "".join(_section(section, tree, notes) for section in ORDER)
    return visible_lines(text)  # invisible characters become escapes, which mean the same in a string


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """Nest dotted keys into dicts."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        level, parts = tree, key.split(".")
        for part in parts[:-1]:
            level = level.setdefault(part, {})
        level[parts[-1]] = value
    return {key: _ordered(value) for key, value in tree.items()}


def _ordered(value: object) -> object:
    """Put the keys of FIRST first, in a dict and in the dicts within it."""
    if not isinstance(value, dict):
        return value
    items = sorted(value.items(), key=lambda item: item[0] not in FIRST)
    return {key: _ordered(item) for key, item in items}


def _notes(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Collect the comments by the dslpar key that they belong to."""
    notes: dict[str, list[str]] = {}
    shared: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.fate == "needed" and isinstance(entry.value, str):
            shared.setdefault((entry.to.rpartition(".")[0], entry.value, entry.why), []).append(entry)
    for first, *others in (group for group in shared.values() if len(group) > 1 and group[0].to):
        also = ", ".join(entry.to.rpartition(".")[2] for entry in others)
        notes[first.to] = [f"{MARK}: {first.why}; likewise {also}"]
        entries = [entry for entry in entries if entry not in (first, *others)]
    for entry in entries:
        source = f"{entry.key}: " if entry.key else ""
        if entry.fate == "added" and entry.why == f"{IMPLIED}{entry.to.partition('.')[0]}.type":
            continue  # the fields of a model follow its type, which has a comment
        if entry.fate in ("changed", "added") and entry.to:
            notes.setdefault(entry.to, []).append(source + entry.why)
        elif entry.fate == "needed" and entry.to:
            value = f"{entry.key} = {source_text(entry.value)}: " if isinstance(entry.value, SHORT) else source
            notes.setdefault(entry.to, []).append(f"{MARK}: {value}{entry.why}")
    return notes


def _section(name: str, tree: Mapping[str, object], notes: Notes) -> str:
    below = {key: text for key, text in notes.items() if key == name or key.startswith(f"{name}.")}
    if name in tree:
        return _assigned(name, tree[name], below)
    missing = below.pop("model", [])
    left = "".join(_comments("", _with_name(key, texts)) for key, texts in below.items())
    return _comments("", missing) + (_MODEL_PLACE if missing else "") + left


def _with_name(key: str, texts: Sequence[str]) -> list[str]:
    return [text.replace(MARK, f"{MARK}: {key}", 1) for text in texts]


def _assigned(name: str, value: object, notes: Notes) -> str:
    shown = f"{name} = {source_text(value)}"
    if not notes and len(shown) <= WIDTH:
        return shown + "\n"
    if not _spreads(value):
        return _comments("", [text for texts in notes.values() for text in texts]) + shown + "\n"
    return _comments("", notes.get(name, ())) + f"{name} = {_display(value, name, notes, '')}\n"


def _display(value: Mapping[str, object], path: str, notes: Notes, indent: str) -> str:
    """Write a dict over several lines with its keys' comments; comments of keys without a value come last."""
    inner = indent + "    "
    lines = [_line(f"{path}.{key}", item, notes, inner) for key, item in value.items()]
    for key, texts in notes.items():
        if _has_no_line(key, path, value):
            lines.append(_comments(inner, _with_name(key.removeprefix(f"{path}."), texts)))
    return f"dict(\n{''.join(lines)}{indent})"


def _line(path: str, item: object, notes: Notes, indent: str) -> str:
    """Write one key and its value, with its comment on the same line if it fits."""
    name, texts = path.rpartition(".")[2], notes.get(path, [])
    inside = any(note.startswith(f"{path}.") for note in notes)
    if _spreads(item) and (inside or len(source_text(item)) > WIDTH - 40):
        return _comments(indent, texts) + f"{indent}{name}={_display(item, path, notes, indent)},\n"
    line = f"{indent}{name}={source_text(item)},"
    if len(texts) == 1 and len(line) + 4 + len(texts[0]) <= WIDTH:
        return f"{line}  # {visible(texts[0])}\n"
    return _comments(indent, texts) + line + "\n"


def _spreads(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value can be written as dict(...) over several lines."""
    return isinstance(value, dict) and bool(value) and has_plain_names(value)


def _has_no_line(key: str, path: str, value: Mapping[str, object]) -> bool:
    """Return whether a comment belongs to a key of this dict that has no line of its own."""
    if not key.startswith(f"{path}."):
        return False
    first, _, rest = key.removeprefix(f"{path}.").partition(".")
    return first not in value or (bool(rest) and not _spreads(value[first]))


def _comments(indent: str, texts: Sequence[str]) -> str:
    width = WIDTH - len(indent) - 2
    wrapped = (textwrap.wrap(visible(text), width, break_long_words=False, break_on_hyphens=False) for text in texts)
    return "".join(f"{indent}# {line}\n" for lines in wrapped for line in lines)
