"""Find each parameter of this rank in DeepSpeed's engine: weight, optimizer state, and its part of the full tensor.

    for shard in parameter_shards(engine):
        shard.name, shard.box, shard.start, shard.stop   # elements [start, stop) of the piece `box`, in row-major order
        shard.weight, shard.states, shard.scalars        # views of what DeepSpeed trains: read and written in place

The *master* of a parameter is the tensor that the optimizer steps. DeepSpeed keeps it in five ways, depending on ZeRO's
stage and the precision. Each way has one function here:

========================  =================================  =====================================================
optimizer                 master                             part of the local piece
========================  =================================  =====================================================
torch's own               the parameter itself               all of it
FP16_UnfusedOptimizer     an fp32 copy of each parameter     all of it
FP16_Optimizer            one flat fp32 tensor per group     all of it
ZeRO 1, 2, BF16           this rank's shard of that          a range, or nothing (`p._hp_mapping`)
ZeRO 3                    one flat tensor per sub-group      an equal range for each rank (`grad_position`)
========================  =================================  =====================================================

A checkpoint consists of flat ranges of boxes of full tensors, as Megatron-LM's distributed optimizer writes them
(`ShardedTensor` with a `flattened_range`). torch.distributed.checkpoint has boxes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.checkpoint.index import copy_name
from dslpar.checkpoint.slices import Box, box_of, full_box
from dslpar.engine.engine import Engine
from dslpar.layers.parameter import placement_of
from dslpar.layers.placement import Placement

SPLIT_FROM = 1 << 16
"""Elements from which each replica of a piece writes a part of it; one replica writes a smaller piece alone."""

Scalar = int | float | bool | Tensor
"""Optimizer value of a whole parameter, such as its step: a plain number or a 0-dim tensor."""


OptimizerState = MutableMapping[Tensor, dict[str, Any]]
"""State of an optimizer, by the tensor that it steps."""
ParameterGroup = MutableMapping[str, Any]
"""Parameter group of a torch optimizer."""


class Master(NamedTuple):
    """The part of a parameter's master on this rank."""

    tensor: Tensor
    """Tensor that the optimizer steps: the parameter, its copy, or a flat tensor of many parameters."""
    offset: int
    """First of this parameter's elements in the flattened `tensor`."""
    start: int
    """First element of the local piece that it holds."""
    stop: int
    """End of these elements, exclusive."""
    state: OptimizerState
    """State of the whole optimizer; `tensor` is a key of it."""
    group: ParameterGroup
    group_number: int
    """Number of the group: optimizers step groups in this order."""

    @property
    def tensor_state(self) -> dict[str, Any]:
        """The optimizer's state of `tensor`; empty before its first step."""
        return self.state.get(self.tensor, {})

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return a view of this parameter's elements in `self.tensor`, or in a state of the same shape."""
        if self.offset == 0 and self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start)


class ParameterShard(NamedTuple):
    """One parameter on this rank."""

    name: str
    """Global name, the same in every layout."""
    shape: tuple[int, ...]
    """Full shape, unpadded."""
    box: Box
    """Part of the full tensor that is the local piece."""
    start: int
    """First element of the local piece that this rank holds."""
    stop: int
    """End of these elements, exclusive; equal to `start` if the rank holds none."""
    write_range: range
    """Elements that this rank writes: over all ranks, each element once."""
    weight: Tensor
    """Elements [start, stop) of the master, or of the weight if there is none; row-major order of the local piece."""
    master: Master | None
    """None: the optimizer does not train this parameter, or not on this rank."""
    tied_copy_rank: int | None
    """This rank's index on the axis "pipe" if it is a tied copy: the first rank that holds the weight owns it."""
    parameter: nn.Parameter

    def stored_name(self, same_layout: bool) -> str:
        """Return the name in the index: a tied copy's own name in the same layout, its owner's name in any other."""
        if same_layout and self.tied_copy_rank is not None:
            return copy_name(self.name, self.tied_copy_rank)
        return self.name

    @property
    def trained(self) -> bool:
        """Return whether the parameter requires a gradient."""
        return self.parameter.requires_grad

    @property
    def states(self) -> dict[str, Tensor]:
        """Optimizer tensors of the weight's shape, as views of the same elements."""
        if self.master is None:
            return {}
        return {key: self.master.view_of(value) for key, value in self._weight_shaped().items()}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """Optimizer values of the whole parameter."""
        shaped = self._weight_shaped()  # for a 0-dim parameter these are 0-dim as well
        return {
            key: value
            for key, value in self._state().items()
            if key not in shaped and (value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float))
        }

    @property
    def irregular(self) -> dict[str, Tensor]:
        """Optimizer tensors of other shapes, such as Adafactor's rows and columns."""
        shaped = self._weight_shaped()
        tensors = {key: value for key, value in self._state().items() if isinstance(value, Tensor) and value.dim()}
        return {key: value for key, value in tensors.items() if key not in shaped}

    def _weight_shaped(self) -> dict[str, Any]:
        shape = None if self.master is None else self.master.tensor.shape
        return {key: value for key, value in self._state().items() if getattr(value, "shape", "none") == shape}

    def _state(self) -> dict[str, Any]:
        return {} if self.master is None else self.master.tensor_state


def parameter_shards(engine: Engine) -> list[ParameterShard]:
    """Return every parameter of this rank, in the model's order, which all replicas share. No collective."""
    masters, groups = find_masters(engine), engine.groups
    coord, copies = groups.coord, groups.zero_axis
    replicated = Placement(groups.tensor, (), ())
    shards = []
    # The order is the same on all ranks of `copies`, so `number` deals out small parameters without communication.
    for number, (name, p) in enumerate(engine.named_parameters()):
        placement, master = placement_of(p), masters.get(p)
        shape = tuple(getattr(p, "ds_shape", p.shape)) if placement is None else placement.shape
        start, stop, weight = _local_elements(p, master)
        write_range = _replica_range(p, number, copies.index, copies.size)
        if write_range is None:
            write_range = range(start, stop)
        is_owner = (placement or replicated).is_stepped_at(coord)
        shard = ParameterShard(
            name=name,
            shape=shape,
            box=full_box(shape) if placement is None else box_of(placement, coord),
            start=start,
            stop=stop,
            write_range=write_range if is_owner else range(0),
            weight=weight,
            master=master,
            tied_copy_rank=coord["pipe"] if getattr(p, "ds_pipe_replicated", False) else None,
            parameter=p,
        )
        shards.append(shard)
    return shards


def _local_elements(p: nn.Parameter, master: Master | None) -> tuple[int, int, Tensor]:
    """Return (start, stop, tensor): the elements of the local piece that this rank holds."""
    if master is not None:
        return master.start, master.stop, master.view_of(master.tensor)
    if hasattr(p, "ds_tensor"):  # ZeRO 3, frozen
        start, stop = _zero_3_range(p)
        return start, stop, p.ds_tensor.detach().view(-1)[: stop - start]
    if getattr(p, "_hp_mapping", "none") is None:  # ZeRO 1 or 2, on another rank
        return 0, 0, p.detach().view(-1)[:0]
    return 0, p.numel(), p.detach()


def _zero_3_range(p: nn.Parameter) -> tuple[int, int]:
    """Return the elements (start, stop) that this rank holds of a parameter sharded by ZeRO 3."""
    # All ranks have shards of equal length, so the last ones are padded, and may hold only padding.
    length, numel = p.partition_numel(), p.ds_numel  # type: ignore[attr-defined]
    start = dist.get_rank(p.ds_process_group) * length  # type: ignore[attr-defined]
    return min(start, numel), min(start + length, numel)


def _replica_range(p: nn.Parameter, number: int, index: int, size: int) -> range | None:
    """Return the range that rank `index` of `size` replicas writes of a parameter that all hold; None: ZeRO shards it.

    Parts are equal, so that no rank writes while the others wait. Of small parameters each rank writes every `size`-th.
    """
    if hasattr(p, "ds_tensor") or hasattr(p, "_hp_mapping"):
        return None
    length = p.numel()
    if length < SPLIT_FROM:
        return range(length if number % size == index else 0)
    return range(length * index // size, length * (index + 1) // size)


# ---- DeepSpeed's optimizers ----


def find_masters(engine: Engine) -> dict[nn.Parameter, Master]:
    """Return the master of each parameter that the optimizer steps on this rank."""
    optimizer = engine.deepspeed.optimizer
    for attribute, masters in _MASTERS_BY_ATTRIBUTE.items():
        if hasattr(optimizer, attribute):
            return dict(masters(optimizer))
    return {  # a torch optimizer steps the parameters themselves: no ZeRO, fp32
        p: Master(p, 0, 0, p.numel(), optimizer.state, group, number)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }


Masters = Iterator[tuple[nn.Parameter, Master]]


def _fp16_unfused_masters(wrapper: Any) -> Masters:
    """Yield the masters of FP16_UnfusedOptimizer: no ZeRO, half precision."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    for number, (group, parameters, copies) in enumerate(groups):
        for p, master in zip(parameters, copies, strict=True):
            yield p, Master(master, 0, 0, p.numel(), inner.state, group, number)


def _fp16_masters(wrapper: Any) -> Masters:
    """Yield the masters of FP16_Optimizer: no ZeRO, half precision, FusedAdam."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)
    for number, (group, parameters, flat) in enumerate(groups):
        offset = 0
        for p in parameters:
            yield p, Master(flat, offset, 0, p.numel(), inner.state, group, number)
            offset += p.numel()


def _sharded_masters(zero: Any, groups: Sequence[Sequence[nn.Parameter]], flats: Sequence[Tensor]) -> Masters:
    """Yield the masters in this rank's shard of each group's flat tensor."""
    state = zero.optimizer.state
    for number, (group, parameters, flat) in enumerate(zip(zero.optimizer.param_groups, groups, flats, strict=True)):
        for p in parameters:
            mapping: Any = p._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                local, master = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield p, Master(flat, master.start, local.start, local.start + local.numel, state, group, number)


def _zero_3_masters(zero: Any) -> Masters:
    for sub_group, parameters in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        number = zero.sub_group_to_group_id[sub_group]
        group = zero.optimizer.param_groups[number]
        for p in parameters:
            _, offset, _ = zero.grad_position[zero.get_param_id(p)]
            yield p, Master(flat, offset, *_zero_3_range(p), zero.optimizer.state, group, number)


_MASTERS_BY_ATTRIBUTE: Mapping[str, Callable[[Any], Masters]] = {
    "fp32_partitioned_groups_flat": _zero_3_masters,
    "single_partition_of_fp32_groups": lambda zero: _sharded_masters(
        zero, zero.bit16_groups, zero.single_partition_of_fp32_groups
    ),
    # BF16_Optimizer: a pipeline without ZeRO, in bf16.
    "fp32_groups_flat_partition": lambda zero: _sharded_masters(
        zero, zero.bf16_groups, zero.fp32_groups_flat_partition
    ),
    "fp32_groups_flat": _fp16_masters,
    "fp32_groups": _fp16_unfused_masters,
}
"""Functions by an attribute that no optimizer further down has: DeepSpeed's classes have no common base to ask."""


# ---- loading ----


def step_order(shard: ParameterShard) -> int:
    """Return the sort key of a shard: an optimizer that has stepped has its state in this order."""
    return -1 if shard.master is None else shard.master.group_number


def set_scalars(master: Master, scalars: Mapping[str, Scalar]) -> None:
    """Set the optimizer's values of one tensor; tensors are overwritten in place, since a kernel may read them."""
    state = master.state[master.tensor]
    # torch's optimizers keep a counter on the CPU, if no kernel on the device reads it.
    on_device = master.group.get("capturable") or master.group.get("fused")
    device = master.tensor.device if on_device else torch.device("cpu")
    for key, stored in scalars.items():
        value = _as_counted(stored, master.group) if key == "step" else stored
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        else:
            state[key] = value.to(device) if isinstance(value, Tensor) else value


def _as_counted(step: Scalar, group: ParameterGroup) -> Scalar:
    """Return a step in this optimizer's type: a number for DeepSpeedCPUAdam, a tensor for torch's Adam.

    The host decides which of them steps offloaded parameters, and the checkpoint may come from the other.
    """
    if isinstance(step, Tensor) and "bias_correction" in group:
        return int(step)
    if not isinstance(step, Tensor) and "capturable" in group:
        return torch.tensor(float(step))
    return step


def state_tensor(shard: ParameterShard, key: str, dtype: torch.dtype) -> Tensor:
    """Return the shard's elements of an optimizer tensor, which is created with zeros if it does not exist yet."""
    assert shard.master is not None, f"{shard.name} is not trained here"
    tensor, state = shard.master.tensor, shard.master.state[shard.master.tensor]
    # The optimizer creates its state at its first step, which a new engine has not taken.
    if key not in state:
        state[key] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    return shard.master.view_of(state[key])


def before_load(engine: Engine) -> None:
    """Have ZeRO 3 free the parameters that it has gathered, so that only the shards must be filled."""
    zero = engine.deepspeed.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        # As in DeepSpeed's own load: "persistent" (small) parameters stay gathered between steps.
        zero.checkpoint_event_prologue()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)


def after_load(engine: Engine) -> None:
    """Cast the masters to the weights that the model computes with. All ranks must call it together.

    ZeRO 1 and 2 gather the weights from the ranks that hold shards, as after a step. Each rank has read only its own
    shard, since reading all weights on every rank would multiply the disk reads by the number of ranks. ZeRO 3 gathers
    its persistent parameters again, and drops the secondary copies of zero_hpz_partition_size.
    """
    optimizer: Any = engine.deepspeed.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups_flat"):
        for weights, masters in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            weights.data.copy_(masters.data)
    elif hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)
