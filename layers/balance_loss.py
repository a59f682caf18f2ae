"""Load-balancing loss of mixtures of experts, exact in every layout: its statistics cover all ranks' tokens.

    sums = sums + router_sums(logits, top_k=2)            # in each mixture: this rank's own tokens
    loss = balance_loss(groups, sums, top_k=2)            # after the last layer, on every rank

Letters: n tokens of this rank, E experts, k experts per token.

transformers' `load_balancing_loss_func` (equations 4 to 6 of Switch Transformer, arXiv 2101.03961) takes the router
logits of all mixtures in one forward::

    loss = E * sum over e of f_e P_e
    f_e = (choices of expert e) / (tokens * mixtures)                     # k choices per token; no gradient
    P_e = (sum of the router probabilities of expert e) / (tokens * mixtures)

Tokens that the padding mask excludes count nowhere. The product is nonlinear, so f and P must be known over all tokens
before they are multiplied. A mean of the losses of several ranks, layers or stages is another number.

**Tokens.** One forward is that of a *global micro-batch*: the micro-batches that all data ranks run at the same place
of a step. It has `global_size / accumulation` consecutive samples of the run's order, so it depends on the global batch
and on the accumulation, and on nothing else in the layout. The loss of a step is the mean over its global
micro-batches. It equals the loss of one process with the same accumulation, and so with `micro_size * data` samples per
micro-batch.

With another accumulation the loss is another number, in transformers as here. A loss over all tokens of the step would
avoid that. But the gradient of every micro-batch depends on f, and f would be known only after the last forward of the
step. So each micro-batch would need a second forward, or its activations would be kept for the whole step.

**Sums.** Layers pass two sums on, [2, E]: choices and probabilities. A pipeline sends them to the next stage with the
residual, and autograd brings the gradient of the probabilities back the same way. A layer that is recomputed returns
its sums again, but nothing adds them a second time.

**Communication.** Per micro-batch, `balance_loss` all-reduces 2 E numbers over the tensor group and E over the data
ranks. The probabilities of other data ranks are not needed: the loss is linear in them once f is known. Each data rank
returns its own share, multiplied by the number of data ranks. The mean of these shares over data ranks is the loss, and
the mean of their gradients, which DeepSpeed computes, is its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.upcast import upcast


def router_sums(logits: Tensor, top_k: int, counted: Tensor | None = None) -> Tensor:
    """Return the choices and the summed probabilities of each expert, [2, E], in float32 or wider.

    logits: the router's [n, E]; n may be 0. counted: which tokens count [n], nonzero or True; None: all.
    """
    probabilities = functional.softmax(logits, dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices  # in the logits' dtype, as in transformers: ties depend on it
    probabilities = upcast(probabilities)
    choices = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    if counted is not None:
        excluded = (counted == 0).unsqueeze(-1)
        choices, probabilities = choices.masked_fill(excluded, 0), probabilities.masked_fill(excluded, 0)
    return torch.stack([choices.sum(0), probabilities.sum(0)])


LEAST = 1e-20
"""Least sum that scores are divided by: all sigmoids of a token may be 0. DeepSeek-V3 adds this number."""


def sums_of_choices(experts: Tensor, scores: Tensor) -> Tensor:
    """Return what `router_sums` does, [2, E], of choices that are already made.

    experts: each token's experts [n, k]. scores: of all experts [n, E], in float32 or wider. A token's probabilities
    are its scores divided by their sum, which is 1 for a softmax. DeepSeek-V3 (arXiv 2412.19437, equation 19) does this
    with the scores of a sigmoid.
    """
    choices = torch.zeros_like(scores).scatter(-1, experts, 1.0)
    total = scores.sum(-1, keepdim=True).clamp(min=LEAST)
    return torch.stack([choices.sum(0), (scores / total).sum(0)])


def squares_of_logits(logits: Tensor) -> Tensor:
    """Return the third row of the sums, [1, E], for a z-loss: in its first column, the squares of the log-sum-exp.

    logits: the router's [n, E], in float32 or wider.
    """
    total = logits.logsumexp(-1).square().sum()
    return functional.pad(total.view(1, 1), (0, logits.shape[1] - 1))


def z_loss(groups: Groups, sums: Tensor, top_k: int) -> Tensor:
    """Return this data rank's share of the z-loss, whose mean over data ranks is the loss; 0 if there is no token.

    The loss is the mean of log(sum(exp(logits)))^2 over the tokens and mixtures of a global micro-batch, as in ST-MoE
    (arXiv 2202.08906, equation 5). It keeps the router's logits small. sums: [3, E], the last row of
    `squares_of_logits`; otherwise as in `balance_loss`.
    """
    choices, _, squares = collectives.reduce_from_group(sums, groups.axis("tensor")).unbind()
    data = groups.axis("data")
    tokens = (collectives.all_reduce(choices.detach(), data).sum() / top_k).clamp(min=1)
    loss: Tensor = squares.sum() / tokens * data.size
    return loss


def balance_loss(groups: Groups, sums: Tensor, top_k: int) -> Tensor:
    """Return this data rank's share of the loss, whose mean over data ranks is the loss; 0 if no token counts.

    sums: the `router_sums` of all mixtures, added up; each token counts on one rank of the tensor group only. All ranks
    of the tensor group and all data ranks must call it together. The result is equal on all ranks of the tensor group.
    """
    choices, probabilities = collectives.reduce_from_group(sums, groups.axis("tensor")).unbind()
    data = groups.axis("data")
    choices = collectives.all_reduce(choices.detach(), data)
    tokens = (choices.sum() / top_k).clamp(min=1)
    loss: Tensor = (choices / tokens * probabilities / tokens).sum() * (len(choices) * data.size)
    return loss
