"""Hostfiles: syntax of each launcher, errors, selecting hosts, and the shipped files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.cluster.filter import as_deepspeed, filter_hosts
from dslpar.cluster.hostfile import format_hosts, parse
from tests.support.lint import MODEL, findings
from tests.support.paths import ROOT

FILES = sorted((ROOT / "hostfiles").iterdir())
TWO = parse("node1 slots=4\nnode2 slots=4\n", "hosts")


def test_parse() -> None:
    cluster = parse("# comment\n\nnode1 slots=4\n  node2   slots=2 # spare\n", "hosts")
    assert [(host.name, host.slots, host.location.line) for host in cluster.hosts] == [("node1", 4, 3), ("node2", 2, 4)]
    assert cluster.hosts[1].slots_location[1:] == (4, 17, 4, 18)
    assert (cluster.world_size, cluster.bad_lines) == (6, ())


@pytest.mark.parametrize(
    ("text", "hosts", "for_deepspeed"),
    [
        ("n1 slots=4\n", [("n1", 4)], True),
        ("n1 slots=4 max_slots=8\nn2 slots=4 max-slots=4 # x\n", [("n1", 4), ("n2", 4)], True),
        ("me@n1 slots=4\n", [("me@n1", 4)], True),
        ("n1:4\nn2:4 # spare\n", [("n1", 4), ("n2", 4)], False),
        ("n1\nn2\n", [("n1", 1), ("n2", 1)], False),
        ("n1\nn1\nn2\nn1\nn2.site.org\n", [("n1", 3), ("n2", 1), ("n2.site.org", 1)], False),
        ("gpu[07-09,31] slots=2\n", [("gpu07", 2), ("gpu08", 2), ("gpu09", 2), ("gpu31", 2)], False),
        ("10.0.0.1 slots=1\n10.0.0.2:1\n", [("10.0.0.1", 1), ("10.0.0.2", 1)], False),
    ],
    ids=["DeepSpeed", "OpenMPI", "a user", "MPICH", "names", "PBS: a line a slot", "Slurm", "mixed"],
)
def test_each_launchers_syntax(text: str, hosts: list[tuple[str, int]], for_deepspeed: bool) -> None:
    cluster = parse(text, "hosts")
    assert [(host.name, host.slots) for host in cluster.hosts] == hosts
    assert cluster.bad_lines == ()
    assert cluster.readable_by_deepspeed == for_deepspeed
    again = parse(format_hosts(cluster.hosts), "hosts")
    assert [(host.name, host.slots) for host in again.hosts] == hosts
    assert again.readable_by_deepspeed


@pytest.mark.parametrize(
    "line",
    [
        "node1 4",
        "node1 slots=",
        "node1 slots=x",
        "node1 slots=4 max=8",
        "node1 slots=4 max_slots=2",
        "node1 slots = 4",
        "slots=4",
        "node1,node2 slots=4",
        "node1:",
        "node1:4:4",
        "gpu[3-1] slots=4",
        "gpu[0-999999999] slots=4",
        "gpu[1-2]",
        "[::1] slots=4",
    ],
)
def test_bad_lines(line: str) -> None:
    cluster = parse(f"good slots=1\n{line}\n", "hosts")
    assert [(bad.location.line, bad.text) for bad in cluster.bad_lines] == [(2, line)]
    assert [host.name for host in cluster.hosts] == ["good"]


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("localhost slots=8\n", None, []),
        ("localhost 8\n", 8, ["HST101"]),
        ("a slots=4\na slots=4\n", None, ["HST102"]),
        ("a slots=4\na\n", None, ["HST102", "HST103", "HST113"]),
        ("a slots=5\nb slots=3\n", None, ["HST103"]),
        ("a slots=0\n", 8, ["HST104", "HST105"]),
        ("# nobody\n", 8, ["HST104"]),
        ("a slots=4\n", 8, ["HST105"]),
        ("a\nb\n", None, ["HST113"]),
        ("a\na\nb\nb\n", None, []),
        ("a:4\nb:4\n", None, ["HST114"]),
        ("a[1-2] slots=4\n", None, ["HST114"]),
    ],
)
def test_rules(text: str, world: int | None, expected: list[str]) -> None:
    found = findings(MODEL, world, hostfile=text)
    assert sorted(finding.code for finding in found) == expected
    assert all(finding.location.path == "hosts" and finding.help for finding in found)


# ---- --include, --exclude ----


@pytest.mark.parametrize(
    ("flag", "text", "left", "again"),
    [
        ("--include", "node2", {"node2": None}, "node2"),
        ("--include", "node2@node1:2,0", {"node1": (0, 2), "node2": None}, "node1:0,2@node2"),
        ("--include", "node1:0@node1:1", {"node1": (0, 1)}, "node1:0,1"),
        ("--include", "node1:3,2,1,0", {"node1": None}, "node1"),
        ("--exclude", "node1", {"node2": None}, "node2"),
        ("--exclude", "node1:0@node2:1,2,3", {"node1": (1, 2, 3), "node2": (0,)}, "node1:1,2,3@node2:0"),
        ("--exclude", "node1:0,1,2,3", {"node2": None}, "node2"),
    ],
)
def test_a_choice(flag: str, text: str, left: dict[str, object], again: str) -> None:
    chosen = filter_hosts(TWO, text, flag)  # type: ignore[arg-type]
    assert chosen.filter_errors == ()
    assert {host.name: host.devices for host in chosen.hosts} == left
    assert chosen.filtered
    assert as_deepspeed(chosen.hosts) == again


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("--include", "node3", ["HST110 --include:1:1 unknown host node3"]),
        ("--include", "node1@nod2:9", ["HST110 --include:1:7 unknown host nod2"]),
        (
            "--exclude",
            "node1:4@node2:1,7",
            [
                "HST111 --exclude:1:1 node1 has no slot 4: it has 4 slots, numbered from 0",
                "HST111 --exclude:1:9 node2 has no slot 7: it has 4 slots, numbered from 0",
            ],
        ),
        ("--include", "node1,node2", ["HST112 --include:1:1 'node1,node2' selects nothing"]),
        (
            "--include",
            "node1:x@",
            ["HST112 --include:1:1 'node1:x' selects nothing", "HST112 --include:1:9 '' selects nothing"],
        ),
        ("--include", "node1:", ["HST112 --include:1:1 'node1:' selects nothing"]),
        ("--exclude", "node1@node2", ["HST112 --exclude:1:1 --exclude node1@node2 leaves no host"]),
    ],
)
def test_a_wrong_choice(flag: str, text: str, told: list[str]) -> None:
    """Every error is reported at its place, but none about the world, which is not the intended one."""
    found = findings(
        MODEL + "parallel = dict(pipeline=3)\n", None, hostfile=format_hosts(TWO.hosts), **{flag[2:]: text}
    )
    assert [f"{one.code} {one.location} {one.message}" for one in found] == told
    assert all(one.help for one in found)


def test_a_host_that_is_meant_is_named() -> None:
    (found,) = findings(MODEL, None, hostfile=format_hosts(TWO.hosts), include="node1@nod2")
    assert found.help == "did you mean 'node2'?"


def test_what_is_left_is_what_is_linted() -> None:
    """Different slots after the selection are an error, as in a hostfile."""
    found = findings(MODEL, None, hostfile=format_hosts(TWO.hosts), exclude="node1:0")
    assert [(one.code, one.location.path) for one in found] == [("HST103", "hosts")]


SLOTS = st.dictionaries(st.sampled_from([f"n{i}" for i in range(6)]), st.integers(1, 5), min_size=1)


@given(SLOTS, st.data())
def test_a_choice_and_its_opposite_share_the_cluster(slots: dict[str, int], data: st.DataObject) -> None:
    cluster = parse("".join(f"{name} slots={count}\n" for name, count in slots.items()), "hosts")
    every = [(name, slot) for name, count in slots.items() for slot in range(count)]
    some = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    text = "@".join(f"{name}:{slot}" for name, slot in some)

    def left(flag: str) -> set[tuple[str, int]]:
        chosen = filter_hosts(cluster, text, flag)  # type: ignore[arg-type]
        if chosen.filter_errors:
            return set()
        return {(host.name, slot) for host in chosen.hosts for slot in host.devices or range(host.slots)}

    assert left("--include") == set(some)
    assert left("--exclude") == set(every) - set(some)


@settings(deadline=None)  # the first example imports DeepSpeed
@given(SLOTS, st.data())
def test_deepspeed_chooses_the_same(slots: dict[str, int], data: st.DataObject) -> None:
    """DeepSpeed's own parser gets the arguments that dslpar passes."""
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    cluster = parse("".join(f"{name} slots={count}\n" for name, count in slots.items()), "hosts")
    names = data.draw(st.lists(st.sampled_from(list(slots)), min_size=1, unique=True))
    whole = {name: data.draw(st.booleans()) for name in names}
    text = "@".join(name if whole[name] else f"{name}:0" for name in names)
    for flag in ("--include", "--exclude"):
        theirs = parse_inclusion_exclusion(slots, *((text, "") if flag == "--include" else ("", text)))
        chosen = filter_hosts(cluster, text, flag)  # type: ignore[arg-type]
        ours = {} if chosen.filter_errors else {h.name: list(h.devices or range(h.slots)) for h in chosen.hosts}
        assert ours == dict(theirs)
        assert list(ours) == list(theirs), "the same order: ranks follow it"


# ---- shipped hostfiles ----


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_our_hostfiles(path: Path) -> None:
    text = path.read_text()
    cluster = parse(text, str(path))
    assert cluster.world_size == math.prod(int(size) for size in path.name.removesuffix("gpu").split("x"))
    assert findings(MODEL, None, hostfile=text) == []


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("# device: h100-80g\nnode1 slots=8\n", "h100-80g"),
        ("node1 slots=8\r\n  #device:a100-40g \r\n", "a100-40g"),
        ("node1 slots=8 # device: h100-80g\n", None),
        ("# the device: h100-80g\nnode1 slots=8\n", None),
        ("node1 slots=8\n", None),
    ],
)
def test_a_comment_names_the_device(text: str, device: str | None) -> None:
    cluster = parse(text, "hosts")
    assert cluster.device == device
    assert [host.name for host in cluster.hosts] == ["node1"]
    assert not cluster.bad_lines
