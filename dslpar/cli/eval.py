"""`dslpar eval RUN`: measure a trained model on held-out data, in one process or under a launcher."""

from __future__ import annotations

import argparse

from dslpar.cli import arguments, trained_run
from dslpar.cli.action import import_with_torch

EPILOG = """\
dslpar eval outputs/gpt
dslpar eval outputs/gpt --metrics perplexity,accuracy@1 --format json
dslpar eval outputs/gpt --data "data.files=['test.txt']"
torchrun --nproc-per-node 4 -m dslpar eval outputs/gpt

Measures every sample that the run has held out; with --data, all of the data that it names. Text
has loss, perplexity and accuracy@K (the label is among the K most probable); images have loss and
accuracy@K, and in json precision, recall and F1 of each class. The numbers do not depend on the
layout.

exit status: 0 done, 1 it cannot run, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    trained_run.add_run(parser)
    help = "measure these data: overrides of the keys of `data`; may be repeated"
    parser.add_argument("--data", action="append", default=[], metavar="key=value", help=help)
    help = "loss, perplexity, accuracy@K, between commas; default: all that the data have, K = 1 and 5"
    parser.add_argument("--metrics", type=_names, default=[], metavar="NAMES", help=help)
    help = "measure the first N samples, in the order in which training evaluates; default: all"
    parser.add_argument("--samples", type=arguments.whole_number, metavar="N", help=help)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure; return the exit status."""
    overrides = trained_run.take_run(args, parser)
    if wrong := [each for each in args.data if not each.startswith("data.") or "=" not in each]:
        parser.error(f"--data takes keys of data, such as data.files=..., not {wrong[0]!r}")
    status: int = import_with_torch("dslpar.inference.commands").run_eval(args, overrides)
    return status


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))
