"""Experts that are divided over data ranks, in DeepSpeed's engine.

    register_experts(module, groups)        # before deepspeed.initialize
    split_experts(parameter_groups)         # experts in parameter groups of their own

The e neighbouring data ranks of an axis "expert" hold different experts, so an expert's gradient must be summed over
"expert_data" alone, the ranks that hold the same one. It is still divided by the number of all data ranks, as every
gradient is: the exchange of tokens has already summed over e. ZeRO 1 and 2 shard its optimizer state over expert_data.

DeepSpeed does this for the experts of its own MoE layer: for parameters with `allreduce = False` and the name of their
groups, which are in parameter groups marked "moe", in a model that has a module of class `MoE`. Its layer, its gate and
its group creation are not used here. Norms are summed by dslpar's patches (M11, M12): over all data ranks, whose shards
of experts are all different.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from deepspeed.moe.layer import MoE
from torch import nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of


class _ExpertMark(MoE):  # type: ignore[misc]
    """Module without parameters by which DeepSpeed's engine finds that a model has experts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_: object) -> None:
        """Do nothing: the groups exist."""


MARK = "_experts_over_data"


def register_experts(module: nn.Module, groups: Groups) -> None:
    """Mark a model's experts for DeepSpeed if data ranks hold different ones; also frozen ones, which it broadcasts."""
    experts = [p for p in module.parameters() if is_expert(p)]
    if not experts:
        return
    name = _register_groups(groups)
    for p in experts:
        p.allreduce, p.group_name = False, name  # type: ignore[attr-defined]
    if any(p.requires_grad for p in experts):  # DeepSpeed requires a parameter group of experts then
        module.add_module(MARK, _ExpertMark())


def _register_groups(groups: Groups) -> str:
    """Give DeepSpeed the process groups of experts, and return the name by which it knows them."""
    of_process: Any = import_module("deepspeed.utils.groups")
    expert, copies = groups.axis("expert"), groups.axis("expert_data")
    name = f"dslpar experts {expert.peers} of {copies.peers}"
    of_process._EXPERT_PARALLEL_GROUP[name], of_process._EXPERT_PARALLEL_GROUP_RANKS[name] = expert.group, expert.peers
    of_process._EXPERT_DATA_PARALLEL_GROUP[name] = copies.group
    of_process._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = copies.peers
    return name


def is_expert(p: nn.Parameter) -> bool:
    """Return whether data ranks hold different pieces of a parameter."""
    placement = placement_of(p)
    return placement is not None and placement.is_expert


def split_experts(parameter_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups in which experts have groups of their own, marked for DeepSpeed, behind all others."""
    dense: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in parameter_groups:
        parts: Sequence[tuple[list[dict[str, Any]], dict[str, Any], list[nn.Parameter]]] = (
            (dense, {}, [p for p in group["params"] if not is_expert(p)]),
            (experts, {"moe": True}, own := [p for p in group["params"] if is_expert(p)]),
        )
        for target, mark, parameters in parts:
            if parameters:
                name = {"name": own[0].group_name} if mark else {}
                target.append({**group, "params": parameters, **mark, **name})
    return [*dense, *experts]
