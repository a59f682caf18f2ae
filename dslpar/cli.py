"""The commands: `dslpar lint`, `dslpar explain`, `dslpar show`.

Each imports what it needs inside, so that lint starts in a blink. Flags and `key=value` overrides may stand anywhere.
Exit status: 0 nothing wrong, 1 errors found (with --strict warnings too), 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from dslpar.config.load import Config
    from dslpar.errors import Finding
    from dslpar.hostfile import Cluster


class Command(NamedTuple):
    """One command: what it does, its arguments, and its run."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(
        prog="dslpar",
        description="Lint, show and explain how a model is spread over a cluster.",
        epilog="commands:\n" + "".join(f"  {name:10}{command.help}\n" for name, command in COMMANDS.items()),
        formatter_class=_formatter,
        usage="dslpar COMMAND ... (dslpar COMMAND --help says more)",
    )
    top.add_argument("--version", action="store_true", help="print the version and stop")
    if not words or words[0] not in COMMANDS:
        return _no_command(top, words)
    command = COMMANDS[words[0]]
    parser = argparse.ArgumentParser(prog=f"dslpar {words[0]}", description=command.help, formatter_class=_formatter)
    command.arguments(parser)
    return command.run(parser.parse_intermixed_args(words[1:]), parser)


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Of a fixed width: to ask the terminal, argparse would load every compression of the standard library."""
    return argparse.RawDescriptionHelpFormatter(prog, width=100)


def _no_command(top: argparse.ArgumentParser, words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        from dslpar.read import did_you_mean

        top.error(f"no command {words[0]!r}; " + (did_you_mean(words[0], COMMANDS) or f"one of {', '.join(COMMANDS)}"))
    if top.parse_args(words).version:
        from dslpar import __version__

        print(f"dslpar {__version__}")
        return 0
    top.print_help()
    return 2


# lint -------------------------------------------------------------------------------------------------------------


def _lint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="CFG or key=value", help="config files, overrides of their keys")
    _world_arguments(parser)
    parser.add_argument("--format", choices=("text", "concise", "json"), default="text", help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings too")


def _lint(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar.linter import book, formats

    findings: list[Finding] = []
    sources: dict[str, str] = {}
    cluster = _cluster(args, parser, sources)
    for config in _configs(args, parser):
        findings += book.lint(config, args.world_size, cluster)
        sources |= config.sources
    findings = list(dict.fromkeys(findings))  # what is true of the world is true of each config
    sys.stdout.write(formats.FORMATS[args.format](findings, sources))
    bad = ("error", "warning") if args.strict else ("error",)
    return int(any(finding.severity in bad for finding in findings))


# explain ----------------------------------------------------------------------------------------------------------


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="code or name of a rule, such as PAR101")


def _explain(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar.linter.book import codes, page_of

    page = page_of(args.code)
    if page is None:
        from dslpar.read import did_you_mean

        fix = did_you_mean(args.code, codes()) or f"the codes are {', '.join(codes())}"
        parser.error(f"no rule {args.code!r}; {fix}")
    print(f"{page.code} {page.name} ({page.severity})\n\n{page.text()}")
    return 0


# show -------------------------------------------------------------------------------------------------------------


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="CFG or key=value", help="a config file, and overrides of its keys")
    _world_arguments(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar import flow, show
    from dslpar.errors import DslparError
    from dslpar.linter import book, formats

    sources: dict[str, str] = {}
    cluster = _cluster(args, parser, sources)
    world_size = args.world_size or (cluster.world_size if cluster else None)
    if not world_size:
        parser.error("show needs the number of ranks: --world-size N or --hostfile FILE")
    configs = _configs(args, parser)
    if len(configs) > 1:
        parser.error("show takes one config")
    config = configs[0]
    try:
        job = flow.job_of(config, world_size, cluster=cluster)
    except DslparError as error:
        sys.stderr.write(formats.text(error.findings, sources | dict(config.sources)))
        return 1
    notes = book.lint(config, world_size, cluster)
    if notes:
        sys.stderr.write(formats.text(notes, sources | dict(config.sources)))
    sys.stdout.write(show.FORMATS[args.format](job))
    return 0


# Words that several commands share --------------------------------------------------------------------------------


def _world_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=_count, metavar="N", help="ranks of the job")
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots; gives the world size if N does not")


def _count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return count


def _configs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Config]:
    from dslpar import flow

    paths = [word for word in args.words if not _is_override(word)]
    if not paths:
        parser.error("there is no config file among the arguments")
    overrides = [word for word in args.words if _is_override(word)]
    return [flow.load(path, overrides) for path in paths]


def _is_override(word: str) -> bool:
    """`key=value` and `~key`; a path with a `=` in one of its folders is a path."""
    return word.startswith("~") or "=" in word.partition("/")[0]


def _cluster(args: argparse.Namespace, parser: argparse.ArgumentParser, sources: dict[str, str]) -> Cluster | None:
    if args.hostfile is None:
        return None
    from dslpar import hostfile

    try:
        with open(args.hostfile, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read the hostfile {args.hostfile}: {error}")
    sources[args.hostfile] = text
    return hostfile.parse(text, args.hostfile)


COMMANDS: Mapping[str, Command] = {
    "lint": Command("find everything that is wrong with a config, before anything starts", _lint_arguments, _lint),
    "explain": Command("print the page of a rule: what, why, example, instead", _explain_arguments, _explain),
    "show": Command("print sizes, rank groups, stages and DeepSpeed's config", _show_arguments, _show),
}


def run() -> NoReturn:
    """The entry point of `python -m dslpar.cli`."""
    sys.exit(main())


if __name__ == "__main__":
    run()
