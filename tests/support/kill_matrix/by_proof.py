"""Show `dslpar prove` each mutant that a layout meets: whether it is found, and with which parameter and axis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from dslpar.distributed import forked_ranks
from dslpar.layout.resolve import Job
from dslpar.parity import certificate
from dslpar.parity import prove as proving
from dslpar.parity.one_process import Reference
from dslpar.parity.prove import Program, Proof
from dslpar.parity.shrink import one_process_job
from dslpar.schema.sections import OtherModel
from tests.support import warm
from tests.support.kill_matrix.child import ChildError, ChildTimeoutError, in_child
from tests.support.kill_matrix.layouts import Layout
from tests.support.kill_matrix.recorder import install_recorder, met
from tests.support.kill_matrix.results import Result, Results
from tests.support.maths_mutants.mutant import Mutant

LONGEST_S = 240.0
"""Time limit of one proof and its explanation."""
IDLE_S = 15.0
"""Ranks that wait for each other this long count as hanging."""


class LayoutProof:
    """A layout that passes the proof unchanged, and its remembered reference."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name, self.job, self.other = f"prove {name}", layout.job(), layout.other()
        warm.import_deepspeed()
        if isinstance(model := self.job.spec.model, OtherModel) and model.transformers is not None:
            warm.import_transformers(model.transformers.model)  # else each forked rank does, for seconds
        self._references: dict[str, Reference] = {}
        self._reference_of = proving.reference_of

    def prove(self, change: Callable[[], None]) -> Proof:
        """Prove the layout, with a change on its ranks."""
        return proving.prove(self.job, resume_on=self.other, change=change)

    def met_by_right_run(self, mutants: Sequence[Mutant]) -> set[str]:
        """Prove the unchanged layout, and return the names of the mutants that it meets.

        Raises:
            AssertionError: the proof fails.
        """
        proving.reference_of = self._remembered  # shared by all trials, free of mutants
        forked_ranks.run_on_ranks.__kwdefaults__["idle_s"] = IDLE_S
        proof = self.prove(lambda: None)
        assert proof.verdict == certificate.PROVED, f"{self.name}: {proof}"
        with TemporaryDirectory() as folder:
            path = Path(folder, "met")
            recorded = self.prove(partial(install_recorder, mutants, path))
            assert recorded.verdict == certificate.PROVED, f"{self.name}, recorded: {recorded}"
            return met(path)

    def _remembered(
        self, small: Job, steps: int, program: Program | None = None, resumed: tuple[int, Job] | None = None
    ) -> Reference:
        then = resumed and (resumed[0], resumed[1].batch)
        key = f"{one_process_job(small).spec} {small.batch} {steps} {then}"
        if key not in self._references:
            self._references[key] = self._reference_of(small, steps, program, resumed)
        return self._references[key]

    def result(self, mutant: Mutant) -> Result:
        """Prove the layout with a mutant, and return the result."""
        began = time.monotonic()
        made = partial(Result, mutant.name, self.name)
        try:
            proof = in_child(partial(self.prove, mutant.apply), LONGEST_S)
        except ChildTimeoutError as error:
            return made("timeout", guess=str(error), seconds=time.monotonic() - began)
        except ChildError as error:
            return made("stopped", guess=str(error)[:300], seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        if proof.verdict == certificate.PROVED:
            return made("survived", seconds=seconds)
        if proof.verdict == certificate.REFUSED:
            return made("stopped", guess="; ".join(each.message for each in proof.findings)[:300], seconds=seconds)
        found = proof.first_difference
        assert found is not None
        failed = tuple(each.name for each in proof.checks if not each.holds)
        return made("killed", found.parameter, found.axis or "", found.guess, failed, seconds)


def show(
    name: str, layout: Layout, mutants: Sequence[Mutant], results: Results, *, again: bool
) -> Iterator[tuple[Mutant, Result]]:
    """Yield the result of each mutant that the layout meets. `again`: also mutants that another layout has found."""
    proof = LayoutProof(name, layout)
    if all((mutant.name, proof.name) in results.known for mutant in mutants):
        return
    found = proof.met_by_right_run(mutants)
    for mutant in mutants:
        if (mutant.name, proof.name) in results.known:
            continue
        if mutant.name not in found:
            results.add(Result(mutant.name, proof.name, "not met"))
            continue
        if not again and results.killers(mutant.name):
            continue
        result = proof.result(mutant)
        results.add(result)
        yield mutant, result
