"""Proof on the ranks of a launched job, with its real world size and precision: `prove --on-devices`.

A proof compares the gradients of one step with those of plain torch, within the rounding of the precision.

    status = run(load, report, small=False, request="...")      # on every rank; rank 0 reports

1. The ranks meet as in train.py, under any launcher or none.
2. Rank 0 computes the first step of the whole model in plain torch (`device_reference`). The other ranks wait, without
   a timeout and without using their devices.
3. All ranks build the same engine as train.py, and take the job's own first step on the job's own data.
4. Within that step each gradient is compared (`gathered_gradients`).

If one rank ends, all ranks end, with the same status. Ranks exchange findings after each phase that may raise some
(`_together`). If only one rank has an error, the others may already be in a collective, and never come there. That
rank's guard (dslpar/watchdog) then ends the job.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.visible import visible, visible_lines
from dslpar.data.loader import Loader
from dslpar.data.order import Samples, micro_batches
from dslpar.data.source import Source, all_counted, find_source, make_samples
from dslpar.distributed import bootstrap, collectives
from dslpar.distributed.consistency import first_findings
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.distributed.groups import Groups
from dslpar.distributed.rank_session import SLOW_FACTOR, RankExit, RankSession
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.engine.model import model_from_job
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import check_data, inputs_of
from dslpar.linter.report import text as report_text
from dslpar.parity import certificate, device_reference
from dslpar.parity.checks import Check, Difference, worst_of
from dslpar.parity.device_reference import DTYPES, FirstStep, StepBatches
from dslpar.parity.explain import FirstDifference
from dslpar.parity.gathered_gradients import Found, compare_gradients
from dslpar.parity.one_process import FLOOR, finite
from dslpar.parity.prove import Proof
from dslpar.parity.samples import draw_samples
from dslpar.parity.shrink import SmallJob, at_full_size, one_process_job, with_small_model
from dslpar.reporting import logging, run_dir

Value = TypeVar("Value")

_REFUSED = RankExit(certificate.STATUS[certificate.REFUSED], is_result=True)
MOST_SKIPPED = 20
"""Most steps to try: fp16's loss scale falls from 2^16 to 1, and is halved at each skipped step after the first."""
NORM_BOUND = 1e-5
"""Relative bound between the reported norm, computed in float32, and the norm of the gathered gradients, in float64.
Both sum the squares of the same numbers. In float32, some thousand additions in a row round by 1e-7 each, with random
signs.
"""
ALONE_S = 120.0
"""Seconds that a rank with a finding waits for the other ranks. If they do not come, they are in a collective that this
rank will not join, and its guard ends them.
"""
_PROGRESS_S = 10.0


class Loaded(NamedTuple):
    """The config and job to prove."""

    config: Config
    job: Job


Load = Callable[[int], Loaded | None]
"""Loads and lints the config for a world size; None: it is refused, and the findings have been printed."""
Report = Callable[[Proof, Loaded], None]
"""Prints a proof, on rank 0."""


def run(load: Load, report: Report, *, small: bool, request: str) -> int:
    """Prove the job on these ranks; return the exit status, which is the same on all ranks.

    `small`: use the model in miniature. `request`: the requested options, which must be the same on all ranks.
    """
    with RankSession(os.environ, watch_one=True, refused=_REFUSED) as rank:
        loaded, source = rank.prepare(lambda dist_env: _load(load, dist_env, small))
        rank.config = loaded.config
        with logging.prints_to_log(None):  # DeepSpeed's output is not part of the result
            verdict, proof = _Ranks(rank, loaded, source).prove(small, request)
        if proof is not None:
            report(proof, loaded)
        if status := certificate.STATUS[verdict]:
            raise RankExit(status, is_result=True)
    return rank.status


def _load(load: Load, dist_env: DistributedEnv, small: bool) -> tuple[Loaded, Source | None]:
    """Return the job and its data (a miniature needs none); print findings."""
    loaded = load(dist_env.world_size)
    if loaded is None:
        raise _REFUSED
    try:
        check_data(loaded.job)
        return loaded, None if small else find_source(loaded.job)
    except DslparError as error:
        logging.print_findings(loaded.config.at_keys(error.findings), loaded.config.sources)
        raise _REFUSED from error


@dataclass
class _Reference:
    """Rank 0's reference, and the facts about it that other ranks need."""

    small: bool
    """True if the model is in miniature."""
    why_small: str
    """Why a miniature is used although it was not requested; empty: none is used, or it was requested."""
    samples: Samples | None
    """The samples to train on; None: the config's data."""
    first: FirstStep | None
    """The first step; None on ranks other than 0."""


class _Ranks:
    """One rank of a proof; all ranks call its methods together."""

    def __init__(self, session: RankSession, loaded: Loaded, source: Source | None) -> None:
        self.session, self.loaded, self.source = session, loaded, source
        self.rank, self.world = session.dist_env.rank, session.world
        assert session.monitor is not None, "also one process is watched"
        self.monitor = session.monitor
        self.runs: tuple[SmallJob, ...] = ()

    def prove(self, small: bool, request: str) -> tuple[str, Proof | None]:
        """Return the verdict (on all ranks) and the proof (on rank 0)."""
        job = self.loaded.job
        self.session.meet(job)
        bootstrap.extend_timeouts(None)  # only the guards detect hangs; nothing else may end a waiting rank
        try:
            proof = self._proof(small, request)
        except DslparError as error:  # every rank has the same findings
            findings = tuple(self.loaded.config.at_keys(error.findings))
            proof = Proof(certificate.REFUSED, self.runs, findings=findings) if self.rank == 0 else None
        return collectives.broadcast_object(proof.verdict if proof else "", self.world), proof

    def _proof(self, small: bool, request: str) -> Proof | None:
        job = self.loaded.job
        facts = {f"version of {name}": version for name, version in run_dir.versions().items()}
        text = None if self.source is None else self.source.whole_identity
        self.session.agree(job, {"command line": request, "text": text, **facts})
        reference = self._reference(small)
        size = with_small_model(job) if reference.small else at_full_size(job)
        if reference.why_small:
            size = size._replace(not_proven=(f"the model at its own size: {reference.why_small}", *size.not_proven))
        self.runs = (size,)
        return self._step(size, reference)

    # ---- one process ----

    def _reference(self, small: bool) -> _Reference:
        """Have rank 0 compute the first step while the other ranks wait; share its other fields with all ranks."""
        self._enter("computing the reference" if self.rank == 0 else "waiting for the reference")
        made = self._together("reference", lambda: self._computed(small) if self.rank == 0 else None)
        first = None if made is None else made.first
        shared = made and _Reference(made.small, made.why_small, made.samples, None)
        reference = collectives.broadcast_object(shared, self.world)
        assert reference is not None, "rank 0 has computed it, or raised a finding"
        reference.first = first
        return reference

    def _computed(self, small: bool) -> _Reference:
        """Compute the first step of the whole model, or of its miniature if requested or if the whole does not fit.

        Raises:
            DslparError: the model cannot be built, or its miniature does not fit either.
        """
        job, why = self.loaded.job, ""
        if not small:
            size = at_full_size(job)
            samples = self._own_samples(size.job)
            first, why = self._first_step(size, lambda module: samples, all_counted(size.job))
            if first is not None:
                return _Reference(False, "", None, first)
        size, drawn = with_small_model(job), list[Samples]()
        model = model_from_job(one_process_job(size.job))

        def draw(module: nn.Module) -> Samples:
            drawn.append(draw_samples(size.job, model, module, size.job.batch.global_size))
            return drawn[-1]

        first, why_not = self._first_step(size, draw, None)
        if first is None:
            message = f"rank 0 cannot compute the first step by itself: {why_not}"
            hint = "start the ranks where rank 0's host has more memory; or prove without --on-devices"
            raise DslparError([finding("HST235", message, hint, job.path)])
        return _Reference(True, why, drawn[-1], first)

    def _first_step(
        self, size: SmallJob, samples_of: Callable[[nn.Module], Samples], counted: bool | None
    ) -> tuple[FirstStep | None, str]:
        """Return the first step, computed on rank 0's device or CPU; None, and the reason, if it fits on neither.

        `counted`: whether all labels count; None: `all_counted` of the samples.
        """
        job = size.job
        model = model_from_job(one_process_job(job))
        needed = device_reference.needed_bytes(job, model)
        device = bootstrap.current_device()
        size_of_batch = job.batch.micro_size
        if model.takes_statistics:
            size_of_batch = job.batch.global_size // job.batch.accumulation
        whole = job.batch._replace(micro_size=size_of_batch, accumulation=job.batch.global_size // size_of_batch)

        def batches_of(module: nn.Module) -> StepBatches:
            samples = samples_of(module)
            batches = list(micro_batches(samples, whole, job.spec.train.seed, 0, 1, 0))
            return StepBatches(batches, samples.all_counted if counted is None else counted)

        said = []
        for place in device_reference.places(_free_bytes, device, needed):
            try:
                progress = _Progress(f"the reference, {place}")
                return device_reference.first_step(job, model, batches_of, place, progress), ""
            except torch.cuda.OutOfMemoryError:  # torch 2.4 has only this name for it
                said.append(f"its activations do not fit {place}")
            finally:
                get_accelerator().empty_cache()  # the engine is built next
        free = ", ".join(f"{place} has {_gib(_free_bytes(place))} free" for place in {device, torch.device("cpu")})
        said = said or [f"its weights and gradients are {_gib(needed)}, and {free}"]
        return None, "; ".join(said)

    def _own_samples(self, job: Job) -> Samples:
        assert self.source is not None, "a job at full size has found its data"
        return make_samples(job, self.source.train, inputs_of(job))

    # ---- the layout ----

    def _step(self, size: SmallJob, reference: _Reference) -> Proof | None:
        """Take the first step under the layout, and compare it with the reference."""
        job = size.job
        self._enter("building")
        groups = Groups(job.mesh, num_chunks=job.chunks.num)
        self.monitor.page.location = groups.stage_name
        counted = all_counted(job) if reference.samples is None else reference.samples.all_counted
        engine = self._together("engine", lambda: build_engine(job, groups, all_counted=counted))
        bootstrap.extend_timeouts(None)  # for groups made since the last call
        loader = self._together("data", lambda: self._loader(engine, reference.samples))
        comparison = compare_gradients(engine, reference.first)
        self._enter("step", 1, (job.spec.train.step_timeout or 0) * SLOW_FACTOR)
        for _ in range(MOST_SKIPPED):
            loss = engine.train_batch(iter(()) if loader is None else loader.step(0))
            found = comparison.result()
            if not (engine.skipped and job.spec.precision.dtype == "fp16"):
                break
        losses = collectives.gather_objects((loss, engine.grad_norm), self.world)
        self._enter("comparing")
        if reference.first is None:
            return None
        return _proof_of(size, reference.first, found, losses)

    def _loader(self, engine: Engine, samples: Samples | None) -> Loader | None:
        """Return this rank's loader; None if it reads no data."""
        if not engine.needs_data:
            return None
        samples = self._own_samples(engine.job) if samples is None else samples
        return Loader(samples, engine.job, engine.groups.coord["data"], lambda: 0)

    # ---- all ranks ----

    def _enter(self, phase: str, step: int = 0, limit_s: float = 0) -> None:
        self.monitor.page.enter(phase, step, limit_s)

    def _together(self, name: str, act: Callable[[], Value]) -> Value:
        """Call `act` on this rank, wait for all ranks, and return the result.

        Raises:
            DslparError: on every rank, with the findings of one rank that raised.
        """
        findings: Sequence[Finding] = ()
        value: Value | None = None
        try:
            value = act()
        except DslparError as error:
            findings = error.findings
        try:
            found = first_findings(findings, self.world, name, ALONE_S)
        except TimeoutError:
            self._fail_alone(findings)
        if found:
            raise DslparError(found)
        return value  # type: ignore[return-value]

    def _fail_alone(self, findings: Sequence[Finding]) -> NoReturn:
        """Have this rank's guard end all ranks, including this rank."""
        text = report_text.text(self.loaded.config.at_keys(findings), self.loaded.config.sources)
        sys.stderr.write(
            visible_lines(f"{self.monitor.location} cannot run, and the other ranks do not know yet:\n{text}")
        )
        self.monitor.mark_failed("cannot run", text)
        self.monitor.wait_for_end()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(get_accelerator().available_memory())


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


class _Progress:
    """Prints the progress of a slow reference to stderr."""

    def __init__(self, title: str) -> None:
        self.title, self.said_s = title, time.monotonic()

    def __call__(self, done: int, count: int) -> None:
        if time.monotonic() - self.said_s > _PROGRESS_S:
            self.said_s = time.monotonic()
            sys.stderr.write(visible(f"{self.title}: {done} of {count} micro-batches") + "\n")


# ---- the verdict ----


def _proof_of(size: SmallJob, first: FirstStep, found: Found | None, numbers: Sequence[tuple[float, float]]) -> Proof:
    """Return the proof from rank 0's results; `numbers` are each rank's loss and norm."""
    checks = [worst_of("loss", {"step 1": _worst_number([loss for loss, _ in numbers], first.loss, first.loss_bound)})]
    if found is None:
        checks.append(Check("gradients", math.inf, 0.0, "not finite: every step was skipped"))
        return Proof(certificate.DIFFERS, (size,), tuple(checks), None, size.not_proven, reference=first.where)
    norms = [norm for _, norm in numbers]
    against = {"against one process": _worst_number(norms, first.norm, max(FLOOR, first.norm_bound))}
    if not size.job.spec.gradient_handler:
        against["against the gathered gradients"] = _worst_number(norms, found.norm, NORM_BOUND)
    checks += [worst_of("gradients", found.differences), worst_of("norm", against), _copies(size.job, found)]
    holds = all(each.holds for each in checks)
    verdict = certificate.PROVED if holds else certificate.DIFFERS
    difference = None if holds else found.first or _unexplained(checks)
    return Proof(verdict, (size,), tuple(checks), difference, size.not_proven, reference=first.where)


def _worst_number(values: Sequence[float], true: float, bound: float) -> Difference:
    return Difference(max(finite(abs(value - true) / max(abs(true), 1e-300)) for value in values), bound)


def _copies(job: Job, found: Found) -> Check:
    """Return the worst deviation between copies. Copies must be bit-identical, but tied copies on two stages may
    differ by rounding.
    """
    if (worst := found.copies) is None:
        return Check("copies", 0.0, 0.0, "")
    first, second = worst.ranks
    bound = device_reference.least(DTYPES[job.spec.precision.dtype], 1) if worst.tied else 0.0
    off = worst.off if math.isfinite(worst.off) else math.inf
    return Check("copies", off, bound, f"{worst.name}, ranks {first} and {second}")


def _unexplained(checks: Sequence[Check]) -> FirstDifference:
    wrong = " and ".join(each.name for each in checks if not each.holds)
    guess = f"every gradient is right within rounding, and {wrong} is not: run dslpar prove in miniature"
    return FirstDifference("", None, None, guess)
