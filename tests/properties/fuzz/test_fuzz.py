"""Fuzzing: no input makes the linter crash, hang or act, and every finding has a place in the file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dslpar.core.errors import Finding, Location
from dslpar.linter import check as linter_check
from tests.properties.fuzz.check import MAX_CPU_S, Report, Watch, in_processes, load_everything, one, unsound
from tests.properties.fuzz.inputs import KINDS, MODEL, Input, sample
from tests.support.fake_world import in_forks

IN_TEST = 400
ALL = 100_000


def check(report: Report) -> None:
    """Print the slowest input, and fail with the first problem."""
    cpu_s, seed = report.slowest
    print(f"slowest: {cpu_s:.3f} s of CPU, sample({seed}); all: {report.cpu_s:.0f} s; {len(report.codes)} codes seen")
    assert not report.failures, "\n".join(map(str, report.failures[:10]))
    assert set(report.kinds) == set(KINDS)


def test_400_inputs(tmp_path: Path) -> None:
    check(in_processes(range(ALL, ALL + IN_TEST), tmp_path))


@pytest.mark.prove
@pytest.mark.minutes(10)
def test_100_000_inputs(tmp_path: Path) -> None:
    report = in_processes(range(ALL), tmp_path)
    check(report)
    assert sum(report.kinds.values()) == ALL
    assert len(report.codes) > 100, "too few rules are reached"


# ---- the measures can fail ----


def _seen(action: str) -> list[str]:
    """Return what the watch records of one action."""
    load_everything()
    watch = Watch()
    actions = {
        "write": lambda: open("CANARY", "w").close(),
        "read": lambda: open("/etc/hostname").close(),
        "run": lambda: subprocess.run(["true"], check=True),
        "exec": lambda: exec("1"),
        "import": lambda: __import__("this_is_no_module"),
        "config": lambda: linter_check.load("cfg.py"),
    }
    watch.on = True
    try:
        actions[action]()
    except (ImportError, OSError):
        pass
    finally:
        watch.on = False
    return watch.seen


@pytest.mark.parametrize("action", ["write", "read", "run", "exec", "import"])
def test_the_watch_sees(action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_forks(_seen, [action])[0]


def test_the_watch_lets_configs_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg.py").write_text(MODEL)
    assert in_forks(_seen, ["config"]) == [[]]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("cfg.py", 1, 1, 1, 6), None),
        (("cfg.py", 2, 1, 2, 1), None),
        (("cfg.py", 3, 1, 3, 1), "lines"),
        (("cfg.py", 1, 8, 1, 8), "line of"),
        (("cfg.py", 1, 4, 1, 2), "before"),
        (("other.py", 1, 1, 1, 1), "no file"),
    ],
)
def test_a_place_outside_of_its_file_is_seen(place: tuple[str, int, int, int, int], said: str | None) -> None:
    finding = Finding("CFG000", "a-name", "error", "said", "help", Location(*place))
    wrong = unsound(finding, {"cfg.py": "x = 1\n"}, Input(0, "", "cfg.py", b""))
    assert (said is None) == (wrong == [])
    assert said is None or said in wrong[0]


def test_samples_are_the_same_each_time() -> None:
    assert [sample(seed) for seed in range(50)] == [sample(seed) for seed in range(50)]


# ---- what it once found ----

FOUND = {
    "an override with ** in a dict": Input(0, "", "cfg.py", MODEL.encode(), ("x={**{}}", "zero={**{}, 'stage': 1}")),
    "an override of many levels": Input(0, "", "cfg.py", MODEL.encode(), ("a." * 30_000 + "b=1",)),
    "an override of many items, not of ASCII": Input(
        0, "", "cfg.py", MODEL.encode(), ("train.output_dir=['é'," + "0," * 40_000 + "]",)
    ),
    "counts of billions of layers": Input(
        0, "", "cfg.py", (MODEL + "parallel = dict(pipeline=dict(size=2, counts=[2**31, 1]))\n").encode()
    ),
    "a character that YAML refuses": Input(0, "", "cfg.yaml", b"a: \x1b\n"),
    "all divisors of a huge world": Input(
        0, "", "cfg.py", (MODEL + "zero = dict(stage=3, zero_hpz_partition_size=3)\n").encode(), world=2**31
    ),
}


def _tried(case: str) -> tuple[list[str], float]:
    load_everything()
    wrong, cpu_s, found = one(FOUND[case], Watch())
    return wrong + ([] if found else ["nothing is found"]), cpu_s


@pytest.mark.parametrize("case", FOUND)
def test_what_the_fuzzer_found(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, cpu_s = in_forks(_tried, [case])[0]
    assert wrong == []
    assert cpu_s < MAX_CPU_S
