"""Loss and accuracy: equal to torch's for any shape, and independent of the vocabulary's padding.

The reference is torch's own function over the full row in one process, in float64 unless stated otherwise. Sums have at
most some hundred terms, so correct results differ by some 1e-15 of the largest. A missing or doubled term changes them
by 1e-3 or more.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers import IGNORE_INDEX, Placement, accuracy, cross_entropy, gather, loss, placement
from dslpar.layers.loss import Reduction
from dslpar.layout import divisors
from tests.support.layouts import LAYOUTS
from tests.support.live_storages import LiveStorages
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting

TOLERANCE = 1e-12


class Case(NamedTuple):
    """Logits [6, 6, vocab] or [36, vocab] of size `scale`, with some labels ignored."""

    flat: bool
    vocab: int
    scale: float
    ignored: float
    ignore_index: int
    smoothing: float
    reduction: Reduction
    seed: int

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return logits and labels."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (36,) if self.flat else (6, 6)
        logits = torch.randn((*shape, self.vocab), generator=generator) * self.scale
        labels = torch.randint(self.vocab, shape, generator=generator)
        return logits, labels.masked_fill(torch.rand(shape, generator=generator) < self.ignored, self.ignore_index)


CASES = st.builds(
    Case,
    flat=st.booleans(),
    vocab=st.integers(1, 40),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    ignore_index=st.sampled_from([IGNORE_INDEX, -1, 0, 10_000]),
    smoothing=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 2**32),
)
THREE_D = LAYOUTS["cuboid-1-2-2-replicated"]
"""The vocabulary is sharded over y, then over z."""


NEAR_1 = Case(False, 2, 30.0, 0.9, IGNORE_INDEX, 0.0, "mean", 83534)
"""All counted labels have a probability near 1."""


@pytest.mark.parametrize(
    "tensor",
    [LAYOUTS["1d-2"], pytest.param(LAYOUTS["2d-4"], marks=pytest.mark.prove), THREE_D, LAYOUTS["ring-2"]],
)
@example(cases=[NEAR_1])
@settings(max_examples=3, deadline=None)
@given(cases=st.lists(CASES, min_size=20, max_size=30))
def test_the_loss_is_torchs(tensor: mesh.TensorMesh, cases: list[Case]) -> None:
    for found in on_ranks(tensor.size, compared, tensor, cases):
        wrong = {case: errors for case, errors in zip(cases, found, strict=True) if not max(errors) <= TOLERANCE}
        assert not wrong


def compared(tensor: mesh.TensorMesh, cases: list[Case]) -> list[list[float]]:
    """Return the errors of loss, gradient of the logits and accuracy for each case."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    return [[*_loss(groups, case), _accuracy(groups, case)] for case in cases]


def _loss(groups: Groups, case: Case) -> tuple[float, float]:
    full, labels = case.numbers()
    stored, at = _stored(groups, full)
    stored, full = stored.requires_grad_(), full.requires_grad_()
    options: dict[str, Any] = dict(ignore_index=case.ignore_index, label_smoothing=case.smoothing)
    loss = cross_entropy(groups, stored, labels, case.vocab, reduction=case.reduction, **options)
    expected = functional.cross_entropy(
        full.flatten(0, -2), labels.flatten(), reduction=case.reduction, **options
    ).view(loss.shape)
    if case.reduction == "mean" and not (labels != case.ignore_index).any():
        expected = full.sum() * 0  # torch gives NaN
    grad = torch.rand(loss.shape, generator=torch.Generator().manual_seed(case.seed)) + 0.5
    loss.backward(grad)
    expected.backward(grad)
    assert stored.grad is not None
    assert full.grad is not None
    # A gradient is (p - 1) * weight at the label: if p is near 1 it is small, but rounds like 1.
    counted = int((labels != case.ignore_index).sum()) if case.reduction == "mean" else 1
    weight = grad.max().item() / max(counted, 1)
    return _off(loss, expected), _off(gather(stored.grad, at, groups)[..., : case.vocab], full.grad, weight)


def _accuracy(groups: Groups, case: Case) -> float:
    """Use rounded logits, so that the largest occurs several times."""
    logits, labels = case.numbers()
    logits = logits.div_(case.scale).round_()
    found = accuracy(groups, _stored(groups, logits)[0], labels, case.vocab, case.ignore_index)
    counted = labels != case.ignore_index
    right = (logits.argmax(-1) == labels) & counted
    return abs(found.item() - right.sum().item() / max(counted.sum().item(), 1))


def _stored(groups: Groups, full: Tensor) -> tuple[Tensor, Placement]:
    """Return this rank's piece and its placement; the padding columns are the largest of all."""
    vocab = full.shape[-1]
    padding = full.new_full((*full.shape[:-1], divisors.vocabulary(vocab, groups.tensor).value - vocab), 2000.0)
    padded = torch.cat([full, padding], -1)
    at = placement.inner(groups.tensor, *padded.shape)
    return at.cut(padded, groups.coord), at


def _off(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Return max|a - b| over the larger of max|b| and `least`, or max|a| if both are zero."""
    largest = max(b.detach().abs().max().item(), least)
    return (a - b).detach().abs().max().item() / (largest or 1.0)


def test_a_loss_that_counts_the_padding_is_detected() -> None:
    case = Case(False, 17, 1.0, 0.3, IGNORE_INDEX, 0.1, "mean", 1)
    (wrong, *_), *_ = on_ranks(2, padding_counted, LAYOUTS["1d-2"], [case])
    assert min(wrong) > 1e-3


def padding_counted(tensor: mesh.TensorMesh, cases: list[Case]) -> list[list[float]]:
    global accuracy, cross_entropy
    cross_entropy, accuracy = _with_padding(cross_entropy), _with_padding(accuracy)
    return compared(tensor, cases)


def _with_padding(function: Any) -> Any:
    return lambda groups, logits, labels, vocab, *args, **options: function(
        groups, logits, labels, vocab + 1, *args, **options
    )


# ---- other input ----


def half_precision() -> tuple[torch.dtype, float]:
    """Return the dtype of the loss of bfloat16 logits, and its difference from the same numbers in float64."""
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    full = torch.randn(6, 6, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.arange(36).view(6, 6)
    loss = cross_entropy(groups, _stored(groups, full)[0], labels, 40)
    expected = functional.cross_entropy(full.double().flatten(0, 1), labels.flatten())
    return loss.dtype, _off(loss.double(), expected)


def test_half_precision_is_upcast() -> None:
    for dtype, off in on_ranks(2, half_precision):
        assert dtype == torch.float32
        assert off < 1e-6  # float32's 6e-8, some terms; bfloat16's is 4e-3


def refused(labels: list[int]) -> list[str]:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    logits = torch.zeros(len(labels), 9)
    texts = []
    for function in (cross_entropy, partial(cross_entropy, reduction="none"), accuracy):
        with pytest.raises(DslparError) as raised:
            function(groups, logits, torch.tensor(labels), 17)
        texts.append(str(raised.value))
    return texts


@pytest.mark.parametrize("label", [17, -1, 1000])
def test_a_label_outside_the_vocabulary_is_refused_on_every_rank(label: int) -> None:
    """17 is the first padding column."""
    for texts in on_ranks(2, refused, [0, 16, label, IGNORE_INDEX]):
        for text in texts:
            assert f"TEN222 outside-the-vocabulary: {label} among the labels" in text
            assert "17 entries, 0 to 16" in text


# On ring-2 and 1d-2, a rank holds [2, 2, 17 or 9] of [2, 4, 17] or [2, 2, 17].
OF_OTHER_TOKENS = {"ring-2": ((2, 2, 17), (8,)), "1d-2": ((2, 2, 9), (2, 1))}


def refused_shapes(tensor: mesh.TensorMesh, logits: tuple[int, ...], labels: tuple[int, ...]) -> list[str]:
    groups = Groups(Mesh(tensor=tensor))
    texts = []
    for function in (cross_entropy, accuracy):
        with pytest.raises(DslparError, match="TEN226 wrong-shape") as raised:
            function(groups, torch.zeros(logits), torch.zeros(labels, dtype=torch.long), 17)
        texts.append(str(raised.value))
    return texts


@pytest.mark.parametrize("name", OF_OTHER_TOKENS)
def test_labels_of_another_shape_are_refused(name: str) -> None:
    """Flattened labels of a split sequence would be sharded into equally many labels of other tokens: a wrong loss
    without an error.
    """
    logits, labels = OF_OTHER_TOKENS[name]
    for texts in on_ranks(2, refused_shapes, LAYOUTS[name], logits, labels):
        assert all(f"labels {labels} do not match" in text for text in texts)


def test_a_vocabulary_larger_than_the_logits_is_refused() -> None:
    for texts in on_ranks(2, refused_shapes, LAYOUTS["1d-2"], (3, 8), (3,)):
        assert all("logits have 16 columns, but the vocabulary has 17 tokens" in text for text in texts)


def of_types() -> list[Tensor]:
    """In 8 bits -100 is 156, and 1000 is 232."""
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(groups.coord["y"]), dtype=torch.float64)
    labels = torch.tensor([0, 7, 156, 250, 255])
    types = (torch.int64, torch.int32, torch.uint8)
    return [cross_entropy(groups, logits, labels.to(dtype), 1000, reduction="none") for dtype in types]


def test_labels_may_be_of_any_whole_type() -> None:
    for expected, *others in on_ranks(2, of_types):
        assert all(torch.equal(other, expected) for other in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reduction="avg"), "reduction='avg'\nhelp: one of 'mean', 'sum', 'none'"),
        (dict(label_smoothing=1.5), "label_smoothing=1.5\nhelp: a share"),
        (dict(label_smoothing=float("nan")), "label_smoothing=nan"),
    ],
)
def test_a_loss_that_does_not_exist_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DslparError, match="TEN225 no-such-loss") as raised:
        cross_entropy(Groups(Mesh()), torch.zeros(2, 3), torch.tensor([0, 1]), 3, **options)
    assert message in str(raised.value)


def given_denominator() -> list[float]:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    logits, labels, four = torch.zeros(2, 9), torch.tensor([0, 5]), torch.tensor(4.0)
    losses = [cross_entropy(groups, logits, labels, 17, four, reduction=how) for how in ("mean", "sum", "none")]
    return [value for loss in losses for value in loss.flatten().tolist()]


def test_whatever_the_reduction_a_denominator_divides() -> None:
    one = torch.tensor(17.0).log().item() / 4
    assert on_ranks(2, given_denominator)[0] == pytest.approx([2 * one, 2 * one, one, one], rel=1e-6)


# ---- traffic ----


def sent(tensor: mesh.TensorMesh) -> list[int]:
    """Return elements with backward: mean loss, smoothed mean loss, token losses, and the accuracy."""
    groups = Groups(Mesh(tensor=tensor))
    stored = _stored(groups, torch.randn(6, 6, 17))[0].requires_grad_()
    labels, counts = torch.zeros(6, 6, dtype=torch.long), []
    for options in (dict(), dict(label_smoothing=0.1), dict(reduction="none")):
        with counting(groups) as found:
            cross_entropy(groups, stored, labels, 17, **options).sum().backward()  # type: ignore[arg-type]
        counts.append(found.elements)
    with counting(groups) as found:
        accuracy(groups, stored, labels, 17)
    return [round(sum(elements.values())) for elements in (*counts, found.elements)]


@pytest.mark.parametrize("name", ["cuboid-1-2-2-replicated", "ring-2"])
def test_what_is_sent(name: str) -> None:
    tensor = LAYOUTS[name]
    tokens, whole = tensor.x, 36
    vocab = tensor.y * tensor.z
    own, f_vocab, f_tokens = whole // tokens, (vocab - 1) / vocab, (tokens - 1) / tokens
    mean = 6 * own * f_vocab + 2 * f_tokens
    expected = [mean, mean, 6 * own * f_vocab + whole * f_tokens, 4 * own * f_vocab + 2 * f_tokens]
    assert on_ranks(tensor.size, sent, tensor) == [[round(number) for number in expected]] * tensor.size


# ---- an accelerator's code for a vocabulary that is not sharded ----


@given(CASES, st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_softmax_of_one_rank_alone_is_torch_s_loss(case: Case, indexed: bool) -> None:
    logits, labels = case.numbers()
    logits, labels = logits.double().flatten(0, -2), labels.flatten()
    ignored = labels == case.ignore_index
    padded = functional.pad(logits, (0, 3), value=7.0)
    original = loss._largest_and_sum
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_largest_and_sum", lambda *args, **_: original(*args, indexed=indexed))
        for ours in (True, False):
            x = (padded if ours else logits).clone().requires_grad_()
            if ours:
                targets = labels.masked_fill(ignored, -1)
                token_losses = loss._TokenLosses.apply(  # type: ignore[no-untyped-call]
                    x, targets, Axis(), case.vocab, case.smoothing, case.smoothing / case.vocab
                ).masked_fill(ignored, 0)
            else:
                token_losses = functional.cross_entropy(
                    x,
                    labels,
                    ignore_index=case.ignore_index,
                    label_smoothing=case.smoothing,
                    reduction="none",
                )
            token_losses.sum().backward()
            assert x.grad is not None
            results.append((token_losses.detach(), x.grad[:, : case.vocab]))
    for mine, right in zip(*results, strict=True):
        assert (mine - right).abs().max() <= TOLERANCE * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 64])
def test_a_softmax_of_bfloat16_makes_no_second_tensor_of_its_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch converts all of it first: 4 more bytes per logit, at the peak of a step."""
    monkeypatch.setattr(loss, "_MANY", 0)
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1)).bfloat16()[:, :33]
    with LiveStorages() as storages:
        found = loss._wide_softmax(logits)
    assert torch.equal(found, torch.softmax(logits, -1, dtype=torch.float32))
    parts = -(-rows // loss._PARTS) / rows
    assert storages.peak <= logits.untyped_storage().nbytes() + 4 * found.numel() * (1 + parts)
