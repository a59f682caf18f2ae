"""Run a pipeline schedule on DeepSpeed's engine: this rank's actions of `layout.schedule`, in order.

    pipeline = PipelineExecutor(ds_engine, groups, schedule)
    result = pipeline.forward_backward(loss_fn, batches)
    optimizer_step(ds_engine)

DeepSpeed's pipeline engine knows one schedule, 1F1B, with one stage per rank. Here one loop runs any order of F, B and
W (forward, backward, weight gradients) over the stages that the rank holds. Lint, `show` and the simulator use the same
orders. DeepSpeed still handles each micro-batch (precision, loss scaling, its gradient hooks) and the whole step: sums
of tied gradients, reduction over replicas, the optimizer. With the 1F1B order, results are bit-identical to DeepSpeed's
own.

torch.distributed.pipelining also executes a list of actions, and so does Megatron-LM. torch's executor runs stage
modules without a training engine, and splits a backward by running it twice. Here B stores the operands of the weight
gradients, and W computes these gradients (`layers.weight_gradients`).

A stage's gradients are complete after its last B, or after its last W if the backward is split. From then on they are
reduced over replicas while the rank's other stages continue (`distributed.gradient_buffer`; without ZeRO,
`distributed.per_stage_gradient_reduction`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.profiler import record_function

from dslpar.distributed import collectives, deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.distributed.per_stage_gradient_reduction import StageReduction
from dslpar.distributed.point_to_point import StageMessages
from dslpar.engine.executor import LossFn, MicroBatches, Result, Seed, detach, reduce_gradients, training_mode
from dslpar.engine.vector_reduction import deferred_ids
from dslpar.layers.gradient_accumulation_fusion import fused_accumulation
from dslpar.layers.linear import Linear
from dslpar.layers.weight_gradients import WeightGradients, splitting
from dslpar.layout.schedule import Action, Orders, Schedule, consumer
from dslpar.layout.simulation import receives

log = logging.getLogger("dslpar")

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class _Forward(NamedTuple):
    """Tensors that a micro-batch's forward through a stage keeps for its backward."""

    inputs: list[Tensor]
    """Tensors received from the previous stage; empty on the first stage."""
    outputs: list[Tensor]
    """The floating-point outputs; on the last stage, the loss."""


class PipelineExecutor:
    """Executor of this rank's actions in a pipeline schedule."""

    def __init__(self, ds_engine: PipelineEngine, groups: Groups, schedule: Schedule) -> None:
        self._engine, self._groups, self._schedule = ds_engine, groups, _splittable(schedule, ds_engine.module, groups)
        self._chunks, self._rank = schedule.chunks, groups.coord["pipe"]
        self._orders, self._ahead = self._plan(self._schedule.orders())
        self._forward_orders, self._forward_ahead = self._plan(self._schedule.forward_orders())
        ways = groups.second("pipe", "pipe_up"), groups.second("pipe", "pipe_down")
        self._messages = StageMessages(ways, self._chunks, ds_engine.device)
        self._messages.connect(self._orders)
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        """Weight gradients that a B has left for its W, by (stage, micro-batch), oldest first."""
        self._reduction: StageReduction | None = None
        if self._chunks.num > 1:
            late = deferred_ids(ds_engine.module)
            self._reduction = deepspeed_patches.reduce_by_stages(
                ds_engine, groups.axis("data"), groups.expert_data_axis, late
            )
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        # DeepSpeed calls these while it runs a micro-batch. If the rank has several stages, the answer must be for the
        # running stage.
        ds_engine.is_first_stage = lambda: ds_engine.module.stage == 0
        ds_engine.is_last_stage = lambda: ds_engine.module.stage == self._chunks.last

    def forward_backward(
        self,
        loss_fn: LossFn,
        batches: MicroBatches,
        seed: Seed = lambda index: None,
        keep_outputs: bool = False,
        reduce: bool = True,
    ) -> Result:
        """Run a step's micro-batches; `batches` may be empty on ranks without the first or the last stage."""
        orders = self._orders
        order = orders[self._rank]
        # `completes`: the actions after which a stage's gradients are complete. `early`: such actions that are not the
        # rank's last, so that the reduction overlaps the actions after them.
        last = {(action.kind, action.stage): action for action in order}
        completes = {action for action in last.values() if action.kind == ("W" if self._schedule.split else "B")}
        early = completes - {order[-1]} if self._reduction is not None and reduce else set()
        with training_mode(self._engine.module, True):
            self._begin(orders, self._ahead)
            for action in order:
                self._messages.advance()
                with record_function(f"{_NAMES[action.kind]}, stage {action.stage}, micro-batch {action.micro}"):
                    if action.kind == "F":
                        seed(action.micro)
                        self._forward(action, loss_fn, batches, keep_outputs)
                    elif action.kind == "B":
                        self._backward(action, reduce and action in completes)
                    else:
                        self._weight_gradients(action, reduce and action in completes)
                if self._reduction is not None and action in early:
                    self._reduction.start(self._engine.module.stage_parameters(action.stage))
            self._messages.finish()
        assert not self._forwards
        assert not self._weights
        if reduce:
            reduce_gradients(self._engine)
        return self._result()

    def forward_only(self, loss_fn: LossFn, batches: MicroBatches, keep_outputs: bool = False) -> Result:
        """Run a step's micro-batches forward, in evaluation mode."""
        orders = self._forward_orders
        with training_mode(self._engine.module, False), torch.no_grad():
            self._begin(orders, self._forward_ahead)
            for action in orders[self._rank]:
                self._messages.advance()
                with record_function(f"evaluation, stage {action.stage}, micro-batch {action.micro}"):
                    self._forward(action, loss_fn, batches, keep_outputs)
            self._messages.finish()
        self._forwards.clear()
        return self._result()

    # ---- one action ----

    def _forward(self, action: Action, loss_fn: LossFn, batches: MicroBatches, keep_output: bool) -> None:
        _, stage, micro = action
        if stage == 0:
            inputs: list[Tensor] = []
            x = batches[micro][0]
        else:
            inputs = [_requiring_grad(value) for value in self._messages.receive(action)]
            x = inputs[0] if len(inputs) == 1 else tuple(inputs)
        with self._at(stage), splitting() if self._schedule.split else nullcontext():
            # Copied, as in DeepSpeed: a layer may work in place, which must not change a leaf or the caller's tensor.
            output = DeepSpeedEngine.forward(self._engine, _clone(x))
        if stage == self._chunks.last:
            loss = loss_fn(output, batches[micro][1])
            self._losses.append(loss.detach())
            self._outputs += [detach(output)] if keep_output else []
            self._forwards[stage, micro] = _Forward(inputs, [loss])
            return
        outputs = output if isinstance(output, tuple) else (output,)
        taken_by = consumer(action, self._chunks)
        assert taken_by is not None
        self._messages.send(outputs, taken_by)
        self._forwards[stage, micro] = _Forward(inputs, [each for each in outputs if each.is_floating_point()])

    def _backward(self, action: Action, completes: bool) -> None:
        """Run a micro-batch's backward through a stage; in a split schedule, compute input gradients only.

        completes: the stage's gradients are complete after this backward.
        """
        _, stage, micro = action
        inputs, outputs = self._forwards.pop((stage, micro))
        with self._at(stage), self._boundary(completes), self._weights_aside(stage, micro), fused_accumulation():
            if stage == self._chunks.last:
                DeepSpeedEngine.backward(self._engine, outputs[0])
            else:
                gradients = self._messages.receive(action)
                needed = [index for index, output in enumerate(outputs) if output.requires_grad]
                with self._engine_backward():
                    torch.autograd.backward([outputs[i] for i in needed], [gradients[i] for i in needed])
        taken_by = consumer(action, self._chunks)
        if taken_by is not None:
            floating = [each for each in inputs if each.is_floating_point()]
            # A stage may leave an input unused. The previous stage still waits for its gradient.
            self._messages.send([torch.zeros_like(x) if x.grad is None else x.grad for x in floating], taken_by)

    def _weights_aside(self, stage: int, micro: int) -> AbstractContextManager[None]:
        """Return a context in which a backward leaves weight gradients to its W, if the schedule has W actions."""
        if not self._schedule.split:
            return nullcontext()
        self._weights[stage, micro] = WeightGradients()
        return splitting(self._weights[stage, micro], list(self._weights.values()))  # the newest last

    def _weight_gradients(self, action: Action, completes: bool) -> None:
        """Compute the weight gradients that this micro-batch's B has left."""
        with self._at(action.stage), self._boundary(completes), self._engine_backward():
            self._weights.pop((action.stage, action.micro)).accumulate()

    # ---- DeepSpeed's state during an action ----

    @contextmanager
    def _at(self, stage: int) -> Iterator[None]:
        """Set the module's running stage."""
        module = self._engine.module
        before, module.stage = module.stage, stage
        try:
            yield
        finally:
            module.stage = before

    @contextmanager
    def _boundary(self, completes: bool) -> Iterator[None]:
        """Tell gradient hooks whether gradients are complete and may be reduced."""
        engine = self._engine
        engine._force_grad_boundary = completes
        if hasattr(engine.optimizer, "set_gradient_accumulation_boundary"):
            engine.optimizer.set_gradient_accumulation_boundary(completes)
        try:
            yield
        finally:
            engine._force_grad_boundary = False

    @contextmanager
    def _engine_backward(self) -> Iterator[None]:
        """Do what DeepSpeed's pipeline engine does around a backward that does not start from a loss."""
        engine = self._engine
        sums_in_fp32 = engine.using_bf16_optimizer
        if sums_in_fp32:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True  # else hooks assume a user's backward without loss scaling
        try:
            yield
        finally:
            engine._running_engine_backward = False
        if sums_in_fp32 and not engine._config.bfloat16_config.immediate_grad_update:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)

    # ---- the beginning and end of a step ----

    def _plan(self, orders: Orders) -> tuple[Orders, list[list[Action]]]:
        """Return the orders of this rank and its neighbours (others empty), and the receives to post at each action."""
        pipe = self._chunks.pipe
        near = {(self._rank + step) % pipe for step in (-1, 0, 1)}
        return [orders[rank] if rank in near else [] for rank in range(pipe)], receives(
            orders, self._chunks, self._rank
        )

    def _begin(self, orders: Orders, ahead: list[list[Action]]) -> None:
        self._losses, self._outputs = [], []
        self._messages.begin(orders, ahead)

    def _result(self) -> Result:
        """Return the mean loss over micro-batches and replicas, on all ranks."""
        data, pipe = self._groups.axis("data"), self._groups.axis("pipe")
        loss = torch.zeros((), device=self._engine.device)
        if self._losses:
            loss = sum(self._losses[1:], self._losses[0]) / len(self._losses)
            loss = collectives.all_reduce(loss, data) / data.size if data.size > 1 else loss
        return Result(collectives.broadcast(loss.float(), pipe, source=pipe.size - 1), self._outputs)


def _splittable(schedule: Schedule, module: nn.Module, groups: Groups) -> Schedule:
    """Return the schedule, unsplit if no stage has a layer whose backward can be split.

    All ranks must call it together.
    """
    if not schedule.split:
        return schedule
    splits_here = any(isinstance(part, Linear) for part in module.modules())
    if any(collectives.gather_objects(splits_here, groups.axis("pipe"))):
        return schedule
    log.warning("schedule 'zero_bubble' splits the backward of dslpar's linears; the model has none: it runs unsplit")
    return schedule._replace(split=False)


def _requiring_grad(value: Tensor) -> Tensor:
    return value.requires_grad_(value.is_floating_point() and torch.is_grad_enabled())


def _clone(value: Any) -> Any:
    return tuple(map(_clone, value)) if isinstance(value, tuple | list) else value.clone()
