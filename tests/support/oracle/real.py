"""Take a config through lint, resolve, build and deepspeed.initialize, on one fake rank of its world.

    verdicts = judge([sample(seed) for seed in range(50)])

Only the process group is fake: DeepSpeed and dslpar's patches are those of a run. Each rank is a separate fork, since
DeepSpeed keeps much state in globals. A config that lint refuses is built anyway, as far as possible: the typed spec,
with DeepSpeed's own sections as written.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import traceback
from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # once here, not in every fork
import torch
import torch.fx.experimental.symbolic_shapes
import torch.utils.tensorboard
from torch import Tensor

from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.distributed import collectives, deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.dry_run.even_routing import even_routing
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
"""The file name in the findings of sampled configs."""


class Built(NamedTuple):
    """The result of one rank."""

    accepted: bool
    by: str = ""
    """The one that refused: "dslpar" (a finding), "DeepSpeed", or "nobody could ask"."""
    said: str = ""
    where: str = ""
    """The end of the traceback."""
    stepped: bool = False


class Verdict(NamedTuple):
    """The verdicts of lint and of the real path on one case."""

    case: Case
    findings: list[Finding]
    built: list[Built]

    @property
    def passes(self) -> bool:
        """Return whether lint lets it run."""
        return not has_errors(self.findings)

    @property
    def codes(self) -> set[str]:
        """Return the codes of the errors."""
        return {finding.code for finding in self.findings if finding.severity == "error"}

    @property
    def accepted(self) -> bool:
        """Return whether every tried rank was built."""
        return all(built.accepted for built in self.built)


def judge(cases: Sequence[Case], at_once: int = 2) -> list[Verdict]:
    """Return both verdicts of each case. Cases that pass lint are built on all their ranks, the others on one."""
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
    """Return the evaluated config."""
    return check.load_text(case.text, PATH)


def _built(task: tuple[Case, int, bool]) -> Built:
    """Build one rank in this process, which cannot be used afterwards."""
    case, rank, forced = task
    with tempfile.TemporaryDirectory(prefix="dslpar_oracle_") as folder:
        os.chdir(folder)  # monitors write files
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
    """Build the engine, and return whether it took a step."""
    world = job.mesh.world_size
    slots = max(size for size in range(1, 9) if world % size == 0)  # on hosts with equal slots, as the linter demands
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % slots), LOCAL_SIZE=str(slots))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    asked = job.spec.monitor.wandb
    if asked is not None and asked.enabled:
        job = monitors.without_monitors(job)  # as with --dry-run: W&B would start a process of its own
    deepspeed_patches.skip_shm_op()
    # A fake all-to-all leaves the sizes and the tokens that it should receive as they were.
    exchange = patch.object(collectives, "exchange_rows", _exchange_rows)
    with fake_world(rank, world), even_routing(), exchange, logging.prints_to_log(None):
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        engine = build_engine(job, Groups(job.mesh), all_counted=True)
        return _step(engine)


_exchange = collectives.exchange_rows


def _exchange_rows(x: Tensor, axis: collectives.Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange rows with fake ranks: torch's fake group has nothing to give a rank that sends no row."""
    return _exchange(x, axis, sent, received) if len(x) else x.new_zeros((sum(received), *x.shape[1:]))


def _step(engine: Engine) -> bool:
    """Take one step on tokens if no data must come from a neighbour, and return whether it did."""
    job = engine.job
    alone = job.mesh.pipe == 1 and not (job.spec.zero.stage == 3 and engine.groups.rank)  # ZeRO 3 asks rank 0
    if not alone or not isinstance(job.spec.model, section.GPT):
        return False
    ids = torch.zeros(job.batch.micro_size, job.seq_len, dtype=torch.int64)
    engine.train_batch([(ids, ids)] * job.batch.accumulation)
    return True


# ---- past the linter ----


def forced_job(config: Config, world: int) -> Job:
    """Return the job of a config that lint refuses, with DeepSpeed's sections as written. Raises if there is none."""
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
