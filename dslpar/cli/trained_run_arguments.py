"""Arguments of commands that use a trained model: the run, the checkpoint, and the layout."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.project import add_trust


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the model and its layout, for `dslpar generate` and `dslpar eval`."""
    help = "a run's output_dir, or a checkpoint; and overrides of the config's keys, such as its layout"
    arguments.add_operands(parser, "RUN", help)
    help = "name of the run's checkpoint, such as step_000100, or best (lowest held-out loss); default: the newest"
    parser.add_argument("--checkpoint", metavar="NAME", help=help)
    parser.add_argument("--config", metavar="CFG", help="take the layout from this config, which has the same model")
    help = "what builds the model, if a program passed it: the import path of a function or class"
    parser.add_argument("--model", metavar="MODULE.NAME", help=help)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it
    add_trust(parser)


def model_builder(args: argparse.Namespace) -> Any:
    """Return the function that builds the model of --model; None without the flag."""
    return args.model and import_with_torch("dslpar.training.program_model").builder(args.model)


def take_run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Set `args.path` to the run among the operands; return the overrides. Exit with a usage error without one run."""
    paths = [operand for operand in args.operands if not arguments.is_override(operand)]
    if len(paths) != 1:
        parser.error(f"one run is needed, not {len(paths)}")
    (args.path,) = paths
    sys.path.insert(0, os.getcwd())  # for the user's own modules, as for train.py
    return arguments.overrides(args)
