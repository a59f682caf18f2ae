"""Ranks of labels, accuracy and F1 against scikit-learn and torch; the list of metrics."""

from __future__ import annotations

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.inference.metrics import CLASSES, OTHER, TOKENS, Tally, label_ranks, parse_metrics, sum_tallies


def test_the_rank_of_a_label_is_its_place_in_the_sorted_logits() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randint(0, 4, (2, 5, 12)).float(), torch.randint(0, 10, (2, 5))  # with ties
    order = logits[..., :10].argsort(descending=True, stable=True)  # the last two columns are padding
    expected = (order == labels.unsqueeze(-1)).int().argmax(-1)
    assert torch.equal(label_ranks(Groups(Mesh()), logits, labels, 10), expected)


def test_classes_are_those_of_scikit_learn() -> None:
    import sklearn.metrics  # takes two seconds

    torch.manual_seed(1)
    labels, guesses = torch.randint(0, 5, (60,)), torch.randint(0, 5, (60,))
    halves = []
    for begin in (0, 30):
        halves.append(Tally(CLASSES, (1,)))
        halves[-1]._add_classes(guesses[begin : begin + 30], labels[begin : begin + 30])
    found = sum_tallies(halves).classes()
    expected = sklearn.metrics.precision_recall_fscore_support(labels, guesses, zero_division=0)
    for name, values in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        assert [each[name] for each in found] == pytest.approx(values.tolist())


@pytest.mark.parametrize(
    ("kind", "names", "hint"),
    [
        (CLASSES, ["perplexity"], "choose among loss, accuracy@K"),
        (OTHER, ["accuracy@1"], "choose among loss"),
        (TOKENS, ["loss", "perplexty"], "perplexity"),
        (TOKENS, ["accuracy@0"], "accuracy@K"),
    ],
)
def test_a_metric_that_is_not_there_is_refused(kind: str, names: list[str], hint: str) -> None:
    with pytest.raises(DslparError) as caught:
        parse_metrics(names, kind)
    (found,) = caught.value.findings
    assert found.code == "CFG232"
    assert hint in found.help


def test_the_mean_is_that_of_all_labels() -> None:
    one, other = Tally(TOKENS, (1,), [(6.0, 3)], {1: 2}, 3), Tally(TOKENS, (1,), [(4.0, 1)], {1: 1}, 1)
    found = sum_tallies([one, other]).results()
    assert found["loss"] == 2.5
    assert found["accuracy@1"] == 0.75
    assert found["perplexity"] == pytest.approx(torch.tensor(2.5).exp().item())
