"""The real path of a config: lint, resolve, build, deepspeed.initialize, on one rank of a world that is not there.

    verdicts = judge([sample(seed) for seed in range(50)])

Only the process group is fake: DeepSpeed and our mends are those of a run. Each rank is a fork of its own, since
DeepSpeed keeps much in globals. What lint refuses is built all the same, as far as it can be: the typed spec, with
DeepSpeed's own sections as they were written.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # here, and not in every fork
import torch
import torch.fx.experimental.symbolic_shapes
import torch.utils.tensorboard

from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.language.load import Config
from dslpar.layout.resolve import Job, resolve
from dslpar.linter import check
from dslpar.models.gpt import section
from dslpar.reporting import logging, monitors
from dslpar.schema import sections_reader
from tests.support.fake_world import LostError, fake_world, in_forks
from tests.support.oracle.sample import Case

PATH = "cfg.py"
"""For a rank, of which a compiled model on a busy machine takes a minute."""


class Built(NamedTuple):
    """What became of one rank."""

    accepted: bool
    by: str = ""
    """Who refused: "dslpar" (a finding), "DeepSpeed", or "nobody could ask"."""
    said: str = ""
    where: str = ""
    """The traceback's end."""
    stepped: bool = False


class Verdict(NamedTuple):
    """What lint and the real path say of one case."""

    case: Case
    findings: list[Finding]
    built: list[Built]

    @property
    def passes(self) -> bool:
        """Whether lint lets it run."""
        return not has_errors(self.findings)

    @property
    def codes(self) -> set[str]:
        """Of the errors."""
        return {finding.code for finding in self.findings if finding.severity == "error"}

    @property
    def accepted(self) -> bool:
        """Whether every rank that was asked was built."""
        return all(built.accepted for built in self.built)


def judge(cases: Sequence[Case], at_once: int = 2) -> list[Verdict]:
    """Both verdicts of each case: of what lint passes on all its ranks, of the rest on one."""
    found = [check.lint(config_of(case), case.world) for case in cases]
    asked = [
        (index, rank, has_errors(findings))
        for index, (case, findings) in enumerate(zip(cases, found, strict=True))
        for rank in (case.ranks[-1:] if has_errors(findings) else case.ranks)
    ]
    tasks = [(cases[index], rank, forced) for index, rank, forced in asked]
    answers = in_forks(_built, tasks, at_once)
    verdicts = [Verdict(case, findings, []) for case, findings in zip(cases, found, strict=True)]
    for (index, _, _), answer in zip(asked, answers, strict=True):
        built = Built(False, "DeepSpeed", str(answer)) if isinstance(answer, LostError) else answer
        verdicts[index].built.append(built)
    return verdicts


def config_of(case: Case) -> Config:
    """The config, evaluated."""
    return check.load_text(case.text, PATH)


def _built(task: tuple[Case, int, bool]) -> Built:
    """One rank, in this process, which is spent then."""
    case, rank, forced = task
    with tempfile.TemporaryDirectory(prefix="dslpar_oracle_") as folder:
        os.chdir(folder)  # monitors write
        try:
            job = forced_job(config_of(case), case.world) if forced else check.resolve(config_of(case), case.world)
        except Exception as error:
            return _refused("nobody could ask", error)
        try:
            return Built(True, stepped=_run(job, rank))
        except DslparError as error:
            return _refused("dslpar", error)
        except Exception as error:
            return _refused("DeepSpeed", error)


def _refused(by: str, error: Exception) -> Built:
    where = "".join(traceback.format_exception(error)[-4:])
    return Built(False, by, f"{type(error).__name__}: {str(error)[:400]}", where)


def _run(job: Job, rank: int) -> bool:
    """Builds the engine; whether it took a step."""
    world = job.mesh.world_size
    slots = max(size for size in range(1, 9) if world % size == 0)  # of equal hosts, as the linter demands
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % slots), LOCAL_SIZE=str(slots))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    asked = job.spec.monitor.wandb
    if asked is not None and asked.enabled:
        job = monitors.without_monitors(job)  # as --dry-run has it: W&B would start a process of its own
    deepspeed_patches.skip_shm_op()
    with fake_world(rank, world), logging.prints_to_log(None):
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        engine = build_engine(job, Groups(job.mesh), all_counted=True)
        return _step(engine)


def _step(engine: Engine) -> bool:
    """One step on tokens, where nothing has to come from a neighbour; whether there was one."""
    job = engine.job
    alone = job.mesh.pipe == 1 and not (job.spec.zero.stage == 3 and engine.groups.rank)  # ZeRO 3 asks rank 0
    if not alone or not isinstance(job.spec.model, section.GPT):
        return False
    ids = torch.zeros(job.batch.micro_size, job.seq_len, dtype=torch.int64)
    engine.train_batch([(ids, ids)] * job.batch.accumulation)
    return True


# ---- past the linter ----


def forced_job(config: Config, world: int) -> Job:
    """The job of a config that lint refuses, DeepSpeed's sections as they were written. Raises where there is none."""
    reading = sections_reader.read(config)
    sections = {name: node.plain() for name, node in config.root.value.items()}
    made = reading.spec
    for name, main in (("zero", "stage"), ("precision", "dtype")):
        written = sections.get(name)
        if isinstance(written, dict):
            section = getattr(made, name)
            extra = {key: value for key, value in written.items() if key != main and value is not None}
            extra |= {
                key: {"device": value}
                for key, value in extra.items()
                if key.startswith("offload") and isinstance(value, str)
            }
            made = dataclasses.replace(made, **{name: dataclasses.replace(section, extra=extra)})
    made = dataclasses.replace(made, deepspeed=sections.get("deepspeed") or {})
    return resolve(made, world, config.path)
