"""Lint another framework's config where it stands: findings at its own lines and in its own names.

`dslpar import`'s tables say which dslpar key each of its keys is. From the values that the author wrote, and from the
framework's defaults, a dslpar config is made in memory. dslpar's rules run over it, and those count that hold in the
framework as well (`framework_rules`). The framework's own checks are in the same files.

What nobody knows is unknown, and judged by no rule: a value that the framework's program sets, one that dslpar would
add, or one that the tables cannot translate. So a finding is never about a value that the author did not write.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.core.catalog import finding as make_finding
from dslpar.core.errors import Finding, Location
from dslpar.language.errors import finding as language_finding
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.linter import check
from dslpar.migrate import expression
from dslpar.migrate.convert import IMPLIED, Converter, Import, Leaf, own_location, refused
from dslpar.migrate.convert import Entry as Converted
from dslpar.migrate.defaults import defaults_of
from dslpar.migrate.framework_rules import Entry, Rules, rules_of
from dslpar.migrate.sources import DEEPSPEED, JSON_ENDINGS, REFUSED, Source, merged, read_text
from dslpar.migrate.table import Table
from dslpar.migrate.unread import UNREAD
from dslpar.schema.frameworks import frameworks

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster

CODES: Mapping[str, str] = {"error": REFUSED, "warning": "FRN202", "info": "FRN203"}
"""Severity of a check of the framework -> the code of its findings."""
UNKNOWN_KEY, NOT_JUDGED = "FRN204", "FRN205"
_TWICE = "CFG012"
_MOST_NAMED = 8
"""Keys that one finding names."""


class Model(NamedTuple):
    """The model that --model gives to a source."""

    path: str
    """The dslpar config, or a config.json."""
    section: Mapping[str, Any]
    """The section `model`."""


class Linted(NamedTuple):
    """A source of another framework, and what was found about it."""

    made: Import
    config: Config
    """The dslpar config that the rules saw; its values are at the source's locations."""
    findings: list[Finding]
    places: Mapping[str, Location]
    """The locations of dslpar's keys that the source sets."""


def lint_text(
    text: str,
    path: str,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    name: str = "",
    model: Model | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
    recipe: str = "",
) -> list[Finding]:
    """Return the findings about a source's text; none if its framework is unknown (`name`: the framework, if given).

    `others`: further files of the same run, texts by path, which the framework merges with this one. `recipe`: the
    function, or the arguments of a program, to lint; the first of the file if empty.
    """
    source = merged(read_text(text, path, name, recipe), others)
    if not source.config.complete:
        return refused(source)
    if not source.name and path.endswith(JSON_ENDINGS):
        hint = "name its framework with --from"
        return [
            make_finding(NOT_JUDGED, "no key of a framework is known here: nothing is judged", hint, Location(path))
        ]
    if source.name not in {framework.name for framework in frameworks()}:
        return []
    return lint_source(source, world_size, cluster, model).findings


def lint_source(
    source: Source,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    model: Model | None = None,
) -> Linted:
    """Lint an evaluated source for a world size."""
    converter = Converter(source, model.section if model else None, None)
    made = converter.run()
    rules = rules_of(source.name)
    places = _places(source, made)
    if model is not None:
        places |= {f"model.{key}": Location(model.path) for key in model.section}
    config = _config_of(made, places, rules)
    titles = [converter.table.title, *(inner.title for inner in _inner(converter.table))]
    found = [
        *_language(source),
        *_missing(source),
        *_further(source),
        *_own_checks(
            _Written(converter, world_size, source.is_partial or source.path.endswith(rules.partial)), rules, source
        ),
        *_checks_of_section(converter, world_size),
        *_of_dslpar(config, made, rules, world_size, cluster, places),
        *(item for title in titles for item in _unknown_keys(made, title, converter.table.under)),
    ]
    found += _not_judged(made, titles, {item.key for item in found})
    unique = dict.fromkeys(found)
    return Linted(made, config, sorted(unique, key=Finding.sort_key), places)


def _language(source: Source) -> list[Finding]:
    """Return what the evaluator found, except about the language of Python configs, which is dslpar's own.

    A file that only dslpar cannot read is a warning: the framework may run with it, and its keys are unchecked. So is
    a key that is written twice: PyYAML and Python's json take the later value, and only DeepSpeed's reader refuses it.
    """
    at_home = [item for item in source.config.findings if item.code in (_TWICE, REFUSED)]
    if source.name != DEEPSPEED:
        at_home = [item._replace(severity="warning") if item.code == _TWICE else item for item in at_home]
    at_home += [
        language_finding("CFG009", place, f"{reason}: its keys are not checked", severity="warning")
        for place, reason in source.unreadable
    ]
    return [item._replace(location=own_location(item.location, source)) for item in at_home]


def _missing(source: Source) -> Iterator[Finding]:
    """Yield a warning at each place that names a file which is not there: what it sets is judged by nothing."""
    for place, file in source.missing:
        message = f"file {file!r} is missing: what it sets is not judged"
        hint = "lint where the file is, or write its path from this file's folder"
        yield make_finding(NOT_JUDGED, message, hint, own_location(place, source))._replace(severity="warning")


def _further(source: Source) -> Iterator[Finding]:
    """Yield a note if the run has keys that the source does not show."""
    for place, reason in source.hidden:
        hint = "write the path in the file"
        yield make_finding(NOT_JUDGED, f"{reason}: dslpar does not judge its keys", hint, own_location(place, source))
    if source.is_partial:
        message = "the run has further keys, which a recipe or the `**` of a call adds: dslpar does not judge these"
        yield make_finding(NOT_JUDGED, message, "", own_location(source.config.root.location, source))


# The dslpar config --------------------------------------------------------------------------------------------------


def _places(source: Source, made: Import) -> dict[str, Location]:
    """Return the location of each dslpar key that a key of the source sets: that of its value."""
    places = {}
    for entry in made.entries:
        if entry.key and entry.to and entry.fate in ("kept", "renamed", "changed"):
            node = source.config.root.get(entry.key)
            plain = node is not None and not node.is_mapping and node.location.path in source.config.sources
            places[entry.to] = own_location(node.location, source) if plain and node is not None else entry.location
    return places


def _config_of(made: Import, places: Mapping[str, Location], rules: Rules) -> Config:
    """Make the dslpar config of which each value is at the source's location, and the other values are unknown."""
    whole = Location(made.source.path)
    unknown = {key for entry in rules.unknown for key in entry.subject.split()}
    unknown |= {entry.to for entry in made.entries if entry.fate == "needed" and entry.to}
    unknown |= {entry.to for entry in made.entries if entry.fate == "added" and _is_of_dslpar(entry, made)}
    if (
        made.source.unreadable
        or made.source.hidden
        or any(file.endswith(JSON_ENDINGS) for _, file in made.source.missing)
    ):
        unknown |= {"zero", "precision"}
    # A key that the source does set is known, although the source usually cannot tell it.
    unknown = {key for key in unknown if not any(f"{each}.".startswith(f"{key}.") for each in places)}
    root: dict[Any, Node] = {}
    for key, value in made.values.items():
        if any(f"{key}.".startswith(f"{each}.") for each in unknown):
            continue
        level, parts = root, key.split(".")
        for part in parts[:-1]:
            node = level.setdefault(part, Node({}, whole))
            if not node.is_mapping:  # a shorthand, such as parallel.tensor=4, which another key extends
                break
            level = node.value
        else:
            level[parts[-1]] = _node(value, places.get(key, whole))
    text = made.source.config.sources.get(made.source.config.path, "")
    return Config(made.source.path, Node(root, whole), (), {made.source.path: text}, unknown=frozenset(unknown))


def _is_of_dslpar(entry: Converted, made: Import) -> bool:
    """Return whether an added value is dslpar's own: neither the framework's default nor implied by the source."""
    of_framework = "'s default of " in entry.why or entry.why.endswith(" trains it") or entry.why == "by --model"
    return not (of_framework or entry.why.startswith(IMPLIED))


def _node(value: Any, place: Location) -> Node:
    if isinstance(value, Mapping):
        return Node({key: _node(item, place) for key, item in value.items()}, place, place)
    if isinstance(value, list | tuple):
        return Node(type(value)(_node(item, place) for item in value), place, place)
    return Node(value, place, place)


# dslpar's rules -----------------------------------------------------------------------------------------------------


def _of_dslpar(
    config: Config,
    made: Import,
    rules: Rules,
    world_size: int | None,
    cluster: Cluster | None,
    places: Mapping[str, Location],
) -> Iterator[Finding]:
    """Yield the findings of dslpar's rules that hold in the framework, about keys that the author wrote."""
    whole = Location(config.path)
    for item in check.lint(config, world_size, cluster=cluster):
        if item.code.startswith("HST"):
            yield item
        elif item.code.startswith("FIT"):
            # The forecast is of a run of dslpar, so that it is no mistake of the author.
            hint = f"dslpar's forecast; assumed: {', '.join(assumed(made.entries)) or 'nothing'}"
            yield at_source(item, made, places, placed=True)._replace(severity="info", help=hint)
        elif item.code in rules.judged and not _is_implied(item, made):
            found = at_source(item, made, places, placed=True)
            if found.location != whole:
                yield found


def _is_implied(item: Finding, made: Import) -> bool:
    """Return whether a finding is about a size that other keys imply, so that the author did not write it."""
    implied = (entry.to for entry in made.entries if entry.fate == "added" and entry.why.startswith(IMPLIED))
    return item.key.startswith("model.") and item.key in implied


_DIVIDES = {"TEN": "parallel.tensor", "PIP": "parallel.pipeline"}
"""Family of a rule of dslpar -> the section whose sizes have to divide those of the model."""


def at_source(item: Finding, made: Import, places: Mapping[str, Location], placed: bool = False) -> Finding:
    """Return a finding of dslpar's about the converted config, at the source's location and in its names.

    `places`: the locations of dslpar's keys that the source sets. `placed`: whether the finding is at one of these,
    and not in the text of the converted config. A finding about a size of --model is at the source's key that has to
    divide it.
    """
    names = {entry.to: entry.key for entry in made.entries if entry.key and entry.to}
    place, ours = item.location, item.key
    is_of_model = ours.startswith("model.") and ours not in names
    if is_of_model or not placed:
        section = _DIVIDES.get(item.code[:3], "") if is_of_model else ""
        ours = next((key for key in places if section and f"{key}.".startswith(f"{section}.")), ours)
        near = (key for key in places if f"{ours}.".startswith(f"{key}.") or key.startswith(f"{ours}."))
        place = places.get(ours) or next((places[key] for key in near), Location(made.source.path))
    if item.code == "CFG107" or (item.code == "CFG104" and item.key.partition(".")[0] == "model"):
        return _without_model(item, made, place)
    message, hint = item.message, item.help
    if made.values.get("parallel.tensor.mode", "1d") == "1d":
        message, hint = message.replace("y * q = ", "y = "), hint.replace("y * q = ", "y = ")
    message, hint = in_their_names(message, names), in_their_names(hint, names)
    help = "" if _OURS.search(hint) else hint
    return item._replace(message=message, help=help, location=place, key=names.get(ours, ours), fix=None)


def _without_model(item: Finding, made: Import, place: Location) -> Finding:
    """Return the finding about a model that the conversion does not know, at the source's key that names it."""
    asked = [entry for entry in made.entries if entry.fate == "needed" and entry.key]
    entry = next((each for each in asked if each.to == "model" or each.to == item.key), None)
    what = "there is no model" if entry is None else f"{entry.key} is not converted: {entry.why}"
    help = "give --model FILE: a dslpar config, or a folder of Hugging Face with a config.json"
    place = place if entry is None else entry.location
    key = item.key if entry is None else entry.key
    missing = "" if item.code == "CFG107" else f"{item.message}: "
    return item._replace(message=f"{missing}{what}", help=help, location=place, key=key, fix=None)


_OURS = re.compile(r"\b(?:parallel|batch|schedule|train|zero|model|data|optimizer|lr_scheduler)\.[a-z]|\w=dict\(|mode=")
"""A key of dslpar in a help: it is of no use to the author of another framework's config."""
_PHRASES = (
    (re.compile(r" in mode '1d'"), ""),
    (re.compile(r"is not ([^;]*?) \* accumulation \?"), r"is not a multiple of \1"),
    (re.compile(r"\* data (\d+)"), r"* replicas \1"),
    (re.compile(r"\by = (\d+)"), r"parallel.tensor.size \1"),
)
"""Phrases of dslpar's messages that have another form here."""


def in_their_names(text: str, names: Mapping[str, str]) -> str:
    """Replace dslpar's keys in a text by the source's keys; a key without a dot is a plain word, too."""
    for phrase, other in _PHRASES:
        text = phrase.sub(other, text)
    dotted = ((ours, theirs) for ours, theirs in names.items() if "." in ours)
    for ours, theirs in sorted(dotted, key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w.]){re.escape(ours)}(?![\w.])", _literal(theirs), text)
    for ours, theirs in names.items():
        last = ours.rpartition(".")[2]
        if "_" in last and last != theirs:
            text = re.sub(rf"(?<![\w.-]){re.escape(last)}(?![\w-])", _literal(theirs), text)
    return text


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


# Checks of the framework --------------------------------------------------------------------------------------------


def _own_checks(seen: _Written, rules: Rules, source: Source) -> Iterator[Finding]:
    """Yield the findings of the framework's own checks, each at the first key of it that the author wrote."""
    for rule in rules.checks:
        if not expression.holds(rule.when, seen.value_of, seen.is_given):
            continue
        leaf = next(filter(None, map(seen.leaf, (rule.subject, *expression.keys_of(rule.when)))), None)
        if leaf is not None:
            yield _finding(rule, source, leaf.key, leaf.location, seen.value_of)
        elif f"not given({rule.subject})" in rule.when:  # the framework wants the key, which is not there
            yield _finding(rule, source, rule.subject, Location(source.path), seen.value_of)


def _inner(table: Table) -> Iterator[Table]:
    """Yield the table of DeepSpeed if a section of the source, or a file that it names, has DeepSpeed's keys."""
    inner = table.includes if table.under else None
    while inner is not None and inner.includes is not None:  # LLaMA-Factory has it from TrainingArguments
        inner = inner.includes
    if inner is not None:
        yield inner


def _checks_of_section(converter: Converter, world_size: int | None) -> Iterator[Finding]:
    """Yield the findings of DeepSpeed's own checks about the section, or about the file that it names."""
    used = converter.view.value("distributed_type")
    if used not in (None, "DEEPSPEED"):  # only Accelerate has this key, and it reads the plugin of its type alone
        return
    for inner in _inner(converter.table):
        seen = _Written(converter, world_size, is_partial=False, section=inner)
        if seen.by_name:
            yield from _own_checks(seen, rules_of(inner.framework.name), converter.source)


class _Written:
    """The keys that a source writes, as the conditions of checks name them.

    A condition may name a key as the table does (`seq_length`), or with its section, where several sections have a
    key of the same name (`model.seq_length` and `dataset.seq_length`). `section`: the included table to whose section
    the keys are limited; they are named as in a file of that section alone.
    """

    def __init__(
        self, converter: Converter, world_size: int | None, is_partial: bool, section: Table | None = None
    ) -> None:
        table = section or converter.table
        self.framework, self.defaults = table.framework, converter.view.defaults
        self.world_size, self.is_partial = world_size, is_partial
        leaves = [*converter.leaves, *(leaf for leaf, _ in converter.unread)]
        start = f"{converter.table.under if section else converter.table.wrapper}."
        if section is not None:
            leaves = [leaf for leaf in leaves if leaf.name.startswith(start)]
            names = {leaf.name.removeprefix(start): leaf.value for leaf in leaves}
            self.defaults = {key: default.value for key, default in defaults_of(names, table.defaults).items()}
        self.by_name = {leaf.name.removeprefix(start) if section else leaf.name: leaf for leaf in leaves}
        self.by_key = {self.framework.written(leaf.key).removeprefix(start): leaf for leaf in leaves}

    def leaves_for(self, key: str) -> Mapping[str, Leaf]:
        """Return the leaves among which a key is: those by section if it names one, else those by name."""
        return self.by_key if key.partition(".")[0] in self.framework.sections else self.by_name

    def leaf(self, key: str) -> Leaf | None:
        """Return the leaf of a key, or the first leaf below it; None if the source writes neither."""
        leaves = self.leaves_for(key)
        return leaves.get(key) or next((leaves[name] for name in leaves if name.startswith(f"{key}.")), None)

    def value_of(self, key: str) -> Any:
        """Return the value of a key, else its default; None without both. Raises UnknownError if nobody knows it."""
        if key == "world_size":
            if self.world_size is None:
                raise expression.UnknownError
            return self.world_size
        leaf = self.leaves_for(key).get(key)
        if leaf is None and self.is_partial:
            raise expression.UnknownError
        if leaf is None or leaf.value is None:
            return self.defaults.get(self.framework.name_of(key))
        return leaf.value

    def is_given(self, key: str) -> bool:
        """Return whether a key, or one below it, is written with any value but None, which sets nothing."""
        items = self.leaves_for(key).items()
        inside = [leaf.value for name, leaf in items if name == key or name.startswith(f"{key}.")]
        if UNREAD in inside or (self.is_partial and not inside):
            raise expression.UnknownError
        return any(value is not None for value in inside)


def _finding(rule: Entry, source: Source, key: str, place: Location, value_of: expression.ValueOf) -> Finding:
    node = source.config.root.get(key)
    if node is not None and not node.is_mapping and node.location.path in source.config.sources:
        place = node.location
    message = re.sub(r"\{([\w.]+)\}", lambda found: _shown(value_of(found[1])), rule.says)
    checked = f"checked by {rule.source}"
    hint = f"{rule.help} ({checked})" if rule.help else checked
    return make_finding(CODES[rule.kind], message, hint, own_location(place, source), key)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Keys ---------------------------------------------------------------------------------------------------------------


def _unknown_keys(made: Import, title: str, under: str) -> Iterator[Finding]:
    """Yield a finding for each key that the framework does not have; `under`: the section of an included table."""
    for entry in made.entries:
        ignored = entry.why.startswith(f"{title} ignores top-level keys")
        missing = entry.why.startswith(f"{title} has no such key;")
        if entry.key and (ignored or missing):
            close = entry.why.partition("; ")[2]
            in_file = entry.location.path != made.source.path  # DeepSpeed's JSON, which has no such section
            key = entry.key.lstrip("-").removeprefix(f"{under}.") if in_file and under else entry.key
            message = f"{title} has no key {key!r}" + (", and ignores it" if ignored else "")
            yield make_finding(UNKNOWN_KEY, message, close or "leave it out", entry.location, entry.key)


def _not_judged(made: Import, titles: Sequence[str], judged: Collection[str]) -> Iterator[Finding]:
    """Yield one finding that names the keys that dslpar cannot judge; `judged`: keys that have a finding."""
    not_there = tuple(start for title in titles for start in (f"{title} has no such key;", f"{title} ignores"))
    needed = [entry for entry in made.entries if entry.key and entry.fate == "needed"]
    left = [entry for entry in needed if entry.key not in judged and not entry.why.startswith(not_there)]
    if left:
        names = list(dict.fromkeys(entry.key for entry in left))
        shown = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED))
        message = f"dslpar does not judge {shown}"
        yield make_finding(NOT_JUDGED, message, "dslpar import says why, key by key", left[0].location, left[0].key)


def assumed(entries: Sequence[Converted]) -> list[str]:
    """Return what a conversion added to the source, as `key=value`."""
    return [f"{entry.to}={entry.value!r}" for entry in entries if entry.fate == "added" and entry.to]
