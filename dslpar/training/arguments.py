"""The command line of train.py, and of a program of one's own that takes the same flags. No torch.

    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="images")
    args = dslpar.arguments(parser)                     # program.py --config c.py --resume --images here train.steps=9
    run = dslpar.start(args.config, args.overrides, args.trust)
    ...
    dslpar.fit(run, engine, train_data, resume=args.resume, eval_only=args.eval_only, dry_run=args.dry_run)

That a framework adds its flags to a program's own parser is DeepSpeed's (`deepspeed.add_config_arguments`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dslpar.core.argument_parser import ArgumentParser
from dslpar.core.project import add_trust

_FLAGS = {
    "--resume": "continue from the newest checkpoint in train.output_dir; where there is none, start at step 0",
    "--eval-only": "load the newest checkpoint, print the held-out loss, add it to eval.jsonl, and stop",
    "--dry-run": "build the engine on all ranks (with --resume: load, too), print what was built, and stop; writes "
    "nothing",
}
_NOTHING_SAVED = "train.save_interval=0"
"""An evaluation beside a run that trains does not wait for that run's folder."""


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of train.py."""
    parser = ArgumentParser(prog=program, description=description)
    _add_arguments(parser, config=None)
    return parser


def arguments(
    parser: argparse.ArgumentParser | None = None, argv: Sequence[str] | None = None, *, config: str | None = None
) -> argparse.Namespace:
    """Parse a program's command line, with train.py's flags beside the program's own.

    parser: the program's; its flags may stand anywhere among dslpar's. Left out: it has none.
    argv: the command line; left out: this process's.
    config: the file where --config is left out; None: it must be given.

    Returns:
        What the parser parses, and `config`, `overrides` and `trust`, for `dslpar.start`; `resume`, `eval_only` and
        `dry_run`, for `dslpar.fit`.
    """
    parser = parser or ArgumentParser()
    _add_arguments(parser, config)
    parsed = parser.parse_intermixed_args(argv)
    if parsed.eval_only or parsed.dry_run:
        parsed.overrides = [*parsed.overrides, _NOTHING_SAVED]
    return parsed


def _add_arguments(parser: argparse.ArgumentParser, config: str | None) -> None:
    """Add the flags; `config`: the file by default."""
    help = "the config" + (f"; default: {config}" if config else "")
    names = ("--config", "--config-file")
    parser.add_argument(*names, dest="config", required=config is None, default=config, metavar="FILE", help=help)
    for flag, help in _FLAGS.items():
        parser.add_argument(flag, action="store_true", help=help)
    add_trust(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it; see bootstrap
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config's keys")
