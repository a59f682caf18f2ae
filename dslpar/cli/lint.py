"""`dslpar lint CFG...`: all findings of configs, before anything starts.

What only one format or flag needs (GitHub's commands, SARIF, folders, fixes) is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dslpar.cli import arguments
from dslpar.core.errors import Finding
from dslpar.language.load import Config
from dslpar.linter import check
from dslpar.linter.report import text as report_text

if TYPE_CHECKING:
    from dslpar.cli.fix import Linted

STDIN = "stdin.py"
"""The name of a config from stdin, unless --stdin-filename gives another; its ending tells Python from YAML."""

EPILOG = """\
A folder stands for the configs below it: the *.py, *.yaml and *.yml files that define `model` or
`parallel`, or two other sections. A file without a model that such a config imports is linted as a
part of it. Hidden folders, virtual environments and `outputs` are skipped. `-` is a config from
stdin.

CODES are codes, names or beginnings of codes (PERF, TEN2), separated by commas. The most specific
one decides, and --ignore wins a tie. Findings about what could not be checked (CFG001, CFG005,
CFG009, CFG111, CFG112) are reported whatever --select names. --ignore affects this report only:
launch and training ignore nothing, so nothing wrong starts.

In a config, `# dslpar: ignore[CODE] reason` silences warnings and infos that begin or end on its
line, and `# dslpar: ignore-file[CODE]` those of the whole file, in launch and training as well.
Errors cannot be silenced.

--fix changes what has one certain correction (misspelt keys, the case of a choice, idle comments),
in the named files and folders but not in files they import from elsewhere; a change that would
cause another error is not made. With --statistics, the text and concise formats end with a count of
each code, and json is that count only. Colour is decided by --color, else by NO_COLOR, FORCE_COLOR
or CLICOLOR_FORCE, else it is on for a terminal other than `dumb`.

exit status: 0 no errors, 1 errors (with --strict also warnings; with --diff also something to fix),
2 wrong usage or no config. With --fix, what is left counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    help = "config files, folders of them, or `-` for stdin; and overrides of their keys"
    arguments.add_operands(parser, help=help)
    arguments.add_world(parser)
    arguments.add_format(parser, "text", "concise", "json", "github", "sarif")
    add = parser.add_argument
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: %(default)s")
    add("--select", action="append", default=[], metavar="CODES", help="report only these rules")
    add("--ignore", action="append", default=[], metavar="CODES", help="leave these rules out of the report")
    add("--strict", action="store_true", help="exit with 1 on warnings too")
    add("--statistics", action="store_true", help="count the findings of each rule")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--fix", action="store_true", help="make the changes that are certain to be meant")
    change.add_argument("--diff", action="store_true", help="print what --fix would change, and write nothing")
    add("--configs-only", action="store_true", help="skip named files that are not configs, as in folders")
    add("--stdin-filename", metavar="FILE", help="name of the config from stdin; it finds its imports beside FILE")
    add("--verbose", action="store_true", help="print which files were skipped, and why")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the findings; return 1 if there are errors."""
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    selected = _selection(args, parser)

    def findings_of(config: Config) -> list[Finding]:
        return [item for item in check.lint(config, args.world_size, cluster=cluster) if selected(item.code)]

    if args.statistics and args.format in ("github", "sarif"):
        parser.error(f"--statistics goes with text, concise and json, not with {args.format}")
    stdin = _read_stdin(args, parser)
    paths = [args.stdin_filename or STDIN if path == "-" else path for path in arguments.config_paths(args, parser)]
    configs, note = _load_configs(args, parser, paths, stdin)
    batch: list[Linted] = [(config, findings_of(config)) for config in configs]
    changed = False
    if args.fix or args.diff:
        from dslpar.cli.fix import Fixer

        fixer = Fixer(findings_of, arguments.overrides(args), stdin)
        batch, changed = fixer.run(batch, paths, write=args.fix)
    for config, _ in batch:
        sources |= config.sources
    # Several configs share findings: those of the world, of the hosts, and of files that they all import.
    findings = list(dict.fromkeys(item for _, found in batch for item in found))
    fatal = ("error", "warning") if args.strict else ("error",)
    status = int(any(finding.severity in fatal for finding in findings) or (args.diff and changed))
    out = sys.stderr if args.diff or (args.fix and stdin) else sys.stdout  # stdout has the diff, or the fixed text
    color = report_text.wants_color(args.color, out.isatty(), os.environ)
    report = _report(args, findings, sources, [config.path for config, _ in batch], status, color)
    out.write(report + (note if args.format == "text" else ""))
    return status


def _report(
    args: argparse.Namespace,
    findings: list[Finding],
    sources: Mapping[str, str],
    paths: list[str],
    status: int,
    color: bool,
) -> str:
    """Return the findings in the requested format."""
    if args.format == "github":
        from dslpar.linter.report.github import github

        return github(findings, os.environ)
    if args.format == "sarif":
        from dslpar.linter.report.sarif import sarif

        return sarif(findings, sources, paths, status, os.environ)
    if args.statistics and args.format == "json":
        import json

        return json.dumps(report_text.statistics(findings), indent=2) + "\n"
    text = report_text.FORMATS[args.format](findings, sources, color)
    return text + (report_text.table(findings) if args.statistics else "")


def _selection(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Callable[[str], bool]:
    """Return whether the report has findings of a code."""
    if not (args.select or args.ignore):
        return lambda code: True
    from dslpar.linter.selection import Selection

    try:
        return Selection.parse(args.select, args.ignore).includes
    except ValueError as error:
        parser.error(str(error))


def _read_stdin(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the text on stdin, if `-` is among the operands, under the real path of the name it goes by."""
    if "-" not in args.operands:
        if args.stdin_filename:
            parser.error("--stdin-filename goes with `-`")
        return {}
    if len(arguments.config_paths(args, parser)) > 1:
        parser.error("`-` cannot be combined with other configs")
    from dslpar.language.limits import MAX_SOURCE_BYTES

    data = sys.stdin.buffer.read(MAX_SOURCE_BYTES + 1)
    try:
        return {os.path.realpath(args.stdin_filename or STDIN): data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        parser.error(f"stdin is not UTF-8: {error.reason} at byte {error.start}")


def _load_configs(
    args: argparse.Namespace, parser: argparse.ArgumentParser, paths: list[str], texts: Mapping[str, str]
) -> tuple[list[Config], str]:
    """Load the configs that are named or below named folders; return them and a line that counts the files."""
    overrides = arguments.overrides(args)
    if not (args.configs_only or any(os.path.isdir(path) for path in paths)):
        return [check.load(path, overrides, texts) for path in paths], ""
    from dslpar.linter import config_files

    files = [file for path in paths for file in (config_files.files_below(path) if os.path.isdir(path) else (path,))]
    loaded = [check.load(path, overrides, texts) for path in dict.fromkeys(map(os.path.normpath, files))]
    named = () if args.configs_only else map(os.path.normpath, paths)
    skipped = {path: why for path, why in config_files.skipped(loaded).items() if path not in set(named)}
    if args.verbose:
        sys.stderr.write("".join(f"skipped {path}: {why}\n" for path, why in skipped.items()))
    kept = [config for config in loaded if config.path not in skipped]
    if not kept and not args.configs_only:
        parser.error(f"no config in {', '.join(paths)}; {_count(len(skipped), 'file')} skipped")
    return kept, f"{_count(len(kept), 'config')} linted, {_count(len(skipped), 'file')} skipped\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
