"""Command line of train.py and of user programs that take the same flags. Imports no torch.

    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="images")
    args = dslpar.arguments(parser)                     # program.py --config c.py --resume --images here train.steps=9
    run = dslpar.start(args.config, args.overrides, args.trust)
    ...
    dslpar.fit(run, engine, train_data, resume=args.resume, eval_only=args.eval_only, dry_run=args.dry_run)

Like `deepspeed.add_config_arguments`, `arguments` adds the framework's flags to the program's own parser.
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
"""Set for --eval-only and --dry-run, so that they do not wait for the folder lock of a run that trains."""


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of train.py."""
    parser = ArgumentParser(prog=program, description=description)
    _add_arguments(parser, config=None)
    return parser


def arguments(
    parser: argparse.ArgumentParser | None = None, argv: Sequence[str] | None = None, *, config: str | None = None
) -> argparse.Namespace:
    """Parse a program's command line: train.py's flags and the program's own.

    parser: the program's parser; its flags may stand anywhere among dslpar's. Default: no flags of its own.
    argv: the command line; default: this process's.
    config: the default for --config; None: --config is required.

    Returns:
        The parser's namespace, with `config`, `overrides` and `trust` for `dslpar.start`, and `resume`, `eval_only` and
        `dry_run` for `dslpar.fit`.
    """
    parser = parser or ArgumentParser()
    _add_arguments(parser, config)
    parsed = parser.parse_intermixed_args(argv)
    if parsed.eval_only or parsed.dry_run:
        parsed.overrides = [*parsed.overrides, _NOTHING_SAVED]
    return parsed


def _add_arguments(parser: argparse.ArgumentParser, config: str | None) -> None:
    """Add dslpar's flags; `config` is the default for --config."""
    help = "the config" + (f"; default: {config}" if config else "")
    names = ("--config", "--config-file")
    parser.add_argument(*names, dest="config", required=config is None, default=config, metavar="FILE", help=help)
    for flag, help in _FLAGS.items():
        parser.add_argument(flag, action="store_true", help=help)
    add_trust(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it; see bootstrap
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config's keys")
