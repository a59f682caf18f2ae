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

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple

from dslpar.core.frozen import frozen
from dslpar.core.mesh import TENSOR_AXES, Tensor
from dslpar.layout.cuts import Letters, inner_cuts, residual_cuts
from dslpar.layout.divisors import ranks, vocabulary

Key = tuple[str, str]
"""(collective, axis): ("all_gather", "y")."""
Number = int | Fraction


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
    return " ".join(present), ranks(tensor, letters)


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
    cuts = inner_cuts(tensor) if role == "inward" else residual_cuts(tensor)
    sent, held = NOTHING, Fraction(tokens * features, ranks(tensor, cuts.tokens + cuts.features))
    for letter in reversed(cuts.features):
        held *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), held)
    return Passes(forward=sent)


def _over_depth(w: _Operand) -> Traffic:
    return all_reduce(w.tensor, ("d",), Fraction(w.panel, w.tensor.q))


def residual_vectors(tensor: Tensor, elements: int) -> Passes:
    """Vectors that meet the residual, of so many elements in all: gradients are summed over what cuts its tokens."""
    held = Fraction(elements, ranks(tensor, residual_cuts(tensor).features))
    return Passes(backward=all_reduce(tensor, residual_cuts(tensor).tokens, held))


def inner_vectors(tensor: Tensor, elements: int) -> Passes:
    """The same of vectors that meet inner activations."""
    held = Fraction(elements, ranks(tensor, inner_cuts(tensor).features))
    return Passes(backward=all_reduce(tensor, inner_cuts(tensor).tokens, held))


def norm(tensor: Tensor, tokens: Number, hidden_size: int, *, kind: str = "layernorm", bias: bool = True) -> Passes:
    """A norm of the residual: two numbers a token, or one; nothing but its vectors where the hidden dim is whole."""
    cut = residual_cuts(tensor).features
    rows = Fraction(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    if kind == "rmsnorm":
        sums = all_reduce(tensor, cut, rows)
        statistics = Passes(forward=sums, backward=sums)
    else:
        gathered = all_gather(tensor, cut, 2 * rows * ranks(tensor, cut))
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
    held = n * ranks(tensor, inner_cuts(tensor).features)
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


def embedding(tensor: Tensor, tokens: Number, vocab_size: int, hidden_size: int) -> Passes:
    """The token table, looked up: an outward linear of a one-hot."""
    w = _weight(tensor, vocabulary(vocab_size, tensor).value * hidden_size)
    y = _residual(tensor, tokens, hidden_size)
    return Passes(forward=w.gather() + y.reduce(), backward=y.gather() + w.reduce() + _over_depth(w))


def position_embedding(tensor: Tensor, num_positions: int, hidden_size: int) -> Passes:
    """The position table: whole rows on every rank."""
    return residual_vectors(tensor, num_positions * hidden_size)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int) -> Passes:
    """The token table as head, tied or not."""
    return linear(tensor, tokens, hidden_size, vocabulary(vocab_size, tensor).value, role="inward", bias=False)


def cross_entropy(tensor: Tensor, tokens: Number) -> Passes:
    """A maximum and two sums a token, and the loss itself, all forward."""
    features, cut = inner_cuts(tensor).features, inner_cuts(tensor).tokens
    rows = Fraction(tokens, ranks(tensor, cut))
    return Passes(forward=all_reduce(tensor, features, 3 * rows) + all_reduce(tensor, cut, 1))
