"""A policy from transformers' own tensor plan (`base_model_tp_plan`), for the models that have one.

The plan says which linears are column- and row-parallel, which is Megatron-LM's half of a policy: regions are the
modules around a "colwise" linear, and its argument is the first one of their forward. Words of the plan that are not
understood, and models without a plan, are refused here: a policy must be written.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.policies.policy import Policy, match

_IGNORED = {"embedding_rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep"}
"""Of the table and the head, which are found as the model's own."""


def derive(model: Any) -> Policy:
    """Return the policy of a model that is on the meta device.

    Raises:
        DslparError: there is no plan, or it says what is not understood; all of it.
    """
    named = dict(model.named_modules())
    plan = {
        name: word for name, word in dict(model.tp_plan or {}).items() if any(match([name], each) for each in named)
    }
    problems = [] if plan else [f"{type(model).__name__} has no tensor plan in transformers"]
    regions: dict[str, dict[str, list[str]]] = {}
    outward, per_head = [], []
    for pattern, word in plan.items():
        found = [name for name in named if match([pattern], name)]
        linear = all(isinstance(named[name], nn.Linear | Conv1D) for name in found)
        if word == "colwise" and linear:
            region, _, last = pattern.rpartition(".")
            around = named[found[0].rpartition(".")[0]]
            argument = list(inspect.signature(type(around).forward).parameters)[1]
            regions.setdefault(region, {}).setdefault(argument, []).append(last)
        elif word == "rowwise" and linear:
            outward.append(pattern)
        elif word == "replicated_with_grad_allreduce":
            per_head.append(pattern)
        elif word not in _IGNORED:
            problems.append(f"{pattern}: {word!r} of {type(named[found[0]]).__name__}")
    blocks = _blocks(model, regions)
    if not blocks and plan:
        problems.append("no list of blocks holds its regions")
    if problems:
        message = f"{type(model).__name__}: {'; '.join(problems)}"
        raise DslparError([finding("TEN234", message, "give the model a policy", key="model.policy")])
    return Policy(
        blocks=blocks,
        regions={region: {argument: tuple(names) for argument, names in of.items()} for region, of in regions.items()},
        outward=tuple(outward),
        per_head=tuple(per_head),
    )


def _blocks(model: Any, regions: Any) -> tuple[str, ...]:
    """Return the names of the ModuleLists that hold the regions."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return tuple(name for name in lists if any(region.startswith(f"{name}.*.") for region in regions))
