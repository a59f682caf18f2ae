"""Context parallelism through DeepSpeed: beside every mode, in pipelines, with ZeRO, whole and by parts of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from dslpar.schema import sections
from tests.properties.invariance.layouts import Layout, pipe
from tests.properties.invariance.measure import out_of_bound
from tests.support.sampling import sampled

BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "1d 2": {"size": 2, "mode": "1d"},
    "1d 2 sequence": {"size": 2, "mode": "1d", "sequence": True},
    "2d 4": {"size": 4, "mode": "2d"},
}


def rows() -> Iterator[tuple[str, Layout]]:
    """Each impl beside each mode, with each stage of ZeRO and a pipeline; the rest takes turns."""
    shapes = [(1, zero) for zero in range(4)] + [(2, zero) for zero in range(2)]
    for turn, (impl, beside, (pipes, zero)) in enumerate(product(("ring", "ulysses", "hybrid"), BESIDE, shapes)):
        size = 4 if impl == "hybrid" else 2
        own = BESIDE[beside]
        replica = pipes * size * own.get("size", 1)
        data = 2 if zero and replica <= 8 else 1
        if replica > 16:
            continue
        ulysses_size = 2 if impl == "hybrid" else None
        context = sections.ContextParallel(size=size, impl=impl, ulysses_size=ulysses_size)
        parallel: dict[str, Any] = {"context": context}
        parallel |= {"tensor": sections.TensorParallel(**own)} if own else {}
        parallel |= pipe(pipes) if pipes > 1 else {}
        turn += turn // len(shapes)  # else a stage of ZeRO would always meet the same
        recompute, chunks = turn % 2, (1, 3, 4)[turn % 3]
        layout = Layout(
            data * replica,
            parallel,
            zero=zero,
            model="Llama" if turn // 2 % 2 else "GPT",
            tied=turn // 4 % 2 == 0,
            recompute=recompute,
            chunks=chunks,
            num_layers=2,
        )
        words = [f"{impl} {size} beside {beside}", f"pipe {pipes}", f"data {data}", f"ZeRO {zero}", layout.model]
        words += ["tied"] * layout.tied + ["recompute"] * recompute + [f"{chunks} chunks"]
        yield ", ".join(words), layout


def scheduled() -> Iterator[tuple[str, Layout]]:
    """Parts of tokens where the backward is split, and where a rank holds several stages."""
    parallel = {"context": sections.ContextParallel(size=2)} | pipe(2)
    for schedule, recompute in product((("zero_bubble", 1), ("interleaved", 2)), (0, 1)):
        layout = Layout(4, parallel, schedule=schedule, chunks=3, recompute=recompute, zero=recompute)
        yield f"{schedule[0]}, {'recompute' if recompute else 'stored'}, 3 chunks", layout


ROWS = dict(rows()) | dict(scheduled())
SAMPLE = ("ring 2 beside alone, pipe 2, data 1, ZeRO 0, GPT, 3 chunks",)


@pytest.mark.minutes(3)
@pytest.mark.parametrize("name", sampled(ROWS, set(SAMPLE)))
def test_context_parallelism_does_not_change_the_maths(name: str) -> None:
    assert not out_of_bound(ROWS[name])


def test_every_stage_of_zero_meets_parts_of_tokens_and_recomputation() -> None:
    met = {(row.zero, row.chunks > 1, row.recompute) for row in ROWS.values()}
    assert met == set(product(range(4), (False, True), (0, 1)))
    assert all(name in ROWS for name in SAMPLE)
