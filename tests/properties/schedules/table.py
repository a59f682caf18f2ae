"""Layouts that are compared with 1F1B, as data, and the sample that `make test` runs.

ROWS           # name -> Row
SAMPLE         # names
worlds(ROWS)   # name -> rows: those that one set of ranks runs, one after the other

tests/properties/layouts proves modes, ZeRO, ties and recomputation under every schedule against one process. These rows
have what is exact only between schedules, or is not computed in fp32: dropout masks, half precision, numbers of
micro-batches, stages of uneven length, long pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from dslpar.layout.divisors import least_micro_size
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt.section import GPT
from dslpar.schema import sections
from tests.properties.invariance.layouts import MODELS, MODES, pipe

LR = 1e4
"""Large, so that a step shows the gradient: see `measure.gradients`."""
SCHEDULES = (("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
"""Schedule types, and the stages per rank."""
NO_MODE = "no tensor ranks"
SCALE = {"fp16": {"loss_scale": 1024.0}}


class Row(NamedTuple):
    """A layout, a model, a schedule, and its number of micro-batches."""

    mode: str
    """A name in invariance's `MODES`."""
    pipe: int
    schedule: tuple[str, int]
    micro_batches: int
    zero: int = 0
    tied: bool = True
    recompute: int = 0
    """Interval of activation checkpointing; 0: none."""
    data: int = 1
    keep: str = "x"
    """The panels that are kept until the backward."""
    layers: int = 0
    """0: one layer per stage when each rank has two stages."""
    cut: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Counts or stage_ids of uneven stages. 1F1B has fewer stages, and always the automatic partition."""
    model: str = "GPT"
    """A name in invariance's `MODELS`."""
    dtype: str = "fp32"
    offload: bool = False
    ignoring: bool = False
    """Whether part of the labels does not count, with a different number in each micro-batch."""
    dropout: float = 0.0

    @property
    def reference(self) -> Row:
        """Return the same row under 1F1B."""
        return self._replace(schedule=("1f1b", 1), cut=())

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        group = self._parallel().tensor
        return self.pipe * self.data * (1 if group is None else group.size or 1)

    @property
    def name(self) -> str:
        """Return the row in words."""
        words = [*[f"data {self.data}"] * (self.data > 1), f"ZeRO {self.zero}", "tied" if self.tied else "untied"]
        words += ["recompute"] * bool(self.recompute) + ["offload"] * self.offload + ["ignoring"] * self.ignoring
        words += [f"keep {self.keep}"] * (self.mode != NO_MODE) + [f"{what} {list(ids)}" for what, ids in self.cut]
        words += [f"dropout {self.dropout}"] * bool(self.dropout)
        kind = ", ".join(what for what in (self.model, self.dtype) if what not in ("GPT", "fp32"))
        head = f"{kind}: " if kind else ""
        schedule = f"{self.schedule[0]} {self.schedule[1]}, {self.micro_batches} micro-batches"
        return f"{head}{self.mode}, pipe {self.pipe}, {schedule}: {', '.join(words)}"

    def job(self) -> Job:
        """Return the job of this row: the smallest micro-batches of the layout, and a step that shows the gradient."""
        once = sections.Spec(model=self._model(), parallel=self._parallel(), batch=sections.Batch(micro_size=1))
        mesh = resolve(once, self.world, "schedules.py").mesh
        extra: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        schedule, chunks = self.schedule
        spec = replace(
            once,
            optimizer=sections.SGD(lr=LR, momentum=0.0, weight_decay=0.0),
            zero=sections.Zero(stage=self.zero, extra=extra),
            precision=sections.Precision(dtype=self.dtype, extra=SCALE.get(self.dtype, {})),
            batch=sections.Batch(micro_size=least_micro_size(mesh.tensor), accumulation=self.micro_batches),
            train=sections.Train(steps=2, clip_grad_norm=None),
            activation_checkpoint=sections.ActivationCheckpoint(interval=self.recompute) if self.recompute else None,
            schedule=sections.PipelineSchedule(type=schedule, num_model_chunks=chunks),
        )
        return resolve(spec, self.world, "schedules.py")

    def _parallel(self) -> sections.Parallel:
        group = {} if self.mode == NO_MODE else MODES[self.mode](self.keep)
        return sections.Parallel(**pipe(self.pipe, **dict(self.cut)), **group)

    def _model(self) -> Any:
        model, num_layers = MODELS[self.model](self.tied), self.layers or 2 * self.pipe
        if isinstance(model, GPT):
            return replace(model, num_layers=num_layers, dropout=self.dropout)
        if "config" in model.args:  # transformers models have two layers
            config = {**model.args["config"], "num_hidden_layers": num_layers}
            return replace(model, args={**model.args, "config": config})
        return model


# ---- the table ----


def others() -> Iterator[Row]:
    """Yield rows for the schedules that each names, or for all."""
    for row in (
        # the longest pipeline, and every number of rounds
        Row(NO_MODE, 8, SCHEDULES[0], 8, zero=1),
        *(Row(NO_MODE, pipes, SCHEDULES[0], pipes * rounds) for pipes in (2, 3, 4) for rounds in (1, 2, 3, 4)),
        # replicas, whose gradients are reduced stage by stage
        *(
            Row(NO_MODE, pipes, SCHEDULES[0], 2 * pipes, zero, tied, data=2)
            for pipes, zero, tied in product((2, 4), (0, 1), (True, False))
        ),
        *(
            Row(mode, 2, SCHEDULES[0], 4, number % 2, number // 2 % 2 == 0, number // 4 % 2, data=2)
            for number, mode in enumerate(MODES)
            if mode != "3d 8"  # 32 ranks
        ),
        Row(NO_MODE, 2, SCHEDULES[0], 4, data=2, ignoring=True),
        Row(NO_MODE, 2, SCHEDULES[0], 4, zero=1, data=4, recompute=2),
        # Llama's form, and models with torch's linears, whose backward cannot be split
        *(Row(NO_MODE, pipes, SCHEDULES[0], 8, zero, bool(zero), model="Llama") for pipes in (2, 4) for zero in (0, 1)),
        Row("1d 2 sequence", 2, SCHEDULES[0], 4, zero=1, tied=False, recompute=1, model="Llama"),
        Row("2d 4", 2, SCHEDULES[0], 4, tied=False, model="Llama"),
        Row(NO_MODE, 2, SCHEDULES[0], 4, model="Sequential"),
        Row(NO_MODE, 2, SCHEDULES[0], 4, zero=1, model="layers_cfg"),
        Row(NO_MODE, 2, SCHEDULES[0], 4, model="transformers' Llama", data=2),
        # masks of dropout, which must not depend on the order either
        Row(NO_MODE, 2, SCHEDULES[0], 4, dropout=0.1),
        Row("1d 2 sequence", 2, SCHEDULES[0], 8, zero=1, recompute=1, dropout=0.1),
        # other dtypes: gradients summed in fp32, and scaled ones
        *(
            Row(NO_MODE, pipes, SCHEDULES[0], 2 * pipes, 1, tied, recompute, dtype=dtype, offload=offload)
            for dtype, offload in product(("bf16", "fp16"), (False, True))
            for pipes, tied, recompute in ((2, True, 0), (4, False, 1))
        ),
        Row(NO_MODE, 2, SCHEDULES[0], 4, data=2, dtype="bf16"),
        Row(NO_MODE, 2, SCHEDULES[0], 4, zero=1, data=2, dtype="bf16"),
        Row(NO_MODE, 2, SCHEDULES[0], 4, zero=1, data=2, dtype="fp16"),
        Row("1d 2 sequence", 2, SCHEDULES[0], 4, zero=1, dtype="bf16"),
        Row("2d 4", 2, SCHEDULES[0], 4, zero=1, tied=False, dtype="fp16"),
    ):
        yield from (row._replace(schedule=schedule) for schedule in SCHEDULES)
    # stages of uneven length
    uneven = Row(NO_MODE, 2, ("interleaved", 2), 4, layers=8)
    for zero, cut in product((0, 1), (("counts", (1, 3, 2, 2)), ("stage_ids", (0, 0, 0, 1, 0, 1, 1, 1)))):
        for schedule in ("interleaved", "zero_bubble"):
            yield uneven._replace(schedule=(schedule, 2), zero=zero, tied=not zero, cut=(cut,))
    yield uneven._replace(schedule=("zero_bubble", 1), cut=(("counts", (5, 3)),))
    yield uneven._replace(schedule=("interleaved", 4))
    yield uneven._replace(schedule=("zero_bubble", 4))
    # With one chunk, there may be fewer micro-batches than ranks, or no multiple of the ranks.
    for pipes, count in ((2, 1), (2, 3), (2, 7), (3, 4), (4, 2), (4, 5), (4, 15)):
        yield Row(NO_MODE, pipes, ("zero_bubble", 1), count, zero=count % 2)


ROWS = {row.name: row for row in others()}


def worlds(names: Iterable[str]) -> dict[str, Sequence[Row]]:
    """Return rows grouped for one set of ranks each; rows with the same reference are neighbours.

    Rows with many ranks are split into several sets, since they take long on few cores.
    """
    found: dict[str, list[Row]] = {}
    for row in sorted((ROWS[name] for name in names), key=lambda row: str(row.reference)):
        replicas = f", data {row.data}" if row.data > 1 else ""
        part = f", ZeRO {row.zero}, {'tied' if row.tied else 'untied'}" if row.world > 16 else ""
        part = f", ZeRO {row.zero}" if row.world == 16 else part
        found.setdefault(f"{row.mode}, pipe {row.pipe}{replicas}{part}", []).append(row)
    return found


SAMPLE = tuple(
    row.name
    for row in ROWS.values()
    if row.schedule == ("zero_bubble", 2) and row.mode == NO_MODE and (row.dropout or (row.cut and row.zero))
)
"""Sample of `make test`: masks and uneven stages, under the schedule with the most complex order."""
