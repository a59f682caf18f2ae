"""A program's model by its import path: what is called with what, and what is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
from torch import nn

from dslpar.core.errors import DslparError
from dslpar.models.sequential import Sequential, SingleModule, Stage
from dslpar.training import program_model

JOB: Any = types.SimpleNamespace(path="cfg.py")
GROUPS: Any = object()


class Net(nn.Linear):
    """A class without required arguments."""

    def __init__(self, width: int = 2) -> None:
        super().__init__(width, width)


BUILT = nn.Sequential(nn.Linear(2, 2))


def of_groups(groups: Any) -> nn.Module:
    """Take what layers of dslpar.layers take."""
    assert groups is GROUPS
    return Net()


def of_run(run: Any, **more: Any) -> Stage:
    """Take what dslpar.prove passes."""
    assert run.job is JOB
    assert not more
    return Stage(Net())


def of_nothing() -> None:
    """Forget to return the model."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Net", SingleModule), ("BUILT", Sequential), ("of_groups", SingleModule), ("of_run", Stage)],
)
@pytest.mark.parametrize("mark", [".", ":"])
def test_classes_functions_and_modules(name: str, mark: str, kind: type) -> None:
    assert isinstance(program_model.builder(f"{__name__}{mark}{name}")(None, JOB, GROUPS), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (f"{__name__}.__name__", "CFG006", "is not the full name"),
        (f"{__name__}.nothing", "CFG006", "has no 'nothing'"),
        (f"{__name__}.JOB", "CFG233", "has the type SimpleNamespace, and is no model"),
        (f"{__name__}.of_nothing", "CFG233", "returned a value of type NoneType"),
        ("torch.nn.Linear", "CFG233", "needs the argument 'in_features'"),
        ("os.path.join", "CFG122", "standard library"),
    ],
)
def test_what_makes_no_model(name: str, code: str, message: str) -> None:
    with pytest.raises(DslparError) as caught:
        program_model.builder(name)(None, JOB, GROUPS)  # type: ignore[arg-type]
    (found,) = caught.value.findings
    assert (found.code, message in found.message) == (code, True), found
