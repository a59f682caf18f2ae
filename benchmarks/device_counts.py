"""Count the device work of a block and of a step on a CPU, as one rank of a fake process group.

    python -m benchmarks.device_counts              # all rows
    python -m benchmarks.device_counts pipeline     # rows whose names hold the word

For a block, forward and backward, it counts kernels, kernels that only move elements, bytes that kernels read and
write, collectives, collectives that no product hides, and graph breaks of torch.compile. With overlap it also gives the
exposed share in the middle of a model, relative to the block's collectives without overlap. For the loss it counts
bytes per logit in bfloat16. For a step (the second one) it counts the same, and the host's waits for the device. Rows
of `plain torch` are the same model in torch.nn; its step is a loop with autocast.

Below the rows, each target (benchmarks.device_targets) is shown with its earlier and its current value. Exit status 1:
a target is missed that is not known to be missed, or a count is above its row's limit.

Numbers are those of torch's operations before any fusion. They show what is enqueued, not how long it takes. Rows
called compiled count the kernels that torch's inductor makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import device_targets
from benchmarks.device_blocks import (
    FORMS,
    TENSORS,
    BlockCounts,
    block_counts,
    compiled_loss_bytes,
    loss_bytes,
    plain_counts,
)
from benchmarks.device_counter import Kernels
from benchmarks.device_steps import (
    ACCUMULATION,
    LAYOUTS_OF_STEPS,
    StepCounts,
    accumulation_bytes,
    plain_step_counts,
    step_counts,
)
from benchmarks.device_targets import Counts, Found
from tests.support.fake_world import LostError, in_forks

"""For one row."""
BLOCKS: Mapping[str, Callable[[], BlockCounts]] = {
    f"{form}, {kind}": partial(block_counts, form, kind) if kind in TENSORS else partial(plain_counts, form)
    for form in FORMS
    for kind in ("plain torch", *TENSORS)
}
STEPS: Mapping[str, Callable[[], StepCounts]] = {
    **{f"{form}, plain torch": partial(plain_step_counts, form) for form in FORMS},
    **{layout: partial(step_counts, layout) for layout in LAYOUTS_OF_STEPS},
}
BYTES: Mapping[str, Callable[[], Counts]] = {
    "the loss": lambda: dict(zip(("torch's", "bytes a logit"), loss_bytes(), strict=True)),
    "the loss, compiled": lambda: {"bytes a logit": compiled_loss_bytes("one process")},
    "the loss, compiled, 1d": lambda: {"bytes a logit": compiled_loss_bytes("1d")},
    # From so many on, what is not compiled goes by parts.
    "the loss, compiled, 1d, many": lambda: {"bytes a logit": compiled_loss_bytes("1d", 1024, 40_960)},
    "a gradient's sum": lambda: {"bytes a parameter": accumulation_bytes()},
}
TABLES: Mapping[str, Mapping[str, Callable[[], Any]]] = {"block": BLOCKS, "step": STEPS, "bytes": BYTES}
HEADERS = {
    "block": "a block, forward and backward",
    "step": f"a step, accumulation {ACCUMULATION}",
    "bytes": "bytes moved",
}


def counts_of(counted: BlockCounts | StepCounts | Counts) -> Counts:
    """Return the columns of a row."""
    if isinstance(counted, BlockCounts):
        both = counted.forward + counted.backward
        share = {} if counted.exposed_share is None else {"exposed share": round(counted.exposed_share, 3)}
        return _columns(both) | {"graph breaks": counted.graph_breaks} | share
    if isinstance(counted, StepCounts):
        waits = counted.waits
        of_host = {"reads": waits.reads, "copies from the host": waits.copies, "synchronize": waits.synchronizations}
        return _columns(counted.kernels) | {name: len(places) for name, places in of_host.items()}
    return counted


def _columns(kernels: Kernels) -> dict[str, float]:
    return {
        "kernels": kernels.kernels,
        "copies": kernels.layout_copies,
        "clones": kernels.by_name["clone"],
        "KB moved": kernels.num_bytes // 1024,
        "collectives": kernels.collectives,
        "exposed": kernels.exposed,
    }


def main() -> int:
    """Print the tables; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_counts", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rows whose names hold all words")
    parser.add_argument("--write-limits", action="store_true", help="make what is counted these rows' limits")
    arguments = parser.parse_args()
    found, lost = _count(arguments.words)
    if arguments.write_limits and not lost:
        device_targets.write_limits(found, keep_others=bool(arguments.words))
    problems = device_targets.report(found)
    print("\n".join(lost), end="\n" if lost else "")
    return int(bool(problems or lost))


def _count(words: Sequence[str]) -> tuple[Found, list[str]]:
    """Count the rows and print them; also those that did not end."""
    found: dict[tuple[str, str], Counts] = {}
    lost = []
    for table, rows in TABLES.items():
        names = [name for name in rows if all(word in name for word in words)]
        columns: list[str] = []
        for name, counted in zip(names, in_forks(_call, [rows[name] for name in names]), strict=True):
            if isinstance(counted, LostError):
                lost.append(f"{table}, {name}: {counted}")
                continue
            counts = found[table, name] = counts_of(counted)
            if list(counts) != columns:
                columns = list(counts)
                print(f"\n{HEADERS[table]:42}" + "  ".join(f"{column:>7}" for column in columns))
            print(f"{name:42}" + "  ".join(f"{value:{max(7, len(column))}g}" for column, value in counts.items()))
    return found, lost


def _call(count: Callable[[], Any]) -> Any:
    return count()


if __name__ == "__main__":
    sys.exit(main())
