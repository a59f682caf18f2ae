"""The training program, one process a rank: `train.py --config FILE [key=value ...]`, under any launcher or none.

    deepspeed --num_gpus 8 train.py --config configs/gpt_3d.py train.steps=50
    mpirun -np 8 --bind-to none python train.py --config configs/gpt_3d.py --resume
    python train.py --config configs/gpt_3d.py parallel=None            # one process, the same path

The config is loaded, linted and resolved before torch is imported, and before any process group exists. Rank 0 speaks;
the others only in error. Exit status: 0 the run is done, 1 it cannot run or has failed, 2 the command line is wrong,
train.requeue_status (75) it was told to stop by SIGTERM or SIGUSR1, has saved a checkpoint, and is to be queued again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Finding, Location
from dslpar.distributed import bootstrap
from dslpar.distributed.bootstrap import DistributedEnv
from dslpar.layout.resolve import Job
from dslpar.linter import check as linter_check
from dslpar.linter.report import text as report_text
from dslpar.reporting import logging, monitors, run_dir
from dslpar.reporting.logging import log

if TYPE_CHECKING:
    from dslpar.checkpoint import Stored
    from dslpar.data.corpus import Corpus
    from dslpar.distributed import collectives
    from dslpar.engine.engine import Engine
    from dslpar.language.load import Config
    from dslpar.watchdog.rank_monitor import RankMonitor

_PATIENCE_S = 10
"""How long a rank that has nothing to say waits to be ended by the launcher, after rank 0 has said why."""
_MET_PATIENCE_S = 3
"""The same where the ranks have met, so that rank 0 is not late: on another host nobody may end this one."""


class Ready(NamedTuple):
    """What will run, on what text, what says so, and how much of it was asked for."""

    job: Job
    corpus: Corpus
    config: Config
    flags: argparse.Namespace

    @property
    def trains(self) -> bool:
        """Whether steps are taken, and files written."""
        return not (self.flags.eval_only or self.flags.dry_run)

    @property
    def loads(self) -> bool:
        """Whether a checkpoint is loaded, if there is one."""
        return bool(self.flags.resume or self.flags.eval_only)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit status."""
    try:
        dist_env = bootstrap.read_distributed_env(os.environ)
    except DslparError as error:
        sys.stderr.write(report_text.text(error.findings, {}))
        return 1
    monitor = bootstrap.monitor_rank(dist_env, os.environ)
    with logging.muted_unless_rank_0(dist_env.rank) as unsaid:
        status, ready = _prepare(dist_env, sys.argv[1:] if argv is None else argv)
    if ready is not None:
        return _run(dist_env, ready, monitor)
    if status and dist_env.rank:
        time.sleep(_PATIENCE_S)  # rank 0 most often says the same, and the launcher ends this one
        sys.stderr.write(f"{monitor.location} cannot run:\n{unsaid.getvalue()}")
    return status


def _run(dist_env: DistributedEnv, ready: Ready, monitor: RankMonitor) -> int:
    """The run itself; its exit status."""
    os.environ.update(monitors.environment(ready.job))
    train = ready.job.spec.train
    if ready.trains:
        monitor.stop_on_signal(train.term_grace, train.requeue_status)
    monitor.page.enter("starting")
    bootstrap.setup_distributed(dist_env, os.environ, monitor)
    _outwait(ready.job)
    try:
        _agree(dist_env, ready)  # so from here on, every rank has read the config
        if dist_env.rank == 0 and ready.trains:
            run_dir.lock_run_folder(ready.job, ready.config)  # before it is looked what is there
        stored = _stored(dist_env, ready) if ready.loads else None
        folder = _claim(dist_env, ready, stored)
    except DslparError as error:
        if dist_env.rank == 0:
            logging.print_findings([_placed(finding, ready) for finding in error.findings], ready.config.sources)
        return _leave(dist_env, monitor)
    with logging.log_to_run_folder(folder, dist_env.rank):
        try:
            status = _work(ready, stored, folder, monitor)
        except DslparError as error:  # what the machine alone could tell, and tells every rank
            log.error("%s", report_text.text(error.findings, {}).rstrip())
            return _leave(dist_env, monitor)
    monitor.page.enter("ending", monitor.page.progress().step)
    bootstrap.teardown_distributed()
    return status


def _leave(dist_env: DistributedEnv, monitor: RankMonitor) -> int:
    """The exit status of an error that every rank has met, and rank 0 tells: at the first rank that leaves, a launcher
    ends the others, so rank 0 goes first.
    """
    monitor.page.enter("ending", monitor.page.progress().step)
    bootstrap.teardown_distributed(together=False)
    if dist_env.rank:
        monitor.wait_for_rank_0(_MET_PATIENCE_S)
    return 1


def _placed(finding: Finding, ready: Ready) -> Finding:
    """At its key, where that stands in the config: those who find it know the file alone."""
    known = finding.key and finding.location == Location(ready.job.path)
    return finding._replace(location=ready.config.at(finding.key)) if known else finding


# ---- before anything starts ----


def _prepare(dist_env: DistributedEnv, words: Sequence[str]) -> tuple[int, Ready | None]:
    """Everything that can be known to be wrong before a process group exists; with it, the exit status."""
    from dslpar.data.corpus import load_corpus

    config: Config | None = None
    try:
        flags = _parser().parse_intermixed_args(words)
        config = linter_check.load(flags.config, flags.overrides)
        checked = linter_check.check(config, dist_env.world_size)
        logging.print_findings(checked.findings, config.sources)
        if checked.has_errors:
            return 1, None
        job = _asked(checked.job, flags)
        if dist_env.rank == 0:
            monitors.check_packages(job)
        ready = Ready(job, load_corpus(job), config, flags)
        logging.print_findings([*run_dir.unused_checkpoint(job, config, loads=ready.loads)], config.sources)
        return 0, ready
    except DslparError as error:
        logging.print_findings(error.findings, config.sources if config else {})
        return 1, None
    except SystemExit as ended:  # argparse's, which has printed why
        return int(ended.code or 0), None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train what a config describes, on this rank.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the config")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in train.output_dir; where there is none, start at step 0",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="load the newest checkpoint, print the held-out loss, add it to eval.jsonl, and stop",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build the engine on all ranks (with --resume: load, too), print what was built, and stop; writes nothing",
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it; see bootstrap
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config's keys")
    return parser


def _asked(job: Job, flags: argparse.Namespace) -> Job:
    """The job as the flags have it: what does not train needs no monitors, and an evaluation held-out text."""
    if flags.eval_only or flags.dry_run:
        job = monitors.without_monitors(job)
    if flags.eval_only:
        train = dataclasses.replace(job.spec.train, eval_interval=job.spec.train.steps)
        job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train))
    return job


# ---- all ranks together, before anything is built ----


def _agree(dist_env: DistributedEnv, ready: Ready) -> None:
    """They run the same, on whatever host they are; else DslparError, on every rank."""
    from dslpar.training import consistency

    flags = {name: value for name, value in vars(ready.flags).items() if isinstance(value, bool)}
    consistency.demand(consistency.identity(ready.job, ready.corpus, flags), _world(dist_env))


def _stored(dist_env: DistributedEnv, ready: Ready) -> Stored | None:
    """The checkpoint to load, checked; None: there is none, and nothing to evaluate would be an error."""
    from dslpar import checkpoint

    job = ready.job
    stored = checkpoint.newest(job, _world(dist_env))
    if stored is not None:
        checkpoint.check(stored, job, checkpoint.text_identity(ready.corpus.train))
    elif ready.flags.eval_only:
        message = f"--eval-only, and no checkpoint in {job.output_dir}"
        hint = "train first, or name the folder of a run, train.output_dir=..."
        key = "train.output_dir"
        raise_finding("CKP206", message, hint, job.path, key)
    return stored


def _claim(dist_env: DistributedEnv, ready: Ready, stored: Stored | None) -> Path | None:
    """The folder to write to, on rank 0 of a run that trains; what is complete leaves all as it is."""
    if dist_env.rank or not ready.trains or _is_complete(ready, stored):
        return None
    return run_dir.prepare_run_folder(
        ready.job, ready.config, resumed=stored is not None and _is_own(ready.job, stored)
    )


def _is_own(job: Job, stored: Stored) -> bool:
    """Whether it is of the run in this folder, which then goes on; another run that is there is set aside."""
    return Path(stored.path).parent.resolve() == Path(job.output_dir, run_dir.CHECKPOINTS).resolve()


def _is_complete(ready: Ready, stored: Stored | None) -> bool:
    return ready.trains and stored is not None and stored.step >= ready.job.spec.train.steps


def _world(dist_env: DistributedEnv) -> collectives.Axis:
    from dslpar.distributed import collectives

    return collectives.Axis(dist_env.world_size, dist_env.rank, tuple(range(dist_env.world_size)))


# ---- the work ----


def _work(ready: Ready, stored: Stored | None, folder: Path | None, monitor: RankMonitor) -> int:
    """What was asked for; the exit status."""
    job = ready.job
    if stored is not None and _is_complete(ready, stored):
        log.info("%s is of step %d, and train.steps is %d: complete", stored.path, stored.step, job.spec.train.steps)
        return 0
    if ready.loads and stored is None:
        log.info("nothing to resume in %s: starting at step 0", job.output_dir)
    engine = _build(job, stored, folder, monitor)
    _introduce(job, engine)
    if stored is not None:
        log.info("%s is loaded: step %d, sample %d", stored.path, engine.steps_done, engine.consumed_samples)
        _tell_changes(job, stored)
    if ready.flags.dry_run:
        _count(engine)
    elif ready.flags.eval_only:
        _evaluate(ready, engine)
    else:
        return _train(ready, engine, folder, monitor)
    return 0


def _outwait(job: Job) -> None:
    """What torch gives up waiting for is to be longer than what a step, or a checkpoint, may take."""
    from dslpar.training.loop import SLOW

    bound = job.spec.train.step_timeout
    bootstrap.extend_timeouts(bound and SLOW * bound)


def _tell_changes(job: Job, stored: Stored) -> None:
    """What is not as it was in the run that saved: the layout, and what takes effect."""
    from dslpar import checkpoint

    for line in checkpoint.changes(stored, job):
        log.info("%s", line)


def _build(job: Job, stored: Stored | None, folder: Path | None, monitor: RankMonitor) -> Engine:
    """The engine, as the checkpoint has it."""
    from dslpar import checkpoint
    from dslpar.data.text import TextSamples
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    with logging.prints_to_log(folder):
        groups = Groups(job.mesh)
        monitor.page.set_location(groups.stage_name)
        monitor.page.enter("building")
        engine = build_engine(job, groups, all_counted=TextSamples.all_counted)
        _outwait(job)
        if stored is not None:
            monitor.page.enter("loading")
            checkpoint.load(engine, stored)
    return engine


def _train(ready: Ready, engine: Engine, folder: Path | None, monitor: RankMonitor) -> int:
    """The steps; the exit status."""
    from dslpar.training.loop import Steps

    if folder is not None:
        run_dir.truncate_metrics(folder, engine.steps_done)
    steps = Steps(ready.job, engine, ready.corpus, folder, monitor)
    steps.train()
    if not steps.stopped or engine.steps_done == ready.job.spec.train.steps:
        return 0
    log.info("told to stop: %s", f"step {engine.steps_done} is saved in {steps.saved}" if steps.saved else "not saved")
    return monitor.mark_stopped(engine.steps_done, steps.saved)


def _evaluate(ready: Ready, engine: Engine) -> None:
    """The held-out loss, on the terminal and in eval.jsonl."""
    from dslpar.training.loop import Steps

    job = ready.job
    loss = Steps(job, engine, ready.corpus, folder=None).held_out_loss()
    tokens = job.spec.train.eval_steps * job.batch.global_size * job.seq_len
    log.info("held-out loss at step %d: %.4f, over %d tokens", engine.steps_done, loss, tokens)
    if engine.groups.rank == 0:
        with open(Path(job.output_dir, run_dir.EVAL), "a", encoding="utf-8") as file:
            run_dir.write_record(file, {"step": engine.steps_done, "eval_loss": loss, "tokens": tokens})


def _introduce(job: Job, engine: Engine) -> None:
    """What runs, in two lines."""
    mesh, cuboid, batch = job.mesh, job.mesh.tensor, job.batch
    mode = f" ({cuboid.mode})" if cuboid.mode else ""
    log.info(
        "%s: world of %d = pipeline %d * data %d * tensor %d%s, on %s; written to %s",
        *(job.path, mesh.world_size, mesh.pipe, mesh.data, cuboid.size, mode, engine.deepspeed.device, job.output_dir),
    )
    log.info(
        "%d samples of %d tokens a step = micro %d * accumulation %d * data %d; ZeRO %d, %s",
        *(batch.global_size, job.seq_len, batch.micro_size, batch.accumulation, mesh.data),
        *(job.spec.zero.stage, job.spec.precision.dtype),
    )


def _count(engine: Engine) -> None:
    """What was built, in a line."""
    from dslpar.training.loop import num_parameters

    everywhere, here = num_parameters(engine)
    log.info("built on all ranks: %s parameters in all, of which rank 0 holds %s", f"{everywhere:,}", f"{here:,}")
