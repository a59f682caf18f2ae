"""Hostfiles: what DeepSpeed reads, what it does not, and the files that we ship."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dslpar.hostfile import parse
from tests.lint.helpers import MODEL, findings

FILES = sorted((Path(__file__).parents[1] / "hostfiles").iterdir())


def test_parse() -> None:
    cluster = parse("# comment\n\nnode1 slots=4\n  node2   slots=2 # spare\n", "hosts")
    assert [(host.name, host.slots, host.location.line) for host in cluster.hosts] == [("node1", 4, 3), ("node2", 2, 4)]
    assert cluster.hosts[1].slots_location[1:] == (4, 17, 4, 18)
    assert (cluster.world_size, cluster.bad_lines) == (6, ())


@pytest.mark.parametrize(
    "line", ["node1", "node1 4", "node1 slots=", "node1 slots=x", "node1 slots=4 max=8", "slots=4"]
)
def test_bad_lines(line: str) -> None:
    cluster = parse(f"good slots=1\n{line}\n", "hosts")
    assert [(bad.location.line, bad.text) for bad in cluster.bad_lines] == [(2, line)]


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("localhost slots=8\n", None, []),
        ("localhost 8\n", 8, ["HST101"]),
        ("a slots=4\na slots=4\n", None, ["HST102"]),
        ("a slots=5\nb slots=3\n", None, ["HST103"]),
        ("a slots=0\n", 8, ["HST104", "HST105"]),
        ("# nobody\n", 8, ["HST104"]),
        ("a slots=4\n", 8, ["HST105"]),
    ],
)
def test_rules(text: str, world: int | None, expected: list[str]) -> None:
    found = findings(MODEL, world, hostfile=text)
    assert sorted(finding.code for finding in found) == expected
    assert all(finding.location.path == "hosts" and finding.help for finding in found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_our_hostfiles(path: Path) -> None:
    text = path.read_text()
    cluster = parse(text, str(path))
    assert cluster.world_size == math.prod(int(size) for size in path.name.removesuffix("gpu").split("x"))
    assert findings(MODEL, None, hostfile=text) == []
