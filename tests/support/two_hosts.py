"""Two hosts on one machine, for launchers over ssh: each has its own network, name, processes, mounts and sshd.

    with two_hosts() as hosts:
        hostfile = hosts.hostfile(slots=4)                  # "host0 slots=4", "host1 slots=4"
        done = hosts.run(0, ["deepspeed", "--hostfile", hostfile, "train.py"])
        job = hosts.start(0, ["mpirun", ...], output=path)  # job.pid: what runs, to send it a signal
        hosts.cut(1), hosts.restore(1), hosts.kill(1)

A host is a process in its own namespaces. It dies with the process that asked for it, even by SIGKILL, and its network
and mounts go with it. So nothing is left over, and any number of pairs can run side by side. A third namespace is the
switch: host 0 keeps its link when host 1's is cut. Files are shared, as on a cluster's file system. ssh finds its keys
in private mounts, so nobody's ~/.ssh is read or written. This needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from tests.support.paths import ROOT
from tests.support.waiting import IDLE_S, wait, wait_until

BIN = Path(sys.executable).parent
PACKAGES = {
    "ip": "iproute2",
    "pdsh": "pdsh",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
}
"""Program -> its Debian package."""
SBIN = "/usr/sbin:/sbin"
Names = Literal["known", "loopback", "unknown"]
NOTHING: Mapping[str, str] = MappingProxyType({})
_BORN_S = 20

SSH_CONFIG = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 10
"""
SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
UseDNS no
MaxStartups 100
PidFile none
SetEnv {environ}
"""
BOOT = """\
set -e
hostname {name}
ip link set lo up
mount -t tmpfs tmpfs /run
mkdir /run/sshd
if test -d ~/.ssh; then mount -t tmpfs tmpfs ~/.ssh; fi
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount --bind {folder}/{name}.hosts /etc/hosts
until ip address show dev eth0 2>/dev/null | grep -q {address}; do sleep 0.02; done
exec "$(command -v sshd)" -D -e -f {folder}/{name}.sshd_config
"""


class Finished(NamedTuple):
    """A finished command."""

    status: int
    output: str


class Job(NamedTuple):
    """A command that runs on a host."""

    process: subprocess.Popen[bytes]
    """The process that entered the host and waits there; its status is the command's."""
    pid: int
    """The command's pid as seen from outside, to which signals are sent."""


def missing() -> str:
    """Return why two hosts cannot run here, and what to install; "" if they can."""
    if os.geteuid() != 0:
        return "two hosts need root, for namespaces"
    absent = {package for program, package in PACKAGES.items() if not shutil.which(program, path=_path(os.environ))}
    if absent:
        return f"two hosts need apt-get install {' '.join(sorted(absent))}"
    tried = subprocess.run(["unshare", "-n", "-u", "-m", "-p", "-f", "ip", "link"], capture_output=True, text=True)
    return f"two hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def two_hosts(*, names: Names = "known", **environ: str) -> Iterator[Hosts]:
    """Start two hosts that reach each other by ssh.

    `names`: whether both hosts know a host's name as its address; or the host itself knows it as 127.0.1.1, as on
    Debian, which torch's gloo fails on; or nobody knows it, and hostfiles contain addresses. `environ`: set for every
    ssh session, on top of the settings of tests.
    """
    assert not missing(), missing()
    with tempfile.TemporaryDirectory(prefix="dslpar_hosts_") as folder:
        hosts = Hosts(Path(folder), names, environ)
        try:
            hosts.boot()
            yield hosts
        finally:
            hosts.end()


class Hosts:
    """host0 and host1, and the switch between them."""

    names = ("host0", "host1")
    addresses = ("10.77.0.10", "10.77.0.11")

    def __init__(self, folder: Path, names: Names, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._names = names
        self._settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environ}
        self._switch: _Namespaces | None = None
        self._jobs: list[subprocess.Popen[bytes]] = []
        self._hosts: list[_Namespaces | None] = [None, None]

    # ---- for tests ----

    def environ(self, host: int) -> dict[str, str]:
        """Return the variables of commands on a host: this process's, with the Python environment's programs first."""
        return os.environ | {"PYTHONPATH": str(ROOT), "PATH": _path(os.environ)} | self._session(host)

    @property
    def called(self) -> tuple[str, str]:
        """Return the names by which the hosts know each other."""
        return self.addresses if self._names == "unknown" else self.names

    def hostfile(self, slots: int) -> str:
        """Return the path of a hostfile, which DeepSpeed and OpenMPI read alike."""
        path = self.folder / f"hostfile_{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.called))
        return str(path)

    def start(
        self,
        host: int,
        words: Sequence[str],
        output: Path,
        cwd: Path | str = ROOT,
        environ: Mapping[str, str] = NOTHING,
    ) -> Job:
        """Start a command on a host, in its own session, with `environ` on top of `self.environ(host)`."""
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*self._enter(host), f"--wd={cwd}", "--", *words],
                env=self.environ(host) | environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._jobs.append(process)
        return Job(process, _child(process))

    def run(
        self,
        host: int,
        words: Sequence[str],
        idle_s: float = IDLE_S,
        cwd: Path | str = ROOT,
        environ: Mapping[str, str] = NOTHING,
    ) -> Finished:
        """Run a command on a host to its end. Without progress for `idle_s`, everything that it may have started on
        both hosts is killed, and the test fails.
        """
        output = self.folder / f"output_{time.monotonic_ns()}"
        job = self.start(host, words, output, cwd, environ)
        try:
            status = wait(job.process, idle_s)
        except AssertionError as error:
            self.sweep()
            job.process.wait()
            raise AssertionError(f"{error}:\n{output.read_text(errors='replace')[-5000:]}") from None
        return Finished(status, output.read_text(errors="replace"))

    def processes(self, host: int) -> dict[int, list[str]]:
        """Return the processes on a host without sshd and its sessions: pid -> command line."""
        inside = self._hosts[host]
        return inside.processes() if inside else {}

    def sweep(self) -> None:
        """Kill all processes on the hosts."""
        for host in (0, 1):
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Cut a host off the network silently: no packet comes or goes."""
        self._on_switch("ip", "link", "set", f"port{host}", "down")

    def restore(self, host: int) -> None:
        """Put a host on the network again, newly booted if it had been killed."""
        if self._hosts[host] is None:
            self._boot_host(host)
        self._on_switch("ip", "link", "set", f"port{host}", "up")
        self._until_reachable(host)

    def kill(self, host: int) -> None:
        """Switch a host off, as without power: no connection is closed, no process ends in order."""
        inside, self._hosts[host] = self._hosts[host], None
        assert inside is not None, f"{self.names[host]} is down"
        self.cut(host)
        self._on_switch("ip", "link", "delete", f"port{host}")  # connections that wait for an answer would keep it
        inside.end()

    def shared_disk(self, path: Path | str, size_bytes: int) -> None:
        """Mount one file system of this size at `path` on both hosts. It is invisible outside of them."""
        assert self._switch is not None
        options = ("-t", "tmpfs", "-o", f"size={size_bytes}")
        self._done(["nsenter", "-t", str(self._switch.pid), "-m", "mount", *options, "tmpfs", str(path)])

    def small_disk(self, host: int, path: Path | str, size_bytes: int) -> None:
        """Mount a file system of this size at `path` on that host alone."""
        options = ("-t", "tmpfs", "-o", f"size={size_bytes}")
        self._done([*self._enter(host), "--", "mount", *options, "tmpfs", str(path)])

    # ---- their setup ----

    def boot(self) -> None:
        """Set up the switch, the keys and both hosts, and wait until each answers by ssh."""
        for name in ("key", "host_key"):
            self._done(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)])
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        # Hosts see what is mounted beside the switch, and not the other way round.
        self._switch = _Namespaces(("-n", "-m", "--propagation", "shared"), "exec sleep infinity")
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        for host in (0, 1):
            self._boot_host(host)
        for host in (0, 1):
            self._until_reachable(host)

    def end(self) -> None:
        """Remove the hosts completely."""
        for namespaces in (*self._hosts, self._switch):
            if namespaces is not None:
                namespaces.end()
        for process in self._jobs:
            process.wait()

    def _boot_host(self, host: int) -> None:
        assert self._switch is not None
        name, address = self.names[host], self.addresses[host]
        (self.folder / f"{name}.hosts").write_text("127.0.0.1 localhost\n" + self._known_to(name))
        self._temporary(host).mkdir(exist_ok=True)
        session = {"PATH": _path(os.environ), **self._session(host)}
        settings = " ".join(f'"{key}={value}"' for key, value in session.items())
        config = SSHD_CONFIG.format(folder=self.folder, environ=settings)
        (self.folder / f"{name}.sshd_config").write_text(config)
        script = BOOT.format(folder=self.folder, name=name, address=address)
        beside = ("nsenter", "-t", str(self._switch.pid), "-m")
        flags = ("-n", "-u", "-m", "--propagation", "slave", "-p", "--mount-proc")
        inside = self._hosts[host] = _Namespaces(flags, script, beside)
        port = f"port{host}"
        card = ("name", "eth0", "address", f"02:00:00:00:00:0{host}", "netns", str(inside.pid))  # a reboot keeps it
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", *card)
        self._on_switch("ip", "link", "set", port, "master", "bridge", "up")
        network = ["nsenter", "-t", str(inside.pid), "-n", "ip"]
        self._done([*network, "link", "set", "eth0", "up"])
        self._done([*network, "address", "add", f"{address}/24", "dev", "eth0"])

    def _session(self, host: int) -> dict[str, str]:
        """Return the variables of every session on a host."""
        return {"TMPDIR": str(self._temporary(host)), **self._settings}

    def _temporary(self, host: int) -> Path:
        """Return a host's own temporary folder: OpenMPI tells jobs apart by process ids, which two hosts may share."""
        return self.folder / f"tmp{host}"

    def _known_to(self, host: str) -> str:
        """Return a host's /etc/hosts."""
        known = dict(zip(self.names, self.addresses, strict=True)) if self._names != "unknown" else {}
        known |= {host: "127.0.1.1"} if self._names == "loopback" else {}
        return "".join(f"{address} {name}\n" for name, address in known.items())

    def _until_reachable(self, host: int) -> None:
        def answers() -> bool:
            words = [*self._enter(host), "--", "ssh", self.addresses[host], "true"]
            return subprocess.run(words, env=self.environ(host), capture_output=True).returncode == 0

        wait_until(answers, f"no sshd on {self.names[host]}")

    def _enter(self, host: int) -> list[str]:
        inside = self._hosts[host]
        assert inside is not None, f"{self.names[host]} is down"
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(inside.pid), "-n", "-u", "-m", "-p"]

    def _on_switch(self, *words: str) -> str:
        assert self._switch is not None
        return self._done(["nsenter", "-t", str(self._switch.pid), "-n", *words])

    def _done(self, words: Sequence[str]) -> str:
        done = subprocess.run(words, env=self.environ(0), capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout


class _Namespaces:
    """A process in its own namespaces, which end with it; it ends with this process."""

    def __init__(self, flags: Sequence[str], script: str, beside: Sequence[str] = ()) -> None:
        end_with_us = ["setpriv", "--pdeathsig", "KILL", *beside, "unshare", "--kill-child", "-f", *flags]
        environ = os.environ | {"PATH": _path(os.environ)}
        self._process = subprocess.Popen([*end_with_us, "sh", "-c", script], env=environ, stderr=subprocess.PIPE)
        self.pid = _child(self._process)
        """The pid of the namespaces' first process, as seen from outside."""

    def processes(self) -> dict[int, list[str]]:
        """Return all processes of the same pid namespace without sshd and its sessions."""
        mine, found = _namespace(self.pid), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and _namespace(int(entry.name)) == mine:
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
                    if words[0] and not words[0].startswith("sshd:") and int(entry.name) != self.pid:
                        found[int(entry.name)] = words
        return found

    def end(self) -> None:
        """Kill the first process; the kernel kills all others with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _child(process: subprocess.Popen[bytes]) -> int:
    """Return the only child of a process that was just started, as soon as it exists, or 0 if it ended without one."""
    path, children = Path(f"/proc/{process.pid}/task/{process.pid}/children"), list[str]()

    def has_child() -> bool:
        children[:] = path.read_text().split() if process.poll() is None else []
        return bool(children) or process.poll() is not None

    wait_until(has_child, "no child")
    return int(children[0]) if children else 0


def _path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join([str(BIN), environ.get("PATH", os.defpath), SBIN])
