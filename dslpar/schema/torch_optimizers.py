"""Optimizers of torch and DeepSpeed by name: where each lives, its arguments and their kinds (those of
dslpar.schema.types).

`elementwise` means that each element's update looks at that element alone, so that a shard of a tensor can be updated
by itself: what ZeRO and tensor parallelism need. AdamW, Adam and SGD are sections of dslpar's own
(`dslpar.schema.sections`).

    >>> named("RMSprop").dotted, elementwise("torch.optim.RMSprop"), elementwise("my_package.MyOptimizer")
    ('torch.optim.RMSprop', True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class KnownOptimizer(NamedTuple):
    """One row of the table."""

    dotted: str
    """The class, by its full name."""
    args: Mapping[str, str] = {}
    """Keyword arguments besides lr, and their kinds."""
    elementwise: bool = True
    """Whether shards of a tensor can be updated alone."""
    refused: str = ""
    """Why dslpar does not run it; empty: it does."""
    offload: bool | None = None
    """Whether it needs the optimizer to be offloaded to the CPU (True), cannot have it so (False), or takes both."""
    on_cpu: str = ""
    """The class in its place where the optimizer is offloaded, by its full name; empty: the same one."""


_DECAY = {"weight_decay": "Rate"}
_TORCH = dict.fromkeys(("foreach", "maximize", "differentiable", "capturable"), "Flag") | _DECAY
_ADAM = {"betas": "Betas", "eps": "Positive"}
_DEEPSPEED_ADAM = _ADAM | _DECAY | {"bias_correction": "Flag"}
_REMOVED = KnownOptimizer("", refused="DeepSpeed 0.19 has removed it")


def _torch(name: str, args: Mapping[str, str], without: str = "") -> KnownOptimizer:
    left = {key: kind for key, kind in {**_TORCH, **args}.items() if key not in without.split()}
    return KnownOptimizer(f"torch.optim.{name}", left)


def _refused(name: str, why: str) -> KnownOptimizer:
    return KnownOptimizer(f"torch.optim.{name}", refused=why)


OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "ASGD": _torch("ASGD", {"lambd": "Rate", "alpha": "Rate", "t0": "Positive"}),
    "Adadelta": _torch("Adadelta", {"rho": "Share", "eps": "Positive"}),
    "Adafactor": _torch(
        "Adafactor",
        {"beta2_decay": "NotPositive", "eps": "AdafactorEps", "d": "FromOne"},
        without="differentiable capturable",
    )._replace(elementwise=False),  # the second moment is a row times a column of the whole matrix
    "Adagrad": _torch(
        "Adagrad",
        {"lr_decay": "Rate", "initial_accumulator_value": "Rate", "eps": "Positive", "fused": "Flag"},
        without="capturable",
    ),
    "Adamax": _torch("Adamax", _ADAM),
    "LBFGS": _refused("LBFGS", "it evaluates the loss several times a step, by a closure"),
    "Muon": _refused("Muon", "it takes matrices alone, and models have biases and gains"),
    "NAdam": _torch("NAdam", {**_ADAM, "momentum_decay": "Rate", "decoupled_weight_decay": "Flag"}),
    "RAdam": _torch("RAdam", {**_ADAM, "decoupled_weight_decay": "Flag"}),
    "RMSprop": _torch("RMSprop", {"alpha": "Rate", "eps": "Positive", "momentum": "Rate", "centered": "Flag"}),
    "Rprop": _torch("Rprop", {"etas": "Etas", "step_sizes": "Pair"}, without="weight_decay"),
    "SparseAdam": _refused("SparseAdam", "it takes sparse gradients, and dslpar's are dense"),
    "FusedAdam": KnownOptimizer(
        "deepspeed.ops.adam.FusedAdam",
        {**_DEEPSPEED_ADAM, "adam_w_mode": "Flag", "set_grad_none": "Flag"},
        offload=False,
    ),
    "DeepSpeedCPUAdam": KnownOptimizer(
        "deepspeed.ops.adam.DeepSpeedCPUAdam",
        {**_DEEPSPEED_ADAM, "adamw_mode": "Flag", "amsgrad": "Flag", "fp32_optimizer_states": "Flag"},
        offload=True,
    ),
    "Lion": KnownOptimizer(
        "deepspeed.ops.lion.FusedLion",
        {**_DECAY, "betas": "Betas"},
        on_cpu="deepspeed.ops.lion.DeepSpeedCPULion",
    ),
    "Lamb": KnownOptimizer(
        "deepspeed.ops.lamb.FusedLamb",
        {**_DEEPSPEED_ADAM, "eps_inside_sqrt": "Flag", "max_coeff": "Positive", "min_coeff": "Positive"},
        elementwise=False,  # each tensor's step is scaled by the tensor's own norm
    ),
    "OneBitAdam": _REMOVED,
    "OneBitLamb": _REMOVED,
    "ZeroOneAdam": _REMOVED,
}
_OWN = {"torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"}
_BY_DOTTED = {row.dotted: name for name, row in OPTIMIZERS.items() if row.dotted}


def short(name: str) -> str:
    """The table's name of a class that is written in full; any other name as it is."""
    return _BY_DOTTED.get(name, name)


def named(name: str) -> KnownOptimizer | None:
    """The row of a name, short or full; None for a class that is not in the table."""
    return OPTIMIZERS.get(short(name))


def elementwise(name: str) -> bool:
    """Whether shards of a tensor can be updated alone; of a class that is not in the table nobody knows, so: no."""
    row = named(name)
    return name in _OWN or (row is not None and row.elementwise)
