"""`@frozen`: behaves as a frozen dataclass for the standard library, pickle and its users."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest

from dslpar.core import frozen
from dslpar.core.mesh import Mesh, Tensor
from dslpar.models.gpt.section import GPT
from dslpar.schema.sections import Adam, AdamW, TensorParallel


def test_fields_defaults_and_inheritance() -> None:
    assert [field.name for field in fields(AdamW)] == [field.name for field in fields(Adam)]
    assert (AdamW().weight_decay, Adam().weight_decay, Adam(lr=1.0).lr) == (0.01, 0.0, 1.0)
    assert is_dataclass(Adam())


def test_equality_hash_and_repr() -> None:
    assert AdamW() == AdamW(lr=3e-4)
    assert AdamW() != Adam(weight_decay=0.01)
    assert hash(Mesh(pipe=2)) == hash(Mesh(pipe=2))
    assert repr(Tensor(y=2)).startswith("Tensor(d=1, q=1, y=2, z=1, mode=None")


def test_values_that_keep_their_hash_are_equal_by_their_fields() -> None:
    one, same, other = (Tensor(y=size) for size in (2, 2, 3))
    assert one == same != other
    assert len({one, same, other}) == 2  # from here on hashes are cached
    assert one == same != other
    assert one != (2,)
    lists = [TensorParallel(size=8, mode="cuboid", shape=[2, 2, size]) for size in (2, 2, 4)]  # type: ignore[arg-type]
    assert lists[0] == lists[1] != lists[2], "also where a program has given what has no hash"


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


@frozen.frozen
class Base:
    name: str
    tags: list[str] = frozen.field(default_factory=list, metadata={"of": "base"})


@frozen.frozen
class Heir(Base):
    name: str = "heir"
    size: int = frozen.field(default=2)


def test_our_own_fields_say_what_the_standard_library_does() -> None:
    for cls in (Heir, Base, AdamW, Mesh):
        ours, theirs = frozen.fields(cls), fields(cls)
        assert [(item.name, item.type, dict(item.metadata)) for item in ours] == [
            (item.name, item.type, dict(item.metadata)) for item in theirs
        ]
        assert [item.required for item in ours] == [
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING for item in theirs
        ]
    assert (Heir(), Heir().tags, Heir(tags=["a"]).size) == (Heir(name="heir"), [], 2)
    with pytest.raises(TypeError, match="needs name="):
        Base()  # type: ignore[call-arg]


def test_our_own_replace_and_is_frozen() -> None:
    mesh = Mesh(pipe=2, tensor=Tensor(y=2))
    assert frozen.replace(mesh, pipe=4) == replace(mesh, pipe=4)
    assert frozen.is_frozen(mesh)
    assert frozen.is_frozen(Mesh)
    assert not frozen.is_frozen(FrozenInstanceError)
    assert not frozen.is_frozen(4)


def test_a_kept_hash_is_no_part_of_a_value() -> None:
    tensor = Tensor(y=2, mode="1d")
    assert hash(tensor) == hash(Tensor(y=2, mode="1d"))
    for made in (pickle.loads(pickle.dumps(tensor)), copy.copy(tensor), frozen.replace(tensor, y=2)):
        assert vars(made).keys() == {item.name for item in frozen.fields(Tensor)}, "a hash of another process"
        assert made == tensor
        assert hash(made) == hash(tensor)
    assert hash(frozen.replace(tensor, y=4)) != hash(tensor)
