"""`config.yaml`: written as safe YAML, read back with places, through the parser's events only.

No tag is ever constructed. Scalars follow YAML 1.2's core schema with one addition, so that `1e-4` is a float (PyYAML's
YAML 1.1 reads a string) and `yes`, `010`, `1:30` and dates are strings (there: True, 8, 90, a date); what is
written is quoted where either reading would take a string for something else. Tuples come back as lists, references
as strings by their full names (which mean the same where a class is expected), LazyCall mappings with `_target_`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from dslpar.core.errors import Location
from dslpar.language.codes import MistakeError, finding
from dslpar.language.limits import MAX_DEPTH, check_items, check_size, too_much
from dslpar.language.load import Config
from dslpar.language.session import Session
from dslpar.language.source import Source, check_tokens
from dslpar.language.tree import TARGET, Node, Reference
from dslpar.language.values import Dict, List, Placed, Slot

NULLS = ("", "~", "null", "Null", "NULL")
TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
MAX_DIGITS = 400
LINE_ENDS = "\x85\u2028\u2029"
"""Line ends to YAML 1.1 alone: only a double-quoted string keeps them."""
INT = re.compile(r"[-+]?[0-9]+")
PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def dump(config: Config, resolved: Mapping[str, object], sections: Collection[str] = ()) -> str:
    """The author's merged values as YAML, and what dslpar resolved beneath; `sections` are the names to write."""
    names = [name for name in config.root.value if not sections or name in sections]
    values = {name: portable(config.root.value[name]) for name in names}
    return dump_plain(values | ({"resolved": portable(resolved)} if resolved else {}))


def dump_plain(values: Mapping[str, Any]) -> str:
    """Plain values as YAML that reads back equal, tuples as lists."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Without anchors; strings quoted where our reading differs from PyYAML's."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "'" if not isinstance(scalar(value), str) else None
        if any(character in value for character in LINE_ENDS):
            style = '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    made: str = yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return made


def portable(value: Any) -> Any:
    """A value of YAML's: references as names, tuples as lists."""
    if isinstance(value, Node):
        value = value.plain()
    if isinstance(value, Mapping):
        return {key if key == TARGET else portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    return value.name if isinstance(value, Reference) else value


def scalar(text: str) -> Any:
    """The value of a plain scalar."""
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


def read_names(source: Source, session: Session) -> dict[str, Slot] | None:
    """The top-level names of a YAML or JSON file; None if it is not YAML, with a finding."""
    import yaml

    session.sources[source.path] = source.text
    start = Location(source.path)
    try:
        check_tokens(source)
        value, _ = _Reader(source, session).document()
        if not isinstance(value, Dict):
            raise MistakeError("CFG001", "this YAML is not a mapping", "write `section:` and its keys below, indented")
    except yaml.MarkedYAMLError as error:
        place = _place_of_mark(error.problem_mark or error.context_mark, source)
        session.report(MistakeError("CFG001", f"this is not YAML: {error.problem or error.context}"), place)
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        session.report(MistakeError("CFG001", f"this is not YAML: {message}", "save the file as UTF-8 text"), start)
    except MistakeError as failed:
        session.report(failed, start)
    else:
        return _slots(value, session, start)
    return None


def _place_of_mark(mark: Any, source: Source) -> Location:
    """Where the parser stopped; the end of the text is on its last line."""
    if mark is None:
        return Location(source.path)
    line = min(mark.line + 1, len(source.lines))
    column = mark.column + 1 if line == mark.line + 1 else max(len(source.lines[-1]), 1)
    return Location(source.path, line, column, line, column + 1)


def _slots(value: Dict, session: Session, start: Location) -> dict[str, Slot]:
    names = {}
    for key, item in value.items():
        place, key_place = value.origins[key]
        if isinstance(key, str):
            names[key] = Slot(item, place or start, key_place or start)
        else:
            session.report(MistakeError("CFG013", f"the name {key!r} is not a string", "quote it"), key_place or start)
    return names


class _Reader:
    """Builds values from the parser's events, which come one by one: depth and size are bounded as they come."""

    def __init__(self, source: Source, session: Session) -> None:
        import yaml

        self.source, self.session = source, session
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.events = yaml.parse(source.text, Loader=loader)
        self.anchors: dict[str, Placed] = {}

    def document(self) -> Placed:
        """The one document of the stream."""
        import yaml

        result: Placed = (Dict(), Location(self.source.path))
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise MistakeError("CFG002", "more than one YAML document", "keep one", self.place(event))
            elif isinstance(
                event, (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent, yaml.AliasEvent)
            ):
                result = self.value(event, 0)
        return result

    def place(self, event: Any) -> Location:
        start, end = event.start_mark, event.end_mark
        return Location(self.source.path, start.line + 1, start.column + 1, end.line + 1, end.column + 1)

    def value(self, event: Any, depth: int) -> Placed:
        import yaml

        self.session.budget.spend(1)
        place = self.place(event)
        if depth > MAX_DEPTH:
            raise too_much("YAML nested too deep")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise MistakeError("CFG001", f"the anchor {event.anchor!r} is not defined before", place=place)
            return self.anchors[event.anchor]
        self.check_tag(event, place)
        if isinstance(event, yaml.ScalarEvent):
            made: Any = self.scalar_value(event)
        else:
            made = Dict() if isinstance(event, yaml.MappingStartEvent) else List()
        if event.anchor:
            self.anchors[event.anchor] = (made, place)
        if isinstance(made, Dict):
            self.fill_mapping(made, depth)
        elif isinstance(made, List):
            self.fill_list(made, depth)
        return made, place

    @staticmethod
    def scalar_value(event: Any) -> Any:
        as_text = event.style in ("'", '"', "|", ">") or (event.tag or "").endswith(":str")
        return check_size(event.value if as_text else scalar(event.value))

    @staticmethod
    def check_tag(event: Any, place: Location) -> None:
        tag = event.tag
        if tag and tag not in ("!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise MistakeError(
                "CFG002", f"the YAML tag {tag!r} is not part of the config language", "leave it out", place
            )

    def fill_list(self, made: List, depth: int) -> None:
        import yaml

        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            value, place = self.value(event, depth + 1)
            made.append(value)
            made.origins.append(place)
            check_items(len(made))

    def fill_mapping(self, made: Dict, depth: int) -> None:
        import yaml

        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                return
            key, key_place = self.value(event, depth + 1)
            value, place = self.value(next(self.events), depth + 1)
            self.put(made, key, value, place, key_place)

    def put(self, made: Dict, key: Any, value: Any, place: Location, key_place: Location) -> None:
        if isinstance(key, (Dict, List)):
            self.session.report(MistakeError("CFG013", "a key that is neither a string nor a number"), key_place)
            return
        if key == "<<":
            failed = MistakeError(
                "CFG002", "the merge key `<<` is not part of the config language", "write the keys out"
            )
            self.session.report(failed, key_place)
            return
        if key in made:
            message = f"the key {key!r} stands twice in this mapping"
            self.session.add(finding("CFG012", key_place, message, severity="error"))
        made.put(key, value, place, key_place)
