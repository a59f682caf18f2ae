"""`dslpar init [CFG]`: write a config to start from, by flags or by a few questions on a terminal.

Without a terminal it asks nothing, and missing flags have their defaults. With `--from` it does the same as `dslpar
import`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dslpar.cli import arguments, import_
from dslpar.cli.starter import Choices, Starter, make_starter
from dslpar.cli.starter_models import NAMES, StarterError, find_model
from dslpar.core.argument_parser import ArgumentParser
from dslpar.core.errors import has_errors
from dslpar.core.visible import visible
from dslpar.language.source_text import config_text
from dslpar.launch.agent import num_accelerators
from dslpar.migrate.registry import TABLES
from dslpar.schema.datasets import DATASETS

EPILOG = """\
dslpar init                                               ask a few questions, on a terminal
dslpar init mine.py --model llama --gpus 8 --nodes 2      ask only for the data
dslpar init mine.py --model vit --data-path images        images in one folder per class
dslpar init mine.py --model /models/Llama-3.2-1B          start from trained weights
dslpar init mine.py --from libai their_config.py          the same as dslpar import

Default layout: 2 tensor ranks within a node if its ranks divide, one pipeline stage per node (2 on
a single node with 8 or more ranks), and data ranks for the rest. If lint reports problems, the next
layout with fewer stages or tensor ranks is tried. Models are small, so that a first run takes
seconds. A model from a folder has trained weights, and gets a small learning rate.

exit status: 0 written, 1 lint finds errors in the choices (nothing is written), 2 wrong usage"""
_DEFAULT_FILE = "config.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    add, number = parser.add_argument, arguments.whole_number
    add("file", nargs="?", metavar="CFG", help=f"the file to write; default: {_DEFAULT_FILE}")
    help = f"{', '.join(NAMES)}; a transformers class; or a folder that transformers saved; default: gpt"
    add("--model", metavar="NAME", help=help)
    add("--gpus", type=number, metavar="N", help="ranks per node; default: the GPUs of this machine, or 1")
    add("--nodes", type=number, metavar="M", help="number of nodes; default: 1")
    add("--tensor", type=number, metavar="N", help="tensor ranks; default: by the rule below")
    add("--pipeline", type=number, metavar="N", help="pipeline stages; default: by the rule below")
    add("--data", choices=tuple(DATASETS), help="type of the training data; default: the model's usual type")
    add("--data-path", metavar="PATH", help="data files or folder; default for text: Python's own source")
    help = f"convert another framework's config ({', '.join(TABLES)}) instead, as dslpar import does"
    add("--from", dest="source", nargs=2, metavar=("FRAMEWORK", "FILE"), help=help)
    add("-y", "--yes", action="store_true", help="ask no questions, even on a terminal")
    add("--force", action="store_true", help="overwrite CFG")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the config; return 1, and write nothing, if lint finds errors in the choices."""
    asks = not (args.yes or args.source) and sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        try:
            _ask_all(args)
        except EOFError:
            parser.error("no answer: give flags instead (dslpar init --help), or --yes to take the defaults")
    path = args.file or _DEFAULT_FILE
    if os.path.lexists(path) and not args.force:
        parser.error(f"{path} exists: choose another name, or --force")
    if args.source:
        return _import(args, path, parser)
    choices = Choices(
        model=args.model or "gpt",
        gpus=args.gpus or _gpus_here(),
        nodes=args.nodes or 1,
        data=args.data,
        data_path=args.data_path,
        tensor=args.tensor,
        pipeline=args.pipeline,
    )
    try:
        starter = make_starter(choices, path)
    except StarterError as error:
        parser.error(str(error))
    arguments.print_findings(starter.findings, {path: starter.text})
    if has_errors(starter.findings):
        return 1
    _write(path, starter, args.force, parser)
    return 0


def _gpus_here() -> int:
    return num_accelerators() or 1


def _write(path: str, starter: Starter, force: bool, parser: argparse.ArgumentParser) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(starter.text)
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror}")
    commands = [line[2:] for line in starter.text.splitlines() if line.startswith("# dslpar l")]
    print(visible(f"{path} is written, for {starter.world_size} ranks. Next:"))
    for command in commands:
        print(visible(f"  {command}"))


# ---- questions ----


def _ask_all(args: argparse.Namespace) -> None:
    """Ask for the values of missing flags. A question is repeated until its answer is valid.

    Raises:
        EOFError: there are no more answers.
    """
    print("Press Enter to take the default in brackets.")
    args.model = args.model or _ask(f"Model ({', '.join(NAMES[:6])}, a class, a folder)", "gpt", _checked_model)
    model = find_model(args.model)
    kind = args.data or next(iter(model.data), "text")
    if args.data_path is None:
        is_text = kind not in ("images", "tokens")
        default = "" if is_text else None
        shown = "Text files or folder (none: Python's own source)" if is_text else f"Folder of {kind}"
        args.data_path = _ask(shown, default, _checked_path) or None
    args.gpus = args.gpus or _ask("Ranks (GPUs) per node", _gpus_here(), arguments.whole_number)
    args.nodes = args.nodes or _ask("Nodes", 1, arguments.whole_number)
    args.file = args.file or _ask("File to write", _DEFAULT_FILE, str)


def _ask(question: str, default: object, parse: Callable[[str], object]) -> object:
    """Ask until `parse` accepts the answer. An empty answer is the default, if there is one."""
    while True:
        shown = f" [{default}]" if default not in ("", None) else ""
        answer = input(visible(f"{question}{shown}: ")).strip()
        if not answer and default is not None:
            return default
        try:
            return parse(answer)
        except (StarterError, argparse.ArgumentTypeError) as error:
            print(visible(error))


def _checked_model(name: str) -> str:
    find_model(name)
    return name


def _checked_path(path: str) -> str:
    if not os.path.exists(path):
        raise StarterError(f"there is no {path!r}")
    return path


# ---- dslpar import ----


def _import(args: argparse.Namespace, path: str, parser: argparse.ArgumentParser) -> int:
    """Run `dslpar import FILE --from FRAMEWORK -o CFG`. --model gives the model if FILE has none."""
    framework, file = args.source
    if framework not in TABLES:
        parser.error(f"--from {framework}: the frameworks are {', '.join(TABLES)}")
    if args.data or args.data_path or args.tensor or args.pipeline:
        parser.error(f"--from takes the data and the layout from {file}: change them in {path} afterwards")
    words = [file, "--from", framework, "-o", path, *(["--force"] if args.force else [])]
    if args.gpus or args.nodes:
        words += ["--world-size", str((args.gpus or 1) * (args.nodes or 1))]
    importer = ArgumentParser(prog="dslpar import")
    import_.add_arguments(importer)
    with _model_file(args.model, path, parser) as model:
        return import_.run(importer.parse_args([*words, *(["--model", model] if model else [])]), importer)


@contextlib.contextmanager
def _model_file(name: str | None, path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Write the model `name` to a temporary config, and yield the config's path; yield "" if `name` is None."""
    if name is None:
        yield ""
        return
    try:
        model = find_model(name, os.path.dirname(path) or ".")
    except StarterError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="dslpar_init_") as folder:
        file = Path(folder, "model.py")
        file.write_text(config_text({"model": model.section}), encoding="utf-8")
        yield str(file)
