"""Preflight checks of a job's hosts: the message for each problem; and ending a job's leftovers.

The first tests use made-up hosts, the last ones two real hosts over ssh (tests/system/two_hosts).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslpar.cluster import network, ssh
from dslpar.cluster.hostfile import parse
from dslpar.core.errors import Finding
from dslpar.launch import agent, host_findings, preflight
from dslpar.launch.agent import HostReport
from dslpar.launch.host_findings import HostChecks, HostResult
from tests.support.runs import ROOT, write_config
from tests.support.stopwatch import Stopwatch
from tests.support.two_hosts import Hosts, missing, two_hosts
from tests.support.waiting import wait, wait_until

HOSTS = parse("node1 slots=4\nnode2 slots=4\n", "hosts").hosts
VERSIONS = agent.versions()
GOOD = HostReport("node", VERSIONS, {}, "shared", True, 40000, 4, 8, "eth0", 0.0)
CHECKS = HostChecks(files=(), output_dir="out")


def found(second: HostReport, checks: HostChecks = CHECKS, skew_s: float = 0.0) -> list[Finding]:
    """Return the findings if the first host is fine, and the second is as given."""
    results = (HostResult(HOSTS[0], GOOD), HostResult(HOSTS[1], second, skew_s=skew_s))
    return list(host_findings.all_findings(results, checks))


def test_nothing_is_said_of_hosts_that_are_alike() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("second", "code", "said", "help_"),
    [
        (
            GOOD._replace(versions={**VERSIONS, "torch": "1.0.0"}),
            "HST212",
            "node2 has torch 1.0.0, but this",
            "same env",
        ),
        (GOOD._replace(versions={**VERSIONS, "deepspeed": ""}), "HST212", "node2 has deepspeed (none)", "same env"),
        (GOOD._replace(folder="not shared"), "HST214", "does not see what this host writes to out", "output_dir="),
        (GOOD._replace(folder="not writable"), "HST214", "may not write to out", "output_dir="),
        (GOOD._replace(accelerators=2), "HST206", "node2 has 2 accelerators, but the hostfile asks for 4", "slots=2"),
        (GOOD._replace(accelerators=0), "HST206", "node2 has 0 accelerators, but the hostfile asks for 4", "driver"),
        (GOOD._replace(interface=""), "HST217", "node2 has no network interface that the other", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_host_that_differs(second: HostReport, code: str, said: str, help_: str) -> None:
    (finding,) = found(second)
    assert finding.code == code
    assert said in finding.message
    assert help_ in finding.help
    assert (finding.location.path, finding.location.line) == ("hosts", 2)


def test_the_config_is_compared_file_by_file(tmp_path: Path) -> None:
    for name in ("cfg.py", "base.py"):
        (tmp_path / name).write_text(name)
    files = [str(tmp_path / "cfg.py"), str(tmp_path / "base.py")]
    there = {path: agent.digest(path) for path in files}
    checks = HostChecks(files=files, output_dir="out")
    results = [HostResult(HOSTS[0], GOOD._replace(digests=there))]
    one_missing = GOOD._replace(digests={files[0]: "", files[1]: "another"})
    said = [one.message for one in host_findings.all_findings((*results, HostResult(HOSTS[1], one_missing)), checks)]
    assert said == [f"node2 has no file {files[0]}", f"node2 has another {files[1]} than this host"]


def test_accelerators_count_only_where_they_are_used() -> None:
    assert found(GOOD._replace(accelerators=2), HostChecks(files=(), output_dir="out", on_cpu=True)) == []
    none = GOOD._replace(accelerators=0)
    assert list(host_findings.all_findings((HostResult(HOSTS[0], none), HostResult(HOSTS[1], none)), CHECKS)) == [], (
        "no host has one"
    )


def test_a_user_on_a_host_is_no_part_of_what_others_look_for() -> None:
    hosts = parse("me@node1 slots=4\nme@node2 slots=4\n", "hosts").hosts
    assert [preflight._query(hosts, number, CHECKS, "").peers for number in (0, 1)] == [["node2"], ["node1"]]


@pytest.mark.parametrize(("skew_s", "said"), [(1.5, None), (-1.5, None), (90.0, "90 s ahead of"), (-7.0, "7 s behind")])
def test_clocks(skew_s: float, said: str | None) -> None:
    findings = found(GOOD, skew_s=skew_s)
    assert [one.code for one in findings] == (["HST215"] if said else [])
    assert all(one.severity == "warning" and str(said) in one.message for one in findings)


def test_a_clock_is_off_only_beyond_what_passed_meanwhile() -> None:
    assert [preflight._skew(there, 100.0, 103.0) for there in (101.0, 100.0, 103.0, 105.5, 96.0)] == [0, 0, 0, 2.5, -4]


def test_a_port_that_is_taken_is_told_where_it_was_asked_for() -> None:
    results = (HostResult(HOSTS[0], GOOD._replace(port_is_free=False)), HostResult(HOSTS[1], GOOD))
    (finding,) = host_findings.all_findings(results, HostChecks(files=(), output_dir="out", port=29500))
    assert (finding.code, finding.message) == ("HST216", "port 29500 of node1 is in use, perhaps by another job")
    assert "--master-port 40000" in finding.help
    assert list(host_findings.all_findings(results, CHECKS)) == []


@pytest.mark.parametrize(
    ("status", "stderr", "code", "said", "help_"),
    [
        (
            255,
            "ssh: Could not resolve hostname node2: Name or service not known",
            "HST211",
            "a name that",
            "/etc/hosts",
        ),
        (255, "ssh: connect to host node2 port 22: Connection refused", "HST211", "refuses ssh", "sshd"),
        (255, "ssh: connect to host node2 port 22: Connection timed out", "HST211", "does not answer", "is it up"),
        (255, "ssh: connect to host node2 port 22: No route to host", "HST211", "no route", "is it up"),
        (255, "me@node2: Permission denied (publickey).", "HST211", "without a password", "ssh-copy-id node2"),
        (255, "Host key verification failed.", "HST211", "unknown or a changed host key", "ssh node2, once"),
        (255, "kex_exchange: something else", "HST211", "something else", "ssh node2"),
        (97, "sh: cd: can't cd to /x", "HST213", "has no folder", "shared file system"),
        (127, "env: python: No such file or directory", "HST212", "has no ", "same path"),
        (1, "/bin/python: No module named dslpar", "HST212", "has no dslpar", "same path"),
        (1, "Traceback\nImportError: libx.so", "HST212", "cannot run dslpar: ImportError: libx.so", "node2"),
    ],
)
def test_why_a_host_did_not_answer(status: int, stderr: str, code: str, said: str, help_: str) -> None:
    finding = host_findings.failure_of(HOSTS[1], status, f"a banner\n{stderr}\n")
    assert finding.code == code
    assert said in finding.message
    assert help_ in finding.help
    assert finding.location == HOSTS[1].location


SAYS = {
    "latin-1": ("printf 'Gr\\374\\337e\\n' >&2; exit 255", "HST211", "cannot be reached: Gr"),
    "of another dslpar": (
        """echo '{"dslpar": {"host": "n", "versions": {"dslpar": "9.9+0"}, "new": 1}}'""",
        "HST212",
        "node2 has dslpar 9.9+0, but this host has another version",
    ),
    "nothing": ("exit 0", "HST212", "cannot run dslpar: status 0"),
}


@pytest.mark.parametrize("what", SAYS)
def test_whatever_a_host_says_is_a_finding(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, code, said = SAYS[what]
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    one = preflight._inspect(HOSTS[1], agent.Query([]), CHECKS)
    assert one.failure is not None
    assert one.failure.code == code
    assert said in one.failure.message


# ---- hosts that meet ----


@pytest.mark.parametrize(
    ("first", "said"), [("localhost", []), ("none.invalid", ["127.0.0.1 cannot connect to none.invalid:{}: Name or"])]
)
def test_hosts_meet_by_the_name_that_ranks_use(first: str, said: list[str]) -> None:
    hosts = parse(f"{first} slots=1\n127.0.0.1 slots=1\n", "hosts").hosts
    port = network.free_port()
    checks = HostChecks(files=(), output_dir="out", local_hosts=frozenset({first, "127.0.0.1"}))
    found = list(preflight._cannot_connect(hosts, port, checks))
    assert [one.message.startswith(text.format(port)) for one, text in zip(found, said, strict=True)] == [True] * len(
        said
    )
    assert all((one.code, one.location.line) == ("HST224", 2) for one in found)
    assert network.is_free(port)


def test_nobody_listens() -> None:
    assert agent.connect("127.0.0.1", network.free_port()) == "Connection refused"


# ---- identity of this host ----


def test_this_machine_by_its_names_and_addresses() -> None:
    for name in ("localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()):
        assert network.is_here(name), name
    for name in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid"):
        assert not network.is_here(name), name


# ---- a host's own report ----


def test_this_host(tmp_path: Path) -> None:
    file = tmp_path / "cfg.py"
    file.write_text("a = 1\n")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        report = agent.inspect(agent.Query([str(file), str(tmp_path / "none")], port=port))
    assert not report.port_is_free
    assert network.is_free(report.free_port)
    assert report.versions == VERSIONS
    assert report.versions["dslpar"].count("+") == 1
    assert (len(report.digests[str(file)]), report.digests[str(tmp_path / "none")]) == (64, "")
    assert agent.inspect(agent.Query([], mark=str(file))).folder == "shared"
    assert agent.inspect(agent.Query([], mark=str(tmp_path / "none"))).folder == "not shared"


def test_a_host_reports_the_paths_that_it_lacks(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    report = agent.inspect(agent.Query([], paths=[str(tmp_path), gone]))
    assert report.missing == [gone]
    result = HostResult(HOSTS[1], GOOD._replace(missing=[gone]))
    (found,) = host_findings.all_findings([result], CHECKS)
    assert (found.code, found.message) == ("BAT201", f"{HOSTS[1].name} has no {gone}, which the config names")


def test_no_mark_is_left(tmp_path: Path) -> None:
    (host,) = parse("localhost slots=1\n", "hosts").hosts
    checked = preflight.check_hosts(
        (host,), HostChecks(files=(), output_dir=str(tmp_path / "runs" / "a"), local_hosts=frozenset({"localhost"}))
    )
    assert checked.findings == ()
    assert list(tmp_path.iterdir()) == [], "nor a folder"
    assert checked.port
    assert checked.table().count("\n") == 2


def test_an_output_folder_that_this_host_cannot_write_to() -> None:
    """Other hosts, which were not asked, have no finding."""
    (host,) = parse("localhost slots=1\n", "hosts").hosts
    checks = HostChecks(files=(), output_dir="/proc/none/out", local_hosts=frozenset({"localhost"}))
    (found,) = preflight.check_hosts((host,), checks).findings
    assert (found.code, found.message.partition(": ")[0]) == ("HST214", "this host may not write to /proc/none/out")


def test_a_visit_imports_no_torch() -> None:
    code = "import sys, dslpar.launch.agent; sys.exit(any(n in sys.modules for n in ('torch', 'deepspeed', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_command_for_another_host_is_quoted() -> None:
    command = ssh.command("node2", ["echo", "a b", "$HOME"], {"A": "b c"}, "/my folder")
    assert command[-1] == "cd '/my folder' || exit 97; exec env 'A=b c' echo 'a b' '$HOME'"


def test_a_signal_finds_the_processes_of_its_job_alone() -> None:
    def sleeper(job: str, **environ: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, agent.JOB: job, **environ})

    mine, rank, other = sleeper("one"), sleeper("one", RANK="0"), sleeper("one1")
    try:
        wait_until(lambda: len(list(agent.processes("one"))) == 2, "not two processes")
        assert agent.send_signal("one", signal.SIGKILL) == 2
        assert [process.wait(10) for process in (mine, rank)] == [-signal.SIGKILL] * 2
        assert other.poll() is None
    finally:
        for process in (mine, rank, other):
            process.kill()
            process.wait()


# ---- two real hosts ----


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def check(hosts: Hosts, config: Path, hostfile: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dslpar.cli", "launch", str(config), "--hostfile", hostfile, "--check", *words]
    done = hosts.run(0, command)
    return done.status, done.output


def test_hosts_that_are_ready(hosts: Hosts, tmp_path: Path) -> None:
    status, said = check(hosts, write_config(tmp_path), hosts.hostfile(2), f"train.output_dir={tmp_path / 'out'}")
    assert status == 0, said
    rows = [line.split() for line in said.splitlines() if line.startswith("host")]
    assert [row[0] for row in rows] == ["host", "host0", "host1"]
    assert [row[-2:] for row in rows[1:]] == [["eth0", "ok"]] * 2
    assert rows[1][1:] == rows[2][1:]
    assert said.splitlines()[-1] == "ready for 4 ranks"


def test_hosts_that_do_not_meet(hosts: Hosts, tmp_path: Path) -> None:
    """ssh works, but rank 0's port is closed."""
    port = str(network.free_port())
    rule = ["ipproto", "tcp", "dport", port, "prohibit"]
    assert hosts.run(1, ["ip", "rule", "add", *rule]).status == 0
    try:
        words = ("--master-port", port, f"train.output_dir={tmp_path / 'out'}")
        status, said = check(hosts, write_config(tmp_path), hosts.hostfile(2), *words)
    finally:
        hosts.run(1, ["ip", "rule", "delete", *rule])
    assert status == 1, said
    assert f":2:1: HST224 cannot-meet: host1 cannot connect to host0:{port}: Permission denied" in said


def test_a_kernel_that_binds_to_any_address_does_not_make_all_hosts_this_one(hosts: Hosts) -> None:
    code = "open('/proc/sys/net/ipv4/ip_nonlocal_bind', 'w').write('1'); from dslpar.cluster import network; "
    code += "print([network.is_here(name) for name in ('host0', '10.77.0.10', 'host1', '10.77.0.11')])"
    done = hosts.run(0, [sys.executable, "-c", code])
    assert done.output == "[True, True, False, False]\n"


def test_all_that_is_wrong_is_told_at_once(hosts: Hosts, tmp_path: Path) -> None:
    """An unknown name, an address without a host, and a host whose config folder is another one."""
    folder = tmp_path / "apart"
    folder.mkdir()
    config, hostfile = write_config(folder), tmp_path / "hosts"
    hostfile.write_text("host0 slots=2\nhost1 slots=2\nhost7 slots=2\n10.77.0.77 slots=2\n")
    hosts.small_disk(1, folder, 1_000_000)
    watch = Stopwatch()
    status, said = check(hosts, config, str(hostfile), "batch.global_size=8", f"train.output_dir={folder / 'out'}")
    assert status == 1, said
    assert f"{hostfile}:2:1: HST213 config-differs-there: host1 has no file {config}" in said
    assert f"{hostfile}:2:1: HST214 output-not-shared: host1 does not see" in said
    assert f"{hostfile}:3:1: HST211 unreachable-host: host7 has a name that is unknown here" in said
    assert f"{hostfile}:4:1: HST211 unreachable-host: 10.77.0.77 cannot be reached: no route" in said
    assert watch.alone_s() < 30, "side by side"


def test_steps_of_a_script_that_sets_what_torch_wants(hosts: Hosts, tmp_path: Path) -> None:
    """RANK, WORLD_SIZE and LOCAL_RANK are set, but not the number of ranks per host: they still meet by the network."""
    code = "import os; from dslpar.distributed import bootstrap; place = bootstrap.read_distributed_env(os.environ); "
    code += "print(place.local_size < 2, bootstrap._gloo_environment(place, os.environ))"
    said = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host0", "MASTER_PORT": "29555"}
    done = hosts.run(1, [sys.executable, "-c", code], environ=said)
    assert done.output == "True {'GLOO_SOCKET_IFNAME': 'eth0'}\n"


def test_what_is_left_of_a_job_elsewhere_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    mine = hosts.start(1, ["sleep", "60"], tmp_path / "mine", environ={agent.JOB: "mine"})
    other = hosts.start(1, ["sleep", "61"], tmp_path / "other", environ={agent.JOB: "other"})
    code = "from dslpar.launch import preflight; preflight.signal_job(['host1', 'host7'], 'mine', 9, timeout_s=20)"
    assert hosts.run(0, [sys.executable, "-c", code]).status == 0
    assert wait(mine.process) in (-9, 137)
    assert other.process.poll() is None
    other.process.kill()
    hosts.sweep()
