"""YAML configs: written as safe YAML, and read with locations from the parser's events.

No tag is ever constructed. Scalars follow YAML 1.2's core schema; PyYAML follows YAML 1.1. So `1e-4` is a float (a
string in PyYAML), `010` is 10 (8 in PyYAML), and `yes`, `1:30` and dates are strings (True, 90 and a date in PyYAML). A
string is written in quotes if either version would read it as another type.

Other frameworks' files (`Session.is_pyyaml`) have two things of YAML 1.1 that their programs read: `yes`, `no`, `on`
and `off` as values, and the merge key `<<`, whose mappings set what the mapping itself does not.

Three kinds of values change when a written file is read back. Tuples become lists. LazyCall mappings become mappings
with the key `_target_`. References become strings with their full names, which are valid wherever a class is expected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import yaml

from dslpar.core.errors import Location
from dslpar.core.visible import visible, visible_lines
from dslpar.language.errors import ConfigError, finding
from dslpar.language.limits import MAX_DEPTH, check_items, check_size, limit_error
from dslpar.language.load_session import Session
from dslpar.language.source import Source, check_tokens
from dslpar.language.tree import TARGET, Node, Reference
from dslpar.language.values import Binding, Dict, List, Located, Value

NULLS = ("", "~", "null", "Null", "NULL")
TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
OLD_TRUTHS = {
    word: value
    for name, value in (("yes", True), ("on", True), ("no", False), ("off", False))
    for word in (name, name.capitalize(), name.upper())
}
"""Booleans of YAML 1.1 alone."""
MERGE = "<<"
MAX_DIGITS = 400
INT = re.compile(r"[-+]?[0-9]+")
PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
PLAIN_TAGS = ("!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def dump(root: Node, resolved: Mapping[str, object], sections: Collection[str] = ()) -> str:
    """Write the author's merged values as YAML, then dslpar's resolved values; `sections` limits the names written."""
    values = {name: portable(node) for name, node in root.value.items() if not sections or name in sections}
    return dump_plain(values | ({"resolved": portable(resolved)} if resolved else {}))


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors that quotes a string if `scalar` would not read it as one.

    A string with invisible characters is double-quoted, since double quotes allow escapes, and preserve characters
    that end a line only in YAML 1.1.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True

    def string(self, value: str) -> yaml.ScalarNode:
        style = "'" if not isinstance(scalar(value), str) else None
        if visible(value) != value:
            style = '"'
        node: yaml.ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", value, style=style)
        return node


_Dumper.add_representer(str, _Dumper.string)


def dump_plain(values: Mapping[str, Value]) -> str:
    """Write plain values as YAML that reads back equal, except that tuples become lists."""
    made: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return visible_lines(made)


def portable(value: Value) -> Value:
    """Convert a value for YAML: references to names, tuples to lists."""
    if isinstance(value, Node):
        value = value.plain()
    if isinstance(value, Mapping):
        return {key if key == TARGET else portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    return value.name if isinstance(value, Reference) else value


def scalar(text: str) -> Value:
    """Read a plain scalar."""
    if text in NULLS:
        return None
    if text in TRUTHS:
        return TRUTHS[text]
    if len(text) > MAX_DIGITS:
        return text
    if INT.fullmatch(text):
        return int(text)
    if PREFIXED.fullmatch(text):
        return int(text, 0)
    if FLOAT.fullmatch(text):
        return float(text)
    if SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1).lower())
    return text


def read_names(source: Source, session: Session) -> dict[str, Binding] | None:
    """Read the top-level names of a YAML or JSON file. Returns None, with a finding, if it is not a YAML mapping."""
    session.sources[source.path] = source.text
    start = Location(source.path)
    try:
        check_tokens(source)
        value, _ = _Reader(source, session).document()
        if not isinstance(value, Dict):
            raise ConfigError(
                "CFG001", "this YAML is not a mapping", "correct it: `section:`, and its keys below, indented"
            )
    except yaml.MarkedYAMLError as error:
        location = _location_of_mark(error.problem_mark or error.context_mark, source)
        session.report(ConfigError("CFG001", f"cannot parse this as YAML: {error.problem or error.context}"), location)
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        session.report(
            ConfigError(
                "CFG001", f"cannot parse this as YAML: {message}", "correct the encoding: save the file as UTF-8 text"
            ),
            start,
        )
    except UnicodeEncodeError as error:  # lone surrogates, which libyaml cannot take
        session.report(
            ConfigError(
                "CFG001", f"cannot parse this as text: {error}", "correct the encoding: save the file as UTF-8 text"
            ),
            start,
        )
    except ConfigError as error:
        session.report(error, start)
    else:
        return _slots(value, session, start)
    return None


def _location_of_mark(mark: Value, source: Source) -> Location:
    """Return the location where the parser stopped."""
    if mark is None:
        return Location(source.path)
    line, column = source.position(mark.index)
    return Location(source.path, line, column, line, column + 1)


def _slots(value: Dict, session: Session, start: Location) -> dict[str, Binding]:
    names = {}
    for key, item in value.items():
        location, key_location = value.origins[key]
        if isinstance(key, str):
            names[key] = Binding(item, location or start, key_location or start)
        else:
            session.report(
                ConfigError("CFG013", f"the name {key!r} is not a string", "choose a string: put it in quotes"),
                key_location or start,
            )
    return names


class _Reader:
    """Builds values from the parser's events as they arrive, so that bounds apply before the whole file is read."""

    def __init__(self, source: Source, session: Session) -> None:
        self.source, self.session = source, session
        # libyaml's parser is several times faster, but not every PyYAML is built with it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.events = yaml.parse(source.text, Loader=loader)
        self.anchors: dict[str, Located] = {}

    def document(self) -> Located:
        """Read the one document of the stream."""
        result: Located = (Dict(), Location(self.source.path))
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise ConfigError(
                        "CFG002", "more than one YAML document", "choose one document", self.location(event)
                    )
            elif isinstance(
                event, (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent, yaml.AliasEvent)
            ):
                result = self.value(event, 0)
        return result

    def location(self, event: Value) -> Location:
        # By index: U+0085, U+2028 and U+2029 end a line for the parser, but not for an editor or for `lines`.
        start, end = (self.source.position(mark.index) for mark in (event.start_mark, event.end_mark))
        return Location(self.source.path, *start, *end)

    def value(self, event: yaml.Event, depth: int, is_key: bool = False) -> Located:
        """Read the value that begins with an event, consuming all events up to its end."""
        self.session.budget.spend(1)
        location = self.location(event)
        if depth > MAX_DEPTH:
            raise limit_error("YAML is nested too deeply")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise ConfigError("CFG001", f"undefined anchor {event.anchor!r}", location=location)
            return self.anchors[event.anchor]
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)), event
        if event.tag and event.tag not in PLAIN_TAGS:
            message = f"the YAML tag {event.tag!r} is not part of the config language"
            raise ConfigError("CFG002", message, "leave it out", location)
        made: Value
        if isinstance(event, yaml.ScalarEvent):
            is_text = event.style in ("'", '"', "|", ">") or (event.tag or "").endswith(":str")
            made = check_size(event.value if is_text else scalar(event.value))
            if self.session.is_pyyaml and not is_text and not is_key:
                made = OLD_TRUTHS.get(event.value, made)
        else:
            made = Dict() if isinstance(event, yaml.MappingStartEvent) else List()
        # Stored before it is filled, since an alias within it may name it. The export refuses such a container.
        if event.anchor:
            self.anchors[event.anchor] = (made, location)
        if isinstance(made, Dict):
            self.fill_mapping(made, depth)
        elif isinstance(made, List):
            self.fill_list(made, depth)
        return made, location

    def fill_list(self, made: List, depth: int) -> None:
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            value, location = self.value(event, depth + 1)
            made.append(value)
            made.origins.append(location)
            check_items(len(made))

    def fill_mapping(self, made: Dict, depth: int) -> None:
        merged: list[Dict] = []
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                self.merge(made, merged)
                return
            key, key_location = self.value(event, depth + 1, is_key=True)
            value, location = self.value(next(self.events), depth + 1)
            others = value if isinstance(value, List) else [value]
            if key == MERGE and self.session.is_pyyaml and all(isinstance(other, Dict) for other in others):
                merged += [other for other in others if isinstance(other, Dict)]
            else:
                self.put(made, key, value, location, key_location)

    def merge(self, made: Dict, merged: list[Dict]) -> None:
        """Add what the mappings of `<<` set and the mapping itself does not; the first of several counts."""
        for other in merged:
            for key, value in other.items():
                self.session.budget.spend(1)
                if key not in made:
                    made.put(key, value, *other.origins[key])

    def put(self, made: Dict, key: Value, value: Value, location: Location, key_location: Location) -> None:
        """Set an item. A key that the language does not support is a finding instead."""
        if isinstance(key, (Dict, List)):
            self.session.report(ConfigError("CFG013", "a key that is neither a string nor a number"), key_location)
            return
        if key == MERGE:
            message = "the merge key `<<` is not part of the config language"
            self.session.report(ConfigError("CFG002", message, "choose the keys, and write them out"), key_location)
            return
        if key in made:
            # An error here, a warning in Python: YAML 1.2 forbids it, and another reader may take the first value.
            message = f"the key {key!r} appears twice in this mapping"
            self.session.add(finding("CFG012", key_location, message, severity="error"))
        made.put(key, value, location, key_location)
