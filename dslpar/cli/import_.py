"""`dslpar import FILE`: convert another framework's config to dslpar, and report on every key.

The config goes to stdout and the report to stderr. With `-o` the config goes to OUT and the report to stdout. Exit
status: 0 everything is converted, 1 the author must change something by hand, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys

from dslpar.cli import arguments
from dslpar.cli.foreign_files import MODEL_HELP, model_of
from dslpar.core.errors import has_errors
from dslpar.core.visible import visible
from dslpar.language.errors import ConfigError
from dslpar.language.finder import OURS
from dslpar.language.source import read_source
from dslpar.linter import check
from dslpar.linter.problem import UnknownValueError
from dslpar.linter.report import text as report_text
from dslpar.migrate import others, report, writer
from dslpar.migrate.convert import Import, convert, refused
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import MERGES, REFUSED, Source, merged, read_text, recipes_of
from dslpar.migrate.table import Epoch

EPILOG = """\
The converted config goes to stdout and the report to stderr; with -o, the config to OUT and the
report to stdout.

exit status: 0 everything is converted, 1 you must change something (see the report), 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    add, number = parser.add_argument, arguments.whole_number
    add(
        "file",
        metavar="FILE",
        help="a config of a framework, such as ColossalAI (.py), DeepSpeed (.json), Accelerate (.yaml), "
        "torchtitan (.toml) or Megatron-LM (.sh)",
    )
    help = "further files that the framework merges with FILE, as GPT-NeoX does (local_setup.yml)"
    add("others", nargs="*", metavar="FILE", help=help)
    add("-o", "--output", dest="out", metavar="OUT", help="the file to write; default: -, stdout")
    names = ", ".join(TABLES)
    add(
        "--from",
        dest="source",
        choices=tuple(TABLES),
        metavar="FRAMEWORK",
        help=f"the config's framework: {names}; default: detected from FILE",
    )
    add("--recipe", metavar="NAME", help="the function of FILE whose config to import; default: the first one")
    add("--model", metavar="FILE", help=MODEL_HELP)
    add("--world-size", type=number, metavar="N", help="lint the result for this number of ranks")
    add("--num-samples", type=number, metavar="N", help="number of samples in the data, to convert epochs to steps")
    arguments.add_format(parser)
    add("--force", action="store_true", help="overwrite OUT")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the config and the report; return 1 if the author must change something, or lint finds errors."""
    args.out = None if args.out == "-" else args.out
    if args.out and os.path.lexists(args.out) and not args.force:
        parser.error(f"{args.out} exists: choose another name, or --force")
    source, given = _source(args, parser), model_of(args.model, parser)
    model = given.section if given else None
    made = convert(source, model)
    if args.num_samples:
        if convert(source, model, Epoch(args.num_samples, 1)).entries == made.entries:
            sys.stderr.write(visible(f"note: --num-samples has no effect: {args.file} counts no epochs") + "\n")
        else:
            open_keys = _open_sizes(made)
            made = _postponed(made, open_keys) if open_keys else convert(source, model, _epoch(made, args, parser))
    text = writer.file_of(made)
    config = check.load_text(text, args.out or "<imported>.py")
    findings = check.lint(config, args.world_size)
    _write(text, args, parser)
    out = sys.stdout if args.out else sys.stderr
    if args.format == "json":
        out.write(report.as_json(made, args.out, findings))
    else:
        out.write(report.text(made, args.out) + "lint of the result:\n" + report_text.text(findings, config.sources))
    return int(made.needs_you or has_errors(findings))


def _source(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Source:
    """Evaluate FILE; exit with a usage error if it is not a config of a supported framework."""
    try:
        text = read_source(args.file, {}).text
    except ConfigError as error:
        parser.error(error.message)
    _refuse_others(text, args)
    source = _read(text, args, parser)
    if not source.config.complete:
        arguments.print_findings(refused(source), {args.file: text})
        parser.error(f"cannot read {args.file}")
    if source.name == OURS:
        parser.error(f"{args.file} is already a dslpar config: there is nothing to import (if it is not, use --from)")
    if not source.name:
        parser.error(f"cannot detect the framework of {args.file}: give --from {', '.join(TABLES)}")
    return _with_others(source, args, parser)


def _with_others(source: Source, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Source:
    """Return the source with the keys of the further files; exit with a usage error if a key is in two files."""
    if not args.others:
        return source
    if source.name not in MERGES:
        parser.error(f"{TABLES[source.name].title} reads one config, not {1 + len(args.others)}: import each by itself")
    try:
        texts = {path: read_source(path, {}).text for path in args.others}
    except ConfigError as error:
        parser.error(error.message)
    source = merged(source, texts)
    twice = [item for item in source.config.findings if item.code == REFUSED]
    if twice or not source.config.complete:
        arguments.print_findings(twice or refused(source), source.config.sources)
        sys.exit(2)
    return source


def _read(text: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Source:
    """Read the text of FILE, of its functions the one that --recipe names."""
    if args.recipe:
        names = [recipe.name for recipe in recipes_of(text, args.file)] if args.file.endswith(".py") else []
        if args.recipe not in names:
            has = f"it has {', '.join(names)}" if names else "it has no function that returns a config"
            parser.error(f"--recipe: no function {args.recipe!r} in {args.file}: {has}")
    return read_text(text, args.file, args.source or "", args.recipe or "")


def _refuse_others(text: str, args: argparse.Namespace) -> None:
    """Exit with status 2 if FILE is of a framework that dslpar recognises and does not convert, or is a program."""
    found = others.finding_about(text, args.file)
    if found is not None:
        arguments.print_findings([found], {args.file: text})
        sys.exit(2)


def _open_sizes(made: Import) -> list[str]:
    """Return the keys that determine the samples of a step and that neither the source nor a default of it sets."""
    asked = [entry.to for entry in made.entries if entry.fate == "needed"]
    sizes = [key for key in asked if key.partition(".")[0] in ("batch", "parallel")]
    known = any(key in made.values for key in ("batch.micro_size", "batch.global_size"))
    return list(dict.fromkeys(sizes)) or ([] if known else ["batch.micro_size"])


def _postponed(made: Import, keys: list[str]) -> Import:
    """Return the import with its epochs unconverted, since dslpar's defaults are no sizes of the source."""
    help_ = f"{' and '.join(keys)} must be known first: settle it in the source"
    entries = (entry._replace(why=entry.why.replace("give --num-samples N", help_)) for entry in made.entries)
    return made._replace(entries=tuple(entries))


def _epoch(made: Import, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Epoch:
    """Return the size of an epoch in samples (--num-samples), with the number of samples per step of the result."""
    layout = check.check(check.load_text(writer.file_of(made), "<imported>.py"), args.world_size).context.layout
    try:
        size = layout.requested_batch.global_size or layout.batch.global_size
    except UnknownValueError:
        hint = "--world-size N may help" if args.world_size is None else f"write the batch sizes into {args.file}"
        parser.error(f"--num-samples: the number of samples per step is unknown; {hint}")
    return Epoch(args.num_samples, size)


def _write(text: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.out:
        sys.stdout.write(text)
        return
    try:
        with open(args.out, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        parser.error(f"cannot write {args.out}: {error.strerror}")
