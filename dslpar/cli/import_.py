"""`dslpar import FILE`: a config of ColossalAI's, LiBai's or DeepSpeed's to a dslpar file, and a report of every key.

The file goes to standard output and the report to standard error, or with `-o` the file to OUT and the report to
standard output. Exit status: 0 everything is carried over, 1 something needs you, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from dslpar.cli import arguments as cli_arguments
from dslpar.core.errors import Finding, has_errors
from dslpar.language.codes import MistakeError
from dslpar.language.source import read_source
from dslpar.linter import check
from dslpar.linter.problem import UnknownValueError
from dslpar.linter.report import text as report_text
from dslpar.migrate import report, writer
from dslpar.migrate.convert import Import, convert, refused
from dslpar.migrate.rows import Epoch
from dslpar.migrate.sources import NAMES, OURS, Source, read_text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument(
        "file", metavar="FILE", help="a config of ColossalAI's or LiBai's (.py), or DeepSpeed's (.json)"
    )
    parser.add_argument("-o", dest="out", metavar="OUT", help="the file to write; left out: standard output")
    parser.add_argument("--from", dest="name", choices=NAMES, help="whose config it is; left out: what FILE tells")
    parser.add_argument("--model", metavar="FILE", help="a dslpar config, whose model is taken")
    parser.add_argument(
        "--world-size", type=cli_arguments.count, metavar="N", help="ranks of the job, to lint the result for"
    )
    parser.add_argument(
        "--num-samples",
        type=cli_arguments.count,
        metavar="N",
        help="samples of the data, to make steps of the source's epochs",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="of the report; default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="write over OUT")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Writes the file and the report; 1 if something needs the author."""
    if args.out and os.path.lexists(args.out) and not args.force:
        parser.error(f"{args.out} exists: choose another name, or --force")
    source, model = _source(args, parser), _model(args, parser)
    made = convert(source, model)
    if args.num_samples:
        made = _with_epochs(made, convert(source, model, _epoch(made, args, parser)), parser)
    text = writer.file_of(made)
    config = check.load_text(text, args.out or "<imported>.py")
    findings = check.lint(config, args.world_size)
    _write(text, args, parser)
    told = sys.stdout if args.out else sys.stderr
    told.write(_report(made, args, findings, config.sources))
    return int(made.needs_you or has_errors(findings))


def _source(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Source:
    """The source, evaluated."""
    try:
        text = read_source(args.file, {}).text
    except MistakeError as failed:
        parser.error(failed.message)
    source = read_text(text, args.file, args.name or "")
    if not source.config.complete:
        sys.stderr.write(report_text.text(refused(source), {args.file: text}))
        parser.error(f"{args.file} cannot be read")
    if source.name == OURS:
        parser.error(f"{args.file} is a dslpar config already: there is nothing to import (--from says otherwise)")
    if not source.name:
        parser.error(f"{args.file} does not tell whose config it is: --from {', '.join(NAMES)}")
    return source


def _model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Mapping[str, Any] | None:
    """The model of the config that --model names."""
    if args.model is None:
        return None
    config = check.load(args.model)
    if not config.complete:
        parser.error(f"--model {args.model}: {config.findings[0].message}")
    node = config.root.value.get("model")
    if node is None or not node.is_mapping:
        parser.error(f"{args.model} has no model")
    target = {} if node.target is None else {"type": node.target.name.removeprefix("dslpar.models.")}
    return target | {str(key): child.plain() for key, child in node.value.items()}


def _epoch(made: Import, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Epoch:
    """What an epoch is: the samples that were given, and those of one step, by the result."""
    cx = check.check(check.load_text(writer.file_of(made), "<imported>.py"), args.world_size).context
    try:
        size = cx.requested_batch.global_size or cx.batch.global_size
    except UnknownValueError:
        parser.error("--num-samples: how many samples a step takes is not known; --world-size N may tell")
    return Epoch(args.num_samples, size)


def _with_epochs(before: Import, made: Import, parser: argparse.ArgumentParser) -> Import:
    """The second of the two; it is a mistake if epochs make no difference."""
    if made.entries == before.entries:
        parser.error(f"--num-samples: {made.source.path} counts no epochs")
    return made


def _write(text: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.out:
        sys.stdout.write(text)
        return
    try:
        with open(args.out, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        parser.error(f"cannot write {args.out}: {error.strerror}")


def _report(made: Import, args: argparse.Namespace, findings: list[Finding], sources: Mapping[str, str]) -> str:
    if args.format == "json":
        return report.as_json(made, args.out, findings)
    return report.text(made, args.out) + "lint of the result:\n" + report_text.text(findings, sources)
