"""Metrics of a trained model: sum losses and hits over micro-batches; compute loss, perplexity, accuracy and F1.

    tally = Tally(kind, (1, 5), num_classes)
    tally.add(family, groups, output, labels)            # a micro-batch, on the last stage
    sum_tallies([...]).results()                         # {"loss": ..., "perplexity": ..., "accuracy@1": ...}

Sums and numbers of labels are stored separately. So a mean is over all labels, and does not depend on micro-batches.
(lm-eval averages per document. Megatron-LM's loss averages micro-batches with different numbers of labels.) A label's
position among the sorted logits of the vocabulary is found without gathering logits: each process counts the larger
logits in its shard, and the counts are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.suggest import did_you_mean
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.activation_sharding import unshard
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layers.placement import inner_cuts, piece
from dslpar.layers.token_ids import local_tokens
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel
from dslpar.models.sequential import cross_entropy
from dslpar.policies.loss import ModelLoss, OwnLoss
from dslpar.schema.datasets import is_images

TOKENS, CLASSES, OTHER = "tokens", "classes", "other"
"""Kinds of prediction: tokens of a vocabulary, classes of samples, or anything else (ViTMAE's pixels)."""
_DEFAULTS = {
    TOKENS: ("loss", "perplexity", "accuracy@1", "accuracy@5"),
    CLASSES: ("loss", "accuracy@1", "accuracy@5"),
    OTHER: ("loss",),
}
_EXAMPLES = {TOKENS: "loss, perplexity, accuracy@K", CLASSES: "loss, accuracy@K", OTHER: "loss"}


def kind_of(job: Job, family: LayeredModel, groups: Groups) -> str:
    """Return the kind of a job's model: TOKENS, CLASSES or OTHER."""
    if isinstance(family.loss(groups), OwnLoss):
        return OTHER
    name = getattr(job.spec.model, "target", "")
    return CLASSES if is_images(job.spec.data) or name.endswith(_CLASSIFIERS) else TOKENS


_CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification")
"""Suffixes of transformers classes that predict one class per sample, for data of any type."""


def parse_metrics(requested: Sequence[str], kind: str) -> tuple[str, ...]:
    """Return the requested metrics, or the defaults of this kind of model if nothing is requested.

    Raises:
        DslparError: a metric is unknown, or not defined for this kind of model; the hint lists valid metrics.
    """
    known = ["loss", *(["perplexity"] if kind == TOKENS else [])]
    for name in requested:
        head, at, number = name.partition("@")
        is_accuracy = kind != OTHER and head == "accuracy" and at and number.isdecimal() and int(number) > 0
        if name not in known and not is_accuracy:
            hint = f"choose among {_EXAMPLES[kind]}{did_you_mean(name, [*known, 'accuracy@1'], '; ')}"
            raise_finding("CFG232", f"there is no metric {name!r} of {_DESCRIBED[kind]}", hint)
    return tuple(requested) or _DEFAULTS[kind]


_DESCRIBED = {TOKENS: "text", CLASSES: "images and their classes", OTHER: "what this model predicts"}


def accuracy_ks(metrics: Sequence[str]) -> tuple[int, ...]:
    """Return the K of each accuracy@K."""
    return tuple(int(name.partition("@")[2]) for name in metrics if "@" in name)


@dataclass
class Tally:
    """Sums over labels, as plain numbers that ranks can exchange."""

    kind: str
    """TOKENS, CLASSES or OTHER."""
    ks: tuple[int, ...]
    """K of each accuracy@K."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(sum, number of labels) of each of the model's losses."""
    hits: dict[int, int] = field(default_factory=dict)
    """K -> number of labels among the K largest logits."""
    count: int = 0
    """Number of labels that are not ignored."""
    predicted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Confusion matrix: (class, predicted class) -> number of samples."""

    def add(self, family: LayeredModel, groups: Groups, output: Any, labels: Any) -> None:
        """Add a micro-batch: the last layer's local output, and the full labels.

        All ranks of the tensor group must call it together; their sums are equal.
        """
        outputs = output if isinstance(output, tuple) else (output,)
        given = labels if isinstance(labels, tuple) else (labels,)
        for number, found in enumerate(_losses(family.loss(groups), outputs, given)):
            before = self.losses[number] if number < len(self.losses) else (0.0, 0.0)
            self.losses[number : number + 1] = [(before[0] + found[0], before[1] + found[1])]
        if self.kind == OTHER:
            return
        first = given[0]
        if self.kind == TOKENS:
            vocab_size = getattr(family, "vocab_size", outputs[0].shape[-1])
            ranks = label_ranks(groups, outputs[0], first, vocab_size)
        else:
            logits = _whole_logits(family, groups, output)
            ranks = _ranks_in(logits, first)
            self._add_classes(logits.argmax(-1), first)
        counted = first != IGNORE_INDEX
        self.count += int(counted.sum())
        for k in self.ks:
            self.hits[k] = self.hits.get(k, 0) + int(((ranks < k) & counted.to(ranks.device)).sum())

    def _add_classes(self, predicted: Tensor, labels: Tensor) -> None:
        for own, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
            if own != IGNORE_INDEX:
                self.predicted[own, guess] = self.predicted.get((own, guess), 0) + 1

    def results(self) -> dict[str, float]:
        """Return every metric by name."""
        loss = math.fsum(total / max(count, 1) for total, count in self.losses)
        found = {"loss": loss}
        if self.kind == TOKENS:
            found["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        return found | {f"accuracy@{k}": self.hits.get(k, 0) / max(self.count, 1) for k in self.ks}

    def classes(self) -> list[dict[str, float]]:
        """Return precision, recall, F1 and the number of samples of each class that occurs or was predicted."""
        return [self._class(number) for number in sorted({each for pair in self.predicted for each in pair})]

    def _class(self, number: int) -> dict[str, float]:
        right = self.predicted.get((number, number), 0)
        support = sum(count for (own, _), count in self.predicted.items() if own == number)
        guessed = sum(count for (_, guess), count in self.predicted.items() if guess == number)
        precision, recall = right / max(guessed, 1), right / max(support, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-300)
        return {"class": number, "precision": precision, "recall": recall, "f1": f1, "samples": support}


def sum_tallies(tallies: Sequence[Tally]) -> Tally:
    """Add up the tallies of several replicas, in order."""
    total = Tally(tallies[0].kind, tallies[0].ks)
    length = max(len(each.losses) for each in tallies)
    for number in range(length):
        own = [each.losses[number] for each in tallies if number < len(each.losses)]
        total.losses.append((math.fsum(loss for loss, _ in own), math.fsum(count for _, count in own)))
    for each in tallies:
        total.count += each.count
        for k, hits in each.hits.items():
            total.hits[k] = total.hits.get(k, 0) + hits
        for pair, count in each.predicted.items():
            total.predicted[pair] = total.predicted.get(pair, 0) + count
    return total


# ---- one micro-batch ----


def _losses(loss_fn: Any, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[tuple[float, int]]:
    """Return (sum, number of labels) of each loss of the model."""
    whole: Any = tuple(outputs) if len(outputs) > 1 else outputs[0]
    if isinstance(loss_fn, OwnLoss):
        size = len(labels[0])
        return [(float(loss_fn(whole, labels[0])) * size, size)]
    one = torch.ones((), device=outputs[0].device)
    several = isinstance(loss_fn, ModelLoss) and loss_fn.num_labels > 1
    first = loss_fn.of_first if several else loss_fn
    found = [(float(first(outputs[0] if several else whole, (labels[0], one))), _count(labels[0]))]
    others = zip(outputs[1:], labels[1:], strict=False) if several else ()
    return found + [(float(cross_entropy(logits, (own, one))), _count(own)) for logits, own in others]


def _count(labels: Tensor) -> int:
    return int((labels != IGNORE_INDEX).sum())


def _whole_logits(family: LayeredModel, groups: Groups, output: Any) -> Tensor:
    whole = family.whole_output(groups, output)
    logits: Tensor = next(iter(whole.values())) if isinstance(whole, Mapping) else whole
    return logits


def _ranks_in(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many logits [batch, classes] come before each label's: larger ones, and equal ones to its left."""
    target = labels.clamp(min=0).unsqueeze(-1)
    own = logits.gather(-1, target)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return ((logits > own) | ((logits == own) & (columns < target))).sum(-1)


def label_ranks(groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return how many logits of its token are larger than each label's logit (0: it is the largest), as top-k needs.

    `logits` [batch/x, sequence/x, V/n] is this process's piece; `labels` and the result are the full micro-batch,
    [batch, sequence]. All ranks of the tensor group must call it together, and get equal results. The result is
    meaningless for ignored labels.
    """
    cuts = inner_cuts(groups.tensor)
    axis = groups.axis(*cuts.features)
    first = piece(groups.tensor, groups.coord, cuts.features)[0] * logits.shape[-1]
    own = local_tokens(groups, labels, cuts).clamp(min=0).unsqueeze(-1)
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    at = (own - first).clamp(0, logits.shape[-1] - 1)
    here = (own >= first) & (own < first + logits.shape[-1])
    target = collectives.all_reduce(logits.gather(-1, at).masked_fill(~here, 0), axis)
    before = ((logits > target) | ((logits == target) & (columns < own))) & (columns < vocab_size)
    return unshard(groups, collectives.all_reduce(before.sum(-1), axis), (cuts.batch, cuts.sequence))
