"""Read a source: recognise its framework, remove comments from JSON, replace missing configs.

A config may import a missing file (as a LiBai config outside of its checkout does). The imported name is then bound to
an empty mapping, so that the keys that the source sets in it are still read. The report lists the missing file.
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from dslpar.core.catalog import finding as make_finding
from dslpar.core.errors import Location
from dslpar.language.errors import ConfigError, finding
from dslpar.language.finder import LIBAI, OURS, find_absolute, find_config, find_module, home_of_get_config, is_config
from dslpar.language.load import YAML_ENDINGS, Config
from dslpar.language.load_session import parsed
from dslpar.language.source import Source as Text
from dslpar.language.source import read_source
from dslpar.language.tree import Node
from dslpar.linter import check
from dslpar.migrate import megatron_bridge, torchtitan, trainer_programs
from dslpar.migrate.recipes import ROOTS, Recipe, load_recipe, recipes_in
from dslpar.migrate.registry import TABLES
from dslpar.schema import frameworks
from dslpar.schema.sections_reader import SECTIONS

JSON_ENDINGS = (".json", ".hjson")
TOML = ".toml"
MEGATRON_BRIDGE = "megatron_bridge"
HELPERS = {"torchtitan": torchtitan.helpers, MEGATRON_BRIDGE: megatron_bridge.helpers,
           trainer_programs.FRAMEWORK: trainer_programs.helpers}  # fmt: skip
"""What well-known functions return that recipes call, by framework: functions of the file and its path."""
MEGATRON_YAML, _YAML_CFG = "megatron_yaml", "--yaml-cfg"
DEEPSPEED = "deepspeed"
"""The framework of a JSON file that has one of its keys, and no key of any other."""
SHELL_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")


class Source(NamedTuple):
    """Evaluated config of another framework."""

    name: str
    """A name of the registry, 'dslpar', or empty if the framework is unknown."""
    path: str
    config: Config
    missing: tuple[tuple[Location, str], ...] = ()
    """Location and file of each import whose file is missing."""
    unreadable: tuple[tuple[Location, str], ...] = ()
    """Location of the name of each file that is there and cannot be read, and the reason."""
    hidden: tuple[tuple[Location, str], ...] = ()
    """Location of each value that names a file and that only the run knows, and what is said about it."""
    places: Mapping[str, tuple[Location, Location]] = MappingProxyType({})
    """Of a shell script: the locations of each argument's name and of its unknown value, if it has one."""
    is_partial: bool = False
    """Whether the run has further keys that the source does not show: `**config` of a call, a recipe's own keys."""


def read_text(text: str, path: str, name: str = "", recipe: str = "") -> Source:
    """Evaluate a source's text. `name` is the framework; if it is empty, the framework is recognised.

    `recipe` is the function whose config is read, if the file has such functions; if it is empty, the first one.
    """
    if path.endswith(JSON_ENDINGS):
        shown = path if path.endswith(YAML_ENDINGS) else f"{path}.json"
        config = check.load_text(without_comments(text), shown)
        names = {*map(str, config.root.value)}
        ours = "model" in names and names <= {*SECTIONS, "resolved"}
        framework = frameworks.recognise(config.root, path, ())
        theirs = framework.name if framework is not None else DEEPSPEED if _is_of_deepspeed(names) else ""
        name = name or (OURS if ours else theirs)
        return with_section_of_file(Source(name, path, config))
    if path.endswith(SHELL_ENDINGS):
        from dslpar.migrate.shell.arguments import load_arguments  # it uses the YAML parser, which is slow to import

        named = name or recognise(Config(path, Node({}, Location(path)), (), {path: text}), text)
        # The switches of Megatron's programs take no value; --deepspeed of Trainer's programs does.
        if file := _file_of_command(text, path, named):
            return read_text(read_source(file, {}).text, file, named)
        config, places = load_arguments(text, path, has_switches=not (named and TABLES[named].framework.arguments))
        if file := _file_of_arguments(config, path):
            return _with_ignored(read_text(read_source(file, {}).text, file, MEGATRON_YAML), config)
        return with_section_of_file(Source(named or recognise(config, text), path, config, places=places))
    if path.endswith(TOML):
        from dslpar.language.toml_io import load_toml  # few sources are TOML

        config = load_toml(text, path)
        return Source(name or recognise(config, ""), path, config)
    found = recipes_of(text, path, name)
    if found:
        chosen = next((item for item in found if item.name == recipe), found[0])
        others = () if recipe else [item for item in found if item is not chosen]
        helpers = HELPERS[chosen.framework](_tree(text, path), path) if chosen.framework in HELPERS else {}
        config, places, is_partial = load_recipe(text, path, chosen, others, helpers)
        return with_section_of_file(Source(chosen.framework, path, config, places=places, is_partial=is_partial))
    filled, missing = (text, ()) if path.endswith(YAML_ENDINGS) else with_stand_ins(text, path)
    config = check.load_text(filled, path, is_pyyaml=True)
    name = name or recognise(config, filled)
    if name == MEGATRON_BRIDGE:
        config = config._replace(root=megatron_bridge.with_functions(config.root))
    return with_section_of_file(Source(name, path, config, missing))


def _file_of_command(text: str, path: str, name: str) -> str | None:
    """Return the YAML or JSON file that a framework's command is given in place of arguments: `megatron sft a.yaml`."""
    for command in TABLES[name].framework.commands if name else ():
        words = r"\s+".join(map(re.escape, command.split()))
        found = re.search(
            rf"^[^#\n]*?(?<![\w./-]){words}(?:\s|\\\n)+(?P<file>[\w./-]+\.(?:ya?ml|json))\s*$", text, re.M
        )
        if found:
            return nearest_file(found["file"], path)
    return None


def _file_of_arguments(config: Config, path: str) -> str | None:
    """Return the YAML file that replaces the arguments of a Megatron-LM program, if it is there: --yaml-cfg a.yaml."""
    node = config.root.child(_YAML_CFG)
    named = node.value if node is not None else None
    return nearest_file(named, path) if isinstance(named, str) and named.endswith(YAML_ENDINGS) else None


def _with_ignored(source: Source, arguments: Config) -> Source:
    """Add a finding about each argument that stands beside --yaml-cfg, which alone is read (arguments.py:140)."""
    ignored = [(key, node) for key, node in arguments.root.value.items() if key != _YAML_CFG]
    why, hint = f"Megatron-LM reads {_YAML_CFG} alone, and not", "leave it out, or write it into that file"
    findings = (
        finding("CFG010", node.key_location or node.location, f"{why} {key}: {hint}", hint) for key, node in ignored
    )
    config = source.config._replace(
        findings=(*source.config.findings, *findings), sources={**source.config.sources, **arguments.sources}
    )
    return source._replace(config=config)


def _is_of_deepspeed(names: Set[str]) -> bool:
    """Return whether a JSON file may be DeepSpeed's: it has one of its keys, or none at all."""
    return not names or any(row.pattern.partition(".")[0] in names for row in TABLES[DEEPSPEED].rows)


REFUSED = "FRN201"
"""Code of what the framework itself refuses."""
MERGES = ("gpt_neox",)
"""Frameworks whose programs merge several files into one config."""


def merged(source: Source, others: Mapping[str, str]) -> Source:
    """Return a source with the keys of further files of the same run (texts by path), each at its own location.

    GPT-NeoX refuses a key that two files have (NeoXArgs.from_ymls, commit ea7aefd): it becomes a finding.
    """
    if source.name not in MERGES:
        return source
    config = source.config
    for path, text in others.items():
        other = read_text(text, path, source.name).config
        twice = [key for key in other.root.value if key in config.root.value]
        findings = [*config.findings, *other.findings]
        for key in twice:
            first = config.root.value[key]
            message = f"{key} is in {(first.key_location or first.location).path}, too"
            node = other.root.value[key]
            hint = f"keep one of the two: {TABLES[source.name].title} refuses a key that two of its files have"
            findings.append(make_finding(REFUSED, message, hint, node.key_location or node.location, str(key)))
        config = config._replace(
            root=config.root._replace(
                value={**config.root.value, **{key: each for key, each in other.root.value.items() if key not in twice}}
            ),
            findings=tuple(findings),
            sources={**config.sources, **other.sources},
            complete=config.complete and other.complete,
            unknown=config.unknown | other.unknown,
        )
    return source._replace(config=config)


@lru_cache(maxsize=2)  # each of many calls is linted by itself
def programs_in(text: str, path: str) -> list[Recipe]:
    """Return the configs that a Python program makes: TrainingArguments, or a changed recipe of Megatron-Bridge."""
    return trainer_programs.arguments_in(text, path) or trainer_programs.changed_recipes_in(text, path)


def recipes_of(text: str, path: str, name: str = "") -> list[Recipe]:
    """Return the functions of a Python file that return a config of the framework `name`, or of any."""
    if not path.endswith(".py"):
        return []
    has_root = any(root.rpartition(".")[2] in text for root in ROOTS)
    found = (recipes_in(text, path) if has_root else []) or programs_in(text, path)
    return [recipe for recipe in found if name in ("", recipe.framework)]


# Framework ----------------------------------------------------------------------------------------------------------


def recognise(config: Config, text: str) -> str:
    """Recognise a source's framework by its imports, then by the names that it sets; empty if unknown."""
    imported = set(frameworks.imported_packages(text, config.path)) if config.path.endswith(".py") else set()
    if OURS in imported:
        return OURS
    for path, other in config.sources.items():  # a LiBai file may import only neighbouring files
        imported |= set(frameworks.imported_packages(other, path)) if path.endswith(".py") else set()
    script = text if config.path.endswith(SHELL_ENDINGS) else ""
    framework = frameworks.recognise(config.root, config.path, imported - {OURS}, script)
    if framework is not None:
        return framework.name
    return OURS if not {*map(str, config.root.value)}.isdisjoint(SECTIONS) else ""


def _tree(text: str, path: str) -> ast.Module:
    try:
        return parsed(path, text).tree
    except ConfigError:  # the evaluator reports it
        return ast.Module([], [])


Places = dict[str, tuple[Location, Location]]


def assigned(source: Source) -> Places:
    """Return two locations for each dotted key that a source writes: the key's, and its value's or statement's."""
    config = source.config
    if source.places:
        return dict(source.places)
    if config.path.endswith(YAML_ENDINGS) or config.path not in config.sources:
        return {}
    text = Text(config.path, config.sources[config.path])
    places: Places = {}
    for node in _tree(text.text, config.path).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                key = target.id if isinstance(target, ast.Name) else ".".join(map(str, _chain(target)))
                places |= {key: (text.location(target), text.location(node))} | _below(key, node.value, text)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            places[node.name] = (text.location(node), text.location(node))
    return places


def _below(key: str, value: ast.expr, text: Text) -> Places:
    """Return the locations of keys within dicts, calls and lists."""
    items: list[tuple[object, ast.AST, ast.expr]] = []
    if isinstance(value, ast.Call):
        items = [(word.arg, word, word.value) for word in value.keywords if word.arg]
    elif isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        items = [(name.value, name, item) for name, item in pairs if isinstance(name, ast.Constant)]
    elif isinstance(value, (ast.List, ast.Tuple)):
        items = [(number, item, item) for number, item in enumerate(value.elts)]
    places: Places = {}
    for name, node, item in items:
        path = f"{key}.{name}"
        places |= {path: (text.location(node), text.location(item))} | _below(path, item, text)
    return places


# JSON ---------------------------------------------------------------------------------------------------------------

_NOISE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|\t', re.DOTALL)


def without_comments(text: str) -> str:
    """Replace comments (those that DeepSpeed's reader accepts) and tabs by spaces, so that locations stay valid."""
    return _NOISE.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)


# A section in a file of its own ---------------------------------------------------------------------------------------


def with_section_of_file(source: Source) -> Source:
    """Read the JSON file that a config names in place of DeepSpeed's section. Its keys keep their locations there.

    The path is tried from the config's folder and from each folder above, since programs start in their checkout.
    """
    table = TABLES.get(source.name)
    if table is None or not table.under:
        return source
    key = next((str(key) for key in source.config.root.value if table.name_of(str(key)) == table.under), table.under)
    node = source.config.root.get(key)
    for unknown in source.config.unknown & source.places.keys():
        if table.name_of(unknown) == table.under:  # a program's or a script's
            reason = (source.places[unknown][1], f"only the run knows what {unknown} is")
            return source._replace(hidden=(reason,))
    if node is None or not isinstance(node.value, str) or not node.value.endswith(JSON_ENDINGS):
        return source
    file = nearest_file(node.value, source.path)
    if file is None:
        return source._replace(missing=(*source.missing, (node.location, node.value)))
    try:
        text = read_source(file, {}).text
    except ConfigError as error:
        return source._replace(unreadable=(*source.unreadable, (node.location, error.message)))
    shown = file if file.endswith(YAML_ENDINGS) else f"{file}.json"
    section = check.load_text(without_comments(text), shown)
    root = _replaced(source.config.root, key.split("."), section.root._replace(key_location=node.key_location))
    config = source.config._replace(
        root=root,
        findings=(*source.config.findings, *section.findings),
        sources={**source.config.sources, file: text},
        complete=source.config.complete and section.complete,
    )
    return source._replace(config=config)


def nearest_file(name: str, path: str) -> str | None:
    """Find a file from the folder of `path`, or from a folder above; None if there is none."""
    folder = os.path.dirname(path) or "."
    while True:
        file = os.path.normpath(os.path.join(folder, name))
        if os.path.isfile(file):
            return file
        above = os.path.dirname(os.path.abspath(folder))
        if above == os.path.abspath(folder):
            return None
        folder = above


def _replaced(root: Node, parts: Sequence[str], node: Node) -> Node:
    """Return a tree with another node at a path that exists."""
    first, *rest = parts
    below = _replaced(root.value[first], rest, node) if rest else node
    return root._replace(value={**root.value, first: below})


# Missing imports ----------------------------------------------------------------------------------------------------


class Edit(NamedTuple):
    """Replacement text of a statement."""

    place: Location
    text: str


def with_stand_ins(text: str, path: str) -> tuple[str, tuple[tuple[Location, str], ...]]:
    """Replace each import of a missing config by empty mappings. Also returns the location and file of each."""
    source = Text(path, text)
    tree = _tree(text, path)
    home = home_of_get_config(tree)
    edits: list[Edit] = []
    missing: list[tuple[Location, str]] = []
    for node in ast.walk(tree):
        file, names = _missing(node, path, home)
        if file:
            place = source.location(node)
            missing.append((place, file))
            edits.append(Edit(place, "; ".join(f"{name} = {_skeleton(tree, name)}" for name in names)))
    return _edited(source, edits), tuple(missing)


def _missing(node: ast.AST, path: str, home: str) -> tuple[str, list[str]]:
    """Return the missing file that a statement reads, and the names that it binds.

    `home` is the package that get_config is imported from.
    """
    if isinstance(node, ast.ImportFrom):
        return _missing_import(node, path)
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        file = _file_of_get_config(node.value) if home in (OURS, LIBAI) else ""
        try:
            if file:
                find_config(file, path, home)
        except ConfigError:
            return file, [node.targets[0].id]
    return "", []


def _missing_import(node: ast.ImportFrom, path: str) -> tuple[str, list[str]]:
    names = [alias.asname or alias.name for alias in node.names]
    if "*" in names:
        return "", []  # the evaluator refuses it
    if node.level and not node.module:
        there = any(is_config(find_module(alias.name, node.level, path)) for alias in node.names)
        return ("", []) if there else (", ".join(f"{alias.name}.py" for alias in node.names), names)
    if node.level and node.module:
        return ("", []) if is_config(find_module(node.module, node.level, path)) else (_file(node), names)
    if not node.module or "configs" not in node.module.split("."):
        return "", []
    base = find_absolute(node.module, path)
    return ("", []) if base and is_config(base) else (_file(node), names)


def _file(node: ast.ImportFrom) -> str:
    return (node.module or "").replace(".", "/") + ".py"


def _file_of_get_config(value: ast.AST) -> str:
    """Return the file of `get_config("file").name...`; empty for any other expression."""
    while isinstance(value, ast.Attribute):
        value = value.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "get_config":
        first = value.args[0] if value.args else None
        return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    return ""


def _skeleton(tree: ast.Module, name: str) -> str:
    """Return the text of a nested mapping that has every section of `name` that the file accesses, but no values."""
    trie: dict[Any, Any] = {}
    for node in ast.walk(tree):
        parts = _chain(node)
        if parts and parts[0] == name:
            level = trie
            for part in parts[1:-1]:
                level = level.setdefault(part, {})
    return _display(trie)


def _chain(node: ast.AST) -> list[Any]:
    """Split an expression such as `a.b[0].c` into its parts; empty for any other expression."""
    parts: list[Any] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, (str, int)):
            parts.append(node.slice.value)
        else:
            return []
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _display(trie: dict[Any, Any]) -> str:
    if trie and all(type(part) is int and 0 <= part < 1000 for part in trie):
        return "[" + ", ".join(_display(trie.get(index, {})) for index in range(max(trie) + 1)) + "]"
    return "{" + ", ".join(f"{part!r}: {_display(below)}" for part, below in trie.items()) + "}"


def _edited(source: Text, edits: list[Edit]) -> str:
    """Replace statements without moving any other line."""
    lines = list(source.lines)
    # From the last to the first, so that earlier locations stay valid.
    for place, text in sorted(edits, reverse=True):
        rest = lines[place.end_line - 1][place.end_column - 1 :]
        lines[place.line - 1] = lines[place.line - 1][: place.column - 1] + text + rest
        for number in range(place.line, place.end_line):
            lines[number] = ""
    return "\n".join(lines)
