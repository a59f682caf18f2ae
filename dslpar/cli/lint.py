"""`dslpar lint CFG...`: all findings of configs, before anything starts.

What one format or flag alone needs (GitHub's commands, SARIF, folders, fixes) is imported where it is asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping

from dslpar.cli import arguments as cli_arguments
from dslpar.core.errors import Finding
from dslpar.core.named_tuple import NamedTuple
from dslpar.language.load import Config
from dslpar.linter import check
from dslpar.linter.report import text as report_text

EPILOG = """\
A folder stands for the configs below it: *.py, *.yaml and *.yml that give `model` or `parallel`, or two other
sections. What such a config imports and has no model of its own is linted as a part of it. Hidden folders, virtual
environments and `outputs` are left out. `-` is a config from stdin.

CODES are codes, names or first letters of codes (PERF, TEN2), with commas between. The most precise one decides, and
of equals --ignore. What was not looked at (CFG001, CFG005, CFG009, CFG111, CFG112) is told whatever --select names.
--ignore leaves a finding out of this report alone: launch and training do not know it, and nothing wrong starts.

In a config, `# dslpar: ignore[CODE] reason` silences warnings and infos that begin or end on its line, and
`# dslpar: ignore-file[CODE]` those of the whole file; launch and training obey as well. Errors stay.

--fix changes what is certain to be meant (misspelt keys, the case of a choice, idle comments) in the files and folders
that are named, not in what they import from elsewhere; a change that would bring another error is not made. With
--statistics, text and concise end with a count of each code, and json is that count alone. Colour: --color, else
NO_COLOR, FORCE_COLOR or CLICOLOR_FORCE, else on a terminal other than `dumb`.

Exit status: 0 no errors, 1 errors (with --strict warnings too; with --diff something to fix), 2 the command line is
wrong, or names no config. With --fix, what is left counts.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.epilog = EPILOG
    cli_arguments.config_argument(parser, several=True)
    cli_arguments.world_arguments(parser)
    add = parser.add_argument
    choices = ("text", "concise", "json", "github", "sarif")
    add("--format", choices=choices, default="text", help="default: %(default)s")
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: %(default)s")
    add("--select", action="append", default=[], metavar="CODES", help="report these rules alone")
    add("--ignore", action="append", default=[], metavar="CODES", help="leave these rules out of the report")
    add("--strict", action="store_true", help="exit with 1 on warnings too")
    add("--statistics", action="store_true", help="count the findings of each rule")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--fix", action="store_true", help="write changes that are certain to be meant")
    change.add_argument("--diff", action="store_true", help="show what --fix would change, and write nothing")
    add("--configs-only", action="store_true", help="pass over named files that are no configs, as in folders")
    add("--stdin-filename", metavar="FILE", help="what `-` goes by; its imports are found beside FILE")
    add("--verbose", action="store_true", help="say which files were passed over, and why")


class Linted(NamedTuple):
    """One config and what the report says of it."""

    config: Config
    findings: list[Finding]


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the findings; 1 if there are errors."""
    sources: dict[str, str] = {}
    cluster = cli_arguments.cluster(args, parser, sources)
    holds = _selection(args, parser)

    def findings_of(config: Config) -> list[Finding]:
        return [item for item in check.lint(config, args.world_size, cluster=cluster) if holds(item.code)]

    if args.statistics and args.format in ("github", "sarif"):
        parser.error(f"--statistics goes with text, concise and json, not with {args.format}")
    texts = cli_arguments.stdin_texts(args, parser)
    loaded, note = _configs(args, parser, texts)
    batch = [Linted(config, findings_of(config)) for config in loaded]
    changed = False
    if args.fix or args.diff:
        from dslpar.cli import fix

        batch, changed = fix.run(args, batch, findings_of, texts)
    for config, _ in batch:
        sources |= config.sources
    findings = list(dict.fromkeys(item for each in batch for item in each.findings))  # the world's are each config's
    bad = ("error", "warning") if args.strict else ("error",)
    status = int(any(finding.severity in bad for finding in findings) or (args.diff and changed))
    paths = [config.path for config, _ in batch]
    out = sys.stderr if args.diff or (args.fix and texts) else sys.stdout  # stdout has the diff, or the fixed text
    color = report_text.wants_color(args.color, out.isatty(), os.environ)
    out.write(_report(args, findings, sources, paths, status, color) + (note if args.format == "text" else ""))
    return status


def _report(
    args: argparse.Namespace,
    findings: list[Finding],
    sources: Mapping[str, str],
    paths: list[str],
    status: int,
    color: bool,
) -> str:
    """The findings in the format that was asked for."""
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
    """Which codes the report holds."""
    if not (args.select or args.ignore):
        return lambda code: True
    from dslpar.linter.selection import selection

    try:
        return selection(args.select, args.ignore).holds
    except ValueError as error:
        parser.error(str(error))


def _configs(
    args: argparse.Namespace, parser: argparse.ArgumentParser, texts: Mapping[str, str]
) -> tuple[list[Config], str]:
    """The configs that were named, or stand below named folders; and a line that says how many files were read."""
    paths = [cli_arguments.stdin_name(args) if path == "-" else path for path in cli_arguments.paths(args, parser)]
    if not (args.configs_only or any(os.path.isdir(path) for path in paths)):
        return [check.load(path, cli_arguments.overrides(args), texts) for path in paths], ""
    from dslpar.linter import config_files

    found = [file for path in paths for file in (config_files.files_below(path) if os.path.isdir(path) else (path,))]
    loaded = [
        check.load(path, cli_arguments.overrides(args), texts) for path in dict.fromkeys(map(os.path.normpath, found))
    ]
    named = () if args.configs_only else map(os.path.normpath, paths)
    over = {path: why for path, why in config_files.passed_over(loaded).items() if path not in set(named)}
    if args.verbose:
        sys.stderr.write("".join(f"passed over {path}: {why}\n" for path, why in over.items()))
    kept = [config for config in loaded if config.path not in over]
    if not kept and not args.configs_only:
        parser.error(f"there is no config in {', '.join(paths)}; {_counted(len(over), 'file')} passed over")
    return kept, f"{_counted(len(kept), 'config')} linted, {_counted(len(over), 'file')} passed over\n"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
