"""HST: the hostfile, its slots, and the choice of hosts; PERF101: tensor groups that cross hosts.

Examples are hostfiles, with the flags of the command line as comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.core.errors import Location
from dslpar.layout.divisors import divisors
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule

if TYPE_CHECKING:
    pass

_GRAMMAR = "one host a line: NAME slots=N"


@rule("HST101", "bad-hostfile-line")
def bad_hostfile_line(cx: Context) -> Iterator[Problem]:
    """A line of the hostfile that no launcher can parse.

    What it does:
        Checks each line against `NAME slots=N` (DeepSpeed, OpenMPI), `NAME:N` (MPICH), `NAME` (PBS: a slot a line), and
        `gpu[07-12,31] slots=N` (Slurm). Empty lines and comments are allowed.

    Why:
        Launchers fail at such a line when the job starts, or read only a part of it.

    Example:
        localhost slots=8
        other 8

    Use instead:
        localhost slots=4
        other slots=4
    """
    for line in cx.hosts.bad_lines:
        yield Problem(line.location, f"{line.text[:40]!r} {line.reason}", line.hint)


@rule("HST102", "host-twice")
def host_twice(cx: Context) -> Iterator[Problem]:
    """A duplicate host in the hostfile.

    What it does:
        Compares the names of the hosts.

    Why:
        DeepSpeed raises an error when the job starts.

    Example:
        localhost slots=4
        localhost slots=4

    Use instead:
        localhost slots=8
    """
    first: dict[str, int] = {}
    for host in cx.hosts.hosts:
        if host.name in first:
            message = f"duplicate host {host.name}, already on line {first[host.name]}"
            yield Problem(host.location, message, "one line a host, with all of its slots")
        first.setdefault(host.name, host.location.line)


@rule("HST103", "unequal-slots")
def unequal_slots(cx: Context) -> Iterator[Problem]:
    """Hosts with different numbers of slots.

    What it does:
        Checks that all hosts have as many slots as the first.

    Why:
        DeepSpeed's launcher computes local ranks as rank % slots, which is wrong if slots differ: two ranks would share
        one device.

    Example:
        node1 slots=5
        node2 slots=3

    Use instead:
        node1 slots=4
        node2 slots=4
    """
    hosts = [host for host in cx.hosts.hosts if host.slots]
    for host in hosts:
        if host.slots != hosts[0].slots:
            message = f"{host.name} has {host.slots} slots, and {hosts[0].name} has {hosts[0].slots}"
            yield Problem(host.slots_location, message, f"slots={min(one.slots for one in hosts)} on each")


@rule("HST104", "no-slots")
def no_slots(cx: Context) -> Iterator[Problem]:
    """A host without slots, or a hostfile without hosts.

    What it does:
        Checks that there is a host, and that each host has a slot.

    Why:
        A host without slots runs no rank.

    Example:
        localhost slots=0

    Use instead:
        localhost slots=8
    """
    cluster = cx.hosts
    if not cluster.hosts and not cluster.bad_lines:
        yield Problem(Location(cluster.path), "the hostfile has no hosts", _GRAMMAR)
    for host in cluster.hosts:
        if not host.slots:
            yield Problem(host.slots_location, f"{host.name} has no slots", "slots=1 or more, or leave the host out")


@rule("HST105", "slots-differ-from-the-world")
def slots_differ_from_the_world(cx: Context) -> Iterator[Problem]:
    """The number of slots differs from the requested world size.

    What it does:
        Compares the sum of the slots with --world-size, if both are given.

    Why:
        The launcher starts one rank a slot.

    Example:
        localhost slots=6  # --world-size 8

    Use instead:
        localhost slots=8  # --world-size 8
    """
    cluster, requested = cx.hosts, cx.requested_world_size
    if requested is not None and cluster.hosts and cluster.world_size != requested:
        message = f"{cluster.world_size} slots in all, and the world size is {requested}"
        slots = f"{requested} slots in all" if cluster.from_file else f"{requested} tasks (sbatch --ntasks-per-node)"
        yield Problem(cluster.hosts[-1].slots_location, message, f"{slots}, or --world-size {cluster.world_size}")


@rule("HST110", "no-such-host")
def no_such_host(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` names an unknown host.

    What it does:
        Looks for each named host in the hostfile, or in the scheduler's allocation.

    Why:
        DeepSpeed raises an error when the job starts.

    Example:
        node1 slots=4
        node2 slots=4  # --exclude nod2

    Use instead:
        node1 slots=4
        node2 slots=4  # --exclude node2
    """
    yield from _choices(cx, "host")


@rule("HST111", "no-such-slot")
def no_such_slot(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` names a slot that its host does not have.

    What it does:
        Compares the slots, which count from 0, with the host's number of slots.

    Why:
        DeepSpeed raises an error when the job starts.

    Example:
        node1 slots=4  # --include node1:2,4

    Use instead:
        node1 slots=4  # --include node1:2,3
    """
    yield from _choices(cx, "slot")


@rule("HST112", "bad-choice-of-hosts")
def bad_choice_of_hosts(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` cannot be parsed, or leaves no host.

    What it does:
        Parses the flag as DeepSpeed does: NAME, or NAME:SLOT,SLOT, and @ between hosts.

    Why:
        A job without hosts does not start.

    Example:
        node1 slots=4
        node2 slots=4  # --include node1,node2

    Use instead:
        node1 slots=4
        node2 slots=4  # --include node1@node2
    """
    yield from _choices(cx, "syntax")


def _choices(cx: Context, kind: str) -> Iterator[Problem]:
    return (Problem(one.location, one.message, one.hint) for one in cx.hosts.filter_errors if one.kind == kind)


@rule("HST113", "slots-unsaid", "warning")
def slots_unsaid(cx: Context) -> Iterator[Problem]:
    """Hosts without a number of slots.

    What it does:
        Finds lines that are only a name, unless a name is repeated, as in PBS's node file.

    Why:
        Launchers differ: OpenMPI takes a slot a core, MPICH one slot, and DeepSpeed rejects the line. dslpar counts one
        slot a line, and passes that on to each launcher.

    Example:
        node1
        node2

    Use instead:
        node1 slots=4
        node2 slots=4
    """
    alone = [host for host in cx.hosts.hosts if host.syntax == "name"]
    if alone and all(host.slots == 1 for host in alone):
        name = alone[0].name
        message = f"{name} has no slots=N, and counts as 1 (OpenMPI would take one a core, DeepSpeed reject the line)"
        yield Problem(alone[0].location, message, "NAME slots=N")


@rule("HST114", "not-for-deepspeed", "info")
def not_for_deepspeed(cx: Context) -> Iterator[Problem]:
    """A hostfile that `dslpar` can parse and `deepspeed --hostfile` cannot.

    What it does:
        Finds lines in the syntax of MPICH, PBS or Slurm.

    Why:
        `dslpar launch` passes the hosts to each launcher in that launcher's syntax; DeepSpeed by itself would reject
        the file.

    Example:
        node1:4
        node2:4

    Use instead:
        node1 slots=4
        node2 slots=4
    """
    cluster = cx.hosts
    other = [host for host in cluster.hosts if host.syntax in ("colon", "list")]
    if cluster.from_file and other:
        message = f"deepspeed --hostfile cannot parse line {other[0].location.line}; dslpar can"
        yield Problem(other[0].location, message, "NAME slots=N, if the file is also for DeepSpeed")


@rule("PERF101", "tensor-group-across-hosts", "warning")
def tensor_group_across_hosts(cx: Context) -> Iterator[Problem]:
    """A tensor group that crosses hosts.

    What it does:
        Checks that the slots of a host are a multiple of the tensor size.

    Why:
        Tensor parallelism communicates at every layer; between hosts that is an order of magnitude slower. Published
        runs lost 43 % of their speed from 8 to 16 ranks.

    Example:
        node1 slots=1
        node2 slots=1

    Use instead:
        localhost slots=2
    """
    size, hosts = cx.cuboid.size, cx.hosts.hosts
    slots = min((host.slots for host in hosts if host.slots), default=0)
    if size > 1 and len(hosts) > 1 and slots and slots % size:
        message = f"tensor groups of {size} ranks on hosts of {slots} slots: {_crossing(cx, size, slots)}"
        fitting = divisors(slots)
        yield cx.problem(cx.tensor_key, message, f"a size of {' or '.join(map(str, fitting[1:] or fitting))}")


def _crossing(cx: Context, size: int, slots: int) -> str:
    """Name the first group that crosses. The tensor axis is the fastest in both orders, so groups are runs of ranks."""
    first = slots // size * size
    hosts, last = cx.hosts.hosts, first + size - 1
    if any(host.slots != slots for host in hosts) or last // slots >= len(hosts):
        return "some groups cross hosts"
    return f"ranks {first} to {last} are on {hosts[first // slots].name} to {hosts[last // slots].name}"


RULES = (
    bad_hostfile_line,
    host_twice,
    unequal_slots,
    no_slots,
    slots_differ_from_the_world,
    no_such_host,
    no_such_slot,
    bad_choice_of_hosts,
    slots_unsaid,
    not_for_deepspeed,
    tensor_group_across_hosts,
)
