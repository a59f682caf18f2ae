"""Compare the first step on one process with transformers' own forward, in float64: no policy, no dslpar layers.

    off = deviations(model, weights, module, batches, gradients, loss)     # {"lm_head.weight": 1e-15, ..., "loss": 0.0}

Every layout is compared with one process, and both use dslpar's layers. A mistake in a policy affects both sides, so
that comparison would not show it. This comparison does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.layers import IGNORE_INDEX
from dslpar.policies import hf_parity
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import parameters_with_sources, parts

ZERO = 1e-13
"""Share of the largest gradient below which a gradient counts as zero; its error is then relative to the largest."""


def as_plain(model: object) -> HuggingFaceModel | None:
    """Return the model if it can be compared with transformers' own class; None for other models, and with adapters."""
    return model if isinstance(model, HuggingFaceModel) and model.adapters is None else None


def deviations(
    model: HuggingFaceModel,
    weights: Mapping[str, Tensor],
    module: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    gradients: Mapping[str, Tensor],
    loss: float,
) -> dict[str, float]:
    """Return the relative deviations of the first step's loss and gradients from transformers' own.

    Args:
        weights: the weights of `module` at the first step, by dslpar's global names.
        batches: the micro-batches of the step.
        gradients: the gradients of dslpar's layers on one process, by dslpar's global names.
        loss: the loss of dslpar's layers on one process.
    """
    cls = type(model.model)
    attention = hf_parity.plain_attention(cls, model.config)
    # `module` and its constants were built in float32, as in a run.
    plain = hf_parity.build_plain(cls, model.config, attention, constants=torch.float32)
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters(remove_duplicate=False)}
    named = [(name, sources) for name, _, sources in parameters_with_sources(module)]
    of_plain = parts(named, shapes)
    with torch.no_grad():
        for name, part in of_plain.items():
            plain.get_parameter(name).copy_(part.read(weights.__getitem__, shapes[name]))
    losses = [_loss(plain, model, x, y) for x, y in batches]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    largest = max(float(g.abs().max()) for g in gradients.values())
    true = torch.stack(losses).mean().item()
    off = {"loss": abs(loss - true) / max(abs(true), 1e-300)}
    for name, part in of_plain.items():
        wanted = plain.get_parameter(name).grad
        if wanted is None or part.parameter not in gradients:
            continue
        found = part.read(gradients.__getitem__, shapes[name])
        scale = float(wanted.abs().max())
        off[name] = float((found - wanted).abs().max()) / (scale if scale > ZERO * largest else largest)
    return off


def _loss(plain: Any, model: HuggingFaceModel, x: Any, y: Any) -> Tensor:
    """Return the loss of a micro-batch from transformers' forward.

    It is the mean over counted labels, or the sum divided by the denominator that follows the labels.
    """
    inputs = dict(zip(model.policy.inputs, x if isinstance(x, tuple) else (x,), strict=True))
    output = hf_parity.run_plain(plain, inputs)
    if model.policy.loss:
        return output.loss  # type: ignore[no-any-return]
    logits, given = hf_parity.logits_of(output), y if isinstance(y, tuple) else (y,)
    labels, denominator = given[: len(logits)], given[len(logits) :]
    losses = [
        functional.cross_entropy(each.flatten(0, -2), of.flatten(), ignore_index=IGNORE_INDEX)
        for each, of in zip(logits, labels, strict=True)
    ]
    if denominator:
        losses[0] = losses[0] * (labels[0] != IGNORE_INDEX).sum() / denominator[0]
    return torch.stack(losses).sum() + hf_parity.balance_term(plain, inputs, output)
