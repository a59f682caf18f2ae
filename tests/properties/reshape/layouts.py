"""Layouts that save and resume, and the proven pairs of them, as data.

PAIRS       # (saved under, resumed under), names of LAYOUTS
SAMPLE      # from and to every mode, every ZeRO stage, pipelines and replicas
EACH_TIME   # what `make test` runs of these
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.properties.invariance.layouts import LEGACY, Layout, pipe, tensor

Pair = tuple[str, str]

TENSOR = {
    "1d": tensor("1d", 2),
    "1d sequence": tensor("1d", 2, sequence=True),
    "2d": tensor("2d", 4),
    "2.5d": tensor("2.5d", 2, depth=2),
    "3d": tensor("3d", 8),
    "cuboid": tensor("cuboid", 4, shape=(1, 2, 2)),
    "ring": tensor("sequence", 2),
    "ulysses": tensor("sequence", 2, impl="ulysses"),
}

SMALL: dict[str, Layout] = {
    "one process": Layout(1, {}),
    "data 2, 1d 2, ZeRO 2": Layout(4, TENSOR["1d"], zero=2),
    "3d 8": Layout(8, TENSOR["3d"]),
    "pipe 2 (1, 3), ring 2": Layout(4, pipe(2, counts=(1, 3)) | TENSOR["ring"]),
    "interleaved 2, pipe 2, data 2, ZeRO 1": Layout(4, pipe(2), zero=1, accumulation=4, schedule=("interleaved", 2)),
    "data 2, 2.5d 2, ZeRO 3": Layout(4, TENSOR["2.5d"], zero=3, accumulation=4),
    "pipe 4": Layout(4, pipe(4), accumulation=4),
    "2d 4, ZeRO 1": Layout(4, TENSOR["2d"], zero=1),
    "legacy order, pipe 2, data 2, ZeRO 1": Layout(4, pipe(2) | {"order": LEGACY}, zero=1),
    "cuboid (1, 2, 2)": Layout(4, TENSOR["cuboid"], accumulation=1),
    "pipe 2 (3, 1), 1d 2 sequence": Layout(4, pipe(2, stage_ids=(0, 0, 0, 1)) | TENSOR["1d sequence"]),
    "zero bubble 2, pipe 2, 1d 2": Layout(4, pipe(2) | TENSOR["1d"], accumulation=4, schedule=("zero_bubble", 2)),
    "ulysses 2": Layout(2, TENSOR["ulysses"]),
}
"""Layouts in ring order: each resumes on the next one and on the fourth."""

MORE: dict[str, Layout] = {
    "data 4": Layout(4, {}),
    "pipe 2, 1d 2": Layout(4, pipe(2) | TENSOR["1d"]),
    "data 2, ZeRO 3": Layout(2, {}, zero=3),
    "data 2, ZeRO 2, offload": Layout(2, {}, zero=2, offload=("optimizer",)),
    "1d 3": Layout(3, tensor("1d", 3)),
    "data 8, ZeRO 1": Layout(8, {}, zero=1),
    "data 2, 1d 2 sequence, ZeRO 3": Layout(4, TENSOR["1d sequence"], zero=3),
    "pipe 2, 2d 4, ZeRO 1": Layout(8, pipe(2) | TENSOR["2d"], zero=1),
    "data 2, ulysses 2, ZeRO 3": Layout(4, TENSOR["ulysses"], zero=3),
    "2.5d 8 (depth 2)": Layout(8, tensor("2.5d", 8, depth=2)),
    "data 2, ring 2, ZeRO 1": Layout(4, TENSOR["ring"], zero=1),
    "3d 8, ZeRO 3": Layout(8, TENSOR["3d"], zero=3),
    "pipe 2, data 4, ZeRO 1": Layout(8, pipe(2), zero=1),
    "cuboid (2, 3, 1)": Layout(6, tensor("cuboid", 6, shape=(2, 3, 1))),
    "data 2, 2d 4, ZeRO 2": Layout(8, TENSOR["2d"], zero=2),
    "pipe 2, 2.5d 2": Layout(4, pipe(2) | TENSOR["2.5d"]),
    "pipe 4, data 2": Layout(8, pipe(4)),
    "ulysses 4": Layout(4, tensor("sequence", 4, impl="ulysses")),
    "pipe 2, cuboid (1, 2, 2)": Layout(8, pipe(2) | TENSOR["cuboid"]),
    "1d 4 sequence": Layout(4, tensor("1d", 4, sequence=True)),
}

ADAM: dict[str, Layout] = {
    "AdamW, one process": Layout(1, {}, optimizer="AdamW"),
    "AdamW, pipe 2, data 2, ZeRO 1": Layout(4, pipe(2), zero=1, optimizer="AdamW"),
    "AdamW, data 2, 1d 2, ZeRO 3": Layout(4, TENSOR["1d"], zero=3, optimizer="AdamW"),
    "AdamW, 2d 4": Layout(4, TENSOR["2d"], optimizer="AdamW"),
}
"""An optimizer that divides by the root of a second moment, and counts its steps."""

LORA: dict[str, Layout] = {
    "LoRA, data 2, 2d 4, ZeRO 3": Layout(8, TENSOR["2d"], zero=3, model="transformers' Llama, LoRA"),
    "LoRA, pipe 2, 1d 2, ZeRO 1": Layout(4, pipe(2) | TENSOR["1d"], zero=1, model="transformers' Llama, LoRA"),
    "LoRA, one process": Layout(1, {}, model="transformers' Llama, LoRA"),
    "LoRA, data 2, ring 2, ZeRO 2": Layout(4, TENSOR["ring"], zero=2, model="transformers' Llama, LoRA"),
}
"""Frozen weights are stored without optimizer states."""

SCHEDULES: dict[str, Layout] = {
    "AdamW, 1F1B, pipe 4": Layout(4, pipe(4), optimizer="AdamW", accumulation=4),
    "AdamW, interleaved 2, pipe 2, data 2": Layout(
        4, pipe(2), optimizer="AdamW", accumulation=4, schedule=("interleaved", 2)
    ),
    "AdamW, zero bubble 1, pipe 2, data 2, ZeRO 1": Layout(
        4, pipe(2), optimizer="AdamW", accumulation=4, zero=1, schedule=("zero_bubble", 1)
    ),
    "AdamW, zero bubble 2, pipe 2, 2d 4": Layout(
        8, pipe(2) | TENSOR["2d"], optimizer="AdamW", accumulation=4, schedule=("zero_bubble", 2)
    ),
}
"""Each resumes on each other: a ring, and a ring to the next but one."""

UNTIED: dict[str, Layout] = {
    "untied, interleaved 2, pipe 2": Layout(2, pipe(2), tied=False, accumulation=4, schedule=("interleaved", 2)),
    "untied, one process": Layout(1, {}, tied=False),
    "untied, zero bubble 2, pipe 2, ring 2": Layout(
        4, pipe(2) | TENSOR["ring"], tied=False, accumulation=4, schedule=("zero_bubble", 2)
    ),
    "untied, pipe 4": Layout(4, pipe(4), tied=False, accumulation=4),
}
THREE_TIMES: dict[str, Layout] = {
    "T5, interleaved 2, pipe 2, data 2": Layout(
        4, pipe(2), model="transformers' T5", accumulation=4, schedule=("interleaved", 2)
    ),
    "T5, pipe 4": Layout(4, pipe(4), model="transformers' T5", accumulation=4),
    "T5, zero bubble 2, pipe 2, data 2, ZeRO 1": Layout(
        4, pipe(2), model="transformers' T5", accumulation=4, zero=1, schedule=("zero_bubble", 2)
    ),
}
"""The first two of a table's three uses are on two ranks, or on two stages of one rank."""

LAYOUTS = SMALL | MORE | ADAM | LORA | SCHEDULES | UNTIED | THREE_TIMES


def ring(names: Sequence[str], ahead: int = 1) -> list[Pair]:
    """Return pairs of each name and the one that is `ahead` further in the ring."""
    return [(name, names[(at + ahead) % len(names)]) for at, name in enumerate(names)]


SAMPLE: list[Pair] = [
    ("one process", "interleaved 2, pipe 2, data 2, ZeRO 1"),
    ("data 2, 1d 2, ZeRO 2", "data 2, 2.5d 2, ZeRO 3"),
    ("data 2, 2.5d 2, ZeRO 3", "cuboid (1, 2, 2)"),
    ("cuboid (1, 2, 2)", "pipe 2 (3, 1), 1d 2 sequence"),
    ("pipe 2 (3, 1), 1d 2 sequence", "data 2, 1d 2, ZeRO 2"),
    ("zero bubble 2, pipe 2, 1d 2", "3d 8"),
    ("3d 8", "pipe 2 (1, 3), ring 2"),
    ("pipe 2 (1, 3), ring 2", "2d 4, ZeRO 1"),
    ("2d 4, ZeRO 1", "legacy order, pipe 2, data 2, ZeRO 1"),
    ("legacy order, pipe 2, data 2, ZeRO 1", "ulysses 2"),
    ("ulysses 2", "one process"),
]
"""The smallest set of these rings' pairs that meets test_the_pairs_cover_modes_stages_and_what_changes."""
EACH_TIME: list[Pair] = [
    ("one process", "interleaved 2, pipe 2, data 2, ZeRO 1"),
    ("data 2, 1d 2, ZeRO 2", "data 2, 2.5d 2, ZeRO 3"),
    ("cuboid (1, 2, 2)", "pipe 2 (3, 1), 1d 2 sequence"),
    ("pipe 2 (3, 1), 1d 2 sequence", "data 2, 1d 2, ZeRO 2"),
    ("legacy order, pipe 2, data 2, ZeRO 1", "ulysses 2"),
    ("ulysses 2", "one process"),
]
"""The part of the sample that `make test` runs: the rows that killed a mutant first in the kill matrix
(tests.support.kill_matrix), and one from a single process.
"""
PAIRS = list(
    dict.fromkeys(
        [
            *SAMPLE,
            *ring(list(SMALL | MORE)),
            *ring(list(ADAM)),
            *ring(list(LORA)),
            *ring(list(SCHEDULES)),
            *ring(list(UNTIED)),
            *ring(list(THREE_TIMES)),
        ]
    )
)
