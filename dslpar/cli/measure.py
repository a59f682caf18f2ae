"""`dslpar measure`: time matrix products, memory and all-reduces on this machine's devices, for `dslpar plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch

EPILOG = """\
dslpar measure                                                 # one device: products, memory
torchrun --nproc-per-node 8 -m dslpar measure                  # eight: their all-reduces too
dslpar plan CFG --world-size 64 --calibration calibration.json # a plan for these machines

Takes half a minute. The measured constants of products and links replace the defaults. Constants
that only training runs show are fitted by `dslpar plan --calibrate`.

exit status: 0 done, 1 it cannot run, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--device", metavar="NAME", help="a device of `dslpar plan --help`; default: by its driver's name")
    add(
        "--nodes-of",
        type=arguments.whole_number,
        metavar="N",
        help="devices per node; default: the ranks on this host",
    )
    add("--output-file", metavar="FILE", default="calibration.json", help="the file to write; default: %(default)s")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure; return the exit status."""
    measure = import_with_torch("dslpar.distributed.measure")
    try:
        status: int = measure.run(args.device, args.nodes_of, Path(args.output_file))
    except measure.NoDeviceError as error:
        parser.error(str(error))
    return status
