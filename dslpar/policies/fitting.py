"""Find a class whose policy fits another class, such as RobertaForMaskedLM's for XLMRobertaForMaskedLM.

Families of transformers are copies of each other, with the same names of modules. A policy fits if the model has all
modules and attributes that it names, and no further linears with usual names. Whether they also compute the same,
`dslpar policy check` compares.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from dslpar.policies.draft import INWARD, OUTWARD
from dslpar.policies.replacement_modules import features
from dslpar.schema.policy import Policy, match
from dslpar.schema.transformers_policies import POLICIES


def fitting(model: Any) -> str:
    """Return the name of a class whose policy names modules and attributes that the model has; "" if there is none."""
    taken = inspect.signature(type(model).forward).parameters
    taking = {name: policy for name, policy in POLICIES.items() if taken.keys() >= {*policy.inputs}}
    return next((name for name, policy in taking.items() if _fits(policy, model)), "")


def _fits(policy: Policy, model: Any) -> bool:
    named = dict(model.named_modules())
    found = {pattern: [name for name in named if match([pattern], name)] for pattern in _patterns(policy)}
    if not policy.regions or not all(found.values()) or not _covers(policy, named):
        return False
    read = [(each, own) for pattern, names in policy.local.items() for each in found[pattern] for own in names]
    fused = [name for name in named if name.rpartition(".")[2] in policy.fused]
    return all(hasattr(named[each], own) for each, own in read) and all(
        features(named[name])[0] == policy.fused[name.rpartition(".")[2]] * features(named[name])[1] for name in fused
    )


def _patterns(policy: Policy) -> list[str]:
    """Return the patterns of which each must name a module."""
    return [*policy.blocks, *policy.regions, *policy.outward, *policy.inward, *policy.local, *policy.experts]


def _covers(policy: Policy, named: Mapping[str, nn.Module]) -> bool:
    """Return whether a policy names all linears with usual names in lists of modules."""
    names = [*policy.outward, *policy.inward, *policy.routers]
    for region, inward in policy.regions.items():
        of = [each for group in inward.values() for each in group] if isinstance(inward, Mapping) else inward
        names += [f"{region}.{each}" for each in of]
    usual = [name for name in named if name.rpartition(".")[2] in INWARD | OUTWARD and re.search(r"\.\d+\.", name)]
    return all(match(names, name) for name in usual)
