"""`python -m tests.properties.random_layouts`: random layouts, each proved; half of them resume another layout.

    python -m tests.properties.random_layouts --minutes 60                  seeds 0, 1, 2, ... for an hour
    python -m tests.properties.random_layouts --seeds 17 23                 of some seeds alone
    python -m tests.properties.random_layouts --minutes 60 --first 1000     from seed 1000 on

A seed draws a family and a level of every factor of `tests.support.layout_factors`. Factors that lint refuses together
fall back to their plainest level, one at a time, until the row is legal. Most worlds have up to 16 ranks, one in fifty
27 or more. Each row is run by `dslpar.parity.prove`. Every second one saves half-way, and another layout of the same
model resumes. Nothing may differ, and no error may end without a finding.

Megatron-LM's issue 7452 shows that layouts fail in combinations, and that random drawing finds them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.support.drawn_layouts import Drawn, draw
from tests.support.layout_factors import job_of


class Outcome(NamedTuple):
    """The result of a row."""

    kind: str
    """'proved', 'differs', 'refused' (with a finding), or 'broken' (without one)."""
    says: str


def run(drawn: Drawn) -> Outcome:
    """Prove one drawn layout."""
    from dslpar.distributed.forked_ranks import RankError
    from dslpar.parity.prove import prove

    job, other = job_of(drawn.row), job_of(drawn.resumes) if drawn.resumes is not None else None
    assert job is not None, "it was drawn as legal"
    most = max(job.mesh.world_size, other.mesh.world_size if other else 1)
    try:
        proof = prove(job, max_ranks=max(most, 2), steps=3 if other is None else 4, resume_on=other)
    except RankError as error:
        return Outcome("broken", str(error)[-3000:])
    if proof.findings:
        return Outcome("refused", "; ".join(f"{each.code} {each.message}" for each in proof.findings))
    wrong = [
        f"{each.name} {each.worst:.1e} of {each.bound:.1e} at {each.at}" for each in proof.checks if not each.holds
    ]
    return Outcome(proof.verdict, "; ".join([*wrong, *map(str, [proof.first_difference] if wrong else [])]))


def seeds(arguments: argparse.Namespace) -> Iterator[int]:
    """Yield the given seeds, until the time is over."""
    if arguments.seeds:
        yield from arguments.seeds
        return
    end, seed = time.monotonic() + 60 * arguments.minutes, arguments.first
    while time.monotonic() < end:
        yield seed
        seed += 1


def main(argv: Sequence[str]) -> int:
    """Prove layouts. Return 1 if one is not proved."""
    raw = argparse.RawDescriptionHelpFormatter
    name = "python -m tests.properties.random_layouts"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="how long; default: %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="these seeds alone")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    counts, families, modes, resumed = Counter[str](), Counter[str](), Counter[str](), 0
    for seed in seeds(arguments):
        drawn, began = draw(seed), time.monotonic()
        outcome = run(drawn)
        counts[outcome.kind] += 1
        families[drawn.row["family"]] += 1
        modes[drawn.row["mode"]] += 1
        resumed += drawn.resumes is not None
        print(f"{outcome.kind} ({time.monotonic() - began:.1f} s) {drawn}", flush=True)
        if outcome.kind != "proved":
            print(f"    {outcome.says}", flush=True)
    print(f"{counts.total()} layouts, {resumed} of them resumed under another: {dict(counts)}")
    print("families:", ", ".join(f"{name} {count}" for name, count in families.most_common()))
    print("modes:", ", ".join(f"{name} {count}" for name, count in modes.most_common()))
    return 0 if set(counts) <= {"proved"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
