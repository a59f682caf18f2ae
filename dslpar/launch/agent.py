"""What `dslpar launch` runs on each host, without torch: inspects the host before a job, and ends what is left of one.

    python -m dslpar.launch.agent inspect '{"files": ["cfg.py"], ...}'  # prints a line of JSON, a HostReport
    python -m dslpar.launch.agent listen 29500                          # at that port, until its own input ends
    python -m dslpar.launch.agent connect node1 29500                   # connects there; or prints why it cannot
    python -m dslpar.launch.agent signal JOB 9                          # to that job's processes, by their number

A job's processes are those whose environment says DSLPAR_JOB=JOB, so that no other process is ever signalled;
DeepSpeed's own launcher would end every DeepSpeed job of the host (`pkill -f`).
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
from dslpar.watchdog.processes import pids

JOB = "DSLPAR_JOB"
"""The variable that tells a job's processes from all others."""
LISTENING = "dslpar listens"
"""What `listen` prints when it does."""
CANNOT_CONNECT = 1
"""The exit status of `connect` where it cannot; it prints why."""
CONNECT_S = 5.0
"""How long a connection may take; a firewall that drops packets gives no answer at all."""


class Query(NamedTuple):
    """What a host is asked about."""

    files: list[str]
    """The config, and what it imports."""
    mark: str = ""
    """A file that another host has just written; empty: nothing is shared."""
    peers: Sequence[str] = ()
    """Hosts of the job that are not this one, the first of them first."""
    port: int = 0
    """Where rank 0 is to listen, on this host; 0: on another."""


class HostReport(NamedTuple):
    """What a host has."""

    host: str
    versions: dict[str, str]
    """Of python, dslpar (with a digest of its sources), torch, deepspeed; empty where it is missing."""
    digests: dict[str, str]
    """File to a digest of its contents; empty where it cannot be read."""
    folder: str
    """Of the mark: shared, not shared, not writable."""
    port_is_free: bool
    free_port: int
    accelerators: int
    cores: int
    interface: str
    """The network interface towards the other hosts; empty: none that they could reach."""
    time_s: float
    """Since the epoch."""


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
    )


def versions() -> dict[str, str]:
    """Return what must be the same on every host."""
    found = {"python": platform.python_version(), "dslpar": _own_version()}
    for name in ("torch", "deepspeed"):
        found[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _own_version() -> str:
    """Return dslpar's version and a digest of its sources, since checkouts of one version may differ."""
    from dslpar.core.version import VERSION

    package, total = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for folder in (package, package / "layers") for path in folder.rglob("*.py")):
        total.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return f"{VERSION}+{total.hexdigest()[:8]}"


def digest(path: str) -> str:
    """Return a digest of a file's contents; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _folder_state(mark: str) -> str:
    if mark and not Path(mark).exists():
        return "not shared"
    return "shared" if not mark or os.access(Path(mark).parent, os.W_OK | os.X_OK) else "not writable"


def _interface_to_any(peers: Sequence[str]) -> str:
    """Return the interface to the first that has one: a name may be unknown, or a loopback's."""
    for peer in peers:
        with contextlib.suppress(OSError):
            if found := network.interface_to(peer):
                return found
    return ""


def num_cores() -> int:
    """Count the cores that this process may use; hyper-threads of one core are one, as mpirun counts them.

    psutil counts the machine's physical cores, and logical ones of a process; a job in a container has a part of both.
    """
    usable = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({path.read_text() for path in siblings if path.exists()}) or len(usable)


def num_accelerators() -> int:
    """Count NVIDIA's, by their device files; other accelerators are not counted without torch."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


# ---- whether hosts can connect ----


def listen(port: int) -> None:
    """Accept connections where rank 0 will, so that other hosts can try, until nobody is at the other end of stdin."""
    with network.listen(port) as server, selectors.DefaultSelector() as selector:
        for file in (server, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        print(LISTENING, flush=True)
        while all(key.fileobj is server for key, _ in selector.select()):
            server.accept()[0].close()


def connect(address: str, port: int) -> str:
    """Connect to rank 0's port as a rank will; return why not, where that fails."""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---- what is left of a job ----


def processes(job_id: str) -> Iterator[int]:
    """Find the processes of a job on this host: its ranks, and what started them.

    Not by psutil's `environ`, which ends at the first empty entry: programs that rewrite their title leave some.
    """
    for pid in pids():
        with contextlib.suppress(OSError):  # gone, or another user's
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and f"{JOB}={job_id}".encode() in environ:
                yield pid


def send_signal(job_id: str, number: int) -> int:
    """Send a signal to a job's processes; return how many there were."""
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
