"""`dslpar eval RUN`: measure a trained model on held-out data, in one process or under a launcher."""

from __future__ import annotations

import argparse

from dslpar.cli import arguments, trained_run_arguments
from dslpar.cli.action import import_with_torch

EPILOG = """\
dslpar eval outputs/gpt
dslpar eval outputs/gpt --metrics perplexity,accuracy@1 --format json
dslpar eval outputs/gpt --data "data.files=['test.txt']"
torchrun --nproc-per-node 4 -m dslpar eval outputs/gpt

Measures every sample that the run held out; with --data, all samples of that data. Text has loss,
perplexity and accuracy@K (the label is among the K most probable tokens). Images have loss and
accuracy@K, and with --format json precision, recall and F1 per class. Results do not depend on the
layout.

exit status: 0 done, 1 it cannot run, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    trained_run_arguments.add_run(parser)
    help = "measure other data: an override of a key of `data`; repeatable"
    parser.add_argument("--data", action="append", default=[], metavar="key=value", help=help)
    help = "loss, perplexity or accuracy@K, separated by commas; default: all that the data have, with K = 1 and 5"
    parser.add_argument("--metrics", type=_names, default=[], metavar="NAMES", help=help)
    help = "measure the first N samples, in the order of training's evaluation; default: all"
    parser.add_argument("--samples", type=arguments.whole_number, metavar="N", help=help)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure; return the exit status."""
    overrides = trained_run_arguments.take_run(args, parser)
    if wrong := [each for each in args.data if not each.startswith("data.") or "=" not in each]:
        parser.error(f"--data takes keys of data, such as data.files=..., not {wrong[0]!r}")
    build = trained_run_arguments.model_builder(args)
    status: int = import_with_torch("dslpar.inference.commands").run_eval(args, overrides, build)
    return status


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))
