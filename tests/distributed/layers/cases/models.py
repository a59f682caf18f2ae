"""Whole models."""

from __future__ import annotations

from typing import Any

from dslpar.distributed.groups import Groups
from dslpar.layers import Placement
from dslpar.models import GPT, build_module
from tests.support import dense
from tests.support.compare_dense import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUERY_HEADS,
    SEQUENCE,
    VOCAB,
    Found,
    note_copy,
    proven,
    randomized,
    relative,
    tokens,
    whole,
)


def gpt_tied(groups: Groups) -> Found:
    yield from _gpt(groups, {"num_heads": HEADS})


def gpt_untied(groups: Groups) -> Found:
    yield from _gpt(groups, {"num_heads": HEADS, "tie_embeddings": False})


def gpt_llama(groups: Groups) -> Found:
    form = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "rope_theta": 100.0, "bias": False}
    heads = {"num_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS}
    yield from _gpt(groups, heads | form | {"tie_embeddings": False}, num_kv_heads=KV_HEADS, theta=100.0)


def _gpt(groups: Groups, fields: dict[str, Any], **of_attention: Any) -> Found:
    model = GPT(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        max_seq_len=SEQUENCE,
        init_std=0.3,
        **fields,
    )
    module = randomized(build_module(model, groups, seed=3), groups)
    full = whole(module, groups)
    ids, labels = tokens()

    def once(step: int) -> Found:
        loss = model.loss(groups)(module(ids), labels)
        dense_loss = dense.cross_entropy(dense.gpt(full, ids, 2, model.num_heads, **of_attention), labels)
        loss.backward()
        dense_loss.backward()
        note_copy(loss, Placement(groups.tensor, (), ()), groups)
        yield "loss", relative(loss, dense_loss)

    yield from proven(groups, module, full, once)


CASES = (
    gpt_tied,
    gpt_untied,
    gpt_llama,
)
