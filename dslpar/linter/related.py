"""Related places of a finding: where the other values that its message names were written.

    related = RelatedPlaces(cx)
    for place in related.of(finding):
        place.location, place.message       # "tensor.size = 4 is written here"

The rule of the finding runs once more, over sections that note which fields it reads. Of the keys that it has read,
those count whose name or value is in the message. So no rule lists its places, and lint itself pays nothing: only
reports that show the places ask for them. rustc's secondary spans and Pyright's related information are the model for
what is shown; both write them out in each check.

If the value came through a name or an import, the places of the keys that take it come first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from dslpar.core.errors import Finding, Location, Related
from dslpar.language.load import Config
from dslpar.language.source_edits import excerpt
from dslpar.language.tree import Node
from dslpar.linter.context import Context
from dslpar.linter.problem import UnknownValueError
from dslpar.linter.registry import RULES
from dslpar.linter.rules.language import RULES as LANGUAGE_RULES

MOST = 4
"""Places of one finding: more would hide it."""
_GENERAL = frozenset(("size", "type", "mode", "stage", "dtype", "name"))
"""Names of keys that say something only together with their section's."""
_KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
"""A key that a message spells out."""
_MOST_SHOWN = 40
"""Characters of a value."""


class RelatedPlaces:
    """The related places of a config's findings, found when asked for."""

    def __init__(self, cx: Context) -> None:
        """Take the context in which the findings were made, or one for the same config and world."""
        self.cx = cx
        self._read: dict[str, dict[tuple[str, Location], tuple[str, ...]]] = {}

    def of(self, item: Finding) -> tuple[Related, ...]:
        """Return at most `MOST` places: those of the finding's own value first, then in the order of the message."""
        places = _Places(item.location)
        for place in (*_own(self.cx.config, item), *_others(self.cx, item, self.keys_read(item))):
            places.add(place)
        return tuple(places.found[:MOST])

    def keys_read(self, item: Finding) -> tuple[str, ...]:
        """Return the canonical keys that the rule reads up to the finding; none if its rule makes it no more."""
        if item.code not in self._read:
            self._read[item.code] = _keys_read(self.cx, item.code)
        return self._read[item.code].get((item.message, item.location), ())


def key_place(config: Config, key: str) -> tuple[Location, str] | None:
    """Return where the config's own file writes a key, or the nearest section above it; with that key.

    None if the file writes neither: the section comes from the command line, or there is none.
    """
    node, found = config.root, None
    names: list[str] = []
    for name in key.split(".") if key else ():
        child = node.child(name)
        if child is None:
            break
        names.append(name)
        at = child.key_location
        if at is not None and at.path == config.path:
            found = at, ".".join(names)
        node = child
    return found


class _Places:
    """Places that do not overlap the finding's own, or each other."""

    def __init__(self, own: Location) -> None:
        self.own = own
        self.found: list[Related] = []

    def add(self, place: Related) -> None:
        taken = (self.own, *(each.location for each in self.found))
        if not place.location.path.startswith("<") and not any(overlap(place.location, at) for at in taken):
            self.found.append(place)


def overlap(one: Location, other: Location) -> bool:
    """Return whether two places share a character."""
    return one.path == other.path and one[1:3] < other[3:5] and other[1:3] < one[3:5]


# ---- the finding's own value ----


def _own(config: Config, item: Finding) -> Iterator[Related]:
    """Yield the key that takes the value, and the name in the config's file by which it comes in."""
    node = config.root.get(item.key) if item.key else None
    if node is None or node.location != item.location or node.key_location is None:
        return
    if (node.key_location.path, node.key_location.line) != (item.location.path, item.location.line):
        yield Related(node.key_location, f"{_short(item.key)} is set here")
    top = key_place(config, item.key)
    if top is not None and item.location.path != config.path:
        at, key = top
        yield Related(at, f"{key} is {'imported' if key in config.imported else 'set'} here")


# ---- the values that it is compared with ----


class _Value(NamedTuple):
    """A value that the rule has read, and that the author wrote."""

    key: str
    """As the author wrote it."""
    names: tuple[str, ...]
    """Names by which a message may call it."""
    node: Node


def _others(cx: Context, item: Finding, keys_read: tuple[str, ...]) -> Iterator[Related]:
    """Yield the places of the values that the rule has read and that the message names."""
    keys = (*keys_read, *_KEY.findall(item.message))
    values = [*{value.key: value for value in _values(cx, keys) if value.key != item.key}.values()]
    named = [(at, value) for value in values if (at := _position(item.message, value.names, _wrong(value))) is not None]
    others = [value for value in values if all(value is not each for _, each in named)]
    for value in others:
        at = _position(item.message, _shown_values(value.node.value), _RANKS, _not_of(value))
        # A number that two keys have is neither's.
        if at is not None and sum(other.node.value == value.node.value for other in others) == 1:
            named.append((at, value))
    for _, value in sorted(named, key=lambda pair: (pair[0], pair[1].key)):
        yield _place(cx.config, value)


def _keys_read(cx: Context, code: str) -> dict[tuple[str, Location], tuple[str, ...]]:
    """Return message and place of each finding of a rule -> the canonical keys that the rule reads up to it."""
    rule = next((rule for rule in RULES if rule.code == code), None)
    if rule is None or rule in LANGUAGE_RULES:
        return {}  # evaluating the file made the findings, which no key explains
    read: list[str] = []
    traced = Context(
        cx.config,
        cx.reading,
        cx.world.requested_size,
        cx.world.cluster,
        cx.model.by_program,
        forecasts=False,
        read=read,
    )
    found = {}
    with suppress(UnknownValueError):
        for problem in rule.check(traced):
            found[problem.message, problem.location] = tuple(dict.fromkeys(read))
    return found


def _values(cx: Context, keys: tuple[str, ...]) -> Iterator[_Value]:
    """Yield the values of keys, canonical or as written, and of those below a key that is a dict of any arguments."""
    written = cx.reading.written
    for key in keys:
        below = [] if key in written else [each for each in written if each.startswith(f"{key}.")]
        for name in below or [key]:
            source = written.get(name, name)
            node = cx.config.root.get(source)
            if node is not None and node.value is not None and not node.is_mapping:
                yield _Value(source, tuple(dict.fromkeys((source, *_names(name), *_names(source)))), node)


def _names(key: str) -> tuple[str, ...]:
    above, _, last = key.rpartition(".")
    return (f"{_last(above)}.{last}", _last(above)) if last in _GENERAL and above else (last,)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _short(key: str) -> str:
    """Return the end of a key that says which it is."""
    above, _, last = key.rpartition(".")
    return f"{_last(above)}.{last}" if last in _GENERAL and above else last


def _shown_values(value: object) -> tuple[str, ...]:
    """Return how a message would show a value; none for those that are everywhere, such as 1 and True."""
    if isinstance(value, bool) or value in (0, 1, "", None):
        return ()
    return (repr(value),) if isinstance(value, (int, float, str)) else ()


def _position(
    message: str, words: tuple[str, ...], before: str = "", not_after: frozenset[str] = frozenset()
) -> int | None:
    """Return where a message has the first of some words, but for places that are another value's.

    before: a pattern of what does not follow. not_after: names that do not stand in front.
    """
    found = (
        match.start()
        for word in words
        for match in re.finditer(rf"(?<![\w.]){re.escape(word)}(?!\.?\w){before}", message, re.IGNORECASE)
        if not not_after or _word_before(message[: match.start()]) not in not_after
    )
    return min(found, default=None)


def _word_before(text: str) -> str:
    match = re.search(r"(\w+)(?:\s*=|\s+of)?\s*\Z", text)
    return match[1].lower() if match is not None else ""


def _wrong(value: _Value) -> str:
    """Return a pattern behind a name that is not this value's: of `tensor 4`, which is no mode."""
    return r"(?!\s*=?\s*\d)" if isinstance(value.node.value, str) else ""


_RANKS = r"(?!\s+ranks?\b)"


def _not_of(value: _Value) -> frozenset[str]:
    """Return the words behind which a number is not this value's: the 8 of `data 8` is no num_heads."""
    return (_names_of_keys() | {"world"}) - {part for name in value.names for part in name.split(".")}


@cache
def _names_of_keys() -> frozenset[str]:
    from dslpar.schema.keys import declared  # most findings name their keys

    return frozenset(part for each in declared() for part in each.key.split("."))


def _place(config: Config, value: _Value) -> Related:
    shown = repr(value.node.plain())
    what = f"{_short(value.key)} = {shown}" if len(shown) <= _MOST_SHOWN else _short(value.key)
    at = value.node.location
    done = "written" if _is_literal(excerpt(config.sources.get(at.path, ""), at), value.node) else "computed"
    return Related(at, f"{what} is {done} here")


def _is_literal(text: str, node: Node) -> bool:
    """Return whether a source text is the value itself: a literal of Python, or a plain word of YAML."""
    try:
        return bool(ast.literal_eval(text) == node.plain())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text == str(node.plain())
