"""Compare a layout's traffic and memory with mode 1d on as many tensor ranks, for `dslpar show` and the linter.

>>> from dslpar.models.gpt.section import GPT
>>> gpt2 = GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
>>> break_even(gpt2, TensorMesh(q=2, y=2, mode="2d", residual="hidden"), tokens=1024).needed
1732
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.costs import any_model as costs
from dslpar.costs.collective_traffic import LayerTraffic
from dslpar.layout.family_interface import conditions
from dslpar.layout.modes import context_forms, cuboid_of
from dslpar.layout.resolve import Job, heads_of
from dslpar.schema.parallel_forms import tensor_of
from dslpar.schema.sections import Model


class BreakEven(NamedTuple):
    """Traffic and memory of a layer in one mode and in 1d on as many tensor ranks, forward and backward."""

    tokens: int
    """Tokens of the micro-batch."""
    sent: Fraction
    """Elements that a rank sends in this mode."""
    sent_in_1d: Fraction
    needed: int | None
    """Tokens of the smallest micro-batch for which this mode sends less than 1d; None if it never sends less."""
    held: int
    """Elements that a rank holds in this mode: the layer's weights, and tensors saved for the backward."""
    held_in_1d: int
    """Elements that a rank holds in 1d."""


def break_even(model: Model, tensor: TensorMesh, tokens: int) -> BreakEven:
    """Compare a mode with 1d.

    Traffic is affine in the tokens: a fixed part for weights, which 1d never sends, and a part per token for
    activations.
    """
    both = tensor, TensorMesh(y=tensor.size, mode="1d")
    line, reference = (_Line.of(model, each) for each in both)
    slope, fixed = reference.slope - line.slope, line.fixed - reference.fixed
    needed = math.floor(fixed / slope) + 1 if slope > 0 else None
    memories = (costs.layer_memory(model, each, tokens) for each in both)
    held, held_in_1d = (round(memory.weights + memory.saved.elements + memory.saved.wide) for memory in memories)
    needed = None if needed is None else max(needed, 1)
    return BreakEven(tokens, line.at(tokens), reference.at(tokens), needed, held, held_in_1d)


class _Line(NamedTuple):
    """Elements that a layer sends: `fixed` plus `slope` per token."""

    slope: Fraction
    fixed: Fraction

    @classmethod
    def of(cls, model: Model, tensor: TensorMesh) -> _Line:
        # Traffic is affine in the tokens, so two points determine the line.
        fixed = Fraction(costs.layer_traffic(model, tensor, 0).total)
        return cls(Fraction(costs.layer_traffic(model, tensor, 1).total) - fixed, fixed)

    def at(self, tokens: int) -> Fraction:
        return self.slope * tokens + self.fixed


def by_context_form(job: Job, per_node: int = 0) -> dict[str, int]:
    """Return the elements that a layer's attention sends over the context-parallel axis, by legal form.

    Forms are ring, ulysses and hybrid. Elements are per rank and micro-batch, forward and backward. The dict is empty
    without context parallelism, or if the model's layers are unknown.
    """
    spec, model = job.spec, job.spec.model
    heads, tokens = heads_of(model), job.batch.micro_size * job.seq_len
    found = {}
    for form, sections in context_forms(tensor_of(spec), spec.parallel.context, heads, per_node).items():
        cuboid = cuboid_of(*sections, heads)
        if all(each.holds for each in conditions(model, cuboid, job.seq_len)):
            parts = costs.model_costs(model, cuboid, tokens, job.seq_len)
            if parts is not None:
                sent = parts.layer.traffic.both
                of_attention = [sent[kind, axis] for kind, axis in sent if (kind, axis) in _OF_ATTENTION]
                found[form] = math.ceil(sum(of_attention))
    return found


_OF_ATTENTION = {(kind, axis) for kind in ("send", "all_to_all") for axis in ("d", "ulysses", "ring")}
"""Collectives of context-parallel attention. All-reduces of weights' gradients over d are not among them."""


class Summary(NamedTuple):
    """Elements per rank that a tensor group sends for one micro-batch, forward and backward."""

    tokens: int
    """Tokens of the micro-batch."""
    layer: dict[str, int]
    """Elements of one transformer layer, by axis."""
    model: dict[str, int]
    """Elements of all layers, embedding, head and loss, by axis."""
    break_even_tokens: int | None
    """Tokens per micro-batch from which on a layer sends less than in 1d; None in 1d, or if it never sends less."""
    context: dict[str, int]
    """Elements that a layer's attention would send in each legal form of context parallelism (`by_context_form`)."""


def summary(job: Job) -> Summary | None:
    """Return the summary of a job; None without tensor parallelism, or if the model's layers are unknown.

    A tensor that its ranks cannot split evenly gives a fraction of an element, which is rounded up.
    """
    tensor, model = job.mesh.tensor, job.spec.model
    if tensor.size == 1 or not isinstance(model, Model):
        return None
    tokens = job.batch.micro_size * job.seq_len
    return Summary(
        tokens=tokens,
        layer=_rounded(costs.layer_traffic(model, tensor, tokens)),
        model=_rounded(costs.model_traffic(model, tensor, tokens)),
        break_even_tokens=None if tensor.mode == "1d" else break_even(model, tensor, tokens).needed,
        context=by_context_form(job),
    )


def _rounded(passes: LayerTraffic) -> dict[str, int]:
    return {axis: math.ceil(elements) for axis, elements in passes.both.by_axis().items()}
