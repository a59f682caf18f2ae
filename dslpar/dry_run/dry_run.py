"""Dry run of one step of one rank, with checks of all ranks.

    result = dry_run(job, rank=1023)
    result.problems                      # [] if shards cover parameters, stages fit together, and ranks agree
    result.operations[("all_reduce", "y")]

A dry run has these phases:

1. Check the order of actions of all pipeline ranks (`dslpar.dry_run.order`).
2. Run each class of stages once (`dslpar.dry_run.rank_classes`), on the output form of the stage before.
3. Run each class on other ranks of the tensor group, and compare their operations (`dslpar.dry_run.consistency`).
4. Check that the shards of each parameter cover it (`dslpar.dry_run.tiling`).
5. Run the requested rank with all its layers, then the end of its step.
6. Replay the rank's messages for the whole step with the code of training, and compare them with those of its
   neighbours.

A run of a stage has one micro-batch: forward, backward and, if the schedule splits it, the backward of weights.
DeepSpeed's engine is not built, so the reduction over replicas and the optimizer's step are missing.

A dry run uses torch's fake process group, with which one process acts as one rank of any number. torchtitan has a mode
that runs one rank of a config on this group too, on tensors with memory. It has no classes of ranks and no checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from dslpar.distributed.groups import Groups
from dslpar.distributed.point_to_point import Boundary, Forms
from dslpar.dry_run.consistency import disagreements, parameter_problems
from dslpar.dry_run.fake_rank import fake_rank
from dslpar.dry_run.messages import Message, replay
from dslpar.dry_run.model_parallel_sums import record_model_parallel_sums
from dslpar.dry_run.order import order_problems
from dslpar.dry_run.problem import Check, Problem
from dslpar.dry_run.rank_classes import Coord, StageClass, representatives, stage_classes
from dslpar.dry_run.recorder import Call
from dslpar.dry_run.stage import (
    DTYPES,
    NoDryRunError,
    ParameterRecord,
    Part,
    StageError,
    StageRun,
    input_form,
    run_stage,
    shown_form,
    splits_backward,
)
from dslpar.engine.model import model_from_job
from dslpar.engine.stage_layers import parts_of
from dslpar.layers import placement
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Action, Orders
from dslpar.layout.simulation import held
from dslpar.models.layered import LayeredModel, LayerSpec
from dslpar.schema.sections import Model

Key = tuple[str, str]
"""(operation, axes)."""


@dataclass
class ClassRecord:
    """Stages that are alike, and the ranks of these stages that were run."""

    stages: tuple[int, ...]
    num_ranks: int
    """Number of all ranks of these stages."""
    ran: tuple[int, ...]
    """Ranks that were run."""


@dataclass
class DryRun:
    """Result of a dry run: a rank's parameters and operations in a step, and problems of the layout."""

    job: Job
    rank: int
    coord: Mapping[str, int]
    """The rank's index on each axis of the mesh."""
    stages: tuple[int, ...]
    """Stages that the rank holds."""
    layers: tuple[str, ...]
    """Names of the layers on the rank's stages."""
    parameters: dict[str, ParameterRecord] = field(default_factory=dict)
    """The rank's parameters by global name."""
    num_actions: int = 0
    """Actions (F, B, W) of the rank in a step."""
    operations: dict[Key, tuple[int, Fraction]] = field(default_factory=dict)
    """(calls, bytes that the rank sends) in a step, by operation and axes, without messages between stages."""
    messages: list[Message] = field(default_factory=list)
    """Messages between stages, in the rank's order."""
    saved_bytes: int = 0
    """Bytes that a micro-batch saves for the backward on all of the rank's stages, with a GPU's fused kernels."""
    peak_saved_bytes: int | None = None
    """The most saved bytes at once, over all micro-batches in flight. None if the schedule splits the backward: a
    micro-batch then keeps fewer bytes from B to W, and a dry run does not count these."""
    classes: list[ClassRecord] = field(default_factory=list)
    """Classes of stages, and the ranks that were run."""
    num_tiled: int = 0
    """Number of parameters whose shards were checked. Those of layers that are alike count once."""
    problems: list[Problem] = field(default_factory=list)


def dry_run(job: Job, rank: int) -> DryRun:
    """Run one step of a rank of the job on the meta device, and check all ranks by classes.

    Raises:
        NoDryRunError: the job has no such rank, or the model's inputs or stages are unknown.
        DslparError: the model cannot be built on any rank.
    """
    if not 0 <= rank < job.mesh.world_size:
        raise NoDryRunError(f"there is no rank {rank}: the world has {job.mesh.world_size}")
    input_form(job)
    if job.stages.counts is None:
        raise NoDryRunError("the stages of the model are unknown before it is built")
    return _Dry(job, rank).run()


class _Dry:
    """A dry run in progress. Its methods are the phases of the module's docstring, and fill `result`."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.mesh, self.chunks = job, job.mesh, job.chunks
        self.model: LayeredModel = model_from_job(job)
        self.specs: Sequence[LayerSpec] = self.model.layers(Groups.without_processes(job.mesh, rank))
        self.parts = parts_of(self.specs, job.stages.counts or ())
        checkpoint = job.spec.activation_checkpoint
        self.classes = stage_classes(self.specs, self.parts, checkpoint.interval if checkpoint else 0)
        self.class_of = {stage: each for each in self.classes for stage in each.stages}
        self.coord = job.mesh.coord(rank)
        self.rank = rank
        self.forms: dict[Boundary, Forms] = {}
        """Forms of the tensors that an action receives from another stage, by the action's kind and stage."""
        stages = tuple(self.chunks.held_by(self.coord["pipe"]))
        names = tuple(spec.name for stage in stages for spec in self.specs[self.parts[stage] : self.parts[stage + 1]])
        self.result = DryRun(job, rank, self.coord, stages, names)
        self.problems = self.result.problems

    def run(self) -> DryRun:
        """Run all phases; without a run of every stage, the rank itself is not run."""
        orders = [self.job.schedule.order(pipe) for pipe in range(self.chunks.pipe)]
        self.result.num_actions = len(orders[self.coord["pipe"]])
        self.problems += order_problems(self.job.schedule, orders)
        runs = self._chain()
        for each in self.classes:
            self._compare(each, runs)
        self._check_parameters(runs)
        if len(runs) == self.chunks.stages:
            self._run_rank(orders)
        return self.result

    # ---- classes ----

    def _chain(self) -> dict[int, StageRun]:
        """Run the stages in order, each with the output form of the stage before; stages that are alike run once.

        The chain ends at the first stage that fails, so the result may lack the stages after it.
        """
        known: dict[tuple[int, tuple[object, ...]], StageRun] = {}
        runs: dict[int, StageRun] = {}
        forms: Forms = [input_form(self.job)]
        for stage in range(self.chunks.stages):
            each = self.class_of[stage]
            key = each.stages[0], tuple((dtype, tuple(shape)) for dtype, shape in forms)
            try:
                if key not in known:
                    known[key] = self._run_class(each, stage, self.coord, forms)
            except StageError as error:
                self._refused(stage, error)
                return runs
            runs[stage] = run = known[key]
            self._check_boundary(stage, run)
            forms = run.outputs
        return runs

    def _run_class(self, each: StageClass, stage: int, coord: Coord, forms: Forms) -> StageRun:
        run = self._run_part(each.part, stage, coord, forms)
        if self._keeps_form(each, run):
            return run
        whole = Part(range(self.parts[stage], self.parts[stage + 1]), *each.part[1:])
        return self._run_part(whole, stage, coord, forms)

    def _keeps_form(self, each: StageClass, run: StageRun) -> bool:
        """Return whether the shortened run of a class is valid.

        A layer that was run in place of several layers like it must output the form of its input. Otherwise the next
        such layer would have another input.
        """
        left_out = set(each.whole.positions) - set(each.part.positions)
        stand_ins = {max(position for position in each.part.positions if position < other) for other in left_out}
        return all(run.repeated[position] for position in stand_ins)

    def _run_part(self, part: Part, stage: int, coord: Coord, forms: Forms) -> StageRun:
        with fake_rank(self.mesh, self._rank_of(stage, coord)) as groups:
            return run_stage(self.job, self.model, part, groups, forms)

    def _rank_of(self, stage: int, coord: Coord) -> int:
        return self.mesh.rank({**coord, "pipe": self.chunks.rank_of(stage)})

    def _refused(self, stage: int, error: StageError) -> None:
        check: Check = "boundary" if stage and "cannot take" in str(error) else "layers"
        why = f"stage {stage - 1} sends it" if check == "boundary" else "the stage cannot run"
        self.problems.append(Problem(check, f"stage {stage}", str(error), why))

    def _check_boundary(self, stage: int, run: StageRun) -> None:
        """Compare the form of a stage's output with that of the residual stream, and input gradients with inputs."""
        if stage:
            self.forms["F", stage], self.forms["B", stage - 1] = run.inputs, run.input_gradients
            floating = [form for form in run.inputs if form[0].is_floating_point]
            self._compare_forms(stage, "sends back", run.input_gradients, floating, "the inputs that it has received")
        if stage < self.chunks.last:
            why = "the residual of this layout, which every stage after the first receives"
            self._compare_forms(stage, "sends", run.outputs, self._residual(), why)

    def _compare_forms(self, stage: int, does: str, forms: Forms, wanted: Forms, name: str) -> None:
        ours, theirs = (", ".join(map(shown_form, each)) for each in (forms, wanted))
        if ours != theirs:
            what = f"{does} {ours}, and not {theirs}, {name}"
            self.problems.append(Problem("boundary", f"stage {stage}", what, "the next stage expects that"))

    def _residual(self) -> Forms:
        """Return the forms of what stages pass on."""
        job = self.job
        model = job.spec.model
        config = None if isinstance(model, Model) else model.transformers
        hidden: Any = model.hidden_size if config is None else config.size("hidden")  # type: ignore[union-attr]
        stored = placement.residual(self.mesh.tensor, job.batch.micro_size, job.seq_len, hidden)
        # A loss of the routers needs the sums of all of them, which travel with the residual.
        sums: Forms = [] if model.router_sums is None else [(torch.float32, model.router_sums)]
        return [(DTYPES[job.spec.precision.dtype], stored.local_shape), *sums]

    def _compare(self, each: StageClass, runs: Mapping[int, StageRun]) -> None:
        """Run a class of stages on other tensor ranks, and compare them with the requested rank's coordinates."""
        stage = each.stages[0]
        per_stage = self.mesh.data * self.mesh.tensor.size
        own = self._rank_of(stage, self.coord)
        record = ClassRecord(each.stages, len({self.chunks.rank_of(s) for s in each.stages}) * per_stage, (own,))
        self.result.classes.append(record)
        if stage not in runs:
            return
        for coord in representatives(self.mesh):
            other_rank = self._rank_of(stage, coord)
            if other_rank in record.ran:
                continue
            try:
                other = self._run_class(each, stage, coord, runs[stage].inputs)
            except StageError as error:
                self.problems.append(Problem("layers", f"stage {stage} on rank {other_rank}", str(error), _ALIKE))
                continue
            record.ran = (*record.ran, other_rank)
            self.problems += disagreements(stage, own, runs[stage], other_rank, other)

    def _check_parameters(self, runs: Mapping[int, StageRun]) -> None:
        parameters: dict[str, ParameterRecord] = {}
        for stage, run in runs.items():
            for name, record in run.parameters.items():
                first = parameters.setdefault(name, record)
                if first[:3] != record[:3]:
                    what = f"{list(first.local_shape)} on one stage, {list(record.local_shape)} on stage {stage}"
                    self.problems.append(Problem("tiling", name, what, "tied copies must have the same shape"))
        self.result.num_tiled = len(parameters)
        self.problems += parameter_problems(parameters, self.mesh.tensor)

    # ---- the rank itself ----

    def _run_rank(self, orders: Orders) -> None:
        """Run all layers of the rank's stages and the end of the step; replay its messages and its neighbours'."""
        pipe, order = self.coord["pipe"], orders[self.coord["pipe"]]
        runs: dict[int, StageRun] = {}
        with fake_rank(self.mesh, self.rank) as groups:
            for stage in self.result.stages:
                part = Part(range(self.parts[stage], self.parts[stage + 1]), stage == 0, stage == self.chunks.last)
                forms = self.forms.get(("F", stage), [input_form(self.job)])
                try:
                    runs[stage] = run_stage(self.job, self.model, part, groups, forms)
                except StageError as error:
                    self._refused(stage, error)
                    return
                self.result.parameters |= runs[stage].parameters
                sent = self.forms.get(("F", stage + 1), runs[stage].outputs)
                self._compare_forms(
                    stage, "sends", runs[stage].outputs, sent, "the output of a run without repeated layers"
                )
            last = record_model_parallel_sums(self.job, groups, self.specs, [run.module for run in runs.values()])
            found = {pipe: self._replay(groups, orders)} if self.chunks.pipe > 1 else {}
        self.result.operations = _totals(order, runs, last)
        self.result.saved_bytes = sum(run.saved_bytes for run in runs.values())
        if not splits_backward(self.job):
            self.result.peak_saved_bytes = round(held(order, self.chunks).total * self.result.saved_bytes)
        self.result.messages = found.get(pipe) or []
        for other in {(pipe - 1) % self.chunks.pipe, (pipe + 1) % self.chunks.pipe} - {pipe}:
            with fake_rank(self.mesh, self.mesh.rank({**self.coord, "pipe": other})) as groups:
                found[other] = self._replay(groups, orders)
            self._compare_link(pipe, other, found)
            self._compare_link(other, pipe, found)

    def _replay(self, groups: Groups, orders: Orders) -> list[Message] | None:
        """Replay a step's messages as one pipeline rank; None if the replay fails, which is reported as a problem."""
        pipe = groups.coord["pipe"]
        try:
            return replay(groups, orders, self.chunks, self.forms)
        except ValueError:
            return None  # the orders cannot be run; `order_problems` has reported why
        except (LookupError, AssertionError) as error:
            what = "it waits for a message that nobody sends" if isinstance(error, LookupError) else str(error)
            self.problems.append(Problem("messages", f"pipe {pipe}", what, "the step would hang there"))
            return None

    def _compare_link(self, sender: int, receiver: int, found: Mapping[int, Sequence[Message] | None]) -> None:
        sends, receives = found[sender], found[receiver]
        if sends is None or receives is None:
            return
        sent = [each.form for each in sends if each.kind == "send" and each.peer == receiver]
        taken = [each.form for each in receives if each.kind == "receive" and each.peer == sender]
        if sent != taken:
            differ = [index for index, pair in enumerate(zip(sent, taken, strict=False)) if pair[0] != pair[1]]
            what = f"{len(sent)} messages are sent and {len(taken)} received"
            what += f"; message {differ[0]} is {sent[differ[0]]} and {taken[differ[0]]}" if differ else ""
            where = f"pipe {sender} to pipe {receiver}"
            self.problems.append(Problem("messages", where, what, "one side would wait for the other forever"))


_ALIKE = "ranks of a tensor group must run the same layers"


def _totals(
    order: Sequence[Action], runs: Mapping[int, StageRun], last: Sequence[Call]
) -> dict[Key, tuple[int, Fraction]]:
    """Return (calls, bytes sent) of a step by operation and axes; a send and its receive are separate operations."""
    times = Counter((action.kind, action.stage) for action in order)
    calls: Counter[Key] = Counter()
    sent: dict[Key, Fraction] = {}
    repeated = [(n, runs[stage].calls.get(kind, ())) for (kind, stage), n in times.items() if stage in runs]
    for count, group in [*repeated, (1, last)]:
        for call in group:
            key = call.kind, call.axes
            calls[key] += count
            sent[key] = sent.get(key, Fraction(0)) + count * call.num_bytes
    return {key: (calls[key], sent[key]) for key in sorted(calls, key=lambda key: (key[1], key[0]))}
