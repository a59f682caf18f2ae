"""Lines of a finding that lists the differences between two configs."""

from __future__ import annotations

import pytest

from dslpar.checkpoint import resume_changes
from dslpar.checkpoint.resume_changes import Change


@pytest.mark.parametrize(("count", "last"), [(12, "model.a11: saved 1, requested 2"), (14, "and 2 more")])
def test_differences_that_are_not_listed_are_counted(count: int, last: str) -> None:
    lines = resume_changes._lines([Change(f"model.a{number}", 1, 2) for number in range(count)])
    assert lines[0] == "model.a0: saved 1, requested 2"
    assert (len(lines), lines[-1]) == (min(count, 13), last)
