"""Prove that a job's layout computes what one process computes, for `dslpar prove` and `dslpar.prove`.

    proof = prove(job, max_ranks=8, steps=3)
    proof.verdict, proof.checks, proof.first_difference

Three steps cover the mistakes that a step can make. The gradients of the first step are compared one by one. The second
step begins with weights and optimizer state that the first step made. The third step begins with optimizer state, such
as moments, that was updated from nonzero state. The last step also reads data of two epochs.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from dslpar.core.errors import DslparError, Finding
from dslpar.data.order import Samples
from dslpar.distributed.forked_ranks import RankError, run_on_ranks
from dslpar.distributed.groups import Groups
from dslpar.engine.model import CustomModel, model_from_job
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, Stage
from dslpar.parity import certificate, layout_ranks, one_process
from dslpar.parity.checks import Check, compare, merged, worst_of_transformers
from dslpar.parity.explain import FirstDifference, explain
from dslpar.parity.layout_ranks import ModelOf, RankResult
from dslpar.parity.one_process import Reference
from dslpar.parity.samples import draw_samples
from dslpar.parity.shrink import SmallJob, one_process_job, shrink, shrink_both, with_axes
from dslpar.parity.small_mesh import axes_of
from dslpar.parity.small_model import Change

STEPS = 3
"""Default number of compared steps; the module docstring explains what each step covers."""


@dataclass(frozen=True)
class Program:
    """A program's own model, and the samples that it trains on."""

    model_of: ModelOf
    """Makes the model of a job on a rank's groups, or on one process."""
    samples: Samples | None = None
    """Samples that the program passes; None: samples are drawn for the config's model."""


@dataclass(frozen=True)
class Proof:
    """The result of a proof."""

    verdict: str
    """'proved', 'differs' or 'refused'."""
    runs: tuple[SmallJob, ...]
    """The jobs in miniature that ran."""
    checks: tuple[Check, ...] = ()
    """The worst check of each kind, over all runs."""
    first_difference: FirstDifference | None = None
    """The explained difference nearest to the loss; None: everything agrees, or the layout was refused."""
    not_proven: tuple[str, ...] = ()
    """Parts of the job that the comparison does not cover."""
    findings: tuple[Finding, ...] = ()
    """Why the layout was refused."""
    error: str = ""
    """The error that ended a rank, if it was not a finding."""
    reference: str = ""
    """Precision and device of the reference, such as 'float32 on cuda:0'; empty: float64 on the CPU."""

    @property
    def shrunk(self) -> tuple[str, ...]:
        """Values that are smaller than in the config, or otherwise different."""
        return tuple(dict.fromkeys(str(change) for run in self.runs for change in run.changes))


def prove(
    job: Job,
    *,
    max_ranks: int = 8,
    steps: int = STEPS,
    full: bool = False,
    resume_on: Job | None = None,
    program: Program | None = None,
    change: Callable[[], None] = lambda: None,
) -> Proof:
    """Run the job in miniature under its layout and on one process, and compare.

    Args:
        job: a job of any world size.
        max_ranks: largest number of CPU ranks to fork from this process.
        steps: number of optimizer steps; the gradients of the first one are compared.
        full: keep the model's sizes.
        resume_on: another layout of the same run, which resumes from a checkpoint after the first half of the steps.
        program: a program's own model; None: the config's model.
        change: called on each rank of the layout before its engine is built, such as by tests that inject a fault.

    Raises:
        TooFewRanksError: an axis needs more ranks than `max_ranks`; with `resume_on`, all axes together do.
        ValueError: there are too few steps, or `resume_on` changes what a resume must keep.
        RankError: a rank failed for another reason than a finding.
    """
    if steps < 1 + (resume_on is not None):
        raise ValueError(f"{steps} steps: at least {1 + (resume_on is not None)} are needed")
    if resume_on is not None:
        both = shrink_both(job, resume_on, max_ranks=max_ranks, steps=steps, full=full)
        return _proof([_Trial(both[0], steps, program, change, resumes=both[1])])
    small = shrink(job, max_ranks=max_ranks, steps=steps, full=full)
    return _proof([_Trial(each, steps, program, change) for each in small])


def _proof(trials: Sequence[_Trial]) -> Proof:
    """Run the trials, up to the first that is refused; return the proof, with the results up to then."""
    checks, difference, findings = [], None, tuple[Finding, ...]()
    ran: list[_Trial] = []
    for trial in trials:
        ran.append(trial)
        try:
            found = trial.compare()
        except DslparError as error:
            findings = tuple(error.findings)
            break
        checks.append(found)
        if any(not each.holds for each in found) and difference is None:
            difference = trial.explained()
    worst = tuple(merged(checks))
    assert worst or findings, "nothing ran, and nothing was refused"
    verdict = certificate.PROVED if all(each.holds for each in worst) else certificate.DIFFERS
    if findings and verdict == certificate.PROVED:
        verdict = certificate.REFUSED
    runs = [run for trial in ran for run in trial.runs]
    not_proven = dict.fromkeys(each for trial in ran for each in trial.not_proven)
    return Proof(verdict, tuple(runs), worst, difference, tuple(not_proven), findings)


class _Trial:
    """One comparison: a job in miniature under its layout, against the same job on a single process.

    resumes: the same job under another layout, which continues after half of the steps.
    """

    def __init__(
        self,
        small: SmallJob,
        steps: int,
        program: Program | None,
        change: Callable[[], None],
        resumes: SmallJob | None = None,
    ) -> None:
        self.small, self.steps, self.program, self.change, self.resumes = small, steps, program, change, resumes
        self.reference: Reference | None = None
        self.ranks: list[RankResult] = []
        self.before_resume: list[RankResult] = []
        """Results of the first layout, if a second layout resumes from its checkpoint."""

    @property
    def runs(self) -> list[SmallJob]:
        """The small jobs, with all changes."""
        jobs = [self.small] if self.resumes is None else [self.small, self.resumes]
        clip = self.small.job.spec.train.clip_grad_norm
        if self.reference is None or self.reference.clip == clip:
            return jobs
        change = Change("train.clip_grad_norm", clip, self.reference.clip)
        return [each._replace(changes=(*each.changes, change)) for each in jobs]

    @property
    def not_proven(self) -> list[str]:
        """Parts of the job that the comparison does not cover."""
        of_model = self.reference.not_proven if self.reference is not None else ()
        return [*self.small.not_proven, *(self.resumes.not_proven if self.resumes else ()), *of_model]

    def compare(self) -> list[Check]:
        """Run one process and the layout, and return the checks. Raises DslparError: layout or model are refused."""
        resumed = None if self.resumes is None else (self.steps // 2, self.resumes.job)
        self.reference = reference_of(self.small.job, self.steps, self.program, resumed)
        job = _clipping_at(self.small.job, self.reference.clip)
        if self.resumes is None:
            self.ranks = self._run(job, self.steps)
            return compare(self.reference, self.ranks, job.mesh)
        return self._resumed(job, _clipping_at(self.resumes.job, self.reference.clip), self.reference)

    def _run(self, job: Job, steps: int, loads: str = "", saves: str = "") -> list[RankResult]:
        assert self.reference is not None
        model_of = self.program.model_of if self.program else _of_the_job
        return layout_ranks.run_layout(
            job, self.reference.samples, steps, model_of=model_of, loads=loads, saves=saves, change=self.change
        )

    def _resumed(self, job: Job, other: Job, reference: Reference) -> list[Check]:
        """Run half of the steps under one layout, save, and resume under the other layout; return the checks."""
        half = self.steps // 2
        with tempfile.TemporaryDirectory(prefix="dslpar_prove_") as folder:
            first = self.before_resume = self._run(job, half, saves=folder)
            second = self._run(other, self.steps - half, loads=folder)
        begun = first[0]
        self.ranks = [
            dataclasses.replace(
                each,
                losses=[*begun.losses, *each.losses],
                norms=[*begun.norms, *each.norms],
                lrs=[*begun.lrs, *each.lrs],
            )
            for each in second
        ]
        # Gradients belong to the first step, which ran under the first layout.
        before = {each.name: each for each in compare(_of_first_steps(reference, half), first, job.mesh)}
        after = {each.name: each for each in compare(_without_gradients(reference), _without(self.ranks), other.mesh)}
        return merged([[each for name, each in before.items() if name != "weights"], list(after.values())])

    def explained(self) -> FirstDifference:
        """Explain the difference, and the axes without which it disappears."""
        assert self.reference is not None
        job, policy = self.small.job, worst_of_transformers(self.reference)
        if policy is not None and not policy.holds:
            guess = "one process does not compute what transformers' own forward computes: look at the policy"
            return FirstDifference(policy.at, None, None, guess)
        if self.resumes is not None:
            before = explain(_of_gradients(self.reference), _of_gradients_alone(self.before_resume), job.mesh)
            if before is not None:
                return before._replace(guess=f"before the resume: {before.guess}")
            found = explain(_without_gradients(self.reference), _without(self.ranks), self.resumes.job.mesh)
            found = found or _NOTHING_OFF
            return found._replace(guess=f"after the resume: {found.guess}")
        found = explain(self.reference, self.ranks, job.mesh) or _NOTHING_OFF
        needed = self._axes_needed()
        if not needed:
            # No axis is at fault if a single rank differs from one process, whatever correction matches.
            return found._replace(axis=None, guess=f"{found.guess}; it needs no axis: one rank shows it, too")
        only = f"it needs {' and '.join(needed)}: it disappears if such an axis has one rank"
        return found._replace(axis=found.axis or " and ".join(needed), guess=f"{found.guess}; {only}")

    def _axes_needed(self) -> tuple[str, ...]:
        """Return a minimal set of axes with which a difference remains; (): it remains even on one rank.

        Each axis is set to one rank in turn. It stays at one rank if the difference remains.
        """
        job = self.small.job
        needed = list(axes_of(job.spec, job.mesh).used)
        for name in list(needed):
            rest = [each for each in needed if each != name]
            try:
                small = self.small._replace(job=with_axes(job, rest))
                trial = _Trial(small, self.steps, self.program, self.change)
                still_differs = any(not each.holds for each in trial.compare())
            except (DslparError, RankError):
                continue  # the job does not run without that axis
            if still_differs:
                needed = rest
        return tuple(needed)


_NOTHING_OFF = FirstDifference(
    "", None, None, "no gradient and no weight is off: a loss or a norm is not what it should be"
)


def _of_the_job(job: Job, groups: Groups) -> LayeredModel | None:
    return None


def reference_of(
    small: Job, steps: int, program: Program | None = None, resumed: tuple[int, Job] | None = None
) -> Reference:
    """Train the small job's model on one process, forked from this one. Raises DslparError: it cannot be built.

    `resumed`: the step at which another job resumes, and that job.
    """
    layout_ranks.import_for_ranks(small)
    found = run_on_ranks(1, _reference, small, steps, program, resumed, init=None)[0]
    if isinstance(found, DslparError):
        raise found
    return found  # type: ignore[no-any-return]


def _reference(
    small: Job, steps: int, program: Program | None, resumed: tuple[int, Job] | None
) -> Reference | DslparError:
    try:
        job = one_process_job(small)
        model = _on_one_process(small, job, program) if program else model_from_job(job)
        # At least one step's samples, and few enough that the last of several steps reads from two epochs.
        num_samples = max(steps - 1, 1) * small.batch.global_size + 1
        given = program.samples if program else None

        def samples_of(module: nn.Module) -> Samples:
            return given if given is not None else draw_samples(small, model, module, num_samples)

        return one_process.train(small, model, steps, samples_of, resumed)
    except DslparError as error:
        return error


def _on_one_process(small: Job, job: Job, program: Program) -> LayeredModel:
    """Build a program's model for one process; for a hand-split model, join all stages in order."""
    mesh = small.mesh
    made = program.model_of(small, Groups.without_processes(mesh)) if mesh.pipe > 1 else None
    inner = made.model if isinstance(made, CustomModel) else made
    if not isinstance(inner, Stage):
        whole = program.model_of(job, Groups(job.mesh, rank=0))
        assert whole is not None, "a program brings its model"
        return whole
    modules: dict[int, nn.Module] = {}
    for place in range(mesh.pipe):
        of_rank = program.model_of(small, Groups.without_processes(mesh, mesh.rank({"pipe": place})))
        stage = of_rank.model if isinstance(of_rank, CustomModel) else of_rank
        assert isinstance(stage, Stage), "all ranks have a Stage, or none"
        modules |= dict(zip(small.chunks.held_by(place), stage.modules, strict=True))
    whole = Stage(*(modules[stage] for stage in sorted(modules)))
    return dataclasses.replace(made, model=whole) if isinstance(made, CustomModel) else whole


def _clipping_at(job: Job, clip: float | None) -> Job:
    train = dataclasses.replace(job.spec.train, clip_grad_norm=clip)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train))


# ---- a resume: the steps before and after it are compared separately ----


def _of_first_steps(reference: Reference, steps: int) -> Reference:
    """Return the reference of the first `steps` steps. Its weights are still the weights after the run's last step."""
    whole = reference.curve
    curve = dataclasses.replace(whole, losses=whole.losses[:steps], norms=whole.norms[:steps], lrs=whole.lrs[:steps])
    return dataclasses.replace(
        reference,
        curve=curve,
        loss_bounds=reference.loss_bounds[:steps],
        norm_bounds=reference.norm_bounds[:steps],
    )


def _without_gradients(reference: Reference) -> Reference:
    return dataclasses.replace(reference, curve=dataclasses.replace(reference.curve, gradients={}))


def _of_gradients(reference: Reference) -> Reference:
    return dataclasses.replace(reference, curve=dataclasses.replace(reference.curve, weights={}))


def _of_gradients_alone(ranks: Sequence[RankResult]) -> list[RankResult]:
    return [dataclasses.replace(each, weights={}) for each in ranks]


def _without(ranks: Sequence[RankResult]) -> list[RankResult]:
    return [dataclasses.replace(each, gradients={}) for each in ranks]
