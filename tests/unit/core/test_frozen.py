"""`@frozen` is a frozen dataclass for the standard library, for pickle, and for its users."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest

from dslpar.core.mesh import Mesh, Tensor
from dslpar.models.gpt.section import GPT
from dslpar.schema.sections import Adam, AdamW


def test_fields_defaults_and_inheritance() -> None:
    assert [field.name for field in fields(AdamW)] == [field.name for field in fields(Adam)]
    assert (AdamW().weight_decay, Adam().weight_decay, Adam(lr=1.0).lr) == (0.01, 0.0, 1.0)
    assert is_dataclass(Adam())


def test_equality_hash_and_repr() -> None:
    assert AdamW() == AdamW(lr=3e-4)
    assert AdamW() != Adam(weight_decay=0.01)
    assert hash(Mesh(pipe=2)) == hash(Mesh(pipe=2))
    assert repr(Tensor(y=2)).startswith("Tensor(d=1, q=1, y=2, z=1, mode=None")


def test_replace_and_pickle() -> None:
    mesh = Mesh(pipe=2, tensor=Tensor(y=2))
    assert replace(mesh, pipe=4).pipe == 4
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_what_is_refused() -> None:
    with pytest.raises(FrozenInstanceError):
        Mesh().pipe = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del Mesh().pipe  # type: ignore[misc]
    with pytest.raises(TypeError, match="no field layers"):
        GPT(num_layers=1, hidden_size=1, num_heads=1, vocab_size=1, max_seq_len=1, layers=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs num_layers="):
        GPT(hidden_size=1, num_heads=1, vocab_size=1, max_seq_len=1)  # type: ignore[call-arg]
