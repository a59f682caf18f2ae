"""Whole models."""

from __future__ import annotations

from dslpar.comm import all_gather
from dslpar.groups import Groups
from dslpar.models import GPT, build_module
from tests.layers import dense
from tests.layers.proof import (
    FFN,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    Found,
    gradients,
    randomized,
    relative,
    tokens,
    whole,
)


def gpt_tied(groups: Groups) -> Found:
    yield from _gpt(groups, tie_embeddings=True)


def gpt_untied(groups: Groups) -> Found:
    yield from _gpt(groups, tie_embeddings=False)


def _gpt(groups: Groups, tie_embeddings: bool) -> Found:
    model = GPT(
        num_layers=2,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        max_seq_len=SEQUENCE,
        tie_embeddings=tie_embeddings,
        init_std=0.3,
    )
    module = randomized(build_module(model, groups, seed=3), groups)
    full = whole(module, groups)
    ids, labels = tokens()
    loss = model.loss(groups)(module(ids), labels)
    dense_loss = dense.cross_entropy(dense.gpt(full, ids, 2, HEADS), labels)
    loss.backward()
    dense_loss.backward()
    losses = all_gather(loss.detach()[None], groups.axis("tensor"))
    assert (losses == losses[0]).all(), "the loss differs between ranks of a tensor group"
    yield "loss", relative(loss, dense_loss)
    yield from gradients(module, full, groups)


CASES = (
    gpt_tied,
    gpt_untied,
)
