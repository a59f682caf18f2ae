"""The training program, one process per rank: `train.py --config FILE [key=value ...]`, with or without a launcher.

    deepspeed --num_gpus 8 train.py --config configs/gpt_3d.py train.steps=50
    mpirun -np 8 --bind-to none python train.py --config configs/gpt_3d.py --resume
    python train.py --config configs/gpt_3d.py parallel=None            # one process, the same steps

Phases of a rank:

1. Parse the arguments, and load and lint the config, without torch and before any process group exists.
2. Set up torch.distributed, and check that all ranks run the same job.
3. Claim the run folder, build the engine, and load the checkpoint.
4. Train, and tear down.

Rank 0 reports; other ranks report only errors.

Exit status: 0, the run is complete; 1, it cannot run or has failed; 2, the command line is wrong;
train.requeue_status (75), SIGTERM or SIGUSR1 stopped it, a checkpoint is saved, and the job must be queued again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.errors import DslparError
from dslpar.data.source import all_counted, find_source
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.distributed.rank_session import SLOW_FACTOR, RankExit, RankSession
from dslpar.launch.agent import JOB
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import check_data
from dslpar.linter import check
from dslpar.reporting import logging, monitors, run_dir
from dslpar.schema import paths
from dslpar.training.arguments import make_parser
from dslpar.training.request import Request, claim_run_folder

if TYPE_CHECKING:
    from dslpar.checkpoint import Checkpoint
    from dslpar.data.source import Source
    from dslpar.language.load import Config
    from dslpar.training.session import Session


class Loaded(NamedTuple):
    """Everything that the command line names: the job, its data, its config, and the requested action."""

    job: Job
    source: Source
    config: Config
    request: Request
    flags: str
    """The command line's flags, which must be the same on all ranks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit status."""
    words = sys.argv[1:] if argv is None else argv

    def load(dist_env: DistributedEnv) -> Loaded:
        status, loaded = load_and_lint(words, dist_env, linted=JOB in os.environ)
        if loaded is None:
            raise RankExit(status)
        return loaded

    with RankSession(os.environ, watch_one=True) as rank:
        loaded = rank.prepare(load)
        rank.config = loaded.config
        rank.status = _run(loaded, rank)
    return rank.status


def _run(loaded: Loaded, rank: RankSession) -> int:
    """Meet the other ranks, claim the run folder, and run the request; return the exit status."""
    job, source, request = loaded.job, loaded.source, loaded.request
    assert rank.monitor is not None, "train.py's ranks are watched"
    if request.trains:  # handlers are set before the ranks meet: a scheduler may end a job whose ranks still wait
        rank.monitor.stop_on_signal(job.spec.train.term_grace, job.spec.train.requeue_status)
    rank.meet(job, monitors.environment(job))
    from dslpar.training.run_loop import interrupt_logged  # imports torch, as the modules that `_train` imports
    from dslpar.training.session import Session

    session = Session(job, loaded.config, rank.world, rank.monitor, source.identity)
    session.extend_timeouts()
    rank.ending_s = SLOW_FACTOR * (job.spec.train.step_timeout or 0)
    versions = {f"version of {name}": version for name, version in run_dir.versions().items()}
    rank.agree(job, {"text": source.whole_identity, "command line": loaded.flags, **versions})
    # Every rank has read the config by now. The config may be in the run folder, whose files change from here on.
    stored, folder = claim_run_folder(session, job, request, loads=request.loads_checkpoint)
    rank.log_to_run_folder(folder)
    with interrupt_logged(session, job):
        return _train(loaded, session, stored, folder)


def _train(loaded: Loaded, session: Session, stored: Checkpoint | None, folder: Path | None) -> int:
    """Build the engine, then train, evaluate, or only build (--dry-run); return the exit status."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.training.run_loop import log_complete, log_no_checkpoint, run_loop
    from dslpar.training.session import NO_LIMIT
    from dslpar.training.step_data import PartData

    job, source, request = loaded.job, loaded.source, loaded.request
    if stored is not None and request.is_complete(job, stored):
        log_complete(stored.step, job.spec.train.steps)
        return 0
    if request.loads_checkpoint and stored is None:
        log_no_checkpoint(job.output_dir, 0)
    with logging.prints_to_log(folder):
        groups = Groups(job.mesh, num_chunks=job.chunks.num)
        session.locate(groups)
        session.enter("building", times=NO_LIMIT)
        engine = build_engine(job, groups, all_counted=all_counted(job))
        session.extend_timeouts()  # for the groups created since

    def make_data() -> tuple[PartData, PartData | None]:
        train_data, held_out = (PartData(engine, part, session.world) for part in (source.train, source.held_out))
        return train_data, held_out if job.spec.train.eval_interval is not None else None

    return run_loop(engine, session, request, stored, folder, make_data).status


# ---- before torch is imported ----


def load_and_lint(argv: Sequence[str], dist_env: DistributedEnv, linted: bool = False) -> tuple[int, Loaded | None]:
    """Find and print all problems before a process group exists; return the exit status, and what was loaded.

    linted: `dslpar launch` started this rank, and has printed lint's warnings.
    """
    config: Config | None = None
    try:
        arguments = make_parser("train.py", "Train what a config describes, on this rank.").parse_intermixed_args(argv)
        config = check.load(arguments.config, arguments.overrides, trusted=arguments.trust)
        checked = check.check(config, dist_env.world_size)
        if checked.has_errors or not linted:
            logging.print_findings(checked.findings, config.sources)
        if checked.has_errors:
            return 1, None
        job = _requested_job(checked.job, arguments)
        if dist_env.rank == 0:
            monitors.check_packages(job)
        request = Request(arguments.resume, arguments.eval_only, arguments.dry_run)
        paths.check(paths.named_paths(job.spec, job.path), job.path)
        check_data(job)
        flags = {name: value for name, value in vars(arguments).items() if isinstance(value, bool)}
        loaded = Loaded(job, find_source(job), config, request, repr(flags))
        unused = run_dir.unused_checkpoint(job, config, loads=request.loads_checkpoint)
        logging.print_findings([*unused], config.sources)
        return 0, loaded
    except DslparError as error:
        if config is None:
            logging.print_findings(error.findings)
        else:
            logging.print_findings(config.at_keys(error.findings), config.sources)
        return 1, None
    except SystemExit as ended:  # from argparse, which has printed why
        return int(ended.code or 0), None


def _requested_job(job: Job, arguments: argparse.Namespace) -> Job:
    """Return the job as changed by the flags: only training needs monitors, and an evaluation needs held-out data."""
    if arguments.eval_only or arguments.dry_run:
        job = monitors.without_monitors(job)
    if arguments.eval_only:
        train = dataclasses.replace(job.spec.train, eval_interval=job.spec.train.steps)
        job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train))
    return job
