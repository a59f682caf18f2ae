"""Packed documents by policy against each document alone in plain transformers: logits, loss, every gradient.

The models have relative (rotary) positions, so a document gives the same result wherever it begins, apart from
rounding. transformers computes the angles in float32, so the reference has each document at its packed positions.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from torch.nn import functional

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from tests.support import layouts
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies import hf_parity
from tests.support import hugging_face as hf

CLOSE = 1e-12
"""As in test_families.py."""
FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt_neox", "mixtral")
NAMES = ("", "1d-2", "1d-sequence-2", "2d-4", "ring-2", "ulysses-2", "cuboid-1-2-2-sequence-batch", "3d-8")
WINDOWS = ("mistral", "gemma3")
"""Ring and Ulysses refuse them, packed or not."""
CELLS = [cell for cell in product(FAMILIES, NAMES) if not (cell[0] in WINDOWS and cell[1] in ("ring-2", "ulysses-2"))]


def documents() -> torch.Tensor:
    """Return document ids of four samples: one document, two, many with padding, and one of a single token."""
    at = torch.arange(hf_parity.SEQUENCE)
    kinds = [at * 0 + 1, 1 + (at >= 5).int(), (1 + at // 4) * (at < 10), 1 + (at >= 3).int() + (at >= 4).int()]
    return torch.stack(kinds).int()


@lru_cache
def alone(
    family: str,
) -> tuple[dict[str, torch.Tensor], hf_parity.Batch, hf_parity.Result]:
    """Return weights, a packed micro-batch, and plain transformers' results for its documents, one by one."""
    model, weights = hf.plain(hf.FAMILIES[family])
    numbers = documents()
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, model.config.vocab_size, numbers.shape, generator=generator)
    labels = torch.randint(0, model.config.vocab_size, numbers.shape, generator=generator)
    labels = labels.masked_fill(numbers == 0, hf_parity.IGNORED)
    logits = torch.zeros(*numbers.shape, model.config.vocab_size, dtype=torch.float64)
    with hf_parity.in_float64():
        for sample, row in enumerate(numbers):
            for number in set(row.tolist()) - {0}:
                own = row == number
                at = own.nonzero().T
                logits[sample, own] = model(ids[sample, own][None], position_ids=at, use_cache=False).logits[0]
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=hf_parity.IGNORED)
    torch.autograd.backward(loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    batch = hf_parity.Batch({"input_ids": ids, "attention_mask": numbers}, (labels,))
    return weights, batch, hf_parity.Result((logits.detach(),), loss.detach(), gradients)


def of_documents(result: hf_parity.Result) -> hf_parity.Result:
    """Return the result without logits of padding, which are not checked."""
    return result._replace(outputs=(result.outputs[0] * (documents() > 0).unsqueeze(-1),))


@pytest.mark.parametrize(
    ("family", "layout"), sampled(CELLS, {("llama", "1d-2"), ("gemma3", "2d-4"), ("llama", "ring-2")})
)
def test_packed_documents_are_as_if_alone(family: str, layout: str) -> None:
    weights, batch, expected = alone(family)
    tensor = layouts.LAYOUTS[layout] if layout else mesh.TensorMesh()

    def rank() -> dict[str, float]:
        found = hf_parity.by_policy(hf.subject(hf.FAMILIES[family]), weights, tensor, batch)
        return hf_parity.worst(of_documents(found), of_documents(expected))

    for found in on_ranks(tensor.size, rank):
        assert len(found) > 20
        assert {name: value for name, value in found.items() if not value <= CLOSE} == {}


def refused(family: str) -> str:
    batch = hf_parity.Batch({"input_ids": torch.zeros_like(documents()).long(), "attention_mask": documents()}, ())
    with pytest.raises(DslparError) as error:
        hf_parity.by_policy(hf.subject(hf.FAMILIES[family]), hf.plain(hf.FAMILIES[family])[1], mesh.TensorMesh(), batch)
    return str(error.value)


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_positions_of_a_mask_refuse_documents(family: str) -> None:
    (found,) = on_ranks(1, refused, family)
    assert "computes with padding masks, so it cannot take a mask of documents" in found


def test_documents_count() -> None:
    """The same ids taken as padding alone give another result."""
    weights, batch, expected = alone("llama")
    batch = batch._replace(inputs=batch.inputs | {"attention_mask": documents() > 0})

    def rank() -> dict[str, float]:
        return hf_parity.worst(
            hf_parity.by_policy(hf.subject(hf.FAMILIES["llama"]), weights, mesh.TensorMesh(), batch),
            expected,
        )

    (found,) = on_ranks(1, rank)
    assert found["loss"] > 1e-6
