"""Tables of results: kills by kind of mistake, and the mutants that survive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.support.kill_matrix.cover import cover
from tests.support.kill_matrix.results import Result, Results
from tests.support.maths_mutants.mutant import KINDS, Mutant

NEEDS_NO_AXIS = "needs no axis"
"""prove's words for a difference that one rank has, too."""


def row(mutant: Mutant, result: Result) -> str:
    """Return a line of one result."""
    where = f"{result.parameter or '-'}, {result.axis or '-'}" if result.verdict == "killed" else result.guess
    return f"{result.verdict:9}{result.seconds:5.0f} s  {mutant.name} [{mutant.kind}]: {where}"


def of_proofs(mutants: Sequence[Mutant], results: Results) -> str:
    """Return the numbers of mutants that prove found, by kind, with parameter and axis, and the missed mutants."""
    counts = {column: Counter[str]() for column in _COLUMNS}
    survivors = []
    for mutant in mutants:
        of = [each for each in results.known.values() if each.mutant == mutant.name and each.verdict != "not met"]
        killed = sorted((each for each in of if each.kills), key=lambda each: (each.verdict != "killed", not each.axis))
        counts["mutants"][mutant.kind] += 1
        if not of:
            counts["not met"][mutant.kind] += 1
        elif not killed:
            counts["survived"][mutant.kind] += 1
        else:
            best = killed[0]
            counts["found" if best.verdict == "killed" else "stopped"][mutant.kind] += 1
            counts["parameter"][mutant.kind] += bool(best.parameter)
            counts["axis"][mutant.kind] += bool(best.axis)
            counts["no axis"][mutant.kind] += NEEDS_NO_AXIS in best.guess
        survivors += [f"survived {each.by}: {mutant.name}: {mutant.stands_for}" for each in of if not each.kills]
    lines = ["".join([f"{'':10}", *(f"{name:>11}" for name in _COLUMNS)])]
    for kind in (*KINDS, "all"):
        of_kind = [sum(of.values()) if kind == "all" else of[kind] for of in counts.values()]
        lines.append("".join([f"{kind:10}", *(f"{count:11}" for count in of_kind)]))
    return "\n".join([*lines, *survivors])


def of_tests(mutants: Sequence[Mutant], results: Results) -> str:
    """Return the numbers of mutants that tests killed, by kind, the survivors, and a minimum cover of tests."""
    from tests.support.kill_matrix.by_tests import read_recorded

    recorded = {each.test: each for each in read_recorded()}
    counts, survivors, kills = Counter[tuple[str, str]](), [], dict[str, set[object]]()
    for mutant in mutants:
        of = [each for each in results.known.values() if each.mutant == mutant.name and each.verdict != "not met"]
        killers = [each.by for each in of if each.kills]
        for by in killers:
            kills.setdefault(by, set()).add(mutant.name)
        meet = sum(mutant.name in each.met for each in recorded.values())
        verdict = "killed" if killers else "survived" if of else "not shown" if meet else "not met"
        counts[mutant.kind, verdict] += 1
        if verdict == "survived":
            survivors.append(f"survived {len(of)} of {meet} tests: {mutant.name}: {mutant.stands_for}")
    verdicts = ("killed", "survived", "not shown", "not met")
    lines = ["".join([f"{'':10}", *(f"{name:>11}" for name in verdicts)])]
    for kind in (*KINDS, "all"):
        row = [sum(counts[each, verdict] for each in KINDS if kind in (each, "all")) for verdict in verdicts]
        lines.append("".join([f"{kind:10}", *(f"{count:11}" for count in row)]))
    chosen = cover(kills, {name: each.seconds for name, each in recorded.items()})
    lines.append(f"{len(chosen)} of {len(recorded)} recorded tests kill all that was killed:")
    lines += [f"  {len(kills[test]):4} {test}" for test in chosen]
    return "\n".join([*lines, *survivors])


_COLUMNS = ("mutants", "found", "parameter", "axis", "no axis", "stopped", "survived", "not met")
