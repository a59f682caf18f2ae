"""`dslpar plan CFG --world-size N --device D`: forecast memory and time, and suggest better layouts."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from textwrap import wrap

from dslpar.cli import arguments, foreign_files, plan_apply, plan_dry_run, plan_trace
from dslpar.core.errors import has_errors
from dslpar.core.project import add_trust
from dslpar.forecast.device import DEVICES
from dslpar.forecast.machine import MachineError, machine_of
from dslpar.linter import check
from dslpar.planner import planning, report

EPILOG = """\
dslpar plan configs/gpt_3d.py --world-size 16 --device h100-80g      # memory, time, repairs, layouts
dslpar plan CFG --world-size 64 --device h100-80g zero.stage=2       # for another layout
dslpar plan CFG --world-size 64 --device h100-80g --fix parallel.pipeline=2   # search with that pipeline
dslpar plan CFG --world-size 64 --device h100-80g --apply 1          # write the first repair, or layout
dslpar plan --calibrate outputs/a outputs/b outputs/c --device h100-80g   # learn from three runs of yours
dslpar plan CFG --world-size 16 --device a100-80g --trace            # a model without known costs
dslpar plan CFG --world-size 10240 --dry-run --rank 1023             # build and run one rank's part

Memory is the peak of the fullest rank, and time is per step. A job fits with up to 84 % of the
device's memory, and is tight with up to 100 %; above 92 % it would thrash. Suggestions need at most
92 %, keep the global batch, and pass lint.

The error of a time is that of software stacks that were never measured, until three of your runs
calibrate it. It is wider for effects that no run has, such as offload, which the report names.

devices: {devices}

exit status: 0 it fits (or is tight), 1 it does not fit, or lint finds errors, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG.format(devices="\n".join(_wrapped(list(DEVICES))).lstrip())
    arguments.add_operands(parser)
    arguments.add_world(parser)
    arguments.add_program(parser)
    foreign_files.add_arguments(parser)
    add_trust(parser)
    add = parser.add_argument
    help = "the target device; default: cluster.device, or that of the hostfile, of pyproject.toml, or this machine's"
    add("--device", metavar="NAME", help=help)
    help = "devices per node; default: cluster.nodes_of, the hostfile's slots, or the device's usual number"
    add("--nodes-of", type=arguments.whole_number, metavar="N", help=help)
    help = "set a value, and keep it in every suggestion; repeatable"
    add("--fix", action="append", default=[], metavar="KEY=VALUE", help=help)
    help = "write repair N into the config (layout N if it fits, change N if no layout fits), and stop"
    add("--apply", type=arguments.whole_number, metavar="N", help=help)
    help = "use the measured constants in FILE; with --calibrate: write them to FILE"
    add("--calibration", metavar="FILE", help=help)
    help = "fit the constants to your own runs, whose folders are given instead of a config"
    add("--calibrate", action="store_true", help=help)
    help = "build one rank's layers without memory, run its step, and check it against all other ranks; needs torch"
    add("--dry-run", action="store_true", help=help)
    help = (
        "derive the model's costs from its layers, run without memory, and from its data; for models without known"
        " costs; slower, and needs torch"
    )
    add("--trace", action="store_true", help=help)
    add(
        "--rank",
        type=lambda text: arguments.whole_number(text, 0),
        metavar="R",
        help="the rank of --dry-run; default: 0",
    )
    arguments.add_format(parser, *report.FORMATS)


def _wrapped(names: list[str]) -> list[str]:
    return wrap(", ".join(names), width=98, initial_indent="  ", subsequent_indent="  ")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan, or write one of its suggestions."""
    _check_flags(args, parser)
    if args.calibrate:
        from dslpar.cli import plan_calibrate  # reads runs, which needs PyYAML

        return plan_calibrate.run(args, parser)
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    path, parts = foreign_files.one_run(arguments.config_paths(args, parser), args, parser)
    arguments.project_in(".")
    args.world_size = arguments.default_world_size(args, path)
    texts: dict[str, str] = {}
    made = foreign_files.converted(path, args, parser, parts=parts)
    if made is not None:
        if args.apply is not None:
            parser.error(f"--apply changes dslpar's configs: dslpar import {path} -o FILE writes one")
        path = made.path
        texts[os.path.realpath(path)] = made.text
    world_size = arguments.world_size(args, cluster, parser, lambda: check.load(path, texts=texts))
    if world_size is None:
        return 1
    question = planning.Question(
        path=path,
        words=(*arguments.overrides(args), *args.fix),
        fixed=tuple(word.lstrip("~").partition("=")[0] for word in args.fix),
        trusted=tuple(args.trust),
        by_program=args.program,
        texts=texts,
    )
    checked = question.check(world_size)
    found = checked.findings if made is None else made.findings(checked.findings, world_size, cluster)
    arguments.print_findings(found, sources | dict(checked.config.sources if made is None else made.sources))
    job = None if has_errors(found) else planning.job_of(checked)
    if job is None:
        return 1
    project_device = None if args.device else arguments.project_device(os.path.dirname(path))
    if (args.trace or args.dry_run) and not getattr(job.spec.model, "target", "a family"):
        parser.error(planning.NO_MODEL)
    sys.path.insert(0, os.getcwd())  # for the user's own modules, as for train.py
    if args.dry_run:
        return plan_dry_run.run(job, args.rank, args.format, parser)
    try:
        machine = machine_of(job, args.device, args.nodes_of, cluster, args.calibration, project_device=project_device)
        costs_of = None
        if args.trace:
            traced = plan_trace.traced(job, parser)
            if traced is None:
                return 1
            job, costs_of = traced
        gc.disable()  # a search makes no reference cycles, and looking for them takes an eighth of its time
        plan = planning.plan_of(question, checked, job, machine, costs_of)
    except (MachineError, planning.NoForecastError) as error:
        parser.error(str(error))
    finally:
        gc.enable()
    if args.apply is not None:
        return _apply(args, parser, question, plan)
    sys.stdout.write(report.FORMATS[args.format](plan))
    return 1 if plan.own.verdict == "does not fit" else 0


def _check_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error if a flag would be ignored."""
    if args.rank is not None and not args.dry_run:
        parser.error("--rank goes with --dry-run")
    if args.dry_run and (args.apply is not None or args.fix or args.calibration):
        parser.error("--dry-run goes without --apply, --fix and --calibration")
    if args.trace and args.dry_run:
        parser.error("--dry-run goes without --trace")
    others = args.apply is not None or args.fix or args.dry_run or args.trace
    if args.calibrate and (others or arguments.overrides(args)):
        parser.error("--calibrate goes without --apply, --fix, --dry-run, --trace and overrides")


def _apply(
    args: argparse.Namespace, parser: argparse.ArgumentParser, question: planning.Question, made: planning.Plan
) -> int:
    suggestions = made.repairs or made.layouts or made.remedies
    if args.apply > len(suggestions):
        parser.error(f"--apply {args.apply}: there are {len(suggestions)} suggestions")
    return plan_apply.write(question, made, suggestions[args.apply - 1])
