"""A model by policy against plain transformers: logits, loss and every gradient, in float64.

A loss that is close proves nothing: with a reduction missing, the first step's is still exact. So every gradient is
compared, with samples of different lengths, and with weights that are neither zeros nor ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import gather, mark_owners, placement
from dslpar.models.layered import assemble
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import load, parameters_with_sources

BATCH, SEQUENCE = 4, 12
IGNORED = -100
_ZERO = 1e-13


class Batch(NamedTuple):
    """Ids, which of them are tokens, and labels."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def batch(vocab_size: int = 70) -> Batch:
    """Make samples of different lengths, padded on the right; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, vocab_size, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.tensor([SEQUENCE, SEQUENCE - 5, SEQUENCE - 1, 4])
    mask = torch.arange(SEQUENCE)[None] < lengths[:, None]
    labels = torch.randint(0, vocab_size, (BATCH, SEQUENCE), generator=generator).masked_fill(~mask, IGNORED)
    return Batch(ids, mask, labels)


class Subject(NamedTuple):
    """A class of transformers', its config, and its policy as `HuggingFaceModel` takes it."""

    cls: Any
    config: Any
    policy: object = None


class Result(NamedTuple):
    """What a model makes of a batch."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    """By transformers' own names."""


def plain(cls: Any, config: Any, attention: str = "sdpa") -> tuple[Any, dict[str, Tensor]]:
    """Build the model as transformers has it, in float64; return it with its weights."""
    torch.manual_seed(3)
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"  # the fused products know no float64
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which its constants are made, too
    try:
        model = cls._from_config(config, attn_implementation=attention).double().train()
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in name:  # which transformers keeps in float32
                module._buffers[name] = buffer.float()
    with torch.no_grad():
        for p in model.parameters():  # else norms are ones and biases zeros
            p += 0.1 * torch.randn_like(p)
    return model, {name: value.detach().clone() for name, value in model.state_dict().items()}


def reference(model: Any, given: Batch, *, padded: bool) -> Result:
    """Compute the result by plain transformers."""
    with in_float64():
        kwargs = {"attention_mask": given.mask.long()} if padded else {}
        logits = model(input_ids=given.ids, use_cache=False, **kwargs).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), ignore_index=IGNORED)
    torch.autograd.backward(loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Result(logits.detach(), loss.detach(), gradients)


@contextmanager
def in_float64() -> Iterator[None]:
    """Keep float64 as it is, within, where transformers' code goes to float32 to be safe: in norms and softmax."""
    to, plain_float, softmax = Tensor.to, Tensor.float, functional.softmax

    def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is torch.float64 and (torch.float32 in args or kwargs.get("dtype") is torch.float32):
            return self
        return to(self, *args, **kwargs)

    def floated(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype is torch.float64 else plain_float(self, *args, **kwargs)

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype is torch.float64 else dtype)

    with (
        patch.object(Tensor, "to", kept),
        patch.object(Tensor, "float", floated),
        patch.object(functional, "softmax", wide_softmax),
    ):
        yield


def by_policy(
    subject: Subject | HuggingFaceModel,
    weights: Mapping[str, Tensor],
    tensor: mesh.Tensor,
    given: Batch,
    *,
    padded: bool,
) -> Result:
    """Compute the result on this rank of `tensor`, and gather all of it. Leaves the default dtype at float64."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    model = subject if isinstance(subject, HuggingFaceModel) else HuggingFaceModel(*subject)
    with in_float64():
        module = assemble(model.layers(groups), groups, seed=1).train()
        mark_owners(module, groups)
        load(module, weights.__getitem__, groups)
        x: Any = (given.ids, given.mask) if padded else given.ids
        logits = module(x)
        loss = model.loss(groups)(logits, given.labels)
        torch.autograd.backward(loss)
    gradients: dict[str, Tensor] = {}
    for _, p, sources in parameters_with_sources(module):
        assert p.grad is not None, sources
        full = gather(p.grad, p.placement, groups)  # type: ignore[attr-defined]
        lengths = [weights[source.name].shape[1 if source.transposed else 0] for source in sources]
        for source, part in zip(sources, torch.split(full, lengths), strict=True):
            gradients[source.name] = part.t() if source.transposed else part
    at = placement.inner(tensor, *given.ids.shape, _padded(model, groups))
    whole = gather(logits.detach(), at, groups)[..., : model.vocab_size]
    return Result(whole, loss.detach(), gradients)


def _padded(model: HuggingFaceModel, groups: Groups) -> int:
    return placement.table(groups.tensor, model.vocab_size, model.skeleton.hidden_size).padded[0]


def worst(one: Result, other: Result) -> dict[str, float]:
    """Return max|a - b| / max|b| of the logits, the loss and every gradient; one that is not there is infinite.

    A gradient that is zero but for rounding (that of a key's bias: softmax does not see it) is measured by the largest.
    """
    largest = max(float(each.abs().max()) for each in other.gradients.values())
    pairs = {"logits": (one.logits, other.logits), "loss": (one.loss, other.loss)}
    missing = set(other.gradients) ^ set(one.gradients)
    pairs |= {name: (one.gradients[name], other.gradients[name]) for name in set(other.gradients) - missing}
    scales = {name: float(b.abs().max()) for name, (_, b) in pairs.items()}
    scales = {name: scale if scale > _ZERO * largest else largest for name, scale in scales.items()}
    differ = {name: float((a - b).abs().max()) / max(scales[name], 1e-30) for name, (a, b) in pairs.items()}
    return differ | dict.fromkeys(missing, float("inf"))
