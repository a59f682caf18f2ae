"""Gather a model's full weights in any layout, and load full weights into a model in any other layout.

    full = full_state(engine.module, engine.groups)              # {'blocks.0.mlp.up.weight': (F, H), ...}
    load_full_state(other.module, full, other.groups)            # each rank cuts its own piece

Tensors are unpadded, on the CPU, and named as in the model without a pipeline. In a pipeline each rank returns and
loads the tensors of its own layers only. If ZeRO keeps fp32 masters of half-precision weights, the masters are
returned, and a load sets both masters and weights. Optimizer states do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.core.suggest import did_you_mean
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.distributed.parameter_gather import finish_gathers
from dslpar.engine import pipeline_module
from dslpar.layers import gather, placement_of
from dslpar.layers.initial_values import Source, record

Shape = tuple[int, ...]

_CUTOFF = 0.6
"""Least similarity of suggested names: lower than for config keys, since only names of the same shape compete."""


def full_state(module: nn.Module, groups: Groups, *, everywhere: bool = True) -> dict[str, Tensor]:
    """Return {parameter name: full tensor} of this rank's pipeline stages, including its copies of tied weights.

    All ranks must call it together. One tensor is gathered at a time. With `everywhere=False`, only the first rank of
    each tensor group keeps the tensors, and the others return {}.
    """
    finish_gathers(module)
    state = {}
    for name, p in pipeline_module.named_parameters(module):
        placement, piece = placement_of(p), local_piece(p)
        # On every rank, even if it does not keep the result: the gather is a collective of the tensor group.
        full = piece.clone() if placement is None else gather(piece.view(placement.local_shape), placement, groups)
        if everywhere or groups.axis("tensor").index == 0:
            state[name] = full.cpu()
    return state


def load_full_state(
    module: nn.Module, full: Mapping[str, Tensor], groups: Groups, *, strict: bool = True, source: str = "<weights>"
) -> None:
    """Set every parameter of this rank to its piece of the full tensor of the same name.

    All ranks must call it together. `full` has the tensors of the whole model, or at least of this rank's stages.
    `source` names the tensors' origin in errors. With `strict=False`, names that only `full` or only the model has are
    ignored.

    Raises:
        DslparError: on every rank, before any change: names are missing or unknown (`strict`), or shapes differ. The
            error lists all of them.
    """
    # All ranks check before any fills: a rank that raised alone would leave the others waiting in ZeRO 3's gathers.
    _check(full, _shapes(module), groups, strict, source)
    finish_gathers(module)
    with torch.no_grad():
        for name, p in pipeline_module.named_parameters(module):
            if name in full:
                fill(p, full[name], groups)


# ---- one parameter ----


def local_piece(p: nn.Parameter) -> Tensor:
    """Return this rank's tensor-parallel piece of a parameter, without ZeRO's sharding; from the fp32 master if any."""
    if _has_master(p):
        return safe_get_full_fp32_param(p).detach()  # type: ignore[no-any-return]
    with GatheredParameters([p]):
        return p.detach().clone()


def fill(p: nn.Parameter, full: Tensor, groups: Groups) -> None:
    """Set a parameter, and its fp32 master, to this rank's piece of the full tensor; all its ranks call it together."""
    placement = placement_of(p)
    full = full.to(p.device)
    piece = full if placement is None else placement.cut(full, groups.coord)
    # Without a modifier_rank ZeRO 3 discards the written values when it partitions the parameter again.
    with GatheredParameters([p], modifier_rank=0):
        p.copy_(piece)
    record(p, Source.WHOLE, digested=False)
    if _has_master(p):
        safe_set_full_fp32_param(p, piece.float())


def _has_master(p: nn.Parameter) -> bool:
    """Return whether the optimizer of ZeRO 1, 2 or 3 keeps an fp32 master of this parameter."""
    return p.requires_grad and (hasattr(p, "_hp_mapping") or hasattr(p, "_z3_optimizer"))


# ---- names and shapes that do not match ----


def _shapes(module: nn.Module) -> dict[str, Shape]:
    """Return the full shapes of this rank's parameters, even if ZeRO 3 has sharded them."""
    named = pipeline_module.named_parameters(module)
    return {
        name: placement.shape if (placement := placement_of(p)) else tuple(getattr(p, "ds_shape", p.shape))
        for name, p in named
    }


def _check(full: Mapping[str, Tensor], local: Mapping[str, Shape], groups: Groups, strict: bool, source: str) -> None:
    """Compare names and shapes of `full` with the model's, and raise the mismatches of all ranks on every rank."""
    world = groups.axis("pipe", "data", "tensor")
    by_rank = collectives.gather_objects(dict(local), groups.axis("pipe"))
    model = {name: shape for held in by_rank for name, shape in held.items()}
    given = {name: tuple(tensor.shape) for name, tensor in full.items()}
    mismatches: list[Mismatch] = [
        (f"{name!r} has shape {given[name]}, and the model's {shape}", "give weights of the same model")
        for name, shape in model.items()
        if given.get(name, shape) != shape
    ]
    mismatches += _other_names(given, local, model) if strict else ()
    # A rank finds only the missing names of its own stages, so the mismatches of all ranks are gathered.
    everywhere = dict.fromkeys(each for found in collectives.gather_objects(mismatches, world) for each in found)
    if everywhere:
        raise DslparError(finding("CKP207", message, hint, source) for message, hint in everywhere)


Mismatch = tuple[str, str]
"""(message, hint) of a finding."""


def _other_names(
    given: Mapping[str, Shape], local: Mapping[str, Shape], model: Mapping[str, Shape]
) -> Iterator[Mismatch]:
    """Yield this rank's parameters that `given` lacks, and the names in `given` that the model does not have."""
    unknown = [name for name in given if name not in model]
    for name in local:
        if name not in given:
            hint = did_you_mean(name, [other for other in unknown if given[other] == model[name]], "; ", _CUTOFF)
            yield f"no tensor for {name!r} {model[name]}", f"strict=False leaves it as it is{hint}"
    for name in unknown:
        hint = did_you_mean(name, [other for other in model if other not in given], "; ", _CUTOFF)
        yield f"the model has no {name!r} {given[name]}", f"strict=False ignores it{hint}"
