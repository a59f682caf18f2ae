"""Span corruption, as T5 is trained (arXiv 1910.10683).

The encoder's input is the text with each span replaced by a sentinel. The decoder predicts each sentinel and its span:

    text      the quick brown fox jumps over
    encoder   the <0> fox <1> </s>
    decoder   <0> quick brown <1> jumps over </s>

All samples have the same numbers of tokens and spans. The positions of the spans are drawn from the run's seed and the
sample's number in the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dslpar.data.tokens import Ids, windows
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layers.parameter import stable_hash
from dslpar.schema.datasets import SpanTextData
from dslpar.schema.vocabularies import Vocabulary, span_lengths


class SpanSamples:
    """Samples of `ids` [tokens]: sample i is the i-th window of the text, with spans replaced by sentinels.

    `start` is the first id of the decoder's input. `all_counted` is as in `dslpar.data.order.Samples`: True if spans
    and sentinels fill the labels, so that none is padding.
    """

    def __init__(
        self, ids: Ids, vocabulary: Vocabulary, data: SpanTextData, seq_len: int, seed: int, start: int
    ) -> None:
        self.ids, self.vocabulary, self.seq_len, self.seed, self.start = ids, vocabulary, seq_len, seed, start
        self.lengths = span_lengths(data, seq_len)
        self.num_samples = len(ids) // self.lengths.text
        self.all_counted = self.lengths.is_full

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return (encoder ids, attention mask, decoder ids) and the decoder's labels, all int64.

        Encoder ids and mask are [len(samples), seq_len], decoder ids and labels are [len(samples), target length].
        `samples` are indices of windows. `numbers` are the samples' positions in the run, which seed their spans.
        """
        made = [self._sample(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        ids, mask, decoder, labels = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
        return (ids, mask, decoder), labels

    def _sample(self, sample: int, number: int) -> tuple[Ids, Ids, Ids, Ids]:
        random = np.random.default_rng(stable_hash("spans", self.seed, number) % 2**63)
        lengths, special = self.lengths, self.vocabulary.special
        text = windows(self.ids, [sample * lengths.text], lengths.text)[0]
        # The text alternates between stretches that stay and spans that the decoder predicts. Draw the lengths of both.
        kept = _partition(lengths.text - lengths.noise, lengths.spans, random)
        told = _partition(lengths.noise, lengths.spans, random)
        encoder: list[int] = []
        labels: list[int] = []
        at = 0
        for sentinel, keep, span in zip(self.vocabulary.sentinels, kept, told, strict=False):
            encoder += [*text[at : at + keep], sentinel]
            labels += [sentinel, *text[at + keep : at + keep + span]]
            at += keep + span
        encoder.append(special["eos"])
        labels.append(special["eos"])
        pad = special.get("pad", 0)
        decoder = [self.start, *labels[:-1]]
        mask = np.arange(self.seq_len) < len(encoder)
        return (
            _padded(encoder, self.seq_len, pad),
            mask.astype(np.int64),
            _padded(decoder, lengths.target, pad),
            _padded(labels, lengths.target, IGNORE_INDEX),
        )


def _partition(total: int, parts: int, random: np.random.Generator) -> list[int]:
    """Draw `parts` lengths of at least 1 with the sum `total`, uniformly among all such partitions."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    lengths: list[int] = np.diff(np.concatenate([[0], cuts, [total]])).astype(int).tolist()
    return lengths


def _padded(ids: Sequence[int], length: int, pad: int) -> Ids:
    return np.array([*ids, *[pad] * (length - len(ids))], np.int64)
