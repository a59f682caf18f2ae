"""Masked text by brute force: targets, masked inputs, pairs, words; numbers alone decide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dslpar.data.masked import ELSEWHERE, FOLLOWS, MaskedSamples
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.schema.datasets import MaskedTextData
from dslpar.schema.sections import OtherModel
from dslpar.schema.vocabularies import vocabulary_of

WORDS = b"the quick brown fox jumps over the lazy dog; "
TEXT = np.frombuffer(WORDS * 200, np.uint8) + np.uint16(4)
SEQ_LEN = 64
PAD, CLS, SEP, MASK = range(4)


def samples(pairs: bool = False, seed: int = 1, seq_len: int = SEQ_LEN, **data: Any) -> MaskedSamples:
    section = MaskedTextData(**data)
    return MaskedSamples(TEXT, vocabulary_of(section, "", OtherModel(target="x")), section, seq_len, seed, pairs)


def test_a_sample_is_text_between_special_tokens() -> None:
    made = samples()
    ids, labels = made.batch([0, 3], [0, 1])
    assert ids.shape == labels.shape == (2, SEQ_LEN)
    assert made.num_samples == len(TEXT) // (SEQ_LEN - 2)
    assert (ids[:, 0] == CLS).all()
    assert (ids[:, -1] == SEP).all()
    told = torch.where(labels == IGNORE_INDEX, ids, labels)[:, 1:-1]
    assert told[1].tolist() == TEXT[3 * (SEQ_LEN - 2) : 4 * (SEQ_LEN - 2)].tolist()


@pytest.mark.parametrize(("mask_prob", "whole_words"), [(0.15, False), (0.4, False), (0.15, True)])
def test_shares_of_what_is_told(mask_prob: float, whole_words: bool) -> None:
    made = samples(mask_prob=mask_prob, whole_words=whole_words)
    numbers = range(600)
    ids, labels = made.batch([number % made.num_samples for number in numbers], numbers)
    assert isinstance(ids, torch.Tensor)
    assert isinstance(labels, torch.Tensor)
    told = labels != IGNORE_INDEX
    assert not told[:, [0, -1]].any(), "special tokens are never told"
    exact = round((SEQ_LEN - 2) * mask_prob)
    if whole_words:
        assert (told.sum(1) <= exact).all()
        assert (told.sum(1) >= 1).all()
    else:
        assert (told.sum(1) == exact).all()
    shown, label = ids[told], labels[told]
    count = len(shown)
    masked, same = float((shown == MASK).sum() / count), float((shown == label).sum() / count)
    # With a thousand draws or more, four standard deviations are below 0.03. One of 256 random tokens is the same.
    assert masked == pytest.approx(0.8, abs=0.03)
    assert same == pytest.approx(0.1 + 0.1 / 256, abs=0.03)
    others = shown[(shown != MASK) & (shown != label)]
    assert others.min() >= 4, "no special token takes the place of another"
    assert len(others.unique()) > min(100, len(others) // 3)
    places = Counter(torch.nonzero(told)[:, 1].tolist())
    assert len(places) == SEQ_LEN - 2, "every place is told at times"


def test_words_are_told_whole() -> None:
    made = samples(whole_words=True)
    ids, labels = made.batch(range(made.num_samples), range(made.num_samples))
    assert isinstance(labels, torch.Tensor)
    for row, shown in zip(labels.tolist(), ids, strict=True):
        text = [label if label != IGNORE_INDEX else int(id) for label, id in zip(row, shown, strict=True)]
        told = [label != IGNORE_INDEX for label in row]
        for place in range(2, SEQ_LEN - 1):
            inside = all(chr(text[at] - 4).isalpha() for at in (place - 1, place))
            assert not inside or told[place - 1] == told[place], "two letters of one word"


def test_pairs_follow_or_come_from_elsewhere() -> None:
    made = samples(pairs=True)
    numbers = range(400)
    indices = [number % made.num_samples for number in numbers]
    (ids, mask, types), (labels, classes) = made.batch(indices, numbers)  # type: ignore[misc]
    assert mask.min() == 1
    assert float(classes.float().mean()) == pytest.approx(0.5, abs=0.1)
    whole = torch.where(labels == IGNORE_INDEX, ids, labels)
    followed = 0
    for row, kinds, index, kind in zip(whole.tolist(), types.tolist(), indices, classes.tolist(), strict=True):
        middle = row.index(SEP)
        assert row[0] == CLS
        assert row[-1] == SEP
        assert kinds == [0] * (middle + 1) + [1] * (SEQ_LEN - middle - 1)
        text = row[1:middle] + row[middle + 1 : -1]
        source = TEXT[index * made.length : (index + 1) * made.length].tolist()
        assert text[: middle - 1] == source[: middle - 1]
        if kind == FOLLOWS:
            assert text == source
            followed += 1
        else:
            assert kind == ELSEWHERE
    assert followed


def test_the_number_and_the_seed_decide() -> None:
    first, again = samples(), samples()
    assert torch.equal(first.batch([5], [17])[0], again.batch([5], [17])[0])  # type: ignore[arg-type]
    together = first.batch([5, 6], [17, 18])[0]
    assert torch.equal(together[1:], again.batch([6], [18])[0])  # type: ignore[arg-type, index]
    assert not torch.equal(first.batch([5], [17])[0], first.batch([5], [18])[0])  # type: ignore[arg-type]
    assert not torch.equal(first.batch([5], [17])[0], samples(seed=2).batch([5], [17])[0])  # type: ignore[arg-type]


def test_roberta_s_padding_is_1() -> None:
    target = "transformers.RobertaForMaskedLM"
    found = vocabulary_of(MaskedTextData(), "", OtherModel(target=target, args={"config": {}}))
    assert dict(found.special) == {"pad": 1, "cls": 0, "sep": 2, "mask": 3}
    assert found.size == 260
