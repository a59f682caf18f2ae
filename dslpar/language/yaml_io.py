"""`config.yaml`: written as safe YAML, read back with locations, through the parser's events only.

No tag is ever constructed. Scalars follow YAML 1.2's core schema with one addition, so that `1e-4` is a float (PyYAML's
YAML 1.1 reads a string) and `yes`, `010`, `1:30` and dates are strings (there: True, 8, 90, a date); what is
written is quoted where either reading would take a string for something else. Tuples come back as lists, references
as strings by their full names (which mean the same where a class is expected), LazyCall mappings with `_target_`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import yaml

from dslpar.core.errors import Location
from dslpar.core.visible import visible, visible_lines
from dslpar.language.errors import ConfigError, finding
from dslpar.language.limits import MAX_DEPTH, check_items, check_size, limit_error
from dslpar.language.session import Session
from dslpar.language.source import Source, check_tokens
from dslpar.language.tree import TARGET, Node, Reference
from dslpar.language.values import Binding, Dict, List, Located, Value

NULLS = ("", "~", "null", "Null", "NULL")
TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
MAX_DIGITS = 400
INT = re.compile(r"[-+]?[0-9]+")
PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
PLAIN_TAGS = ("!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def dump(root: Node, resolved: Mapping[str, object], sections: Collection[str] = ()) -> str:
    """Write the author's merged values as YAML, and what dslpar resolved beneath; `sections` are the names to write."""
    values = {name: portable(node) for name, node in root.value.items() if not sections or name in sections}
    return dump_plain(values | ({"resolved": portable(resolved)} if resolved else {}))


class _Dumper(yaml.SafeDumper):
    """Without anchors; strings quoted where our reading differs from PyYAML's, and where they are not all visible: a
    double-quoted one may hold escapes, and keeps what is a line end to YAML 1.1 alone.
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
    """Write plain values as YAML that reads back equal, tuples as lists."""
    made: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return visible_lines(made)


def portable(value: Value) -> Value:
    """Turn a value into one that YAML has: references into names, tuples into lists."""
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
    """Read the top-level names of a YAML or JSON file; return None, with a finding, if it is not YAML."""
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
    except ConfigError as error:
        session.report(error, start)
    else:
        return _slots(value, session, start)
    return None


def _location_of_mark(mark: Value, source: Source) -> Location:
    """Return where the parser stopped."""
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
    """Builds values from the parser's events as they come, so that depth and size are bounded before all is read."""

    def __init__(self, source: Source, session: Session) -> None:
        self.source, self.session = source, session
        # libyaml's parser is several times faster; not every PyYAML is built with it.
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
        # By the index: to the parser U+0085, U+2028 and U+2029 end a line too, and to an editor (and to `lines`) not.
        start, end = (self.source.position(mark.index) for mark in (event.start_mark, event.end_mark))
        return Location(self.source.path, *start, *end)

    def value(self, event: yaml.Event, depth: int) -> Located:
        """Read the value that begins with an event, and all events up to its end."""
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
        else:
            made = Dict() if isinstance(event, yaml.MappingStartEvent) else List()
        # Before it is filled, as an alias within it may name it: the export refuses what contains itself.
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
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                return
            key, key_location = self.value(event, depth + 1)
            value, location = self.value(next(self.events), depth + 1)
            self.put(made, key, value, location, key_location)

    def put(self, made: Dict, key: Value, value: Value, location: Location, key_location: Location) -> None:
        """Set an item, unless its key is one that the language has not, which is a finding."""
        if isinstance(key, (Dict, List)):
            self.session.report(ConfigError("CFG013", "a key that is neither a string nor a number"), key_location)
            return
        if key == "<<":
            message = "the merge key `<<` is not part of the config language"
            self.session.report(ConfigError("CFG002", message, "choose the keys, and write them out"), key_location)
            return
        if key in made:
            # An error here, a warning in Python: YAML 1.2 forbids it, and who reads the file next may take the first.
            message = f"the key {key!r} stands twice in this mapping"
            self.session.add(finding("CFG012", key_location, message, severity="error"))
        made.put(key, value, location, key_location)
