"""Run the named benchmarks, or all, and print a line per ratio; exit status 1 if one misses its target."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.measure import HEADER

NAMES = (
    *(
        "lint_speed",
        "lint_many",
        "lsp_speed",
        "plan_speed",
        "overhead",
        "tensor_speed",
        "one_device",
        "transformers_step",
    ),
    *("checkpoint_cost", "save_stall", "replica_check", "reshard_memory", "tokenize_speed", "generate_speed", "bubble"),
    *("schedule_overhead", "context_parallel", "host_time", "gloo_scheduling", "expert_exchange"),
)


def main() -> int:
    """Run the benchmarks on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; all by default")
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    print(HEADER, flush=True)
    passed = True
    for name in names:
        for ratio in importlib.import_module(f"benchmarks.{name}").ratios():
            print(ratio, flush=True)
            passed &= ratio.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
