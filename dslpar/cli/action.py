"""Actions: the second words of two-word commands such as `dslpar checkpoint list`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from dslpar.cli import arguments
from dslpar.core.errors import DslparError


class Action(NamedTuple):
    """One action of a command, such as `list` in `dslpar checkpoint list`."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds the action's flags to its parser."""
    act: Callable[[argparse.Namespace, argparse.ArgumentParser], int]
    """Does the action's work, and returns the exit status."""

    def run(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        """Run the action; return the exit status. In case of a DslparError, print its findings and return 1."""
        try:
            return self.act(args, parser)
        except DslparError as error:
            arguments.print_findings(error.findings, {})
            return 1


def import_with_torch(name: str) -> Any:
    """Import a module that needs torch. Text that DeepSpeed prints on import goes to stderr."""
    logging.disable(logging.WARNING)  # on import, DeepSpeed logs which accelerator it has found
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    finally:
        logging.disable(logging.NOTSET)
