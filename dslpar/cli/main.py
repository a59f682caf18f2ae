"""Entry point of `dslpar`: find the requested command, and run it.

Only that command's module is imported, so that lint starts fast. Flags and `key=value` overrides may come in any order.
Exit status: 0 no errors, 1 errors found (with --strict also warnings), 2 wrong usage, 130 Ctrl-C.
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

from dslpar.core import requirements
from dslpar.core.argument_parser import ArgumentParser
from dslpar.core.suggest import did_you_mean
from dslpar.core.version import VERSION

COMMANDS: Mapping[str, str] = {
    "init": "write a starter config, from flags or a few questions",
    "lint": "check configs and report every problem before anything starts",
    "explain": "print a rule's page: what it does, why, an example, what to use instead",
    "show": "print sizes, rank groups, stages and DeepSpeed's config",
    "prove": "run a layout in miniature and compare it with one process, gradient by gradient",
    "plan": "forecast memory and step time on a device, and suggest layouts that fit and are faster",
    "measure": "time matrix products, memory and all-reduces on this machine's devices, for plan",
    "config": "print every value of a config and its origin; --reference: every key",
    "schema": "print the JSON Schema of configs, for editors of YAML and JSON",
    "completion": "print a script for bash, zsh or fish, which complete commands, flags, files and keys",
    "lsp": "serve an editor: findings, completion, values and fixes while you write a config",
    "mcp": "serve an agent: lint, show, plan and more as tools, below one folder",
    "diff": "print the differences between two configs, and their consequences",
    "launch": "check a config, print the launcher's command line, and run it",
    "import": "convert another framework's config to dslpar, and report on every key",
    "policy": "show how a transformers model is sharded; check that every mode gives the same results",
    "runs": "list training runs with state, step, loss and layout; plot their curves",
    "data": "convert text to token files, train a tokenizer, show and verify token files",
    "generate": "generate text from prompts with a trained model, on any layout",
    "eval": "measure a trained model on held-out data: loss, perplexity, accuracy",
    "checkpoint": "list, show, verify, reshard and export checkpoints, in one process",
}
"""Help texts by command name. Each command is a module of dslpar.cli."""
_KEYWORDS: Mapping[str, str] = {"import": "import_"}
"""Module names of commands whose names are Python keywords."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:  # as git, cargo and ruff have it
        argv = [*argv[1:], "--help"]
    if argv[:1] == ["__complete"]:  # of the scripts that `dslpar completion` prints
        answer = importlib.import_module("dslpar.cli.completion").print_candidates
        status: int = answer(argv[1:], COMMANDS)
        return status
    if not argv or argv[0] not in COMMANDS:
        return _no_command(argv)
    try:
        return _run_command(*argv)
    except ModuleNotFoundError as error:  # whatever command needs it, and wherever: the one place that reports it
        message = requirements.explain(error.name or "", f"dslpar {argv[0]}")
        if not message:
            raise
        sys.stderr.write(message + "\n")
        return 2


def _run_command(name: str, *arguments: str) -> int:
    """Run the command with this name; return the exit status."""
    argv = list(arguments)
    command = importlib.import_module(f"dslpar.cli.{_KEYWORDS.get(name, name)}")
    description = COMMANDS[name]
    if actions := getattr(command, "ACTIONS", None):
        default = getattr(command, "DEFAULT", "")
        if default and (not argv or argv[0] not in actions):
            argv = [default, *argv]
        if not argv or argv[0] not in actions:
            helps = {each: action.help for each, action in actions.items()}
            return _no_command(argv, f"dslpar {name}", helps, description)
        command = actions[argv[0]]
        name, description = f"{name} {argv.pop(0)}", command.help
    if not gc.isenabled():  # `run` has disabled the garbage collector for the imports, which end here
        gc.freeze()
        gc.enable()
    parser = ArgumentParser(prog=f"dslpar {name}", description=description, formatter_class=_formatter)
    command.add_arguments(parser)
    # parse_intermixed_args, which allows operands on both sides of a flag, knows no defaults when it formats help.
    args, rest = parser.parse_known_args(argv)
    if rest:
        args = parser.parse_intermixed_args(argv)
    status: int = command.run(args, parser)
    return status


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Format help at a fixed width, so that it is the same on every terminal and in docs."""
    return argparse.RawDescriptionHelpFormatter(prog, width=100)


def _no_command(
    argv: list[str],
    prog: str = "dslpar",
    commands: Mapping[str, str] = COMMANDS,
    description: str = "Lint, show, plan and launch data, tensor and pipeline parallel training on DeepSpeed.",
) -> int:
    """Handle a command line without a command: --help, --version, or a mistake."""
    width = max(12, *(len(name) + 2 for name in commands))
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog="commands:\n" + "".join(f"  {name:{width}}{help}\n" for name, help in commands.items()),
        formatter_class=_formatter,
        usage=f"{prog} COMMAND ... (see {prog} COMMAND --help)",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    if argv and not argv[0].startswith("-"):
        hint = did_you_mean(argv[0], commands) or f"the commands are {', '.join(commands)}"
        parser.error(f"unknown command {argv[0]!r}; {hint}")
    if parser.parse_args(argv).version:
        print("dslpar", VERSION)
        return 0
    parser.print_help()
    return 2


def run() -> NoReturn:
    """Run the command and exit: the entry point of `dslpar` and of `python -m dslpar.cli`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show must not crash us
    gc.disable()  # until imports are done: imports leave no garbage, and the collector takes 5 % of a start
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: `dslpar explain TEN101 | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        status = 128 + 13  # as a shell reports SIGPIPE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        status = 128 + 2  # as a shell reports SIGINT
    sys.exit(status)
