"""`dslpar generate RUN --prompt TEXT`: generate text with a trained model, in one process or under a launcher."""

from __future__ import annotations

import argparse
import math
from functools import partial

from dslpar.cli import arguments, trained_run_arguments
from dslpar.cli.action import import_with_torch

EPILOG = """\
dslpar generate outputs/gpt --prompt 'def main(' --max-tokens 50
dslpar generate outputs/gpt --prompts prompts.txt --temperature 0.8 --top-p 0.95 --format json
dslpar generate outputs/chat --chat --prompt 'What is 2 + 2?'
torchrun --nproc-per-node 8 -m dslpar generate outputs/gpt --prompts prompts.txt

A single process holds the whole model, whatever the run's layout was. Under a launcher the layout
is the run's, with key=value overrides, or that of --config. At --temperature 0, the default, each
token is the most probable one. Sampling depends only on --seed, the prompt and the position, so it
is the same on every layout. --format json prints a list of {text, tokens}, with the new tokens
only.

exit status: 0 done, 1 it cannot run, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    trained_run_arguments.add_run(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    help = 'a file with one prompt per line, or - for stdin; in a .jsonl file, each line has a "prompt"'
    parser.add_argument("--prompts", metavar="FILE", help=help)
    help = "answer each prompt as a user's message, with the chat template of the run or of its tokenizer"
    parser.add_argument("--chat", action="store_true", help=help)
    help = "a tokenizer.json, or a folder with one; default: that of the run or of its token files, else bytes"
    parser.add_argument("--tokenizer", metavar="PATH", help=help)
    help = "maximum number of new tokens; default: 100, or as many as the model has positions for"
    names = ("--max-tokens", "--max-new-tokens")  # OpenAI's name, and transformers'
    parser.add_argument(*names, type=arguments.whole_number, metavar="N", help=help)
    help = "sample tokens, with logits divided by T; default: 0, take the most probable token"
    parser.add_argument("--temperature", type=_temperature, metavar="T", help=help)
    help = "sample among the K most probable tokens; default: 0 (or -1), among all"
    parser.add_argument("--top-k", type=_top_k, metavar="K", help=help)
    help = "sample among the most probable tokens whose probabilities add up to P; default: 1, among all"
    parser.add_argument("--top-p", type=_share, metavar="P", help=help)
    seed = partial(arguments.whole_number, least=0)
    parser.add_argument("--seed", type=seed, metavar="S", help="seed for sampling, at least 0; default: 0")
    help = "end before this text, which may have \\n and \\t; repeatable"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=help)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Generate; return the exit status."""
    overrides = trained_run_arguments.take_run(args, parser)
    if not args.prompt and not args.prompts:
        parser.error("no prompt: --prompt TEXT, or --prompts FILE")
    # Values that turn a filter off are valid without sampling, and all values with --temperature 0, as in other tools.
    without_effect = [name for name, off in _OFF.items() if getattr(args, name) not in (None, off)]
    if without_effect and args.temperature is None:
        parser.error(f"--{without_effect[0].replace('_', '-')} has no effect without --temperature")
    args.temperature, args.top_k = args.temperature or 0.0, args.top_k or None
    if not all(args.stop):
        parser.error("--stop '' would end every text before it begins")
    args.stop = [each.replace("\\n", "\n").replace("\\t", "\t") for each in args.stop]
    args.seed = args.seed or 0
    build = trained_run_arguments.model_builder(args)
    status: int = import_with_torch("dslpar.inference.commands").run_generate(args, overrides, build)
    return status


_OFF = {"top_k": 0, "top_p": 1.0, "seed": None}
"""Flags of sampling, and the values with which they have no effect."""


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _top_k(text: str) -> int:
    return 0 if text == "-1" else arguments.whole_number(text, least=0)


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
