"""Agent: the program that `dslpar launch` runs on each host, to inspect it before a job or to end a job's processes.

    python -m dslpar.launch.agent inspect '{"files": ["cfg.py"], ...}'  # print a HostReport as a line of JSON
    python -m dslpar.launch.agent listen 29500                          # accept connections until stdin ends
    python -m dslpar.launch.agent connect node1 29500                   # try to connect; print why that fails
    python -m dslpar.launch.agent signal JOB 9                          # send signal 9 to all processes of job JOB

It runs without torch. A job's processes are those with DSLPAR_JOB=JOB in their environment, so that no other process is
ever signalled. DeepSpeed's own launcher would end every DeepSpeed job on the host (`pkill -f`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from dslpar.cluster import network
from dslpar.core.version import VERSION
from dslpar.watchdog.processes import pids

JOB = "DSLPAR_JOB"
"""The environment variable that marks a job's processes."""
LISTENING = "dslpar listens"
"""The line that `listen` prints as soon as it listens."""
CANNOT_CONNECT = 1
"""The exit status of `connect` if it cannot connect. It also prints the reason."""
CONNECT_S = 5.0
"""Time to connect: a firewall that drops packets never answers."""


class Query(NamedTuple):
    """A query to one host."""

    files: list[str]
    """The config, and the files that it imports."""
    mark: str = ""
    """A file that the launching host has just written next to the output; empty: the shared folder is not checked."""
    peers: Sequence[str] = ()
    """Other hosts of the job, in order."""
    port: int = 0
    """The port at which rank 0 will listen on this host; 0: no port is checked."""
    paths: Sequence[str] = ()
    """Files and folders that a run reads: the data, a tokenizer, pretrained weights."""


class HostReport(NamedTuple):
    """Facts about a host."""

    host: str
    versions: dict[str, str]
    """Versions of python, dslpar (with a digest of its sources), torch and deepspeed; empty if missing."""
    digests: dict[str, str]
    """Digest of each file's contents; empty if it cannot be read."""
    folder: str
    """State of the folder with `Query.mark`: "shared", "not shared", or "not writable"."""
    port_is_free: bool
    """Whether `Query.port` is free."""
    free_port: int
    """Any free port."""
    accelerators: int
    cores: int
    interface: str
    """The network interface towards the other hosts; empty if none is found."""
    time_s: float
    """The host's clock, since the epoch."""
    missing: Sequence[str] = ()
    """Those of `Query.paths` that do not exist."""


def inspect(query: Query) -> HostReport:
    """Report on this host, without torch."""
    return HostReport(
        host=socket.gethostname(),
        versions=versions(),
        digests={path: digest(path) for path in query.files},
        folder=_folder_state(query.mark),
        port_is_free=not query.port or network.is_free(query.port),
        free_port=network.free_port(),
        accelerators=num_accelerators(),
        cores=num_cores(),
        interface=_interface_to_any(query.peers),
        time_s=time.time(),
        missing=[path for path in query.paths if not os.path.exists(path)],
    )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every host."""
    found = {"python": platform.python_version(), "dslpar": _own_version()}
    for name in ("torch", "deepspeed"):
        found[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _own_version() -> str:
    """Return dslpar's version and a digest of its sources, since checkouts of one version may differ."""
    package, total = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for folder in (package, package / "layers") for path in folder.rglob("*.py")):
        total.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return f"{VERSION}+{total.hexdigest()[:8]}"


def digest(path: str) -> str:
    """Return a digest of a file's contents; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _folder_state(mark: str) -> str:
    if mark and not Path(mark).exists():
        return "not shared"
    return "shared" if not mark or os.access(Path(mark).parent, os.W_OK | os.X_OK) else "not writable"


def _interface_to_any(peers: Sequence[str]) -> str:
    """Return the interface towards the first peer for which the system finds one; empty if it finds none.

    A peer's name may be unknown here, or mean a loopback address.
    """
    for peer in peers:
        with contextlib.suppress(OSError):
            if found := network.interface_to(peer):
                return found
    return ""


def num_cores() -> int:
    """Count the physical cores that this process may use. A core with hyper-threads counts once, as in mpirun.

    psutil counts either the physical cores of the machine or the logical cores of a process. A container may use only
    some of the machine's physical cores.
    """
    usable = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({path.read_text() for path in siblings if path.exists()}) or len(usable)


def num_accelerators() -> int:
    """Count NVIDIA GPUs by their device files. Other accelerators cannot be counted without torch."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


# ---- connections between hosts ----


def listen(port: int) -> None:
    """Accept connections until stdin ends, at the port that rank 0 will use, so that other hosts can try to connect."""
    with network.listen(port) as server, selectors.DefaultSelector() as selector:
        for file in (server, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        print(LISTENING, flush=True)
        while all(key.fileobj is server for key, _ in selector.select()):
            server.accept()[0].close()


def connect(address: str, port: int) -> str:
    """Connect to rank 0's port as a rank will; return the reason if that fails, else an empty string."""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---- processes of a job ----


def processes(job_id: str) -> Iterator[int]:
    """Yield the processes of a job on this host: its ranks, and the processes that started them.

    psutil's `environ` stops at the first empty entry. Programs that rewrite their process title leave empty entries.
    """
    for pid in pids():
        with contextlib.suppress(OSError):  # gone, or another user's
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and f"{JOB}={job_id}".encode() in environ:
                yield pid


def send_signal(job_id: str, number: int) -> int:
    """Send a signal to a job's processes; return their number."""
    count = 0
    for pid in processes(job_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def main(argv: Sequence[str]) -> int:
    """Run `inspect QUERY`, `listen PORT`, `connect ADDRESS PORT`, or `signal JOB NUMBER`."""
    if argv[0] == "inspect":
        print(json.dumps({"dslpar": inspect(Query(**json.loads(argv[1])))._asdict()}))
    elif argv[0] == "listen":
        listen(int(argv[1]))
    elif argv[0] == "connect":
        reason = connect(argv[1], int(argv[2]))
        print(reason)
        return CANNOT_CONNECT if reason else 0
    else:
        print(send_signal(argv[1], signal.Signals(int(argv[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
