"""A command of two words: what follows `dslpar checkpoint` and `dslpar policy`."""

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
    """The second word, with its flags and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace, argparse.ArgumentParser], int]

    def run(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        """Act; print the findings of an error, and return 1 then."""
        try:
            return self.act(args, parser)
        except DslparError as error:
            arguments.print_findings(error.findings, {})
            return 1


def import_with_torch(name: str) -> Any:
    """Import what needs torch; what DeepSpeed prints when it is imported is not part of the command's output."""
    logging.disable(logging.WARNING)  # of which accelerator DeepSpeed has found
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    finally:
        logging.disable(logging.NOTSET)
