"""What each layer sends: elements a rank, by collective and axis, forward and backward; closed forms, no torch.

    >>> from dslpar.core.mesh import Tensor
    >>> up = linear(Tensor(q=2, y=2, residual="hidden"), 64, 16, 48, role="inward", bias=False)
    >>> {key: int(elements) for key, elements in up.forward.items()}
    {('all_gather', 'y'): 256, ('all_gather', 'q'): 192}
    >>> int(up.total)
    1088

Ring counts: over n ranks, an all-gather or reduce-scatter of E elements in all, and an all-to-all of E a rank, send
(n-1)/n E; an all-reduce twice that; a message all of it. An axis is named by the letters that have more than one rank
("y", "d q"). Numbers are exact, hence fractions. `tests.support.traffic_counter` counts the same while a job runs;
tests hold the two
equal.

Letters: M tokens of a micro-batch, K and N features in and out, h hidden size; x = d q. A linear gathers X over the
axis that splits neither of its dims, W over q, and reduces Y over the axis of K; its backward does the reverse, and
sums dW over d. With f(n) = (n-1)/n, and all panels kept, an inward linear sends twice

    f(y) MK/(xz) + f(q) KN/(yz) + f(z) MN/(xy)      and once    2 f(d) KN/(qyz)

and an outward one the same with y and z exchanged in the terms of X and Y. What `keep` does not keep is gathered once
more. In 1d that is Megatron-LM's four all-reduces a block (arXiv 1909.08053).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from dslpar.core.frozen import frozen
from dslpar.core.mesh import TENSOR_AXES, Tensor
from dslpar.schema import sections

if TYPE_CHECKING:
    from dslpar.layout.resolve import Job

Key = tuple[str, str]
"""(collective, axis): ("all_gather", "y")."""
Number = int | Fraction
Letters = tuple[str, ...]


class Traffic(Mapping[Key, Fraction]):
    """Elements by (collective, axis); a value that adds up. What is nothing is not in it.

    A class of its own, for a sum of plain dicts is no operator.
    """

    __slots__ = ("_elements",)

    def __init__(self, elements: Mapping[Key, Number] | None = None) -> None:
        self._elements = {key: Fraction(number) for key, number in (elements or {}).items() if number}

    def __getitem__(self, key: Key) -> Fraction:
        return self._elements[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def __hash__(self) -> int:
        return hash(frozenset(self._elements.items()))

    def __repr__(self) -> str:
        return f"Traffic({{{', '.join(f'{key}: {number}' for key, number in sorted(self.items()))}}})"

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic({key: self.get(key, 0) + other.get(key, 0) for key in (*self, *other)})

    def __sub__(self, other: Traffic) -> Traffic:
        return self + other * -1

    def __mul__(self, times: Number) -> Traffic:
        return Traffic({key: number * times for key, number in self.items()})

    @property
    def total(self) -> Fraction:
        """Over all collectives and axes."""
        return sum(self._elements.values(), Fraction())

    def of(self, axis: str) -> Fraction:
        """Over the collectives of one axis."""
        return sum((number for (_, name), number in self.items() if name == axis), Fraction())

    def by_axis(self) -> dict[str, Fraction]:
        """`of` every axis that is in it."""
        return {axis: self.of(axis) for axis in sorted({axis for _, axis in self})}


NOTHING = Traffic()


@frozen
class Passes:
    """What is sent forward and backward."""

    forward: Traffic = NOTHING
    backward: Traffic = NOTHING

    def __add__(self, other: Passes) -> Passes:
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __mul__(self, times: int) -> Passes:
        return Passes(forward=self.forward * times, backward=self.backward * times)

    @property
    def both(self) -> Traffic:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def total(self) -> Fraction:
        """Of both, over all collectives and axes."""
        return self.both.total


# Collectives ------------------------------------------------------------------------------------------------------


def all_gather(tensor: Tensor, letters: Letters, whole: Number) -> Traffic:
    """Of pieces that make `whole` elements together."""
    return _ring("all_gather", tensor, letters, whole)


def reduce_scatter(tensor: Tensor, letters: Letters, whole: Number) -> Traffic:
    """Of `whole` elements on each rank, to pieces."""
    return _ring("reduce_scatter", tensor, letters, whole)


def all_reduce(tensor: Tensor, letters: Letters, elements: Number) -> Traffic:
    """A reduce-scatter and an all-gather."""
    return _ring("all_reduce", tensor, letters, 2 * elements)


def all_to_all(tensor: Tensor, letters: Letters, elements: Number) -> Traffic:
    """Of `elements` on each rank, an equal part to each."""
    return _ring("all_to_all", tensor, letters, elements)


def send(tensor: Tensor, letters: Letters, elements: Number) -> Traffic:
    """To one other rank along the axis."""
    name, size = _axis(tensor, letters)
    return Traffic({("send", name): elements if size > 1 else 0})


def _ring(collective: str, tensor: Tensor, letters: Letters, elements: Number) -> Traffic:
    name, size = _axis(tensor, letters)
    return Traffic({(collective, name): Fraction(size - 1, size) * elements})


def _axis(tensor: Tensor, letters: Letters) -> tuple[str, int]:
    """Name and size of the group over some letters."""
    present = [letter for letter in TENSOR_AXES if letter in letters and getattr(tensor, letter) > 1]
    return " ".join(present), _ranks(tensor, letters)


def _ranks(tensor: Tensor, letters: Letters) -> int:
    return math.prod(getattr(tensor, letter) for letter in letters)


# How activations are cut (placement.py has the same as pieces of real tensors) --------------------------------------


def residual_tokens(tensor: Tensor) -> Letters:
    """What cuts the tokens of the stored residual."""
    return ("d", "q", "y") if tensor.residual in ("batch", "sequence") else ("d", "q")


def residual_features(tensor: Tensor) -> Letters:
    """What cuts the features of the stored residual."""
    return ("z", "y") if tensor.residual == "hidden" else ("z",)


def inner_tokens(tensor: Tensor) -> Letters:
    """What cuts the tokens of inner activations."""
    return ("d", "q", "z") if tensor.inner == "batch" else ("d", "q")


def inner_features(tensor: Tensor) -> Letters:
    """What cuts the features of inner activations."""
    return ("y", "z") if tensor.inner == "heads" else ("y",)


def padded_vocab(tensor: Tensor, vocab_size: int) -> int:
    """Rows of the token table with those that make it divisible."""
    multiple = tensor.y * math.lcm(tensor.q, tensor.z if tensor.inner == "heads" else 1)
    return -(-vocab_size // multiple) * multiple


# Layers -----------------------------------------------------------------------------------------------------------

Role = Literal["inward", "outward"]


class _Operand(NamedTuple):
    """An operand of a product: what its pieces are gathered over, and the elements of the panel."""

    tensor: Tensor
    letters: Letters
    panel: Number
    copies: bool = False
    """Not in pieces: equal copies of the panel."""

    def gather(self) -> Traffic:
        return NOTHING if self.copies else all_gather(self.tensor, self.letters, self.panel)

    def reduce(self) -> Traffic:
        how = all_reduce if self.copies else reduce_scatter
        return how(self.tensor, self.letters, self.panel)


def _residual(tensor: Tensor, tokens: Number, features: int) -> _Operand:
    panel = Fraction(tokens * features, tensor.x * tensor.z)
    return _Operand(tensor, ("y",), panel, copies=tensor.residual == "replicated")


def _inner(tensor: Tensor, tokens: Number, features: int) -> _Operand:
    return _Operand(tensor, ("z",), Fraction(tokens * features, tensor.x * tensor.y))


def _weight(tensor: Tensor, elements: int) -> _Operand:
    return _Operand(tensor, ("q",), Fraction(elements, tensor.y * tensor.z))


def linear(
    tensor: Tensor,
    tokens: Number,
    in_features: int,
    out_features: int,
    *,
    role: Role,
    bias: bool = True,
    gather_output: bool = False,
    input_grad: bool = True,
    weight_grad: bool = True,
) -> Passes:
    """A linear layer; of several blocks of features `out_features` is the sum. `..._grad`: what is differentiated."""
    inward = role == "inward"
    kinds = (_residual, _inner) if inward else (_inner, _residual)
    x, y = kinds[0](tensor, tokens, in_features), kinds[1](tensor, tokens, out_features)
    w = _weight(tensor, in_features * out_features)
    again_x = NOTHING if tensor.keep in ("x", "both") else x.gather()
    again_w = NOTHING if tensor.keep in ("w", "both") else w.gather()
    backward = y.gather()
    if input_grad:
        backward += again_w + x.reduce()
    if weight_grad:
        backward += again_x + w.reduce() + _over_depth(w)
    sent = Passes(forward=x.gather() + w.gather() + y.reduce(), backward=backward)
    if bias:
        sent += (inner_vectors if inward else residual_vectors)(tensor, out_features)
    return sent + _joined(tensor, tokens, out_features, role) if gather_output else sent


def _joined(tensor: Tensor, tokens: Number, features: int, role: Role) -> Passes:
    """All features to every rank, over one axis after the other, the one that cuts last first; nothing backward."""
    cut, rows = (inner_features, inner_tokens) if role == "inward" else (residual_features, residual_tokens)
    letters, sent = cut(tensor), NOTHING
    held = Fraction(tokens * features, _ranks(tensor, rows(tensor) + letters))
    for letter in reversed(letters):
        held *= _ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), held)
    return Passes(forward=sent)


def _over_depth(w: _Operand) -> Traffic:
    return all_reduce(w.tensor, ("d",), Fraction(w.panel, w.tensor.q))


def residual_vectors(tensor: Tensor, elements: int) -> Passes:
    """Vectors that meet the residual, of so many elements in all: gradients are summed over what cuts its tokens."""
    held = Fraction(elements, _ranks(tensor, residual_features(tensor)))
    return Passes(backward=all_reduce(tensor, residual_tokens(tensor), held))


def inner_vectors(tensor: Tensor, elements: int) -> Passes:
    """The same of vectors that meet inner activations."""
    held = Fraction(elements, _ranks(tensor, inner_features(tensor)))
    return Passes(backward=all_reduce(tensor, inner_tokens(tensor), held))


NormKind = Literal["layernorm", "rmsnorm"]


def norm(tensor: Tensor, tokens: Number, hidden_size: int, *, kind: str = "layernorm", bias: bool = True) -> Passes:
    """A norm of the residual: two numbers a token, or one; nothing but its vectors where the hidden dim is whole."""
    cut = residual_features(tensor)
    rows = Fraction(tokens, _ranks(tensor, residual_tokens(tensor)))
    if kind == "rmsnorm":
        sums = all_reduce(tensor, cut, rows)
        statistics = Passes(forward=sums, backward=sums)
    else:
        gathered = all_gather(tensor, cut, 2 * rows * _ranks(tensor, cut))
        statistics = Passes(forward=gathered, backward=all_reduce(tensor, cut, 2 * rows))
    num_vectors = 2 if bias and kind == "layernorm" else 1
    return statistics + residual_vectors(tensor, num_vectors * hidden_size)


def attention(
    tensor: Tensor, tokens: Number, hidden_size: int, num_heads: int, *, kv_heads: int | None = None, bias: bool = True
) -> Passes:
    """q, k and v, heads over each other, the projection back; `kv_heads` of keys and values, by default num_heads."""
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", bias=bias)
    outward = linear(tensor, tokens, hidden_size, hidden_size, role="outward", bias=bias)
    return inward + _heads(tensor, tokens, hidden_size, kv_size) + outward


def _heads(tensor: Tensor, tokens: Number, q_size: int, kv_size: int) -> Passes:
    """Attention over a sequence in pieces; causal or not, it sends the same."""
    if tensor.split != "sequence" or tensor.x == 1:
        return Passes()
    letters, n = ("d", "q"), tensor.x
    held = n * _ranks(tensor, inner_features(tensor))
    if tensor.impl == "ulysses":
        exchanged = all_to_all(tensor, letters, Fraction(2 * tokens * (q_size + kv_size), held))
        return Passes(forward=exchanged, backward=exchanged)
    kv = send(tensor, letters, Fraction(2 * tokens * kv_size, held))
    return Passes(forward=kv * (n - 1), backward=kv * (2 * n - 1))


def mlp(
    tensor: Tensor, tokens: Number, hidden_size: int, ffn_size: int, *, activation: str = "gelu", bias: bool = True
) -> Passes:
    """Up and down; with 'swiglu' a gate beside up."""
    blocks = 2 if activation == "swiglu" else 1
    up = linear(tensor, tokens, hidden_size, blocks * ffn_size, role="inward", bias=bias)
    return up + linear(tensor, tokens, ffn_size, hidden_size, role="outward", bias=bias)


def block(tensor: Tensor, tokens: Number, model: sections.GPT) -> Passes:
    """A transformer block: two norms, attention, MLP."""
    h, bias = model.hidden_size, model.bias
    return (
        norm(tensor, tokens, h, kind=model.norm, bias=bias) * 2
        + attention(tensor, tokens, h, model.num_heads, kv_heads=model.kv_heads, bias=bias)
        + mlp(tensor, tokens, h, model.ffn_size, activation=model.activation, bias=bias)
    )


def embedding(tensor: Tensor, tokens: Number, vocab_size: int, hidden_size: int) -> Passes:
    """The token table, looked up: an outward linear of a one-hot."""
    w = _weight(tensor, padded_vocab(tensor, vocab_size) * hidden_size)
    y = _residual(tensor, tokens, hidden_size)
    return Passes(forward=w.gather() + y.reduce(), backward=y.gather() + w.reduce() + _over_depth(w))


def position_embedding(tensor: Tensor, num_positions: int, hidden_size: int) -> Passes:
    """The position table: whole rows on every rank."""
    return residual_vectors(tensor, num_positions * hidden_size)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int) -> Passes:
    """The token table as head, tied or not."""
    return linear(tensor, tokens, hidden_size, padded_vocab(tensor, vocab_size), role="inward", bias=False)


def cross_entropy(tensor: Tensor, tokens: Number) -> Passes:
    """A maximum and two sums a token, and the loss itself, all forward."""
    features, cut = inner_features(tensor), inner_tokens(tensor)
    rows = Fraction(tokens, _ranks(tensor, cut))
    return Passes(forward=all_reduce(tensor, features, 3 * rows) + all_reduce(tensor, cut, 1))


def gpt(tensor: Tensor, tokens: Number, model: sections.GPT) -> Passes:
    """The whole model and its loss: one micro-batch of `tokens`, all on one stage."""
    h, vocab = model.hidden_size, model.vocab_size
    learned = model.positions == "learned"
    return _sum(
        (
            embedding(tensor, tokens, vocab, h),
            position_embedding(tensor, model.max_seq_len, h) if learned else Passes(),
            block(tensor, tokens, model) * model.num_layers,
            norm(tensor, tokens, h, kind=model.norm, bias=model.bias),
            head(tensor, tokens, h, vocab),
            cross_entropy(tensor, tokens),
        )
    )


def _sum(parts: Iterable[Passes]) -> Passes:
    return sum(parts, Passes())


# Against 1d -------------------------------------------------------------------------------------------------------


class BreakEven(NamedTuple):
    """What a block of one mode sends against one of 1d on as many ranks, forward and backward."""

    tokens: int
    """Of the micro-batch."""
    sent: Fraction
    """Elements a rank sends in this mode."""
    sent_in_1d: Fraction
    needed: int | None
    """Tokens of the smallest micro-batch for which this mode sends less; None: it never does."""


def break_even(tensor: Tensor, model: sections.GPT, tokens: int) -> BreakEven:
    """What is sent is affine in the tokens: a part with the activations, and one with the weights that 1d never sends.

    >>> gpt2 = spec.GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
    >>> break_even(Tensor(q=2, y=2, mode="2d", residual="hidden"), gpt2, 1024).needed
    1732
    """
    line, reference = (_Line.of(each, model) for each in (tensor, Tensor(y=tensor.size, mode="1d")))
    slope, fixed = reference.slope - line.slope, line.fixed - reference.fixed
    needed = math.floor(fixed / slope) + 1 if slope > 0 else None
    return BreakEven(tokens, line.at(tokens), reference.at(tokens), None if needed is None else max(needed, 1))


class _Line(NamedTuple):
    """Elements that a block sends, as a function of tokens."""

    slope: Fraction
    fixed: Fraction

    @classmethod
    def of(cls, tensor: Tensor, model: sections.GPT) -> _Line:
        fixed = block(tensor, 0, model).total
        return cls(block(tensor, 1, model).total - fixed, fixed)

    def at(self, tokens: int) -> Fraction:
        return self.slope * tokens + self.fixed


class Summary(NamedTuple):
    """What a tensor group sends for one micro-batch, forward and backward: elements a rank."""

    tokens: int
    """Of the micro-batch."""
    layer: dict[str, int]
    """By axis, one transformer layer."""
    model: dict[str, int]
    """By axis, all layers, embedding, head and loss."""
    break_even_tokens: int | None
    """From so many tokens on, a layer sends less than in 1d on as many ranks; None in 1d, or if it never does."""


def summary(job: Job) -> Summary | None:
    """Of a job; None without tensor parallelism, or where the model's layers are not known.

    Parts of elements, where a ring cannot cut a tensor evenly, are rounded up.
    """
    tensor, model = job.mesh.tensor, job.spec.model
    if tensor.size == 1 or not isinstance(model, sections.GPT):
        return None
    tokens = job.batch.micro_size * job.seq_len
    return Summary(
        tokens=tokens,
        layer=_rounded(block(tensor, tokens, model)),
        model=_rounded(gpt(tensor, tokens, model)),
        break_even_tokens=None if tensor.mode == "1d" else break_even(tensor, model, tokens).needed,
    )


def _rounded(passes: Passes) -> dict[str, int]:
    return {axis: math.ceil(elements) for axis, elements in passes.both.by_axis().items()}
