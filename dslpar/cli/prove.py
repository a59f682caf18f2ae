"""`dslpar prove CFG --world-size N`: whether the layout computes what one process computes, tried on CPU ranks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.project import add_trust
from dslpar.core.visible import visible, visible_lines
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity import certificate

if TYPE_CHECKING:
    from dslpar.parity.prove import Proof

EPILOG = """\
dslpar prove configs/gpt_3d.py --world-size 8
dslpar prove CFG --world-size 512 --ranks 16 zero.stage=2        # of another layout, on more ranks
dslpar prove CFG --world-size 8 --resume-on "parallel.pipeline=4 zero.stage=0"
dslpar prove CFG --world-size 8 --certificate proof.json         # keep it
dslpar prove CFG --verify proof.json                             # does it still speak of CFG?

Trains the config's model in miniature under the config's layout on CPU ranks, through DeepSpeed,
and on one process in double precision. Compares the loss and the gradient norm of each step, every
gradient of the first step, all weights after the last, and all copies. Bounds are what float32
does to this model. If something differs, prints the first parameter in the order of the backward,
what would make its gradient right, and the axes without which the difference is gone.

The miniature keeps the family, every axis of more than one rank, ZeRO's stage, the schedule,
recomputation, ties, the optimizer; what is smaller, or not proven, is listed.

exit status: 0 proved, 1 something differs, 2 lint or the build refuses the layout, or wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    arguments.add_operands(parser)
    arguments.add_world(parser)
    add_trust(parser)
    add, number = parser.add_argument, arguments.whole_number
    add("--ranks", type=number, default=8, metavar="R", help="CPU ranks at most; default: %(default)s")
    add("--steps", type=number, default=3, metavar="S", help="optimizer steps; default: %(default)s")
    add("--full", action="store_true", help="keep the model's sizes; shrink the world and the batch alone")
    help = "save after half of the steps, and go on under the layout that these overrides make of the config"
    add("--resume-on", metavar="OVERRIDES", help=help)
    add("--certificate", metavar="FILE", help="write the result to FILE as JSON")
    help = "run nothing: print whether the certificate in FILE still holds for this config and these versions"
    add("--verify", metavar="FILE", help=help)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prove, or verify a certificate; return the exit status."""
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    (config,) = arguments.load_configs(args, parser)
    args.world_size = arguments.default_world_size(args, config.path)
    if args.verify is not None:
        return _verify(args, config, parser)
    world_size = arguments.world_size(args, cluster, parser)
    if args.resume_on is not None and args.steps < 2:
        parser.error("--resume-on needs at least 2 steps")
    job = _job(config, world_size, sources)
    if job is None:
        return certificate.STATUS[certificate.REFUSED]
    other = None
    if args.resume_on is not None:
        other = _resumed_job(args, config, world_size, sources)
        if other is None:
            return certificate.STATUS[certificate.REFUSED]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks fork, and share the cores
    sys.path.insert(0, os.getcwd())  # where modules of one's own stand, as for train.py
    proving = import_with_torch("dslpar.parity.prove")
    try:
        proof = proving.prove(job, max_ranks=args.ranks, steps=args.steps, full=args.full, resume_on=other)
    except import_with_torch("dslpar.distributed.forked_ranks").RankError as error:
        sys.stderr.write(visible_lines(f"{error}\n"))
        return certificate.STATUS[certificate.DIFFERS]
    made = certificate_of(proof, config, job)
    if args.certificate is not None:
        _write(Path(args.certificate), made, parser)
    if args.format == "json":
        arguments.print_json(made.as_dict())
    else:
        arguments.print_findings(proof.findings, dict(config.sources))
        sys.stdout.write(visible_lines(_text(proof, config, job)))
    return certificate.STATUS[proof.verdict]


def _job(config: Config, world_size: int, sources: dict[str, str]) -> Job | None:
    """Lint the config and print its findings; whether the model fits a device is not asked."""
    checked = check.check(config, world_size, forecasts=False)
    arguments.print_findings(
        [each for each in checked.findings if each.severity == "error"], sources | dict(config.sources)
    )
    return None if checked.has_errors else checked.job


def _resumed_job(args: argparse.Namespace, config: Config, world_size: int, sources: dict[str, str]) -> Job | None:
    overrides = [*arguments.overrides(args), *shlex.split(args.resume_on)]
    return _job(check.load(config.path, overrides, trusted=args.trust or ()), world_size, sources)


def certificate_of(proof: Proof, config: Config, job: Job) -> certificate.Certificate:
    """Return the certificate of a proof."""
    from dslpar.parity.small_mesh import axes_of

    model: Any = job.spec.model
    difference = proof.first_difference
    return certificate.Certificate(
        verdict=proof.verdict,
        layout={
            "world_size": job.mesh.world_size,
            "axes": axes_of(job.spec, job.mesh).sizes,
            "mode": job.mesh.tensor.mode,
            "proved_on": [{"ranks": run.job.mesh.world_size, "axes": run.axes} for run in proof.runs],
        },
        shrunk=proof.shrunk,
        not_proven=proof.not_proven,
        checks=tuple({**each._asdict(), "worst": _number(each.worst)} for each in proof.checks),
        first_difference=None if difference is None else difference._asdict(),
        versions=certificate.versions(transformers=bool(getattr(model, "is_of_transformers", False))),
        config_sha256=certificate.digest(config, job.mesh.world_size),
        findings=tuple(f"{each.code} {each.message}" for each in proof.findings),
    )


def _number(value: float) -> float | str:
    return value if value != float("inf") else "inf"  # JSON has no infinity


def _text(proof: Proof, config: Config, job: Job) -> str:
    ran = " and on ".join(f"{run.job.mesh.world_size} ranks ({run.axes})" for run in proof.runs)
    lines = [f"{config.path}, {job.mesh.world_size} ranks: {proof.verdict} on {ran}"]
    for each in proof.checks:
        mark = "" if each.holds else "  DIFFERS"
        lines.append(f"  {each.name:10} {each.worst:8.1e} of {each.bound:.1e}  {each.at}{mark}")
    if (difference := proof.first_difference) is not None:
        ratio = "" if difference.ratio is None else f", {difference.ratio:g} times as large as it should be"
        lines.append(f"first difference: {difference.parameter or 'none'}{ratio}")
        lines.append(f"  axis: {difference.axis or 'not known'}")
        lines.append(f"  {difference.guess}")
    for title, rows in (("shrunk", proof.shrunk), ("not proven", proof.not_proven)):
        lines += [f"{title}:", *(f"  {row}" for row in rows)] if rows else []
    return "\n".join(lines) + "\n"


def _write(path: Path, made: certificate.Certificate, parser: argparse.ArgumentParser) -> None:
    from dslpar.core.visible import json_text

    try:
        path.write_text(json_text(made.as_dict()), encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror}")


def _verify(args: argparse.Namespace, config: Config, parser: argparse.ArgumentParser) -> int:
    try:
        stored = certificate.read(args.verify)
    except certificate.CertificateError as error:
        parser.error(str(error))
    reasons = certificate.outdated(stored, config, args.world_size)
    if args.format == "json":
        arguments.print_json({"holds": not reasons, "reasons": reasons})
    elif reasons:
        print(visible_lines("\n  ".join([f"{args.verify} does not hold for {config.path}:", *reasons])))
    else:
        print(visible(f"{args.verify} holds for {config.path} in a world of {stored['layout']['world_size']}"))
    return 1 if reasons else 0
