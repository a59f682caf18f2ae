"""Packed conversations in GPT: loss and every gradient as if each were alone, on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.models import GPT, build_module
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.data.chat import ChatSamples, Tokens

SEQ_LEN, VOCAB, CLOSE = 24, 60, 1e-12
MODEL = GPT(
    num_layers=2,
    hidden_size=48,
    num_heads=12,
    num_kv_heads=12,
    vocab_size=VOCAB,
    max_seq_len=SEQ_LEN,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    init_std=0.2,
)
NAMES = ("", "1d-2", "1d-sequence-2", "2d-4", "ring-2", "ulysses-2", "cuboid-1-2-2-sequence-batch", "3d-8")


def conversations() -> list[Tokens]:
    """Return sixteen conversations, from 2 tokens to more than a row holds."""
    random = np.random.default_rng(5)
    lengths = [2, 3, 25, 40, *random.integers(4, 20, 12)]
    learned = [random.random(length) < 0.4 for length in lengths]
    for each in learned:
        each[1] = True
    return [Tokens(random.integers(0, VOCAB, len(each)), each) for each in learned]


def whole_batch(packing: bool, rows: int) -> tuple[Any, Tensor]:
    """Return all samples as one micro-batch, filled up with rows of padding."""
    made = ChatSamples(conversations(), SEQ_LEN, packing)
    inputs, labels = made.batch(range(made.num_samples))
    more = rows - made.num_samples

    def filled(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, torch.full((more, SEQ_LEN), value, dtype=x.dtype)])

    inputs = tuple(filled(x, 0) for x in inputs) if packing else filled(inputs, 0)
    return inputs, filled(labels, -100)


def results(tensor: mesh.TensorMesh) -> dict[bool, tuple[float, dict[str, Tensor]]]:
    """Return the loss and this rank's gradients, packed and not."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    found = {}
    for packing in (False, True):
        module = build_module(MODEL, groups, seed=3)
        inputs, labels = whole_batch(packing, 16)
        loss = MODEL.loss(groups)(module(inputs), labels)
        torch.autograd.backward(loss)
        found[packing] = loss.item(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("layout", sampled(NAMES, {"", "1d-2"}))
def test_packed_is_as_if_alone(layout: str) -> None:
    tensor = LAYOUTS[layout] if layout else mesh.TensorMesh()
    ((expected, _),) = [on_ranks(1, results, mesh.TensorMesh())[0][False]]
    for found in on_ranks(tensor.size, results, tensor):
        (loss, alone), (packed_loss, packed) = found[False], found[True]
        assert loss == pytest.approx(expected, rel=CLOSE)
        assert packed_loss == pytest.approx(loss, rel=CLOSE)
        assert len(packed) > 10
        for name, gradient in alone.items():
            scale = max(gradient.abs().max().item(), 1e-3)
            assert (packed[name] - gradient).abs().max().item() <= CLOSE * scale, name


def test_a_table_of_positions_takes_no_documents() -> None:
    model = replace(MODEL, positions="learned")
    module = build_module(model, Groups(Mesh()), seed=3)
    with pytest.raises(DslparError, match="samples of several documents need rotary positions"):
        module(whole_batch(True, 16)[0])


def test_packing_saves_rows_and_documents_count() -> None:
    assert ChatSamples(conversations(), SEQ_LEN, packing=True).num_samples < 13
    torch.set_default_dtype(torch.float64)
    try:
        (ids, documents), labels = whole_batch(True, 16)
        groups = Groups(Mesh())
        module, loss = build_module(MODEL, groups, seed=3), MODEL.loss(groups)
        kept, mixed = (loss(module(inputs), labels).item() for inputs in ((ids, documents), ids))
    finally:
        torch.set_default_dtype(torch.float32)
    assert abs(kept - mixed) > 1e-3, "without documents, conversations of a row would see one another"
