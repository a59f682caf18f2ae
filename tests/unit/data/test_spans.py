"""T5 spans by brute force: encoder and decoder restore the text, and lengths follow T5's own arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dslpar.data.spans import SpanSamples
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.schema.datasets import SpanTextData
from dslpar.schema.sections import OtherModel
from dslpar.schema.vocabularies import span_lengths, vocabulary_of

TEXT = (np.arange(40_000) * 7919 % 251).astype(np.uint16) + np.uint16(3)
PAD, END = 0, 1
T5 = OtherModel(target="transformers.T5ForConditionalGeneration", args={"config": {"vocab_size": 400}})


def samples(seq_len: int = 64, seed: int = 1, **data: Any) -> SpanSamples:
    section = SpanTextData(**data)
    return SpanSamples(TEXT, vocabulary_of(section, "", T5, seq_len), section, seq_len, seed, start=PAD)


@pytest.mark.parametrize("seq_len", [16, 64, 65, 128, 511])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.15, 1.0), (0.3, 8.0)])
def test_lengths(seq_len: int, density: float, mean: float) -> None:
    data = SpanTextData(noise_density=density, mean_span_length=mean)
    found = span_lengths(data, seq_len)
    assert found.noise == max(1, round(found.text * density))
    assert 1 <= found.spans <= min(found.noise, found.text - found.noise)
    assert found.text - found.noise + found.spans + 1 <= seq_len, "text, sentinels and an end fit"
    more = found.text + 1
    noise = round(more * density)
    spans = max(1, min(round(noise / mean), more - noise, noise))
    assert more - noise + spans + 1 > seq_len, "no more text would fit"
    assert found.target % 8 == 0
    assert found.target >= found.noise + found.spans + 1 > found.target - 8


def test_t5_s_own_lengths() -> None:
    # T5's random_spans_helper: inputs of 512 tokens come from 568 tokens of text, with targets of 114
    found = span_lengths(SpanTextData(), 512)
    assert (found.text, found.noise + found.spans + 1) == (568, 114)


@pytest.mark.parametrize("seq_len", [16, 64, 65])
def test_encoder_and_decoder_give_the_text_back(seq_len: int) -> None:
    made = samples(seq_len)
    sentinels = list(range(399, 399 - made.lengths.spans, -1))
    (ids, mask, decoder), labels = made.batch(range(50), range(100, 150))
    for index, row in enumerate(zip(ids.tolist(), mask.tolist(), decoder.tolist(), labels.tolist(), strict=True)):
        encoder, seen, given, told = row
        length = sum(seen)
        assert seen == [1] * length + [0] * (seq_len - length)
        assert encoder[length - 1] == END
        assert set(encoder[length:]) <= {PAD}
        counted = [label for label in told if label != IGNORE_INDEX]
        assert told == counted + [IGNORE_INDEX] * (len(told) - len(counted))
        assert counted[-1] == END
        assert given[: len(counted)] == [PAD, *counted[:-1]], "each token is told after those before it"
        assert [id for id in encoder if id in sentinels] == sentinels
        assert [id for id in counted if id in sentinels] == sentinels
        spans: dict[int, list[int]] = {}
        for id in counted[:-1]:
            spans.setdefault(id, []) if id in sentinels else spans[list(spans)[-1]].append(id)
        assert all(spans.values()), "no span is empty"
        text = [part for id in encoder[: length - 1] for part in spans.get(id, [id])]
        assert text == TEXT[index * made.lengths.text : (index + 1) * made.lengths.text].tolist()


def test_a_target_of_a_given_length_is_padded() -> None:
    made = samples(target_len=40)
    _, labels = made.batch([0], [0])
    assert labels.shape == (1, 40)
    assert not made.all_counted
    exact = samples(target_len=made.lengths.noise + made.lengths.spans + 1)
    assert exact.all_counted
    assert (exact.batch([0], [0])[1] != IGNORE_INDEX).all()


def test_the_number_and_the_seed_decide() -> None:
    made = samples()
    labels = made.batch([3, 4], [7, 8])[1]
    assert torch.equal(labels[1:], samples().batch([4], [8])[1])
    assert not torch.equal(labels[:1], made.batch([3], [8])[1])
    assert not torch.equal(labels[:1], samples(seed=2).batch([3], [7])[1])
    places = {tuple(made.batch([0], [number])[0][0][0].tolist()) for number in range(20)}
    assert len(places) == 20
