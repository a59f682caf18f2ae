"""The commands: `dslpar lint`, `explain`, `show`, `launch`; see dslpar/cli.

Only the command that runs is imported, so that lint starts in a blink. Flags and `key=value` overrides may stand
anywhere. Exit status: 0 nothing wrong, 1 errors found (with --strict warnings too), 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

COMMANDS: Mapping[str, str] = {
    "lint": "find everything that is wrong with a config, before anything starts",
    "explain": "print the page of a rule: what, why, example, instead",
    "show": "print sizes, rank groups, stages and DeepSpeed's config",
    "config": "print every value of a config and why it is so; --reference: every key that there is",
    "diff": "print what differs between two configs, and what follows from it",
    "launch": "check a config, print the launcher's command line, and run it",
    "import": "a config of ColossalAI's, LiBai's or DeepSpeed's to a dslpar file, and a report of every key",
    "checkpoint": "list, show, verify, reshard and export checkpoints, without the ranks that wrote them",
}
"""Name to help; each is a module of dslpar.cli."""
MODULES: Mapping[str, str] = {"import": "import_"}
"""Of a command that cannot be a module's name, the module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        return _no_command(words)
    # Without this, argparse asks gettext for a translation of each of its words: there is none, and to find that out
    # loads `locale` and looks through folders, 4 % of a start.
    setattr(argparse, "_", str)  # noqa: B010  (typeshed does not know the name)
    name, *words = words
    command = importlib.import_module(f"dslpar.cli.{MODULES.get(name, name)}")
    hint = COMMANDS[name]
    if actions := getattr(command, "ACTIONS", None):
        if not words or words[0] not in actions:
            return _no_command(words, f"dslpar {name}", {word: action.help for word, action in actions.items()}, hint)
        name, command, hint = f"{name} {words[0]}", actions[words[0]], actions[words.pop(0)].help
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog=f"dslpar {name}", description=hint, formatter_class=_formatter
    )
    command.arguments(parser)
    args, rest = parser.parse_known_args(words)
    if rest:  # an override behind a flag, or a mistake: a second reading, since this one formats the usage first
        args = parser.parse_intermixed_args(words)
    status: int = command.run(args, parser)
    return status


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Of a fixed width: to ask the terminal, argparse would load every compression of the standard library."""
    return argparse.RawDescriptionHelpFormatter(prog, width=100)


def _no_command(
    words: list[str],
    prog: str = "dslpar",
    commands: Mapping[str, str] = COMMANDS,
    description: str = "Lint, show, explain and launch how a model is spread over a cluster.",
) -> int:
    top = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=prog,
        description=description,
        epilog="commands:\n" + "".join(f"  {name:12}{hint}\n" for name, hint in commands.items()),
        formatter_class=_formatter,
        usage=f"{prog} COMMAND ... ({prog} COMMAND --help says more)",
    )
    top.add_argument("--version", action="store_true", help="print the version and stop")
    if words and not words[0].startswith("-"):
        from dslpar.core.suggest import did_you_mean

        top.error(f"no command {words[0]!r}; " + (did_you_mean(words[0], commands) or f"one of {', '.join(commands)}"))
    if top.parse_args(words).version:
        from dslpar import __version__

        print(f"dslpar {__version__}")
        return 0
    top.print_help()
    return 2


def run() -> NoReturn:
    """The entry point of the command `dslpar` and of `python -m dslpar.cli`.

    Who reads no further (`dslpar explain TEN101 | head -3`) has had enough: that is no error to speak of.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    gc.disable()  # until all is imported: nothing of that dies, and to look for garbage in it is 5 % of a start
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        status = 128 + 13  # as a shell has it of SIGPIPE
    sys.exit(status)
