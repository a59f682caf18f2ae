"""`python -m tests.support.kill_matrix`: find the mistakes in the maths that tests and `dslpar prove` detect.

    python -m tests.support.kill_matrix                        the tests: record each once, show them the mutants
    python -m tests.support.kill_matrix --tests tests/unit/data tests/distributed/layers      these tests
    python -m tests.support.kill_matrix --record               record alone, which mutants each test meets
    python -m tests.support.kill_matrix --prove all            mutants, each on the first layout that meets and finds it
    python -m tests.support.kill_matrix --prove 2d --all       one layout, with every mutant that it meets
    python -m tests.support.kill_matrix --only "norm:"         mutants whose name, kind or module holds this word
    python -m tests.support.kill_matrix --sample 20 --seed 1   of twenty
    python -m tests.support.kill_matrix --summary              tables of what was found so far

A mutant (`tests.support.maths_mutants`) is a function with one mistake. Results are kept in build/kill_matrix, a line
per mutant, and an interrupted run continues from there.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.support.kill_matrix import summary
from tests.support.kill_matrix.results import Results
from tests.support.maths_mutants import all_mutants
from tests.support.maths_mutants.mutant import Mutant
from tests.support.paths import ROOT


def chosen(args: argparse.Namespace) -> list[Mutant]:
    """Return the selected mutants."""
    found = [
        mutant
        for mutant in all_mutants()
        if not args.only or any(word in f"{mutant.name} {mutant.kind} {mutant.module}" for word in args.only)
    ]
    if args.sample:
        found = random.Random(args.seed).sample(found, min(args.sample, len(found)))
    return found


def main(argv: Sequence[str]) -> int:
    """Run the selected passes. The exit status is 0 unless the arguments are wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.kill_matrix", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--prove", nargs="+", metavar="LAYOUT", help="kill by `dslpar prove` on these; 'all': each")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="by default those that may meet the maths")
    parser.add_argument("--record", action="store_true", help="run each test once, and show it no mutant")
    parser.add_argument("--most", type=int, default=12, metavar="N", help="tests that one mutant is shown, at most")
    parser.add_argument("--only", nargs="+", metavar="WORD")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--all", action="store_true", help="also what another layout or test has killed")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    mutants = chosen(args)
    return _prove(args, mutants) if args.prove else _tests(args, mutants)


def _tests(args: argparse.Namespace, mutants: Sequence[Mutant]) -> int:
    from tests.support.kill_matrix.by_tests import TESTS, Matrix

    results = Results("tests")
    status = 0
    if not args.summary:
        os.chdir(ROOT)
        run = Matrix(mutants, results, every=args.all, most=args.most, only_record=args.record)
        options = ["--all-rows", "-qq", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
        # This program has imported what some plugins of pytest would rewrite.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = int(pytest.main([*options, *(args.tests or TESTS)], plugins=[run]))
    print(summary.of_tests(mutants, results))
    return status


def _prove(args: argparse.Namespace, mutants: Sequence[Mutant]) -> int:
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
