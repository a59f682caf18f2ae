"""`dslpar lint CFG...`: report all findings about configs before anything starts.

The modules of SARIF and of fixes, which import much, are imported when needed, so that lint starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from dslpar.cli import arguments, foreign_files, lint_targets
from dslpar.core.errors import Finding
from dslpar.core.project import Project, add_trust, matches
from dslpar.core.visible import json_text, visible
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.load import Config
from dslpar.linter import check, config_files
from dslpar.linter.report import text as report_text
from dslpar.linter.report.github import github
from dslpar.linter.selection import Selection

if TYPE_CHECKING:
    from dslpar.cli.lint_fix import Linted
    from dslpar.cluster.hostfile import Cluster

STDIN = "stdin.py"
"""The file name of a config from stdin if --stdin-filename is missing. The suffix means that the text is Python."""

EPILOG = """\
A folder means all configs below it: the *.py, *.yaml and *.yml files that define `model` or
`parallel`, or two other sections, one of them as a dict. If a config with a model imports a file
without one, the file is linted as a part of that config. Hidden folders, virtual environments and
`outputs` are skipped.
`-` reads a config from stdin. Without a config, this folder is linted.

A config needs a model, unless your program passes it with dslpar.initialize(config, model=...). For
such configs use --program: a missing model is then no error, and a note says that rules which need
the model are skipped. Names in capitals then belong to the program. Configs with a model are linted
as usual.

A named config of another framework (DeepSpeed's JSON, GPT-NeoX's YAML, a script of Megatron-LM, and
the others that `dslpar import` reads) is linted where it stands, at its own lines and in its own
names. A named Python program is linted by the config that it names, if there is such a file.

CODES are codes, names or prefixes of codes (PERF, TEN2), separated by commas. The most specific one
decides, and --ignore wins a tie. Findings about files or rules that could not be checked (CFG001,
CFG005, CFG009, CFG111, CFG112) are reported whatever --select names. --ignore affects this report
only: launch and training ignore nothing, so that invalid configs never start.

[tool.dslpar] of the nearest pyproject.toml, in a config's folder or above it, may have select,
ignore, per-file-ignores, exclude and world-size (a number, or numbers by pattern). --select,
--exclude and --world-size override these keys, and --ignore adds to them. Configs may call the
packages in --trust, and in `trusted` of the pyproject.toml that applies to the folder you work in,
never of one that came with a config.

In a config, `# dslpar: ignore[CODE] reason` silences warnings and infos that begin or end on its
line, and `# dslpar: ignore-file[CODE]` those of the whole file, in launch and training as well.
Errors cannot be silenced.

--fix corrects findings that have only one possible correction (misspelt keys, the case of a choice,
unused ignore comments). It changes the named files and folders, but no files that they import from
elsewhere, and makes no change that would cause another error. With --statistics the text and
concise formats end with counts per code, and json has only these counts. --color decides about
colours, else NO_COLOR, FORCE_COLOR or CLICOLOR_FORCE; else they are on for terminals except `dumb`.

exit status: 0 no errors, 1 errors (with --strict also warnings; with --diff also fixable findings;
with --targets also refused targets), 2 wrong usage, invalid settings or no config. With --fix only
the remaining findings count.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    help = "config files, folders, or `-` for stdin (default: this folder); and overrides of the configs' keys"
    arguments.add_operands(parser, help=help, nargs="*")
    arguments.add_world(parser, exclude="; without --hostfile: skip these files and folders (old,tmp_*.py)")
    arguments.add_program(parser)
    foreign_files.add_arguments(parser)
    add_trust(parser)
    arguments.add_format(parser, "text", "concise", "json", "github", "gitlab", "sarif")
    add = parser.add_argument
    add("--output-file", metavar="FILE", help="write the report to FILE; default: -, stdout")
    add("--color", choices=("auto", "always", "never"), default="auto", help="color the report; default: %(default)s")
    add("--select", action="append", default=[], metavar="CODES", help="report only these rules")
    add("--ignore", action="append", default=[], metavar="CODES", help="leave these rules out of the report")
    status = parser.add_mutually_exclusive_group()
    status.add_argument("--strict", action="store_true", help="exit with 1 on warnings, too")
    status.add_argument("--exit-zero", action="store_true", help="exit with 0 even if there are errors")
    add("--statistics", action="store_true", help="print the number of findings per rule")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--fix", action="store_true", help="fix findings that have only one possible correction")
    change.add_argument("--diff", action="store_true", help="print the changes of --fix as a diff, and write nothing")
    change.add_argument("--show-files", action="store_true", help="list the files that would be linted, and stop")
    help = "list each class and function that a run would import or call, with what allows it, and stop"
    change.add_argument("--targets", action="store_true", help=help)
    add("--configs-only", action="store_true", help="skip named files that are excluded or not configs, as in folders")
    add("--stdin-filename", metavar="FILE", help="file name of the config on stdin; its imports are found beside FILE")
    add("--verbose", action="store_true", help="list the files that were skipped, and why")
    add("-q", "--quiet", action="store_true", help="print only findings, without counts")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the findings; return 1 if there are errors. The epilog above describes all exit statuses."""
    sources: dict[str, str] = {}
    args.output_file = None if args.output_file == "-" else args.output_file
    settings = _Settings(args, parser)
    cluster = arguments.load_cluster(args, parser, sources)

    def findings_of(config: Config) -> list[Finding]:
        if config.path in parts:
            return []  # it is linted with the config that it is a part of
        includes, world_size = settings.selection_of(config.path), settings.world_size_of(config.path)
        found = check.lint(config, world_size, cluster=cluster, by_program=args.program)
        if config.path in named and (args.source or foreign_files.is_foreign(config, found)):
            others = parts if config.path == main else {}
            found = foreign_files.findings(config, found, args, parser, world_size, cluster, others)
        return [item for item in found if includes(item)]

    if args.statistics and args.format in ("github", "gitlab", "sarif"):
        parser.error(f"--statistics goes with text, concise and json, not with {args.format}")
    stdin = _read_stdin(args, parser)
    args.operands = args.operands or ["."]
    paths = [args.stdin_filename or STDIN if path == "-" else path for path in arguments.config_paths(args, parser)]
    # In a folder, only dslpar's configs are linted; a config of another framework is linted if it is named.
    named = set() if args.configs_only else {path for path in paths if not os.path.isdir(path)}
    named |= {os.path.normpath(path) for path in named}
    configs, note = _load_configs(args, parser, paths, stdin, settings)
    main, parts = foreign_files.parts_of(configs, named, args.source)
    if args.show_files or args.targets:
        return _listing(args, parser, configs)
    batch: list[Linted] = [(config, findings_of(config)) for config in configs]
    changed = False
    if args.fix or args.diff:
        from dslpar.cli.lint_fix import Fixer  # imports tempfile, with the modules of compression

        fixer = Fixer(findings_of, arguments.overrides(args), stdin, args.trust)
        batch, changed = fixer.run(batch, paths, write=args.fix)
    for config, _ in batch:
        sources |= config.sources
    # Several configs share findings: those of the world, of the hosts, and of files that they all import.
    owners: dict[Finding, Config] = {}
    for config, found in batch:
        owners.update({item: config for item in found if item not in owners})
    findings = list(owners)
    if args.format in ("json", "sarif") and findings and not args.statistics:
        findings = _with_related(owners, settings, cluster, args.program)
    fatal = ("error", "warning") if args.strict else ("error",)
    wrong = any(finding.severity in fatal for finding in findings) or (args.diff and changed)
    status = int(wrong and not args.exit_zero)
    out = sys.stderr if args.diff or (args.fix and stdin) else sys.stdout  # then stdout has the diff or the fixed text
    color = report_text.wants_color(args.color, out.isatty() and not args.output_file, os.environ)
    report = _report(args, findings, sources, [config.path for config, _ in batch], status, color)
    report += note if args.format == "text" and not args.quiet else ""
    _write(report, args, parser, out)
    return status


def _with_related(
    owners: Mapping[Finding, Config], settings: _Settings, cluster: Cluster | None, by_program: bool
) -> list[Finding]:
    """Return the findings with the places of the other values that they name, each in the first config that has it."""
    from dslpar.linter.related import RelatedPlaces  # other formats show no places

    related: dict[str, RelatedPlaces] = {}
    made = []
    for item, config in owners.items():
        if config.path not in related:
            size = settings.world_size_of(config.path)
            related[config.path] = RelatedPlaces(check.context_of(config, size, cluster, by_program=by_program))
        made.append(item._replace(related=related[config.path].of(item)))
    return made


class _Settings:
    """Settings from the flags, and from the `[tool.dslpar]` tables that apply to configs (a config's project).

    Each folder's project is looked up once.
    """

    def __init__(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        self.args, self.parser = args, parser
        self.projects: dict[str, Project | None] = {}
        self.selections: dict[str, Selection] = {}
        self.patterns: tuple[str, ...] = ()
        """Patterns of --exclude. Without --hostfile, the flag excludes files instead of hosts."""
        if args.hostfile is None and args.exclude is not None:
            self.patterns, args.exclude = tuple(filter(None, map(str.strip, args.exclude.split(",")))), None
        self.project_of("./")  # this folder's `trusted` applies: if it is invalid, nothing is linted

    def project_of(self, path: str) -> Project | None:
        """Return the settings that apply to a file or folder."""
        folder = os.path.dirname(path)
        if folder not in self.projects:
            self.projects[folder] = arguments.project_in(folder)
        return self.projects[folder]

    def excludes(self, path: str) -> bool:
        """Return whether a file or folder is excluded, by --exclude or by its project."""
        if self.patterns:
            return matches(path, self.patterns)
        project = self.project_of(path)
        return project is not None and project.excludes(path)

    def world_size_of(self, path: str) -> int | None:
        """Return the number of ranks to lint a config for."""
        size: int | None = self.args.world_size
        project = self.project_of(path) if size is None and self.args.hostfile is None else None
        return project.world_size_of(path) if project else size

    def selection_of(self, config: str) -> Callable[[Finding], bool]:
        """Return a function that tells whether the report includes a finding of this config or of its imports."""
        args, project = self.args, self.project_of(config)
        if not (args.select or args.ignore or project):
            return lambda finding: True

        key = project.path if project else ""
        if key not in self.selections:
            try:
                self.selections[key] = Selection.parse(args.select, args.ignore, project)
            except ValueError as error:
                self.parser.error(str(error))

        def includes(finding: Finding) -> bool:
            file = config if finding.location.path.startswith("<") else finding.location.path
            return self.selections[key].includes(finding.code, project.ignored_in(file) if project else ())

        return includes


def _listing(args: argparse.Namespace, parser: argparse.ArgumentParser, configs: list[Config]) -> int:
    """Print the files that would be linted, or the targets that a run of them would import and call."""
    if args.show_files:
        _write("".join(visible(config.path) + "\n" for config in configs), args, parser, sys.stdout)
        return 0
    if args.format not in ("text", "json"):
        parser.error(f"--targets has the formats text and json, not {args.format}")

    report, refused = lint_targets.listing(configs, args.format)
    # Parts that could not be evaluated may call anything, so errors are printed and count.
    unread = [item for config in configs for item in config.findings if item.severity == "error"]
    arguments.print_findings(unread, {path: text for config in configs for path, text in config.sources.items()})
    _write(report, args, parser, sys.stdout)
    return int((refused or bool(unread)) and not args.exit_zero)


def _write(report: str, args: argparse.Namespace, parser: argparse.ArgumentParser, out: TextIO) -> None:
    """Write the report to --output-file, else to `out`."""
    if not args.output_file:
        out.write(report)
        return
    try:
        with open(args.output_file, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
    except OSError as error:
        parser.error(f"cannot write {args.output_file}: {error.strerror}")


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
        return github(findings, os.environ)
    if args.format == "gitlab":
        from dslpar.linter.report.gitlab import gitlab

        return gitlab(findings, sources, paths, os.environ)
    if args.format == "sarif":
        from dslpar.linter.report.sarif import sarif  # imports hashlib and urllib

        return sarif(findings, sources, paths, status, os.environ)
    if args.statistics and args.format == "json":
        return json_text(report_text.statistics(findings))
    if args.quiet and args.format == "text":
        return "\n".join(report_text.block(finding, sources, color) + "\n" for finding in findings)
    text = report_text.FORMATS[args.format](findings, sources, color)
    return text + (report_text.table(findings) if args.statistics else "")


def _read_stdin(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the text on stdin by the real path of its file name; empty if `-` is not among the operands."""
    if "-" not in args.operands:
        if args.stdin_filename:
            parser.error("--stdin-filename goes with `-`")
        return {}
    if len(arguments.config_paths(args, parser)) > 1:
        parser.error("`-` cannot be combined with other configs")

    data = sys.stdin.buffer.read(MAX_SOURCE_BYTES + 1)
    try:
        return {os.path.realpath(args.stdin_filename or STDIN): data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        parser.error(f"stdin is not UTF-8: {error.reason} at byte {error.start}")


def _load_configs(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    paths: list[str],
    texts: Mapping[str, str],
    settings: _Settings,
) -> tuple[list[Config], str]:
    """Load the configs that are named, or that are below named folders; return them, and a line that counts the files.

    `texts`: the text on stdin, by real path. The line is empty if only files are named.
    """
    overrides = arguments.overrides(args)
    if not (args.configs_only or any(os.path.isdir(path) for path in paths)):
        return [check.load(path, overrides, texts, args.trust) for path in paths], ""
    excluded = settings.excludes
    files = [
        file
        for path in paths
        for file in (config_files.files_below(path, excluded) if os.path.isdir(path) else (path,))
        if not (args.configs_only and excluded(file))
    ]
    loaded = [check.load(path, overrides, texts, args.trust) for path in dict.fromkeys(map(os.path.normpath, files))]
    named = () if args.configs_only else map(os.path.normpath, paths)
    skipped = {path: why for path, why in config_files.skipped(loaded).items() if path not in set(named)}
    if args.verbose:
        sys.stderr.write("".join(visible(f"skipped {path}: {why}") + "\n" for path, why in skipped.items()))
    kept = [config for config in loaded if config.path not in skipped]
    if not kept and not args.configs_only:
        parser.error(f"no config in {', '.join(paths)}; {_count(len(skipped), 'file')} skipped")
    return kept, f"{_count(len(kept), 'config')} linted, {_count(len(skipped), 'file')} skipped\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
