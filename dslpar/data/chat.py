"""Chat samples: the assistant's answers are labels, all other text is context.

A sample is one conversation, padded at its end. With packing it has as many conversations as fit
(`dslpar.data.packing`), and each conversation has a number, so that attention stays within it. Labels are shifted by
one, so n tokens take n - 1 positions. Labels of tokens that are not learned are -100. The loss is the mean over the
learned labels of the global batch, whatever rank they are on. Longer conversations are cut at their end, as in TRL and
litgpt, and conversations without a remaining answer are dropped. Both are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.data.chat_source import ConversationRange
from dslpar.data.chat_template import Rendered, Renderer, TemplateProblemError
from dslpar.data.packing import best_fit_decreasing
from dslpar.data.tokens import Ids, vocabulary
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job
from dslpar.schema.chat_templates import template_of
from dslpar.schema.conversations import Line, parse
from dslpar.schema.datasets import ChatData
from dslpar.schema.vocabularies import Vocabulary

log = logging.getLogger("dslpar")
_BATCH = 512
"""Number of conversations that are encoded together, by all threads."""
_HINT_MARK = (
    "in a copy of the template, put {% generation %} and {% endgeneration %} around what the assistant says, and name "
    "it as data.template; or assistant_only_loss=False"
)


class Tokens(NamedTuple):
    """Tokens of a conversation."""

    ids: Ids
    is_learned: NDArray[np.bool_]
    """For each token, whether it is learned as a label."""


class ChatSamples:
    """Samples of conversations. Each conversation is cut to `seq_len` + 1 tokens.

    With `packing` a sample has as many conversations as fit, otherwise one. Samples are padded with `pad`.
    """

    all_counted = False
    """Labels outside the assistant's answers do not count in the loss."""

    def __init__(self, conversations: Iterable[Tokens], seq_len: int, packing: bool, pad: int = 0) -> None:
        self.seq_len, self.packing, self.pad = seq_len, packing, pad
        # Conversations that were cut, and conversations that were dropped since no answer was left.
        self.num_cut, self.num_without_answer = 0, 0
        kept: list[Tokens] = []
        for ids, is_learned in conversations:
            self.num_cut += len(ids) > seq_len + 1
            if is_learned[1 : seq_len + 1].any():
                kept.append(Tokens(ids[: seq_len + 1], is_learned[: seq_len + 1]))
            else:
                self.num_without_answer += 1
        # Flat, since a million small arrays take more memory than their elements.
        self._ids = np.concatenate([each.ids for each in kept]) if kept else np.zeros(0, np.uint16)
        self._is_learned = np.concatenate([each.is_learned for each in kept]) if kept else np.zeros(0, np.bool_)
        lengths = [len(each.ids) for each in kept]
        self._ends = np.cumsum([0, *lengths])
        places = [length - 1 for length in lengths]
        self._rows = best_fit_decreasing(places, seq_len) if packing else [[index] for index in range(len(kept))]
        self.num_conversations, self.num_samples = len(kept), len(self._rows)
        self.fill = sum(places) / max(self.num_samples * seq_len, 1)
        """Share of the samples' positions that is not padding."""

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Any, Tensor]:
        """Return inputs and labels, int64 [len(samples), seq_len]; `numbers` is unused, since nothing is random.

        With packing, inputs are (ids, documents). Documents are int32 numbers of conversations from 1, and 0 for
        padding.
        """
        shape = len(samples), self.seq_len
        ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        documents = np.zeros(shape, np.int32)
        for row, sample in enumerate(samples):
            start = 0
            for number, index in enumerate(self._rows[sample], 1):
                first, end = self._ends[index], self._ends[index + 1]
                stop = start + end - first - 1
                ids[row, start:stop] = self._ids[first : end - 1]
                is_learned = self._is_learned[first + 1 : end]
                labels[row, start:stop][is_learned] = self._ids[first + 1 : end][is_learned]
                documents[row, start:stop] = number
                start = stop
        found = torch.from_numpy(ids)
        # Padding comes last, and causal models do not attend to it, so a single conversation needs no mask.
        return (found, torch.from_numpy(documents)) if self.packing else found, torch.from_numpy(labels)


def chat_samples(job: Job, part: ConversationRange) -> ChatSamples:
    """Read, render and encode the conversations of a part, and log how many are used, cut and dropped.

    Raises:
        DslparError: the tokenizer or the template is unusable, or the template refuses a conversation.
    """
    data = job.spec.data
    assert isinstance(data, ChatData)
    found = vocabulary(job)
    made = ChatSamples(_encoded(job, data, part, found), job.seq_len, data.packing, found.special.get("pad", 0))
    which = "trained on" if part.training else "held out"
    rows = f" in {made.num_samples:,} rows" if data.packing else ""
    log.info(
        *(
            "%s conversations are %s%s; %.0f %% of the positions are not padding",
            f"{made.num_conversations:,}",
            which,
            rows,
        ),
        100 * made.fill,
    )
    if made.num_cut or made.num_without_answer:
        log.warning(
            "conversations %s: %s are truncated to seq_len + 1 = %s tokens; %s are left out, because no answer remains",
            *(which, f"{made.num_cut:,}", f"{job.seq_len + 1:,}", f"{made.num_without_answer:,}"),
        )
    return made


def _encoded(job: Job, data: ChatData, part: ConversationRange, found: Vocabulary) -> Iterator[Tokens]:
    ids = {} if found.tokenizer is None else found.tokenizer.ids
    special_ids = frozenset[int]() if found.tokenizer is None else found.tokenizer.special_ids
    special = [text for text, id in ids.items() if id in special_ids]
    render = Renderer(template_of(data, job.path), data.assistant_only_loss, special)
    encode = _encode_bytes if found.tokenizer is None else Encoder(found)
    lines = part.lines()
    while batch := list(islice(lines, _BATCH)):
        yield from encode([_render(job, render, line) for line in batch])


def _render(job: Job, render: Renderer, line: Line) -> Rendered:
    try:
        return render(parse(line.text))
    except TemplateProblemError as error:
        raise_finding("BAT219", f"{line.place}: {error}", _HINT_MARK, job.path, "data.template")
    except ValueError as error:
        hint = "correct that line, or choose another data.template"
        raise_finding("BAT219", f"{line.place}: {error}", hint, job.path, "data.files")


# ---- tokens ----


def _encode_bytes(texts: Sequence[Rendered]) -> Iterator[Tokens]:
    """Yield texts as tokens that are their UTF-8 bytes."""
    for text, spans in texts:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        is_learned = np.zeros(len(ids), np.bool_)
        for begin, end in spans:
            is_learned[len(text[:begin].encode()) : len(text[:end].encode())] = True
        yield Tokens(ids, is_learned)


class Encoder:
    """Encode texts with Hugging Face's tokenizers. A token is learned if any of its characters is."""

    def __init__(self, found: Vocabulary) -> None:
        from tokenizers import Tokenizer

        assert found.tokenizer is not None
        self.tokenizer = Tokenizer.from_file(found.tokenizer.path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.dtype = np.uint16 if found.size <= 1 << 16 else np.uint32

    def __call__(self, texts: Sequence[Rendered]) -> Iterator[Tokens]:
        # The template has already written the special tokens.
        encodings = self.tokenizer.encode_batch([each.text for each in texts], add_special_tokens=False)
        for encoding, (_, spans) in zip(encodings, texts, strict=True):
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            is_learned = np.zeros(len(begins), np.bool_)
            for begin, end in spans:
                is_learned |= (begins < end) & (ends > begin)
            yield Tokens(np.array(encoding.ids, self.dtype), is_learned)
