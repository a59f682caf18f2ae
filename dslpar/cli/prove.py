"""`dslpar prove CFG --world-size N`: compare a layout's results with one process, on CPU ranks."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.project import add_trust
from dslpar.core.visible import json_text, visible, visible_lines
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity import certificate
from dslpar.parity.small_mesh import axes_of

if TYPE_CHECKING:
    from dslpar.parity.prove import Proof

EPILOG = """\
dslpar prove configs/gpt_3d.py --world-size 8
dslpar prove CFG --world-size 512 --ranks 16 zero.stage=2        # another layout, on more ranks
dslpar prove CFG --world-size 8 --resume-on "parallel.pipeline=4 zero.stage=0"
dslpar prove CFG --world-size 8 --certificate proof.json         # save the result
dslpar prove CFG --verify proof.json                             # does it still hold for CFG?

Trains the config's model in miniature twice: with the config's layout on CPU ranks, through
DeepSpeed, and in one process in double precision. Compares each step's loss and gradient norm,
every gradient of the first step, all weights after the last step, and all copies of each parameter.
Bounds are the effect of float32's rounding on this model. If something differs, prints the first
such parameter in backward order, what would correct its gradient, and the axes without which the
difference disappears.

The miniature keeps the model family, every axis with more than one rank, the ZeRO stage, the
schedule, activation checkpointing, tied weights and the optimizer. The output lists what was
shrunk, and what was not proven.

dslpar launch CFG --prove                                        # --on-devices, on the ranks of a job
torchrun --nproc-per-node 8 -m dslpar prove CFG --on-devices     # the same, under any launcher

With --on-devices nothing is shrunk: world size, layout, precision, model and data are the job's
own, and the job's first step is compared. Rank 0 first computes that step alone. If it has too
little memory for the whole model, the miniature is used, and the output says so.

exit status: 0 proved, 1 something differs, 2 lint or the build refuses the layout, or wrong usage"""


_RANKS, _STEPS = 8, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    arguments.add_operands(parser)
    arguments.add_world(parser)
    add_trust(parser)
    add, number = parser.add_argument, arguments.whole_number
    add("--ranks", type=number, metavar="R", help=f"maximum number of CPU ranks; default: {_RANKS}")
    add("--steps", type=number, metavar="S", help=f"number of optimizer steps; default: {_STEPS}")
    add("--full", action="store_true", help="keep the model's sizes; shrink only the world and the batch")
    help = "save after half of the steps, and resume on the layout that these overrides of the config make"
    add("--resume-on", metavar="OVERRIDES", help=help)
    help = "prove on the ranks of the surrounding job, at its own world size and precision"
    add("--on-devices", action="store_true", help=help)
    add("--small", action="store_true", help="with --on-devices: shrink the model and the batch")
    add("--certificate", metavar="FILE", help="write the result to FILE as JSON")
    help = "run nothing; print whether the certificate in FILE still holds for this config and the installed versions"
    add("--verify", metavar="FILE", help=help)
    arguments.add_format(parser)
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prove, or verify a certificate; return the exit status."""
    if args.on_devices:
        return _prove_on_devices(args, parser)
    if args.small:
        parser.error("--small goes with --on-devices")
    args.ranks, args.steps = args.ranks or _RANKS, args.steps or _STEPS
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    (config,) = arguments.load_configs(args, parser)
    args.world_size = arguments.default_world_size(args, config.path)
    if args.verify is not None:
        return _verify(args, config, parser)
    world_size = arguments.world_size(args, cluster, parser, lambda: config)
    if world_size is None:
        return certificate.STATUS[certificate.REFUSED]
    if args.resume_on is not None and args.steps < 2:
        parser.error("--resume-on needs at least 2 steps")
    job = _job(config, world_size, sources)
    if job is None:
        return certificate.STATUS[certificate.REFUSED]
    other = None
    if args.resume_on is not None:
        other = _resumed_job(args, config, world_size, sources, parser)
        if other is None:
            return certificate.STATUS[certificate.REFUSED]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks fork, and share the cores
    sys.path.insert(0, os.getcwd())  # for the user's own modules, as for train.py
    proving = import_with_torch("dslpar.parity.prove")
    try:
        proof = proving.prove(job, max_ranks=args.ranks, steps=args.steps, full=args.full, resume_on=other)
    except ValueError as error:  # too few ranks or steps, or --resume-on makes a different run
        parser.error(str(error))
    except import_with_torch("dslpar.distributed.forked_ranks").RankError as error:
        sys.stderr.write(visible_lines(f"{error}\n"))
        proof = proving.Proof(certificate.REFUSED, (), error=error.reason)
    made = certificate_of(proof, config, job, _request(args))
    if args.certificate is not None:
        _write(Path(args.certificate), made, parser)
    _print(args, proof, made, config, job)
    return certificate.STATUS[proof.verdict]


def _request(args: argparse.Namespace) -> dict[str, Any]:
    return {"ranks": args.ranks, "steps": args.steps, "full": args.full, "resume_on": args.resume_on}


def _print(args: argparse.Namespace, proof: Proof, made: certificate.Certificate, config: Config, job: Job) -> None:
    if args.format == "json":
        arguments.print_json(made.as_dict())
    else:
        arguments.print_findings(proof.findings, dict(config.sources))
        sys.stdout.write(visible_lines(_text(proof, config, job)))


# ---- on the ranks of a job ----


def _prove_on_devices(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prove on the ranks of the job that this process is a rank of; return the exit status."""
    needless = ("ranks", "steps", "full", "resume_on", "verify", "world_size", "hostfile", "include", "exclude")
    for name in (each for each in needless if getattr(args, each)):
        parser.error(f"--{name.replace('_', '-')} does not go with --on-devices: the job that runs it is proved")
    sys.path.insert(0, os.getcwd())  # for the user's own modules, as for train.py
    on_devices = import_with_torch("dslpar.parity.prove_on_devices")
    path = None if args.certificate is None else Path(args.certificate)

    def load(world_size: int) -> Any:
        if path is not None:
            _check_writable(path, parser)
        (config,) = arguments.load_configs(args, parser)
        job = _job(config, world_size, {})
        return None if job is None else on_devices.Loaded(config, job)

    def report(proof: Proof, loaded: Any) -> None:
        made = certificate_of(proof, loaded.config, loaded.job)
        if path is not None:
            _write(path, made, parser)
        _print(args, proof, made, loaded.config, loaded.job)

    request = repr(sorted((name, value) for name, value in vars(args).items() if name != "local_rank"))
    status: int = on_devices.run(load, report, small=args.small, request=request)
    return status


def _check_writable(path: Path, parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error if a file cannot be written, before the ranks meet and the proof starts."""
    folder = path.parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        parser.error(f"cannot write {path}: its folder does not exist or is not writable")


def _job(config: Config, world_size: int, sources: dict[str, str]) -> Job | None:
    """Lint the config, without the rules that forecast whether it fits a device, and print its errors.

    Return the job; None if there are errors.
    """
    checked = check.check(config, world_size, forecasts=False)
    arguments.print_findings(
        [each for each in checked.findings if each.severity == "error"], sources | dict(config.sources)
    )
    return None if checked.has_errors else checked.job


def _resumed_job(
    args: argparse.Namespace,
    config: Config,
    world_size: int,
    sources: dict[str, str],
    parser: argparse.ArgumentParser,
) -> Job | None:
    try:
        resume_on = shlex.split(args.resume_on)
    except ValueError as error:
        parser.error(f"--resume-on: {error}")
    overrides = [*arguments.overrides(args), *resume_on]
    return _job(check.load(config.path, overrides, trusted=args.trust or ()), world_size, sources)


def certificate_of(
    proof: Proof, config: Config, job: Job, request: dict[str, Any] | None = None
) -> certificate.Certificate:
    """Return a proof's certificate."""
    model: Any = job.spec.model
    difference = proof.first_difference
    return certificate.Certificate(
        verdict=proof.verdict,
        layout={
            "world_size": job.mesh.world_size,
            "axes": axes_of(job.spec, job.mesh).sizes,
            "mode": job.mesh.tensor.mode,
            "proved_on": [{"ranks": run.job.mesh.world_size, "axes": run.axes} for run in proof.runs],
            **({"reference": proof.reference, "precision": job.spec.precision.dtype} if proof.reference else {}),
        },
        shrunk=proof.shrunk,
        not_proven=proof.not_proven,
        checks=tuple(
            {**each._asdict(), "worst": _number(each.worst), "bound": _number(each.bound)} for each in proof.checks
        ),
        first_difference=None if difference is None else difference._asdict(),
        versions=certificate.versions(transformers=bool(getattr(model, "is_of_transformers", False))),
        config_sha256=certificate.digest(config, job.mesh.world_size),
        findings=(*(f"{each.code} {each.message}" for each in proof.findings), *([proof.error] if proof.error else [])),
        request=request or {},
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinity


def _text(proof: Proof, config: Config, job: Job) -> str:
    ran = " and on ".join(f"{run.job.mesh.world_size} ranks ({run.axes})" for run in proof.runs)
    how = f", {job.spec.precision.dtype} against {proof.reference}" if proof.reference else ""
    lines = [f"{config.path}, {job.mesh.world_size} ranks: {proof.verdict}{f' on {ran}' if ran else ''}{how}"]
    if proof.error:
        lines.append(f"  a rank failed: {proof.error}")
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
