"""Command-line overrides: `a.b=value`, `a.0=value`, `a[0]=value`, `~a.b`.

The syntax is a subset of Hydra's: no `+` (any key may be set), no sweeps and no quoting rules. The value is a Python
literal or a `dict(size=2)`; any other text is taken as a string. Overrides act as if written at the end of the file.
They change values in place, so values that the file shares stay shared. Their locations are columns of the
command line, whose overrides are joined by spaces.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.errors import ConfigError, finding
from dslpar.language.limits import MAX_DEPTH, MAX_NESTING, MAX_TEXT, check_size
from dslpar.language.load_session import Session
from dslpar.language.source import parse_quietly
from dslpar.language.values import (
    NO_ORIGINS,
    Binding,
    Dict,
    List,
    Located,
    Origin,
    Unknown,
    Value,
    make_tuple,
    origins_of,
)


class Override(NamedTuple):
    """One parsed override."""

    keys: tuple[str | int, ...]
    """Names, and integers for `[0]`."""
    key_location: Location
    value: Value
    location: Location
    delete: bool = False
    shorthands: Mapping[str, str] = {}
    """By dotted key, the sub-key that a scalar sets: `tensor=4` may mean `tensor.size=4`."""

    def path(self, levels: int | None = None) -> str:
        """Return the dotted key, or its first levels."""
        return ".".join(map(str, self.keys[:levels]))


def apply_overrides(
    texts: Sequence[str], shorthands: Mapping[str, str], names: dict[str, Binding], session: Session
) -> None:
    """Apply overrides to the names of a config. A malformed override, or one of an impossible path, is a finding."""
    texts = [text.replace("\n", " ").replace("\r", " ") for text in texts]
    session.sources[COMMAND_LINE] = " ".join(texts)
    column = 1
    for text in texts:
        try:
            _apply(parse_override(text, column)._replace(shorthands=shorthands), names)
        except ConfigError as error:
            location = error.location or line_part(column, len(text))
            session.add(finding(error.code, location, error.message, error.hint))
        column += len(text) + 1


def line_part(column: int, length: int) -> Location:
    return Location(COMMAND_LINE, 1, column, 1, column + length)


def parse_override(text: str, column: int = 1) -> Override:
    """Parse one override. Raises ConfigError if it is malformed."""
    delete = text.startswith("~")
    key, equals, value = text[delete:].partition("=")
    key_location = line_part(column + delete, len(key))
    if len(text) > MAX_TEXT:
        raise ConfigError(
            "CFG011", "an override of more than 100,000 characters", "choose the file for it: write the value there"
        )
    if delete == bool(equals):
        raise ConfigError("CFG011", f"{shown(text)} is neither `key=value` nor `~key`")
    keys = parse_key(key)
    if not keys or not isinstance(keys[0], str) or not keys[0].isidentifier():
        raise ConfigError("CFG011", f"{shown(key)} is not a key", "correct it: `section.key=value`", key_location)
    if len(keys) > MAX_DEPTH:
        raise ConfigError(
            "CFG011", f"a key of more than {MAX_DEPTH} levels", "correct it: `section.key=value`", key_location
        )
    start = column + delete + len(key) + 1
    location = line_part(start, len(value)) if value else line_part(column, len(text))
    return Override(keys, key_location, parse_value(value, start)[0], location, delete)


def shown(text: str) -> str:
    return repr(text if len(text) < 80 else text[:77] + "...")


def parse_key(key: str) -> tuple[str | int, ...]:
    """Parse `a.b[0].1` to its keys; returns () if it is malformed."""
    keys: list[str | int] = []
    for part in key.split("."):
        name, *indices = part.split("[")
        if not name or any(character.isspace() for character in part):
            return ()
        keys.append(name)
        for index in indices:
            number = index.removesuffix("]")
            if number == index or not number.removeprefix("-").isdecimal() or len(number) > 9:
                return ()
            keys.append(int(number))
    return tuple(keys)


def parse_value(text: str, column: int) -> Located:
    """Parse a literal or a `dict(...)` of literals, with the locations of its parts; any other text is a string."""
    location = line_part(column, len(text))
    stripped = text.strip()
    try:
        tree = parse_quietly(stripped, COMMAND_LINE, "eval").body if stripped else None
        if tree is not None and "\n" not in stripped:
            offset = column + len(text) - len(text.lstrip())
            return literal(tree, _characters(stripped), offset, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        pass
    return text, location


def literal(node: Value, at: Sequence[int], column: int, depth: int) -> Located:
    """Evaluate a literal; `at` is `_characters` of its text. Raises ValueError if the node is not a literal."""
    start, end = at[node.col_offset], at[node.end_col_offset]
    location = line_part(column + start, end - start)
    if depth > MAX_NESTING:
        raise ValueError("nested too deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, (type(None), bool, int, float, str)):
        return check_size(node.value), location
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value, _ = literal(node.operand, at, column, depth + 1)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return (-value if isinstance(node.op, ast.USub) else value), location
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [literal(item, at, column, depth + 1) for item in node.elts]
        values, locations = [value for value, _ in items], [item for _, item in items]
        return (List(values, locations) if isinstance(node, ast.List) else make_tuple(values, locations)), location  # type: ignore[arg-type]
    if isinstance(node, ast.Dict):
        return literal_dict(node, at, column, depth), location
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        made = Dict()
        for keyword in node.keywords:  # `dict(size=2)`, as in a file
            if keyword.arg is None:
                raise ValueError("`**` in a literal")
            start = column + at[keyword.col_offset]
            made.put(keyword.arg, *literal(keyword.value, at, column, depth + 1), line_part(start, len(keyword.arg)))
        return made, location
    raise ValueError("not a literal")


def literal_dict(node: ast.Dict, at: Sequence[int], column: int, depth: int) -> Dict:
    made = Dict()
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        if key_node is None:
            raise ValueError("`**` in a literal")
        key, key_location = literal(key_node, at, column, depth + 1)
        value, location = literal(value_node, at, column, depth + 1)
        made.put(key, value, location, key_location)
    return made


def _characters(text: str) -> Sequence[int]:
    """Map each byte offset in the UTF-8 text, which `ast` counts in, to a character index; the end is included."""
    if text.isascii():
        return range(len(text) + 1)
    return [*(number for number, character in enumerate(text) for _ in character.encode()), len(text)]


def _apply(override: Override, names: dict[str, Binding]) -> None:
    root = Dict()
    for name, binding in names.items():
        root.put(name, binding.value, binding.location, binding.name_location)
    _change_dict(root, override, 0)
    first = str(override.keys[0])
    if first not in root:
        names.pop(first, None)
        return
    location, key_location = root.origins[first]
    assert location is not None
    assert key_location is not None
    # A value that is only changed below its top level still counts as imported.
    old = names.get(first)
    imported_as = old.imported_as if old is not None and old.value is root[first] else ""
    names[first] = Binding(root[first], location, key_location, imported_as)


def _changed(owner: Value, override: Override, depth: int) -> Value:
    """Apply the override to the owner: a dict or list is changed in place and returned, a tuple is replaced."""
    if isinstance(owner, Dict):
        _change_dict(owner, override, depth)
    elif isinstance(owner, (list, tuple)):
        return _changed_sequence(owner, override, depth)
    elif not isinstance(owner, Unknown):
        path, text = override.path(depth), repr(owner)
        shown = text if len(text) < 40 else text[:37] + "..."
        message, hint = f"{path} is {shown}, not a mapping", f"{path}=VALUE sets it"
        raise ConfigError("CFG011", message, hint, override.key_location)
    return owner


def _change_dict(owner: Dict, override: Override, depth: int) -> None:
    key = override.keys[depth]
    if isinstance(key, str) and key not in owner and key.isdecimal() and int(key) in owner:
        key = int(key)
    if depth == len(override.keys) - 1:
        if not override.delete:
            owner.put(key, override.value, override.location, override.key_location)
        elif key in owner:
            owner.drop(key)
        elif not owner.tainted:
            close = did_you_mean(key, owner, "; ")
            raise ConfigError("CFG011", f"there is no {override.path()} to delete{close}", "leave it out")
        return
    old = owner.get(key)
    origin, key_origin = owner.origins.get(key, NO_ORIGINS)
    changed = _changed(_as_mapping(old, origin, key_origin, override, depth), override, depth + 1)
    if old is None:
        owner.put(key, changed, override.location, override.key_location)
    elif changed is not old:
        owner.put(key, changed, origin or override.location, key_origin or override.key_location)


def _as_mapping(value: Value, origin: Origin, key_origin: Origin, override: Override, depth: int) -> Value:
    """Make a mapping of a value, so that a key below it can be set: of None, or of a scalar that has a shorthand."""
    if value is None and not override.delete:
        return Dict()
    path = override.path(depth + 1)
    if isinstance(value, (bool, int, float, str)) and path in override.shorthands:
        made = Dict()
        made.put(override.shorthands[path], value, origin, key_origin)
        return made
    return value


def _changed_sequence(owner: Value, override: Override, depth: int) -> Value:
    key = override.keys[depth]
    index = int(key) if isinstance(key, int) or (key.removeprefix("-").isdecimal() and len(key) < 9) else None
    if index is None or not -len(owner) <= index < len(owner):
        message = f"{override.path(depth + 1)} is not in a list of {len(owner)} items"
        hint = f"choose an index from 0 to {len(owner) - 1}" if owner else "choose the whole list, and set that"
        raise ConfigError("CFG011", message, hint, override.key_location)
    made = owner if isinstance(owner, List) else List(owner, origins_of(owner))
    if depth < len(override.keys) - 1:
        inner = _as_mapping(made[index], made.origins[index], None, override, depth)
        made[index] = _changed(inner, override, depth + 1)
    elif override.delete:
        del made[index], made.origins[index]
    else:
        made[index], made.origins[index] = override.value, override.location
    return make_tuple(made, made.origins) if isinstance(owner, tuple) else made
