"""GPT's loss and output from its logits, both without the columns that pad the vocabulary."""

from __future__ import annotations

import pytest
import torch

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers.loss import cross_entropy
from dslpar.models.gpt.model import GPT

VOCAB, COLUMNS = 6, 8
GROUPS = Groups(Mesh(), rank=0)


def _gpt() -> GPT:
    return GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=VOCAB, max_seq_len=4)


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, COLUMNS, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, VOCAB, (2, 4), generator=generator)


def test_columns_of_padding_are_in_no_softmax() -> None:
    logits, labels = _logits()
    logits[..., VOCAB:] = 9.0
    expected = torch.nn.functional.cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.flatten())
    assert cross_entropy(GROUPS, logits, labels, VOCAB).item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_program_s_criterion_is_given_the_vocabulary() -> None:
    logits, _ = _logits()
    assert torch.equal(_gpt().whole_output(GROUPS, logits), logits[..., :VOCAB])


def test_the_loss_is_over_the_tokens_of_all_micro_batches() -> None:
    """Labels may come with a divisor; otherwise the loss is their own mean."""
    logits, labels = _logits()
    loss = _gpt().loss(GROUPS)
    mean, share = loss(logits, labels), loss(logits, (labels, torch.tensor(32.0)))
    assert share.item() == pytest.approx(mean.item() * labels.numel() / 32, rel=1e-12)
