"""`train.loss_chunks`: run head and loss on one chunk of tokens at a time, so that full logits never exist.

    by_chunks, layers = loss_by_chunks(job, model, groups, layers)     # before they are built
    with by_chunks.in_use():
        loss = by_chunks(engine(inputs), labels)

Logits have one element per token and vocabulary entry. For 131,072 tokens and a vocabulary of 128,256 they take 31 GiB
in bf16, and cross-entropy keeps twice as much again. While `in_use`, the head and all layers after it return their
input unchanged, and the model outputs the residual. The loss then runs these layers on one chunk of tokens after the
other, and again in the backward. If a program asks for outputs or passes its own criterion, all logits are computed.

Liger Kernel and ALST (Arctic Long Sequence Training, arXiv 2506.13996) move the head into the loss in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers.loss import cross_entropy_by_chunks
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, LayerSpec
from dslpar.models.layered import Labels, VocabularyHead


class LossByChunks:
    """A model's loss as a function of its head's input."""

    def __init__(self, groups: Groups, head: VocabularyHead, num_chunks: int) -> None:
        self.groups, self.vocab_size, self.num_chunks = groups, head.vocab_size, num_chunks
        self._loss = head.complete(groups, self._cross_entropy)
        self._is_used = False
        self._put_off: dict[str, tuple[LayerSpec, nn.Module]] = {}
        """The head and all layers after it, by name, as recorded by the newest forward."""

    @contextmanager
    def in_use(self) -> Iterator[LossByChunks]:
        """Make the model's forward stop before the head in this context; this loss runs the layers from the head on."""
        self._is_used = True
        try:
            yield self
        finally:
            self._is_used = False

    def put_off(self, spec: LayerSpec) -> LayerSpec:
        """Return the layer, changed so that it returns its input while this loss is in use."""
        return replace(spec, forward=partial(self._forward, spec))

    def _forward(self, spec: LayerSpec, module: nn.Module, value: Any) -> Any:
        if not self._is_used:
            return spec.apply(module, value)
        self._put_off[spec.name] = spec, module
        return value

    def __call__(self, value: Any, labels: Labels) -> Tensor:
        """Return the loss, given the head's input: the residual, and other values that the model's loss needs."""
        return self._loss(value, labels)

    def _cross_entropy(self, x: Tensor, labels: Labels) -> Tensor:
        """Return the cross-entropy, given the residual as this rank stores it, [batch/x, sequence, H/z].

        x and z are sizes of the tensor mesh (docs/architecture.md, The cuboid).
        """
        labels, denominator = (labels, None) if isinstance(labels, Tensor) else labels
        # ZeRO 3 releases a weight after the recomputation and gathers it again before its use. For a frozen weight,
        # torch has saved the parameter itself and would compare its (empty) shape in between.
        parameters = (p for _, module in self._put_off.values() for p in module.parameters())
        is_emptied = any(not p.requires_grad and hasattr(p, "ds_id") for p in parameters)
        return cross_entropy_by_chunks(
            self.groups,
            self._logits,
            x,
            labels,
            self.vocab_size,
            self.num_chunks,
            denominator,
            compares_recomputed=not is_emptied,
        )

    def _logits(self, x: Tensor) -> Tensor:
        for spec, module in self._put_off.values():
            x = spec.apply(module, x)
        return x


def loss_by_chunks(
    job: Job, model: LayeredModel, groups: Groups, layers: list[LayerSpec]
) -> tuple[LossByChunks | None, list[LayerSpec]]:
    """Return the loss that `train.loss_chunks` configures, and the layers to build with it.

    The loss is None if `loss_chunks` is 1, or if no layer is a vocabulary head: the setting then has no effect
    (DEAD123).
    """
    num_chunks, head = job.spec.train.loss_chunks, model.vocabulary_head
    names = [layer.name for layer in layers]
    if num_chunks == 1 or head is None or head.layer not in names:
        return None, layers
    by_chunks = LossByChunks(groups, head, num_chunks)
    first = names.index(head.layer)
    return by_chunks, layers[:first] + [by_chunks.put_off(layer) for layer in layers[first:]]
