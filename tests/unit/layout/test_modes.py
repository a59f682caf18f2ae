"""The cuboid of each mode of tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from dslpar import resolve
from dslpar.layout.resolve import Job
from dslpar.linter.check import load_text
from tests.support.lint import MODEL, PATH


def job_of(text: str, world: int = 8) -> Job:
    return resolve(load_text(MODEL + text, PATH), world)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("size=4, mode='1d'", dict(d=1, q=1, y=4, z=1, residual="replicated", keep="x", split="batch")),
        ("size=4, mode='1d', sequence=True", dict(y=4, residual="sequence")),
        ("size=4, mode='2d'", dict(d=1, q=2, y=2, z=1, residual="hidden", keep="x")),
        ("size=8, mode='2.5d', depth=2", dict(d=2, q=2, y=2, z=1, residual="hidden")),
        ("size=8, mode='3d'", dict(d=1, q=2, y=2, z=2, residual="batch", inner="batch", keep="none")),
        ("size=4, mode='sequence', impl='ulysses'", dict(d=4, y=1, split="sequence", impl="ulysses")),
        (
            "size=6, mode='cuboid', shape=[2, 3, 1]",
            dict(q=2, y=3, z=1, residual="hidden", inner="heads", keep="none"),
        ),
        ("size=4, mode='2d', keep='both'", dict(keep="both")),
    ],
)
def test_cuboid(tensor: str, expected: dict[str, Any]) -> None:
    world = 6 if "size=6" in tensor else 8
    cuboid = job_of(f"parallel = dict(tensor=dict({tensor}))\n", world).mesh.tensor
    assert {name: getattr(cuboid, name) for name in expected} == expected
