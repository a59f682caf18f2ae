"""Slurm node lists: its manuals' examples and random round trips; allocations of Slurm and PBS."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.cli.main import main
from dslpar.cluster.nodelist import MAX_HOSTS, compress, expand, first, pbs, slurm, tasks
from tests.support.lint import MODEL


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # from the manuals of Slurm::Hostlist, slurm.conf (NodeName) and pdsh
        ("node1,node[2-5,12]", "node1 node2 node3 node4 node5 node12"),
        ("lx[10-12]", "lx10 lx11 lx12"),
        ("linux[00-03]", "linux00 linux01 linux02 linux03"),
        ("foo[7-9,10]", "foo7 foo8 foo9 foo10"),
        ("foo[01-03,05]", "foo01 foo02 foo03 foo05"),
        (
            "rack[01-3]-node[01-2,5]",
            "rack01-node01 rack01-node02 rack01-node5 rack02-node01 rack02-node02 rack02-node5 "
            "rack03-node01 rack03-node02 rack03-node5",
        ),
        ("d[1-3],n[01-02]", "d1 d2 d3 n01 n02"),
        # and cases that they do not spell out
        ("login", "login"),
        ("a[9-11]", "a9 a10 a11"),
        ("a[09-11]", "a09 a10 a11"),
        ("a[099-101]", "a099 a100 a101"),
        ("a[5]", "a5"),
        ("[1-2]", "1 2"),
        ("a[1-2]-ib.site", "a1-ib.site a2-ib.site"),
        ("gpu[07-09,31],login1", "gpu07 gpu08 gpu09 gpu31 login1"),
    ],
)
def test_expand(text: str, names: str) -> None:
    assert expand(text) == names.split()
    assert first(text) == names.split()[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1-", "a[1-]", "a[-1]", "a[1,]", "a[b]", "a[1-2"),
        *("a[3-1]", "a[1-2-3]", "a[[1-2]]", "a]1[", f"a[0-{MAX_HOSTS}]", "a[0-9999999999999999]", "a[1-300]b[1-300]"),
        *("a[٣]", "a[1.5]", "a[0-65535,0-65535]"),
    ],
)
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a node list|not a list|not a range|more than"):
        expand(text)


def test_a_list_that_would_fill_memory_is_refused_before_it_does() -> None:
    with pytest.raises(ValueError, match=r"no range|more than"):
        expand("a" + "[0-60000]" * 50)
    assert len(expand(f"a[1-{MAX_HOSTS}]")) == MAX_HOSTS


NAMES = st.from_regex(r"[a-z]{1,3}([0-9]{1,4}(-[a-z]{1,2}([0-9]{1,2})?)?)?", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=30))
def test_there_and_back(names: list[str]) -> None:
    assert expand(compress(names)) == names


@given(st.text("ab", min_size=1, max_size=2), st.integers(0, 1200), st.integers(1, 40), st.integers(1, 4))
def test_a_range_there_and_back_is_short(before: str, low: int, count: int, width: int) -> None:
    """Any width works, even if numbers outgrow it."""
    names = [before + str(number).zfill(width) for number in range(low, low + count)]
    text = compress(names)
    assert expand(text) == names
    assert text.count("-") <= 1
    assert "," not in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("gpu07 gpu08 gpu09 gpu31 login1", "gpu[07-09,31],login1"),
        ("a9 a10", "a[9-10]"),
        ("a9 a010", "a[9,010]"),
        ("a1 b1 a2", "a1,b1,a2"),
        ("x x", "x,x"),
        ("n1-ib n2-ib n4-ib", "n[1-2,4]-ib"),
    ],
)
def test_compress(names: str, text: str) -> None:
    assert compress(names.split()) == text


# ---- allocations ----


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2),3", [4, 4, 3]), ("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x1)", [1, 2])]
)
def test_tasks(text: str, counts: list[int]) -> None:
    assert tasks(text) == counts


@pytest.mark.parametrize("text", ["", "4(2)", "4x2", "x", "4,,4", "-1"])
def test_what_are_no_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="SLURM_TASKS_PER_NODE"):
        tasks(text)


JOB = {"SLURM_JOB_NODELIST": "gpu[07-08],big1", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def test_a_slurm_job() -> None:
    assert slurm(JOB).hosts == (("gpu07", 4), ("gpu08", 4), ("big1", 2))
    old = {"SLURM_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2"}
    assert slurm(old).hosts == (("a", 2),)
    with pytest.raises(ValueError, match="3 nodes, but SLURM_TASKS_PER_NODE has 1"):
        slurm({**JOB, "SLURM_TASKS_PER_NODE": "4"})
    with pytest.raises(ValueError, match="not a Slurm job"):
        slurm({})


def test_a_pbs_job(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n2\nn2\nn1\nn2\n\n")
    assert pbs({"PBS_NODEFILE": str(file)}).hosts == (("n2", 3), ("n1", 1))
    with pytest.raises(ValueError, match="not a PBS job"):
        pbs({})


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cfg.py"
    path.write_text(MODEL)
    return str(path)


def test_hosts_of_the_job_that_this_runs_in(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**JOB, "SLURM_TASKS_PER_NODE": "4(x3)"}.items():
        monkeypatch.setenv(name, value)
    assert main(["show", config, "--hostfile", "slurm", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 12
    assert (
        main(["launch", config, "--hostfile", "slurm", "--exclude", "big1", "--launcher", "torchrun", "--print"]) == 0
    )
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("#")] == ["# for gpu07", "# for gpu08"]
    assert "--master_addr gpu07" in out


def launch(config: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return `dslpar launch`'s output without the command line."""
    assert main(["launch", config, "--world-size", "2", "--launcher", "torchrun", "--print", *words]) == 0
    return capsys.readouterr().err


def test_an_allocation_of_which_nothing_is_taken(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    cases: list[tuple[dict[str, str], str]] = [
        (JOB, "SLURM_JOB_NODELIST: gpu[07-08],big1\nhelp: --hostfile slurm\n"),
        ({"PBS_NODEFILE": str(tmp_path / "nodes")}, f"{tmp_path / 'nodes'}: n[1-2]\nhelp: --hostfile pbs\n"),
        ({"SLURM_JOB_NODELIST": "n3", "SLURM_TASKS_PER_NODE": "2"}, "SLURM_JOB_NODELIST: n3\n"),
    ]
    for environ, said in cases:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert f"HST223 unused-allocation [info]: all ranks start on this host, not on those of {said}" in launch(
                config, capsys
            )
            assert launch(config, capsys, "--hostfile", str(tmp_path / "hosts")) == ""
    alone = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    unreadable = {"PBS_NODEFILE": str(tmp_path / "gone")}
    for environ in ({}, alone, unreadable):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert launch(config, capsys) == ""


def test_srun_takes_its_job_s_hosts_by_itself(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It must not take a single host and leave the others idle."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in {**JOB, "SLURM_TASKS_PER_NODE": "4(x3)"}.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", config, "--launcher", "slurm", "--print"]) == 0
    said = capsys.readouterr()
    assert "srun --nodes 3 --ntasks 12 --ntasks-per-node 4 " in said.out
    assert "--nodelist 'gpu[07-08],big1' " in said.out
    assert "SOCKET_IFNAME" not in said.out, "nobody has asked those hosts"
    assert "HST223" not in said.err
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    with pytest.raises(SystemExit):
        main(["launch", config, "--launcher", "slurm", "--print"])
    assert "cannot parse SLURM_TASKS_PER_NODE: ''" in capsys.readouterr().err


def test_an_allocation_that_leaves_accelerators_idle(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sbatch --nodes 1 --gpus-per-node 8` makes such an allocation."""
    from dslpar.launch import local_facts

    monkeypatch.setattr(local_facts, "num_accelerators", lambda: 8)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    for tasks_, said in (("1", "1 ranks on localhost, which has 8 accelerators"), ("8", "")):
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks_)
        assert main(["launch", config, "--hostfile", "slurm", "--launcher", "torchrun", "--print"]) == 0
        err = capsys.readouterr().err
        assert said in err
        assert ("HST225" in err) == bool(said)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    assert main(["lint", config, "--hostfile", "slurm", "--world-size", "8"]) == 1
    assert "--world-size 1; or choose 8 tasks (sbatch --ntasks-per-node)" in capsys.readouterr().out


def test_a_port_of_this_host_that_is_taken(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["launch", config, "--world-size", "2", "--launcher", "torchrun", "--master-port", port]
        assert main(words) == 1
        assert f"HST216 port-taken: port {port} of this host is in use" in capsys.readouterr().err
        assert main([*words, "--print"]) == 0


SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}


def test_a_launcher_does_not_launch_once_a_rank(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", config, "--world-size", "1", "--launcher", "torchrun"]) == 1
    assert "HST228 launched-twice: Slurm started this as one of several processes" in capsys.readouterr().err
    assert launch(config, capsys) == "", "--print starts nothing"


def test_what_is_wrong_with_an_allocation_stands_at_its_variable(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert main(["lint", config, "--hostfile", "slurm"]) == 1
    out = capsys.readouterr().out
    assert "SLURM_JOB_NODELIST:1:1: HST103 unequal-slots: big1 has 2 slots, but gpu07 has 4" in out
    assert "gpu[07-08],big1" in out
