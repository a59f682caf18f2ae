"""`python -m tests.support.kill_matrix`: which mistakes in the maths do the tests see, and which does `dslpar prove`?

    python -m tests.support.kill_matrix --prove all            mutants, each on the first layout that meets and finds it
    python -m tests.support.kill_matrix --prove 2d --all       one layout, with every mutant that it meets
    python -m tests.support.kill_matrix --only "norm:"         mutants whose name, kind or module holds this word
    python -m tests.support.kill_matrix --sample 20 --seed 1   of twenty
    python -m tests.support.kill_matrix --summary              tables of what was found so far

A mutant (`tests.support.maths_mutants`) is a function with one mistake. What is found is kept in build/kill_matrix, a
line a mutant, and a run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

from tests.support.kill_matrix import summary
from tests.support.kill_matrix.results import Results
from tests.support.maths_mutants import all_mutants
from tests.support.maths_mutants.mutant import Mutant


def chosen(args: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the arguments ask for."""
    found = [
        mutant
        for mutant in all_mutants()
        if not args.only or any(word in f"{mutant.name} {mutant.kind} {mutant.module}" for word in args.only)
    ]
    if args.sample:
        found = random.Random(args.seed).sample(found, min(args.sample, len(found)))
    return found


def main(argv: Sequence[str]) -> int:
    """See the module; the exit status is 0 unless the arguments are wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.kill_matrix", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--prove", nargs="+", metavar="LAYOUT", help="kill by `dslpar prove` on these; 'all': each")
    parser.add_argument("--only", nargs="+", metavar="WORD")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--all", action="store_true", help="also what another layout or test has killed")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    mutants = chosen(args)
    if args.prove:
        _prove(args, mutants)
    return 0


def _prove(args: argparse.Namespace, mutants: Sequence[Mutant]) -> None:
    from tests.support.kill_matrix import by_proof
    from tests.support.kill_matrix.layouts import LAYOUTS

    results = Results("prove")
    for name in LAYOUTS if args.prove == ["all"] else args.prove:
        if args.summary:
            break
        print(f"-- {name} --", flush=True)
        for mutant, result in by_proof.show(name, LAYOUTS[name], mutants, results, again=args.all):
            print(summary.row(mutant, result), flush=True)
    print(summary.of_proofs(mutants, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
