"""Queries about frozen dataclasses, and values that keep their hash."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

from dslpar.core.frozen import is_frozen, is_required
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.schema.sections import TensorParallel


@dataclass(frozen=True, kw_only=True)
class Base:
    name: str
    tags: list[str] = field(default_factory=list)
    size: int = 2


def test_a_field_without_a_default_is_required() -> None:
    assert [item.name for item in fields(Base) if is_required(item)] == ["name"]


def test_is_frozen() -> None:
    assert is_frozen(Mesh())
    assert is_frozen(Mesh)
    assert not is_frozen(FrozenInstanceError)
    assert not is_frozen(4)
    assert not is_frozen(dataclass(type("Thawed", (), {})))


def test_values_that_keep_their_hash_are_equal_by_their_fields() -> None:
    one, same, other = (TensorMesh(y=size) for size in (2, 2, 3))
    assert one == same != other
    assert len({one, same, other}) == 2  # from here on hashes are cached
    assert one == same != other
    assert one != (2,)
    lists = [TensorParallel(size=8, mode="cuboid", shape=[2, 2, size]) for size in (2, 2, 4)]  # type: ignore[arg-type]
    assert lists[0] == lists[1] != lists[2], "also if a program passes values without a hash"


def test_a_kept_hash_is_no_part_of_a_value() -> None:
    tensor = TensorMesh(y=2, mode="1d")
    assert hash(tensor) == hash(TensorMesh(y=2, mode="1d"))
    for made in (pickle.loads(pickle.dumps(tensor)), copy.copy(tensor), replace(tensor, y=2)):
        assert vars(made).keys() == {item.name for item in fields(TensorMesh)}, "a hash of another process"
        assert made == tensor
        assert hash(made) == hash(tensor)
    assert hash(replace(tensor, y=4)) != hash(tensor)
