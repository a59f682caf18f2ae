"""HST: the hostfile, its slots, and the selection of hosts; PERF101: tensor groups that cross hosts.

The examples on the pages of these rules are hostfiles. A comment in an example has the flags of the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dslpar.core.errors import Location
from dslpar.layout.divisors import divisors
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule

_GRAMMAR = "one host per line: NAME slots=N"


@rule("HST101", "bad-hostfile-line")
def bad_hostfile_line(cx: Context) -> Iterator[Problem]:
    """A line of the hostfile cannot be parsed."""
    for line in cx.world.hosts.bad_lines:
        yield Problem(line.location, f"{line.text[:40]!r} {line.reason}", line.hint)


@rule("HST102", "host-twice")
def host_twice(cx: Context) -> Iterator[Problem]:
    """A host occurs twice in the hostfile."""
    first: dict[str, int] = {}
    for host in cx.world.hosts.hosts:
        if host.name in first:
            message = f"duplicate host {host.name}, already on line {first[host.name]}"
            yield Problem(host.location, message, "choose one line for this host, with all of its slots")
        first.setdefault(host.name, host.location.line)


@rule("HST103", "unequal-slots")
def unequal_slots(cx: Context) -> Iterator[Problem]:
    """Hosts have different numbers of slots."""
    hosts = [host for host in cx.world.hosts.hosts if host.slots]
    for host in hosts:
        if host.slots != hosts[0].slots:
            message = f"{host.name} has {host.slots} slots, but {hosts[0].name} has {hosts[0].slots}"
            yield Problem(host.slots_location, message, f"slots={_common_slots(cx)} on each")


def _common_slots(cx: Context) -> int:
    """Return the most slots that all hosts have, rounded down to whole tensor groups if their size is known."""
    least = min(host.slots for host in cx.world.hosts.hosts if host.slots)
    with suppress(UnknownValueError):
        return least // cx.tensor.size * cx.tensor.size or least
    return least


@rule("HST104", "no-slots")
def no_slots(cx: Context) -> Iterator[Problem]:
    """A host has no slots, or the hostfile has no hosts."""
    cluster = cx.world.hosts
    if not cluster.hosts and not cluster.bad_lines:
        yield Problem(Location(cluster.path), "the hostfile has no hosts", _GRAMMAR)
    for host in cluster.hosts:
        if not host.slots:
            yield Problem(
                host.slots_location, f"{host.name} has no slots", "choose slots=N of 1 or more, or leave the host out"
            )


@rule("HST105", "slots-differ-from-the-world")
def slots_differ_from_the_world(cx: Context) -> Iterator[Problem]:
    """The number of slots differs from the requested world size."""
    cluster, requested = cx.world.hosts, cx.world.requested_size
    if requested is not None and cluster.hosts and cluster.world_size != requested:
        message = f"{cluster.world_size} slots in all, but the world size is {requested}"
        slots = f"{requested} slots in all" if cluster.from_file else f"{requested} tasks (sbatch --ntasks-per-node)"
        hint = f"--world-size {cluster.world_size}; or choose {slots}"
        yield Problem(cluster.hosts[-1].slots_location, message, hint)


@rule("HST110", "no-such-host")
def no_such_host(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` names an unknown host."""
    yield from _choices(cx, "host")


@rule("HST111", "no-such-slot")
def no_such_slot(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` names a slot that its host does not have."""
    yield from _choices(cx, "slot")


@rule("HST112", "bad-choice-of-hosts")
def bad_choice_of_hosts(cx: Context) -> Iterator[Problem]:
    """`--include` or `--exclude` cannot be parsed, or leaves no host."""
    yield from _choices(cx, "syntax")


def _choices(cx: Context, kind: str) -> Iterator[Problem]:
    return (Problem(one.location, one.message, one.hint) for one in cx.world.hosts.filter_errors if one.kind == kind)


@rule("HST113", "slots-unsaid", "warning")
def slots_unsaid(cx: Context) -> Iterator[Problem]:
    """Hosts have no number of slots in the hostfile."""
    alone = [host for host in cx.world.hosts.hosts if host.syntax == "name"]
    if alone and all(host.slots == 1 for host in alone):
        name = alone[0].name
        message = (
            f"{name} has no slots=N, so dslpar counts 1 slot (OpenMPI counts the cores, DeepSpeed rejects the line)"
        )
        yield Problem(alone[0].location, message, "NAME slots=N")


@rule("HST114", "not-for-deepspeed", "info")
def not_for_deepspeed(cx: Context) -> Iterator[Problem]:
    """`dslpar` can parse the hostfile, but `deepspeed --hostfile` cannot."""
    cluster = cx.world.hosts
    other = [host for host in cluster.hosts if host.syntax in ("colon", "list")]
    if cluster.from_file and other:
        message = f"deepspeed --hostfile cannot parse line {other[0].location.line}; dslpar can"
        yield Problem(other[0].location, message, "NAME slots=N, if the file is also for DeepSpeed")


@rule("PERF101", "tensor-group-across-hosts", "warning")
def tensor_group_across_hosts(cx: Context) -> Iterator[Problem]:
    """The ranks of a tensor group are on several hosts."""
    cuboid = cx.tensor.cuboid
    size, hosts = cuboid.size, cx.world.hosts.hosts
    slots = min((host.slots for host in hosts if host.slots), default=0)
    if size > 1 and len(hosts) > 1 and slots and slots % size:
        message = f"tensor groups of {size} ranks on hosts of {slots} slots: {_crossing(cx, size, slots)}"
        # Ranks that share memory are consecutive: z is the fastest axis, then y.
        memory = cuboid.z * (cuboid.y if "y" in cuboid.token_axes else 1)
        if cuboid.symmetric_memory and cuboid.token_axes and slots % memory:
            message += "; comm_overlap='symmetric_memory' needs GPUs that share memory, on one host (HST234)"
        fitting = divisors(slots)
        hint = f"{cx.tensor.key}={' or '.join(map(str, fitting[1:] or fitting))}"
        yield cx.problem(cx.tensor.key, message, hint)


def _crossing(cx: Context, size: int, slots: int) -> str:
    """Name the first group that crosses hosts. The tensor axis is the fastest, so groups are consecutive ranks."""
    first = slots // size * size
    hosts, last = cx.world.hosts.hosts, first + size - 1
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
