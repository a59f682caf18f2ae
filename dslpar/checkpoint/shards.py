"""What a rank holds of each parameter: the master weight, the optimizer's state, and which part of the whole it is.

    for held in of_engine(engine):
        held.name, held.box, held.start, held.stop      # elements [start, stop) of the piece `box`, in row-major order
        held.weight, held.states, held.numbers          # views of what DeepSpeed trains on: written and read in place

DeepSpeed keeps these in five ways, by ZeRO's stage and the precision; each is one function here, that says of each
parameter where its master stands:

========================  =================================  =====================================================
optimizer                 master                             part of the local piece
========================  =================================  =====================================================
torch's own               the parameter itself               all of it
FP16_UnfusedOptimizer     an fp32 copy of each parameter     all of it
FP16_Optimizer            one flat fp32 tensor a group       all of it
ZeRO 1, 2, BF16           a data rank's shard of that        a range, or nothing (`p._hp_mapping`)
ZeRO 3                    one flat tensor a sub-group        an equal range for each data rank (`grad_position`)
========================  =================================  =====================================================

That a checkpoint is made of flat ranges of boxes of whole tensors is how Megatron-LM's distributed optimizer writes its
own (`ShardedTensor` with a `flattened_range`); torch.distributed.checkpoint has boxes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.checkpoint.slices import Box, box_of, whole_box
from dslpar.core.mesh import TENSOR_AXES
from dslpar.engine.engine import Engine
from dslpar.layers import placement_of

SPLIT_FROM = 1 << 16
"""Elements from which the replicas of a piece each write a part of it; smaller ones are written by one of them."""

Number = int | float | bool | Tensor
"""What an optimizer counts by, of a parameter as a whole: a plain number or a 0-dim tensor. (No parameter is one.)"""


class Master(NamedTuple):
    """Where the weight of one parameter stands that the optimizer steps on this rank."""

    tensor: Tensor
    """What the optimizer knows: the parameter, its copy, or a flat tensor of many."""
    offset: int
    """Where in that, flattened, this parameter's elements begin."""
    start: int
    """Which of the local piece's elements these are: the first, ..."""
    stop: int
    """... and the one after the last."""
    state: MutableMapping[Tensor, dict[str, Any]]
    """The optimizer's state, by `tensor`."""
    group: MutableMapping[str, Any]
    """Its parameter group."""
    turn: int
    """The number of that group: optimizers step them in this order."""

    @property
    def kept(self) -> dict[str, Any]:
        """What the optimizer keeps of `tensor`; empty before its first step."""
        return self.state.get(self.tensor, {})

    def of(self, tensor: Tensor) -> Tensor:
        """This parameter's elements of `self.tensor`, or of a state that is shaped as it is: a view."""
        if self.offset == 0 and self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start)


class Held(NamedTuple):
    """One parameter on this rank."""

    name: str
    """Global, the same in every layout."""
    shape: tuple[int, ...]
    """Of the whole tensor, unpadded."""
    box: Box
    """Which part of the whole the local piece is."""
    start: int
    """The elements of the local piece that stand here: the first, ..."""
    stop: int
    """... and the one after the last; equal where this rank has none."""
    writes: range
    """Those of them that this rank writes: over all ranks every element once."""
    weight: Tensor
    """These elements, of the master; their row-major order is that of the local piece."""
    master: Master | None
    """Where the optimizer has them; None: it does not train this parameter, or not here."""
    copy_of_stage: int | None
    """This stage, where it is a tied copy of a weight that an earlier stage owns."""
    parameter: nn.Parameter

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.parameter.requires_grad

    @property
    def states(self) -> dict[str, Tensor]:
        """The optimizer's tensors that are shaped as the weight: views of the same elements."""
        return {} if self.master is None else {key: self.master.of(value) for key, value in self._shaped().items()}

    @property
    def numbers(self) -> dict[str, Number]:
        """What the optimizer counts by."""
        shaped = self._shaped()
        return {key: value for key, value in self._kept().items() if key not in shaped and _is_number(value)}

    @property
    def odd(self) -> dict[str, Tensor]:
        """The optimizer's tensors of other shapes, such as Adafactor's rows and columns."""
        kept, shaped = self._kept(), self._shaped()
        tensors = {key: value for key, value in kept.items() if isinstance(value, Tensor) and value.dim()}
        return {key: value for key, value in tensors.items() if key not in shaped}

    def _shaped(self) -> dict[str, Tensor]:
        shape = None if self.master is None else self.master.tensor.shape
        return {key: value for key, value in self._kept().items() if getattr(value, "shape", "none") == shape}

    def _kept(self) -> dict[str, Any]:
        return {} if self.master is None else self.master.kept


def of_engine(engine: Engine) -> list[Held]:
    """Every parameter of this rank, in the model's order: the same on all ranks of a stage. No collective."""
    masters, coord, data = masters_of(engine), engine.groups.coord, engine.groups.axis("data")
    return [
        _held(name, p, masters.get(p), coord, _turn(p, number, data.index, data.size))
        for number, (name, p) in enumerate(engine.named_parameters())
    ]


def _held(name: str, p: nn.Parameter, master: Master | None, coord: Mapping[str, int], share: range | None) -> Held:
    placement = placement_of(p)
    shape = tuple(getattr(p, "ds_shape", p.shape)) if placement is None else placement.shape
    start, stop, weight = _here(p, master)
    writes = range(start, stop) if share is None else share
    return Held(
        name=name,
        shape=shape,
        box=whole_box(shape) if placement is None else box_of(placement, coord),
        start=start,
        stop=stop,
        writes=writes if _owns(p, coord) else range(0),
        weight=weight,
        master=master,
        copy_of_stage=coord["pipe"] if getattr(p, "ds_pipe_replicated", False) else None,
        parameter=p,
    )


def _here(p: nn.Parameter, master: Master | None) -> tuple[int, int, Tensor]:
    """Which elements stand here, and these."""
    if master is not None:
        return master.start, master.stop, master.of(master.tensor)
    if hasattr(p, "ds_tensor"):  # ZeRO 3, frozen
        start, stop = _of_shard(p)
        return start, stop, p.ds_tensor.detach().view(-1)[: stop - start]
    if getattr(p, "_hp_mapping", "none") is None:  # ZeRO 1 or 2, on another data rank
        return 0, 0, p.detach().view(-1)[:0]
    return 0, p.numel(), p.detach()


def _of_shard(p: nn.Parameter) -> tuple[int, int]:
    """Which elements this data rank has of a parameter that ZeRO 3 shards; the last shard is padded."""
    length, whole = p.partition_numel(), p.ds_numel  # type: ignore[attr-defined]
    start = dist.get_rank(p.ds_process_group) * length  # type: ignore[attr-defined]
    return min(start, whole), min(start + length, whole)


def _turn(p: nn.Parameter, number: int, index: int, size: int) -> range | None:
    """What the data rank `index` of `size` writes of what all of them hold whole; None: ZeRO shards it.

    Equal parts; of small tensors each rank writes every `size`-th.
    """
    if hasattr(p, "ds_tensor") or hasattr(p, "_hp_mapping"):
        return None
    length = p.numel()
    if length < SPLIT_FROM:
        return range(length if number % size == index else 0)
    return range(length * index // size, length * (index + 1) // size)


def _owns(p: nn.Parameter, coord: Mapping[str, int]) -> bool:
    """Whether this rank's piece is the one of its tensor group that is written, of equal ones."""
    placement = placement_of(p)
    return placement.owner(coord) if placement else all(coord[axis] == 0 for axis in TENSOR_AXES)


# ---- DeepSpeed's optimizers ----


def masters_of(engine: Engine) -> dict[nn.Parameter, Master]:
    """Of each parameter that the optimizer steps here, where it does so."""
    optimizer = engine.deepspeed.optimizer
    for mark, masters in _FAMILIES.items():
        if hasattr(optimizer, mark):
            return dict(masters(optimizer))
    return dict(_themselves(optimizer))


Masters = Iterator[tuple[nn.Parameter, Master]]


def _themselves(optimizer: Any) -> Masters:
    """An optimizer of torch's: no ZeRO, fp32."""
    for turn, group in enumerate(optimizer.param_groups):
        yield from ((p, Master(p, 0, 0, p.numel(), optimizer.state, group, turn)) for p in group["params"])


def _copies(wrapper: Any) -> Masters:
    """FP16_UnfusedOptimizer: no ZeRO, half precision."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    for turn, (group, ours, theirs) in enumerate(groups):
        for p, master in zip(ours, theirs, strict=True):
            yield p, Master(master, 0, 0, p.numel(), inner.state, group, turn)


def _flat(wrapper: Any) -> Masters:
    """FP16_Optimizer: the same, for FusedAdam."""
    inner = wrapper.optimizer
    groups = zip(inner.param_groups, wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)
    for turn, (group, ours, flat) in enumerate(groups):
        offset = 0
        for p in ours:
            yield p, Master(flat, offset, 0, p.numel(), inner.state, group, turn)
            offset += p.numel()


def _shards(zero: Any, ours: Sequence[Sequence[nn.Parameter]], flats: Sequence[Tensor]) -> Masters:
    """This data rank's shard of each group's flat tensor."""
    state = zero.optimizer.state
    for turn, (group, parameters, flat) in enumerate(zip(zero.optimizer.param_groups, ours, flats, strict=True)):
        for p in parameters:
            mapping: Any = p._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield p, Master(flat, there.start, here.start, here.start + here.numel, state, group, turn)


def _zero_1_2(zero: Any) -> Masters:
    return _shards(zero, zero.bit16_groups, zero.single_partition_of_fp32_groups)


def _bf16(zero: Any) -> Masters:
    """BF16_Optimizer: a pipeline without ZeRO, in bf16."""
    return _shards(zero, zero.bf16_groups, zero.fp32_groups_flat_partition)


def _zero_3(zero: Any) -> Masters:
    for sub_group, parameters in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        turn = zero.sub_group_to_group_id[sub_group]
        group = zero.optimizer.param_groups[turn]
        for p in parameters:
            _, offset, _ = zero.grad_position[zero.get_param_id(p)]
            yield p, Master(flat, offset, *_of_shard(p), zero.optimizer.state, group, turn)


_FAMILIES: Mapping[str, Callable[[Any], Masters]] = {
    "fp32_partitioned_groups_flat": _zero_3,
    "single_partition_of_fp32_groups": _zero_1_2,
    "fp32_groups_flat_partition": _bf16,
    "fp32_groups_flat": _flat,
    "fp32_groups": _copies,
}
"""By an attribute that no other of them has."""


# ---- what is set ----


def turn_of(held: Held) -> int:
    """In this order an optimizer that has stepped has its state."""
    return -1 if held.master is None else held.master.turn


def set_numbers(master: Master, numbers: Mapping[str, Any]) -> None:
    """What the optimizer counts by, of one tensor that it knows; a tensor stays where it is, and as it is."""
    kept = master.state[master.tensor]
    for key, value in numbers.items():
        if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor):
            kept[key].copy_(value)
        else:
            kept[key] = value.to(_home(master)) if isinstance(value, Tensor) else value


def _home(master: Master) -> torch.device:
    """Where torch's optimizers keep a counter: on the CPU, if no kernel on the device reads it."""
    on_device = master.group.get("capturable") or master.group.get("fused")
    return master.tensor.device if on_device else torch.device("cpu")


def state_of(held: Held, key: str, dtype: torch.dtype) -> Tensor:
    """These elements of one of the optimizer's tensors, which is made, of zeros, where there is none yet."""
    assert held.master is not None, f"{held.name} is not trained here"
    tensor, kept = held.master.tensor, held.master.state[held.master.tensor]
    if key not in kept:
        kept[key] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    return held.master.of(kept[key])


def before_load(engine: Engine) -> None:
    """ZeRO 3 lets go of what it has gathered: the shards are then all there is."""
    zero = engine.deepspeed.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.checkpoint_event_prologue()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)


def after_load(engine: Engine) -> None:
    """The weights that the model computes with, from the masters, cast; of ZeRO 1 and 2 the caller sets these.

    ZeRO 3 then gathers again what it never lets go of, and forgets the second copies of zero_hpz_partition_size. All
    ranks together.
    """
    optimizer: Any = engine.deepspeed.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "fp32_groups_flat"):
        for weights, masters in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            weights.data.copy_(masters.data)
    elif hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
