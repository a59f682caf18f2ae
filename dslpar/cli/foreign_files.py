"""Files of other frameworks, and programs, that are given to `dslpar lint`, `show` and `plan` as if they were configs.

`lint` judges another framework's config where it stands. `show` and `plan` convert it in memory, and say what they
assumed. For a program, `lint` judges the config that the program names.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.errors import Finding
from dslpar.core.visible import visible
from dslpar.language.finder import PACKAGE
from dslpar.language.load import Config
from dslpar.language.source import read_source
from dslpar.linter import check

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster
    from dslpar.migrate.convert import Import
    from dslpar.migrate.foreign_lint import Model
    from dslpar.migrate.sources import Source

_SYNTAX, _FOREIGN, _PROGRAM = "CFG001", "CFG123", "CFG129"
_ALWAYS_FOREIGN = (".hjson",)
MODEL_HELP = "take the model from this dslpar config, or from this folder of Hugging Face, which has a config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --from and --model."""
    # By the files of the tables: every lint adds these flags, and the reader of tables imports tempfile.
    tables = os.listdir(os.path.join(PACKAGE, "migrate", "data"))
    names = tuple(sorted(name.removesuffix(".txt") for name in tables if name.endswith(".txt")))
    help = "the framework of the named files; default: detected from each file"
    parser.add_argument("--from", dest="source", choices=names, metavar="FRAMEWORK", help=help)
    help = f"for another framework's config without a model: {MODEL_HELP}"
    parser.add_argument("--model", metavar="FILE", help=help)


def is_foreign(config: Config, found: Sequence[Finding]) -> bool:
    """Return whether lint recognised a file as another framework's config, or as a program."""
    is_known = config.path.endswith(_ALWAYS_FOREIGN) or any(item.code in (_FOREIGN, _PROGRAM) for item in found)
    return is_known or _is_json_with_comments(config)


def _is_json_with_comments(config: Config) -> bool:
    """Return whether a JSON file is another framework's config once its comments are removed, as DeepSpeed does."""
    text = config.sources.get(config.path)
    if text is None or not config.path.endswith(".json") or not any(item.code == _SYNTAX for item in config.findings):
        return False
    from dslpar.migrate.registry import TABLES
    from dslpar.migrate.sources import read_text

    source = read_text(text, config.path)
    return source.config.complete and source.name in TABLES


def findings(
    config: Config,
    found: list[Finding],
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    world_size: int | None,
    cluster: Cluster | None,
    parts: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """Return the findings about another framework's config, or about the config that a program names.

    `parts`: further files of the same run, texts by path.
    """
    text = config.sources.get(config.path)
    if text is None:
        return found  # the file cannot be read
    if any(item.code == _PROGRAM for item in found) and not args.source:
        return _of_program(config, found, world_size, cluster)
    from dslpar.migrate.foreign_lint import lint_text  # few files get here

    model = model_of(args.model, parser, sizes=True)
    config.sources.update(parts)
    found = lint_text(text, config.path, world_size, cluster, args.source or "", model, parts)
    for path in {item.location.path for item in found} - config.sources.keys():
        if os.path.isfile(path):  # a file that the config names, such as DeepSpeed's JSON: findings show its lines
            config.sources[path] = read_source(path, {}).text
    return found


def parts_of(configs: Sequence[Config], named: Collection[str], source: str | None) -> tuple[str, Mapping[str, str]]:
    """Return the named config with which a framework merges the other named files, and these: texts by path.

    These are files in which no framework is recognised (GPT-NeoX's local_setup.yml); with --from, all other files.
    Without such files the config's path is empty.
    """
    from dslpar.language.load import YAML_ENDINGS

    files = [each for each in configs if each.path in named and each.path.endswith(YAML_ENDINGS)]
    if len(files) < 2 or (source is None and not any(map(_looks_merged, files))):
        return "", {}
    from dslpar.migrate.sources import MERGES

    names = {each.path: _framework(each) for each in files}
    main = next((path for path, name in names.items() if (source or name) in MERGES), "")
    is_part = {path: path != main and (source in MERGES or name == "") for path, name in names.items()}
    parts = {each.path: each.sources[each.path] for each in files if main and is_part[each.path]}
    return (main if parts else ""), parts


def _looks_merged(config: Config) -> bool:
    """Return whether a config has sections that dslpar does not have: most configs need no closer look."""
    from dslpar.schema.sections_reader import SECTIONS

    return not {*map(str, config.root.value)} <= {*SECTIONS, "resolved"}


def _framework(config: Config) -> str:
    """Return the name of a file's framework; "dslpar" for a config of dslpar, empty if it is unknown."""
    from dslpar.schema.frameworks import recognise

    if not _looks_merged(config):
        return "dslpar"
    found = recognise(config.root, config.path, ())
    return "" if found is None else found.name


def _of_program(config: Config, found: list[Finding], world_size: int | None, cluster: Cluster | None) -> list[Finding]:
    """Return the findings of the config that a program names, below a note; without such a file, what was found."""
    from dslpar.schema.python_programs import program_in  # few files get here

    text = config.sources[config.path]
    program = program_in(text, config.path, ())
    if program is not None and not program.is_ours:
        from dslpar.migrate.foreign_lint import lint_text
        from dslpar.migrate.sources import programs_in

        if made := programs_in(text, config.path):
            names, path = [each.name for each in made], config.path
            shown = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
            note = f"this is a Python program, and not a config; its {shown} are linted in its place"
            if made[0].framework == "megatron_bridge":
                what = f"what it changes in its recipe ({shown}) is linted"
                note = f"this is a Python program of Megatron-Bridge, and not a config; {what}"
            each = (lint_text(text, path, world_size, cluster, recipe=name) for name in names)
            return [*_noted(found, note), *dict.fromkeys(item for items in each for item in items)]
    if program is None or not program.config or not program.is_ours:
        return found
    beside = os.path.join(os.path.dirname(config.path), program.config)
    path = next((each for each in (beside, program.config) if os.path.isfile(each)), "")
    if not path:
        return found
    named = check.load(path)
    config.sources.update(named.sources)
    note = f"this is a Python program, and not a config; its config {path} is linted in its place"
    return [*_noted(found, note), *check.lint(named, world_size, cluster=cluster, by_program=True)]


def _noted(found: list[Finding], note: str) -> list[Finding]:
    return [item._replace(severity="info", message=note, help="") for item in found if item.code == _PROGRAM]


def model_of(name: str | None, parser: argparse.ArgumentParser, sizes: bool = False) -> Model | None:
    """Return the model section of the config or folder that --model names.

    `sizes`: of a folder, the sizes that all frameworks share, and not the class of transformers.
    """
    if name is None:
        return None
    from dslpar.migrate import model_folder
    from dslpar.migrate.foreign_lint import Model

    if file := model_folder.file_of(name):
        try:
            read = model_folder.read(file)
        except model_folder.ModelFolderError as error:
            parser.error(f"--model {name}: {error}")
        return Model(file, model_folder.sizes_of(read) if sizes else model_folder.section_of(read))
    config = check.load(name)
    node = config.root.value.get("model")
    if not config.complete or node is None or not node.is_mapping:
        parser.error(f"--model {name}: {config.findings[0].message if config.findings else 'it has no model'}")
    type_ = {} if node.target is None else {"type": node.target.name.removeprefix("dslpar.models.")}
    return Model(name, type_ | {str(key): child.plain() for key, child in node.value.items()})


class Converted(NamedTuple):
    """Another framework's config, converted in memory."""

    path: str
    """The path of the dslpar config, which ends with .py."""
    text: str
    """The text of the dslpar config."""
    source: Source
    model: Model | None

    @property
    def sources(self) -> Mapping[str, str]:
        """Texts of the source by path, for findings."""
        return self.source.config.sources

    def findings(
        self, found: Sequence[Finding], world_size: int | None, cluster: Cluster | None = None
    ) -> list[Finding]:
        """Return what lint finds in the source, and the errors found in the converted config, at the source's lines."""
        from dslpar.migrate.foreign_lint import at_source, lint_source

        linted = lint_source(self.source, world_size, cluster, self.model)
        ours = [at_source(item, linted.made, linted.places) for item in found if item.severity == "error"]
        seen = {(item.code, item.location) for item in linted.findings}
        ours = [item for item in ours if (item.code, item.location) not in seen]
        return [*(item for item in linted.findings if item.severity != "info"), *dict.fromkeys(ours)]


def one_run(
    paths: Sequence[str], args: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[str, Mapping[str, str]]:
    """Return the config of a run, and the other files with which its framework merges it: texts by path.

    Exits with a usage error if several files are not of one run.
    """
    if len(paths) == 1:
        return paths[0], {}
    main, parts = parts_of([check.load(path) for path in paths], paths, args.source)
    if len(parts) + 1 != len(paths):
        command = parser.prog.split()[-1]
        parser.error(f"{command} takes one config, not {len(paths)} (or the files that GPT-NeoX merges in one run)")
    return main, parts


def load(
    path: str,
    overrides: Sequence[str],
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    parts: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Config, Converted | None]:
    """Load a config; one of another framework is converted in memory, and a note says what was assumed.

    `parts`: further files of the same run, texts by path.
    """
    trusted = tuple(getattr(args, "trust", ()))
    plain = check.load(path, trusted=trusted)
    made = None if getattr(args, "program", False) else converted(path, args, parser, plain, parts)
    if made is None:
        return check.load(path, overrides, trusted=trusted) if overrides else plain, None
    return check.load_text(made.text, made.path, overrides)._replace(trusted=trusted), made


def converted(
    path: str,
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    config: Config | None = None,
    parts: Mapping[str, str] = MappingProxyType({}),
) -> Converted | None:
    """Convert another framework's config, and print what was assumed; None if the file is not such a config.

    `config`: the file, if it has been read. `parts`: further files of the same run, texts by path.
    """
    name = getattr(args, "source", None) or ""
    config = config or check.load(path)
    text = config.sources.get(path)
    if text is None or not (name or _is_config_of_others(config)):
        return None
    from dslpar.migrate import writer
    from dslpar.migrate.convert import convert
    from dslpar.migrate.registry import TABLES
    from dslpar.migrate.sources import merged, read_text

    source = merged(read_text(text, path, name), parts)
    if not source.config.complete or source.name not in TABLES:
        return None
    model = model_of(getattr(args, "model", None), parser)
    made = convert(source, model.section if model else None)
    sys.stderr.write(visible(_assumed(made, path, TABLES[source.name].title)) + "\n")
    return Converted(path if path.endswith(".py") else f"{path}.py", writer.file_of(made), source, model)


def _is_config_of_others(config: Config) -> bool:
    if config.path.endswith(_ALWAYS_FOREIGN):
        return True
    from dslpar.schema.sections_reader import SECTIONS

    if config.complete and not config.findings and {*map(str, config.root.value)} <= {*SECTIONS, "resolved"}:
        return False  # most configs are dslpar's own, and need not be linted twice
    from dslpar.language.finder import OURS
    from dslpar.linter.context import Context
    from dslpar.linter.rules.foreign import foreign_config
    from dslpar.migrate import sources
    from dslpar.schema import sections_reader

    text = config.sources.get(config.path, "")
    if config.path.endswith(".py") and sources.programs_in(text, config.path):
        return True
    if config.path.endswith(".py") and sources.recognise(config, text) in ("", OURS):
        return False
    # This rule alone: the whole lint follows, of what the file becomes.
    context = Context(config, sections_reader.read(config), forecasts=False)
    return any(True for _ in foreign_config.findings(context)) or _is_json_with_comments(config)


def _assumed(made: Import, path: str, title: str) -> str:
    from dslpar.migrate.foreign_lint import assumed

    added = ", ".join(assumed(made.entries)) or "nothing"
    note = f"{path} is a config of {title}, converted in memory (dslpar import writes it); assumed: {added}"
    needed = [entry for entry in made.entries if entry.fate == "needed"]
    parts = {
        "not converted": [entry.key for entry in needed if entry.key],
        "to be chosen": [entry.to for entry in needed if entry.to and not entry.key],
        "missing": [file for _, file in made.source.missing],
    }
    more = (f"; {title}: {', '.join(dict.fromkeys(names))}" for title, names in parts.items() if names)
    return note + "".join(more)
