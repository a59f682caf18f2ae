"""Weights as the whole model has them, out of any layout and into any other, by placements alone.

    whole = full_state(engine.module, engine.groups)             # {'blocks.0.mlp.up.weight': (F, H), ...}
    load_full_state(other.module, whole, other.groups)           # each rank cuts its own piece

Tensors are unpadded, on the CPU, and under the names that the model has without a pipeline; of a pipeline each stage
gives and takes its own layers, so the union over the stages is the model. Where ZeRO keeps fp32 masters of weights in
half precision, those are given, and both are set. The state of an optimizer is not touched.
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
from dslpar.engine import pipeline_module
from dslpar.layers import gather, placement_of

Shape = tuple[int, ...]


def full_state(module: nn.Module, groups: Groups, *, everywhere: bool = True) -> dict[str, Tensor]:
    """{global name: whole tensor} of what this stage holds; of a weight that is tied to another stage's, its copy.

    All ranks must call it together. One tensor at a time is gathered. Without `everywhere` only the first rank of each
    tensor group keeps them, and the others return nothing.
    """
    state = {}
    for name, p in pipeline_module.named_parameters(module):
        whole = _whole(p, groups)
        if everywhere or groups.axis("tensor").index == 0:
            state[name] = whole.cpu()
    return state


def load_full_state(
    module: nn.Module,
    full: Mapping[str, Tensor],
    groups: Groups,
    *,
    strict: bool = True,
    source: str = "<weights>",
) -> None:
    """Sets every parameter that this rank holds to its piece of the tensor of its name.

    All ranks must call it together, each with the whole model's tensors, or with its stage's at least. `source` is what
    errors call the place that these come from. Without `strict`, names that only one side has are passed over.

    Raises:
        DslparError: on every rank, with all names that are missing or unknown (`strict`), and all shapes that differ;
            nothing is changed then.
    """
    _check(full, _shapes(module), groups, strict, source)
    with torch.no_grad():
        for name, p in pipeline_module.named_parameters(module):
            if name in full:
                _fill(p, full[name], groups)


# ---- one parameter ----


def _whole(p: nn.Parameter, groups: Groups) -> Tensor:
    """The full, unpadded tensor on every rank of the tensor group."""
    placement, held = placement_of(p), _held(p)
    return held.clone() if placement is None else gather(held.view(placement.local_shape), placement, groups)


def _held(p: nn.Parameter) -> Tensor:
    """This rank's piece of the model, in one piece where ZeRO has sharded it: of its fp32 master, if there is one."""
    if _has_master(p):
        return safe_get_full_fp32_param(p).detach()  # type: ignore[no-any-return]
    with GatheredParameters([p]):
        return p.detach().clone()


def _fill(p: nn.Parameter, full: Tensor, groups: Groups) -> None:
    placement = placement_of(p)
    full = full.to(p.device)
    piece = full if placement is None else placement.cut(full, groups.coord)
    with GatheredParameters([p], modifier_rank=0):
        p.copy_(piece)
    if _has_master(p):
        safe_set_full_fp32_param(p, piece.float())


def _has_master(p: nn.Parameter) -> bool:
    """Whether an optimizer of ZeRO's 1, 2 or 3 keeps this parameter a second time."""
    return p.requires_grad and (hasattr(p, "_hp_mapping") or hasattr(p, "_z3_optimizer"))


# ---- what does not fit ----


def _shapes(module: nn.Module) -> dict[str, Shape]:
    """Whole shapes of what this rank holds."""
    named = pipeline_module.named_parameters(module)
    return {name: placement.shape if (placement := placement_of(p)) else _shape(p) for name, p in named}


def _shape(p: nn.Parameter) -> Shape:
    return tuple(getattr(p, "ds_shape", p.shape))


def _check(full: Mapping[str, Tensor], held: Mapping[str, Shape], groups: Groups, strict: bool, source: str) -> None:
    """The same findings on every rank: of all stages together."""
    world = groups.axis("pipe", "data", "tensor")
    stages = collectives.gather_objects(dict(held), groups.axis("pipe"))
    model = {name: shape for stage in stages for name, shape in stage.items()}
    given = {name: tuple(tensor.shape) for name, tensor in full.items()}
    mine = [*_other_shapes(given, model), *(_other_names(given, held, model) if strict else ())]
    said = dict.fromkeys(finding for found in collectives.gather_objects(mine, world) for finding in found)
    if said:
        raise DslparError(finding("CKP207", message, hint, source) for message, hint in said)


Said = tuple[str, str]


def _other_shapes(given: Mapping[str, Shape], model: Mapping[str, Shape]) -> Iterator[Said]:
    for name, shape in model.items():
        if name in given and given[name] != shape:
            yield f"{name!r} has shape {given[name]}, and the model's {shape}", "give weights of the same model"


def _other_names(given: Mapping[str, Shape], held: Mapping[str, Shape], model: Mapping[str, Shape]) -> Iterator[Said]:
    """Missing is what this stage holds; unknown, what no stage has."""
    free = [name for name in given if name not in model]
    for name in held:
        if name not in given:
            hint = did_you_mean(name, [other for other in free if given[other] == model[name]], "; ")
            yield f"no tensor for {name!r} {model[name]}", f"strict=False leaves it as it is{hint}"
    for name in free:
        hint = did_you_mean(name, [other for other in model if other not in given], "; ")
        yield f"the model has no {name!r} {given[name]}", f"strict=False passes it over{hint}"
