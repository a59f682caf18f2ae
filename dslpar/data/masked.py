"""Masked language modelling, as BERT and RoBERTa are trained (arXiv 1810.04805, 1907.11692).

A sample is [CLS] text [SEP]. For next-sentence prediction it is [CLS] A [SEP] B [SEP]. All samples have `seq_len`
tokens. The prediction targets are drawn from the run's seed and the sample's number in the run. So they do not depend
on the layout, differ between epochs, and are the same after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dslpar.data.tokens import Ids, ordinary_ids, windows, word_starts
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layers.parameter import stable_hash
from dslpar.schema.datasets import MaskedTextData
from dslpar.schema.vocabularies import Vocabulary

FOLLOWS, ELSEWHERE = 0, 1
"""Classes of B: it follows A in the text, or comes from elsewhere. The numbers are those of BertForPreTraining."""
_MASKED, _OTHER = 0.8, 0.9
"""Cumulative shares of the prediction targets: 80 % become the mask token, the next 10 % another token."""


class MaskedSamples:
    """Samples of `ids` [tokens]: sample i is the i-th window of the text, with special tokens added.

    With `pairs`, the window is split into A and B for next-sentence prediction. About half of the samples get a random
    B.
    """

    all_counted = False
    """Only labels of prediction targets count in the loss."""

    def __init__(
        self, ids: Ids, vocabulary: Vocabulary, data: MaskedTextData, seq_len: int, seed: int, pairs: bool
    ) -> None:
        self.ids, self.vocabulary, self.data, self.seed, self.pairs = ids, vocabulary, data, seed, pairs
        self.length = seq_len - (3 if pairs else 2)
        """Number of text tokens in a sample."""
        self.num_samples = len(ids) // self.length
        self.ordinary = ordinary_ids(vocabulary)

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor | tuple[Tensor, ...], object]:
        """Return ids and labels, int64 [len(samples), seq_len]; a label of -100 is not counted.

        `samples` are indices of windows. `numbers` are the samples' positions in the run, which seed their targets.
        With `pairs`, return (ids, attention mask, token types) and (labels, classes of B [len(samples)]).
        """
        made = [self._sample(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        ids, labels, types, classes = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
        if not self.pairs:
            return ids, labels
        return (ids, torch.ones_like(ids), types), (labels, classes)

    def _sample(self, sample: int, number: int) -> tuple[Ids, Ids, Ids, np.int64]:
        """Return ids, labels and token types [seq_len], and the class of B."""
        random = np.random.default_rng(stable_hash("mask", self.seed, number) % 2**63)
        text = windows(self.ids, [sample * self.length], self.length)[0]
        pieces, kind = [text], FOLLOWS
        if self.pairs:
            middle = int(random.integers(self.length // 4, self.length - self.length // 4 + 1))
            middle = min(max(middle, 1), self.length - 1)
            pieces = [text[:middle], text[middle:]]
            if random.random() < 0.5:
                size = self.length - middle
                kind, start = ELSEWHERE, int(random.integers(len(self.ids) - size + 1))
                pieces[1] = windows(self.ids, [start], size)[0]
        special, sep = self.vocabulary.special, [self.vocabulary.special["sep"]]
        parts: list[Ids] = [np.array([special["cls"]])]
        starts: list[Ids] = [np.zeros(1, np.bool_)]
        for piece in pieces:
            parts += [piece, np.array(sep)]
            starts += [word_starts(piece, self.vocabulary), np.zeros(1, np.bool_)]
        types = np.zeros(sum(map(len, parts)), np.int64)
        types[len(types) - len(pieces[-1]) - 1 :] = len(pieces) - 1
        is_text = np.concatenate([np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)])
        ids = np.concatenate(parts).astype(np.int64)
        masked, labels = self._mask(ids, is_text, np.concatenate(starts), random)
        return masked, labels, types, np.int64(kind)

    def _mask(self, ids: Ids, is_text: Ids, starts: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
        """Return the ids with masks, and the labels."""
        chosen = self._choose(is_text, starts, random)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        labels[chosen] = ids[chosen]
        draws = random.random(len(chosen))
        others = self.ordinary[random.integers(len(self.ordinary), size=len(chosen))]
        kept = np.where(draws < _OTHER, others, ids[chosen])
        masked = ids.copy()
        masked[chosen] = np.where(draws < _MASKED, self.vocabulary.special["mask"], kept)
        return masked, labels

    def _choose(self, is_text: Ids, starts: Ids, random: np.random.Generator) -> Ids:
        """Return the positions to predict: a share of the text, at least one. Whole words stay within the share."""
        (places,) = np.nonzero(is_text)
        count = max(1, round(len(places) * self.data.mask_prob))
        if not self.data.whole_words:
            return np.sort(random.permutation(places)[:count])
        words = np.split(places, np.nonzero(starts[places])[0][1:])
        chosen: list[Ids] = []
        left = count
        for index in random.permutation(len(words)):
            # A word that would exceed the share is skipped, unless nothing is chosen yet.
            if len(words[index]) <= left or not chosen:
                chosen.append(words[index])
                left -= len(words[index])
            if left <= 0:
                break
        return np.sort(np.concatenate(chosen))
