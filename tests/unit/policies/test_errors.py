"""Errors in transformers' code, as findings."""

from __future__ import annotations

import pytest
import torch

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.policies.errors import as_findings


@pytest.mark.parametrize("raised", [AttributeError("no n_heads"), RuntimeError("shape '[2]' is invalid\nmore")])
def test_an_error_of_code_is_a_finding(raised: Exception) -> None:
    with pytest.raises(DslparError, match=r"TEN234 .*blocks\.0 fails: \w+: \S+ \S+") as found, as_findings("blocks.0"):
        raise raised
    assert found.value.__cause__ is raised
    assert "more" not in found.value.findings[0].message


@pytest.mark.parametrize(
    "raised",
    [
        torch.OutOfMemoryError("of the device"),
        torch.distributed.DistNetworkError("peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        RuntimeError("CUDA error: an illegal memory access"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
)
def test_what_the_machine_says_is_left(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as found, as_findings("blocks.0"):
        raise raised
    assert found.value is raised


def test_a_finding_is_left() -> None:
    error = DslparError([finding("TEN234", "said")])
    with pytest.raises(DslparError) as found, as_findings("blocks.0"):
        raise error
    assert found.value is error
