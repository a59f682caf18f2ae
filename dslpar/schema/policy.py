"""Policy: the facts about a transformers model that dslpar needs to partition it, as data. No torch.

Terms: an inward linear reads the residual stream, and an outward linear adds to it. The module between an inward and
an outward linear, attention or an MLP, is a region. Its forward runs on inner activations, such as heads or MLP
features. A policy names these linears and regions. All other parts of a model (norms, tables, tying, dropout, masks,
positions) are found by inspecting what its modules do.

transformers' own plans (`base_model_tp_plan`) and ColossalAI's and Megatron-LM's lists of layers to replace name the
same linears. Tensor modes that also split the hidden dim need the regions in addition.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.core.suggest import did_you_mean

Names = tuple[str, ...]
DECODER_INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Policy:
    """Patterns of module names. In a pattern, `*` matches one part of a dotted name, as in transformers' plans."""

    blocks: Names
    """The lists of blocks that a pipeline partitions, in the order in which they run: ("model.layers",). A pattern may
    match several lists (Swin's "swin.encoder.layers.*.blocks").
    """
    regions: Mapping[str, Names | Mapping[str, Names]]
    """Region -> names of its inward linears within it: {"model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")}. If
    the arguments of the region's forward feed different linears: region -> argument -> names. A model without regions
    (ResNet) is never split: its tensor group has one rank.
    """
    outward: Names
    """Linears that end a region: ("model.layers.*.self_attn.o_proj", ...)."""
    inward: Names = ()
    """Inward linears that a block's own forward calls, without a module around them (OPT's fc1)."""
    own_attention: Mapping[str, Names] = field(default_factory=dict)
    """Attention region that computes its scores itself, not through transformers' attention interface -> arguments of
    its forward with numbers per sample and head, [samples * heads, ...] (Bloom's alibi).
    """
    experts: Names = ()
    """Modules that hold all experts of a mixture; the experts are divided over the tensor group. The mixture is the
    module around such a module. Entries of `regions` and `outward` within a mixture belong to a shared expert, which
    all tokens visit.
    """
    routers: Names = ()
    """Modules that compute the weights of experts: routers, gates of shared experts. Each rank computes all."""
    per_head: Names = ()
    """Modules within a region whose weights all heads share."""
    inner_norms: Names = ()
    """Norms within a region over the features of all heads, not of one head (OLMo 2's q_norm)."""
    head_vectors: Names = ()
    """Parameters of a region with one number per head, [heads] or [heads, 1, 1]: attention sinks."""
    latent: Names = ()
    """Inward linears that compute a latent, which each rank holds whole (latent attention's kv_a_proj_with_mqa)."""
    from_latent: Names = ()
    """Linears within a region from a latent to heads (kv_b_proj)."""
    fused: Mapping[str, int | Names] = field(default_factory=dict)
    """Last part of the name of a fused inward linear -> the number of linears of equal size in its weight (GPT-2's
    c_attn: 3). If the sizes differ: the config fields to which they are proportional.
    """
    local: Mapping[str, Names] = field(default_factory=dict)
    """Module -> attributes that count heads or inner features, such as "num_heads" or "config.num_attention_heads"."""
    requires: Mapping[str, object] = field(default_factory=dict)
    """Field of the config -> its required value; other values run code that the policy does not describe."""
    head_tables: Names = ()
    """Modules with a table of one number per head, (rows, heads), such as T5's relative_attention_bias; or linears with
    one output per head (in SwinV2's MLP of positions).
    """
    inputs: Names = DECODER_INPUTS
    """Arguments of the model's forward that a micro-batch has, in this order; the last ones may be missing."""
    returns: Mapping[str, Names] = field(default_factory=dict)
    """The values that a forward returns after the residual stream, in order. Keys are of two kinds.

    List of blocks -> one name per value: the argument of the next block that gets the value, or "" if none does.

    Module before the blocks -> names of its values. They are passed on to the code after the blocks (ViTMAE's
    ids_restore), and are outputs of the model if the model returns them by that name.
    """
    grid: bool = False
    """Whether blocks arrange tokens on a grid, as Swin does for its windows. Then no mode may split sequences."""
    loss: str = ""
    """The argument of the model's forward that gets the labels, if the model computes its own loss (ViTMAE's
    pixel_values: a loss of pixels). Empty: the loss is the cross-entropy.
    """
    batch_norms: bool = False
    """Whether norms compute statistics over the samples of a micro-batch (ResNet). Then micro_size matters."""
    whole: Names = ()
    """Parts of the model outside the lists of blocks that work on whole activations: "front" (before the blocks),
    "between" (between two lists), "back" (after the blocks). In these parts every rank of the tensor group holds all
    weights and computes the same.
    """

    def returned(self, name: str) -> Names:
        """Return the entry of `returns` for a list of blocks or a module before them; empty if there is none."""
        pattern = match(self.returns, name)
        return self.returns[pattern] if pattern else ()


WITHOUT_ROUTER_NOISE: Mapping[str, object] = {"router_jitter_noise": 0.0}
"""Setting that policies for mixtures of experts require: no noise on router inputs."""


class PlanOf(str):
    """Name of a class whose tensor plan is read for another class, which has modules of the same names."""

    __slots__ = ()


def as_policy(value: object, known: Mapping[str, Policy], derived: Collection[str] = ()) -> Policy | PlanOf:
    """Return the policy that a config gives: a Policy, its fields as a dict, or the name of a class that has one.

    `known`: policies by class name. `derived`: classes whose policy is derived from transformers' tensor plan.

    Raises:
        DslparError: an unknown name, an unknown field, or a missing one.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        if value in known:
            return known[value]
        if value in derived:
            return PlanOf(value)
        names = [*known, *derived, "derived"]
        hint = did_you_mean(value, names) or f"choose one of {', '.join(map(repr, names))}, or the fields of a policy"
        raise_finding("CFG223", f"no policy is known as {value!r}", hint, key="model.policy")
    names = [each.name for each in fields(Policy)]
    needed = [each.name for each in fields(Policy) if each.default is MISSING and each.default_factory is MISSING]
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if unknown := [f"unknown key {name!r}{did_you_mean(name, names, '; ')}" for name in given if name not in names]:
        raise_finding("CFG223", f"policy: {', '.join(unknown)}", f"its keys: {', '.join(names)}", key="model.policy")
    if missing := [name for name in needed if name not in given]:
        message = f"policy: no {', '.join(missing)}"
        raise_finding("CFG223", message, "policy=dict(blocks=..., regions=..., outward=...)", key="model.policy")
    return Policy(**{name: _frozen(part) for name, part in given.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _frozen(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, (list, tuple)) else value


def match(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches `name`, or None.

    >>> match(["model.layers.*.mlp"], "model.layers.3.mlp"), match(["layers.*"], "layers.3.mlp")
    ('model.layers.*.mlp', None)
    """
    return next((pattern for pattern in patterns if _compiled(pattern).fullmatch(name)), None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
