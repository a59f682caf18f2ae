"""A policy: what dslpar must know of a transformers model to cut it, as data. No torch.

A transformer is a residual stream that linears read (inward) and add to (outward). Between an inward and an outward
linear lies a region, attention or an MLP, whose forward runs on inner activations. A policy names these; what else
there is in a model (norms, tables, tying, dropout, masks, positions) is found by looking at what modules do.

transformers' own plans (`base_model_tp_plan`) and ColossalAI's and Megatron-LM's lists of layers to replace name the
same linears; the region is what makes them enough for modes that cut the hidden dim, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.core.suggest import did_you_mean

Names = tuple[str, ...]
DECODER_INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Policy:
    """Patterns of module names; `*` stands for one part of a name, as in transformers' plans."""

    blocks: Names
    """The lists of blocks that a pipeline cuts, in the order in which they run: ("model.layers",). A pattern stands for
    all that have its form (Swin's "swin.encoder.layers.*.blocks").
    """
    regions: Mapping[str, Names | Mapping[str, Names]]
    """Region -> its inward linears, by names within it: {"model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")}.
    Where its arguments feed different linears: argument -> names. A model without any is never cut (ResNet): its tensor
    group is one rank.
    """
    outward: Names
    """Linears that end a region: ("model.layers.*.self_attn.o_proj", ...)."""
    inward: Names = ()
    """Inward linears that a block's own forward calls, with no module around them (OPT's fc1)."""
    own_attention: Mapping[str, Names] = field(default_factory=dict)
    """Region of attention whose code makes its scores itself, and not through transformers' interface -> its arguments
    of numbers for each sample and head, [samples * heads, ...] (Bloom's alibi).
    """
    experts: Names = ()
    """Modules that hold all experts of a mixture, cut by their number over the tensor group. The module around each is
    the mixture; `regions` and `outward` within it are those of an expert that all tokens visit.
    """
    routers: Names = ()
    """Modules of a mixture that weigh experts, computed on every rank: routers, gates of shared experts."""
    per_head: Names = ()
    """Modules within a region that act on each head alike, with weights that all heads share."""
    inner_norms: Names = ()
    """Norms within a region over all of its features, not over those of a head (OLMo 2's q_norm)."""
    head_vectors: Names = ()
    """Parameters of a region's own with a number for each head, [heads] or [heads, 1, 1]: attention sinks."""
    latent: Names = ()
    """Inward linears that make a latent, which every rank has whole (latent attention's kv_a_proj_with_mqa)."""
    from_latent: Names = ()
    """Linears within a region from a latent to heads (kv_b_proj)."""
    fused: Mapping[str, int | Names] = field(default_factory=dict)
    """Last part of an inward linear's name -> of how many linears of equal length its weight is made (GPT-2's c_attn:
    3), or the config's numbers that their lengths are in proportion to.
    """
    local: Mapping[str, Names] = field(default_factory=dict)
    """Module -> attributes that count heads or inner features, such as "num_heads" or "config.num_attention_heads"."""
    requires: Mapping[str, object] = field(default_factory=dict)
    """Setting of the config -> the value that it must have: with others, code runs of which the policy says nothing."""
    head_tables: Names = ()
    """Modules with a table of a number for each head, (rows, heads), such as T5's relative_attention_bias; or linears
    with an output for each head (that of SwinV2's MLP of positions).
    """
    inputs: Names = DECODER_INPUTS
    """Arguments of the model's forward that a micro-batch brings, in its order; it may leave out the last ones."""
    returns: Mapping[str, Names] = field(default_factory=dict)
    """List of blocks -> what its blocks return after the residual: names of the next block's arguments, or "" for what
    that one has no use for. Or a module before the blocks -> what it returns besides: it goes along to the end, to code
    that reads it (ViTMAE's ids_restore), and what the model returns by that name is one of its outputs.
    """
    grid: bool = False
    """Whether blocks arrange their tokens on a grid, as Swin's windows do: no mode may cut sequences then."""
    loss: str = ""
    """The argument of the model's forward that labels take the place of, where it gives a loss without labels (ViTMAE's
    pixel_values: a loss of pixels); else the loss is cross-entropy.
    """
    batch_norms: bool = False
    """Whether norms take statistics over the samples of a micro-batch (ResNet): its size is part of the maths then."""
    whole: Names = ()
    """Which of "front", "between" and "back", what stands around the lists of blocks, works on whole activations: every
    rank of the tensor group computes the same there, and holds all of its weights.
    """

    def returned(self, name: str) -> Names:
        """Return what each block of a list, or a module before blocks, returns after the residual."""
        pattern = match(self.returns, name)
        return self.returns[pattern] if pattern else ()


WITHOUT_AUXILIARY_LOSS: Mapping[str, object] = {"output_router_logits": False, "router_jitter_noise": 0.0}
"""What policies of mixtures of experts require: no loss that balances them, and no noise on what is routed."""


def as_policy(value: object, known: Mapping[str, Policy]) -> Policy:
    """Return the policy that a config gives: one, its fields as a dict, or the name of a class that has one.

    Raises:
        DslparError: no such name, a field that a policy does not have, or one that it needs.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        if value in known:
            return known[value]
        hint = did_you_mean(value, known) or f"choose one of {', '.join(map(repr, known))}, or the fields of a policy"
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
    """Return the first pattern that `name` has the form of, or None.

    >>> match(["model.layers.*.mlp"], "model.layers.3.mlp"), match(["layers.*"], "layers.3.mlp")
    ('model.layers.*.mlp', None)
    """
    return next((pattern for pattern in patterns if _compiled(pattern).fullmatch(name)), None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
