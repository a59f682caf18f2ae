"""What `dslpar launch` runs on each host, without torch: looks around before a job, and ends what is left of one.

    python -m dslpar.launch.agent look '{"files": ["cfg.py"], ...}'     # prints a line of JSON, a Sight
    python -m dslpar.launch.agent listen 29500                          # at that port, until its own input ends
    python -m dslpar.launch.agent meet node1 29500                      # connects there; or prints why it cannot
    python -m dslpar.launch.agent signal JOB 9                          # to that job's processes, by their number

A job's processes are those whose environment says DSLPAR_JOB=JOB, so nothing else is ever met; DeepSpeed's own launcher
would end every DeepSpeed job of the host (`pkill -f`).
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

JOB = "DSLPAR_JOB"
"""The variable that tells a job's processes from all others."""
LISTENS = "dslpar listens"
"""What `listen` prints when it does."""
APART = 1
"""The exit status of a host that cannot connect; it prints why."""
MEET_S = 5.0
"""How long a connection may take; a firewall that drops packets says nothing at all."""


class Question(NamedTuple):
    """What to look at."""

    files: list[str]
    """The config, and what it imports."""
    mark: str = ""
    """A file that another host has just written; empty: nothing is shared."""
    towards: Sequence[str] = ()
    """Hosts of the job that are not this one, the first of them first."""
    port: int = 0
    """Where rank 0 is to listen, on this host; 0: elsewhere."""


class Sight(NamedTuple):
    """What a host has."""

    host: str
    versions: dict[str, str]
    """Of python, dslpar (with a digest of its sources), torch, deepspeed; empty where it is missing."""
    digests: dict[str, str]
    """File to a digest of what it holds; empty where it cannot be read."""
    folder: str
    """Of the mark: shared, not shared, not writable."""
    port_is_free: bool
    free_port: int
    accelerators: int
    cores: int
    interface: str
    """By which it meets the others; empty: by none that they could reach."""
    time_s: float
    """Since the epoch."""


def look(question: Question) -> Sight:
    """This host, without torch."""
    return Sight(
        host=socket.gethostname(),
        versions=versions(),
        digests={path: digest(path) for path in question.files},
        folder=_folder(question.mark),
        port_is_free=not question.port or network.is_free(question.port),
        free_port=network.free_port(),
        accelerators=num_accelerators(),
        cores=num_cores(),
        interface=_interface(question.towards),
        time_s=time.time(),
    )


def versions() -> dict[str, str]:
    """What must be the same on every host."""
    found = {"python": platform.python_version(), "dslpar": _own_version()}
    for name in ("torch", "deepspeed"):
        found[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _own_version() -> str:
    """Of this package: its number, and a digest of its sources, since a checkout may differ at one number."""
    from dslpar import __version__

    package, total = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for folder in (package, package / "layers") for path in folder.rglob("*.py")):
        total.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return f"{__version__}+{total.hexdigest()[:8]}"


def digest(path: str) -> str:
    """Of what the file holds; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _folder(mark: str) -> str:
    if not mark:
        return "shared"
    if not Path(mark).exists():
        return "not shared"
    return "shared" if os.access(Path(mark).parent, os.W_OK | os.X_OK) else "not writable"


def _interface(towards: Sequence[str]) -> str:
    """Towards the first that has one: a name may be unknown, or a loopback's."""
    for host in towards:
        with contextlib.suppress(OSError):
            if found := network.interface_to(host):
                return found
    return ""


def num_cores() -> int:
    """Those that this process may use; hyper-threads of one core are one, as mpirun counts them."""
    usable = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({path.read_text() for path in siblings if path.exists()}) or len(usable)


def num_accelerators() -> int:
    """NVIDIA's, by their device files; other accelerators are not counted without torch."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


# ---- whether hosts meet ----


def listen(port: int) -> None:
    """At the port where rank 0 will, so that the others can try it; until nobody is at the other end of stdin."""
    with network.listen(port) as server, selectors.DefaultSelector() as waits:
        for file in (server, sys.stdin):
            waits.register(file, selectors.EVENT_READ)
        print(LISTENS, flush=True)
        while all(key.fileobj is server for key, _ in waits.select()):
            server.accept()[0].close()


def meet(address: str, port: int) -> str:
    """Connects to rank 0's port as a rank will; why not, where that fails."""
    try:
        socket.create_connection((address, port), MEET_S).close()
    except TimeoutError:
        return f"no answer within {MEET_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---- what is left of a job ----


def processes(job: str) -> Iterator[int]:
    """The processes of a job on this host: its ranks, and what started them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                message = (entry / "environ").read_bytes().split(b"\0")
                if f"{JOB}={job}".encode() in message:
                    yield int(entry.name)


def send(job: str, number: int) -> int:
    """Sends the signal to them; how many there were."""
    count = 0
    for pid in processes(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def main(words: Sequence[str]) -> int:
    """`look QUESTION`, `listen PORT`, `meet ADDRESS PORT`, or `signal JOB NUMBER`."""
    if words[0] == "look":
        print(json.dumps({"dslpar": look(Question(**json.loads(words[1])))._asdict()}))
    elif words[0] == "listen":
        listen(int(words[1]))
    elif words[0] == "meet":
        why = meet(words[1], int(words[2]))
        print(why)
        return APART if why else 0
    else:
        print(send(words[1], signal.Signals(int(words[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
