"""torchrun: one process per host, over ssh on other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.cluster import ssh
from dslpar.cluster.command import LOCALHOST, Command
from dslpar.cluster.launcher import TORCH_VARIABLES, Launcher

if TYPE_CHECKING:
    from dslpar.cluster.request import Context


def _commands(context: Context) -> Iterator[Command]:
    request, facts = context.request, context.facts
    if context.remote:
        for command in _commands_without_ssh(context):
            local = command.host in facts.local_hosts
            argv = ssh.command(command.host, command.argv, command.environ, facts.folder)
            yield command if local else Command({}, argv, command.host)
        return
    start = (facts.programs["torchrun"], "--nproc_per_node", str(context.slots))
    meet = ("--master_addr", LOCALHOST, "--master_port", context.master_port) if request.port else ("--standalone",)
    yield Command({**context.environ, **context.devices}, (*start, *meet, "-m", request.module, *request.arguments))


def _commands_without_ssh(context: Context) -> Iterator[Command]:
    # Run torchrun as a module of this Python, since another host's PATH may have another torchrun.
    request, python = context.request, context.facts.programs["python"]
    start = (python, "-m", "torch.distributed.run", "--nproc_per_node", str(context.slots))
    meet = ("--master_addr", context.master_addr, "--master_port", context.master_port)
    for number, host in enumerate(context.hosts):
        nodes = ("--nnodes", str(len(context.hosts)), "--node_rank", str(number))
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        argv = (*start, *nodes, *meet, "-m", request.module, *request.arguments)
        yield Command({**context.environ, **devices}, argv, host.name)


LAUNCHER = Launcher(
    title="torchrun",
    variables=TORCH_VARIABLES,
    marks=("TORCHELASTIC_RUN_ID",),
    processes=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    program="torchrun",
    install="pip install 'dslpar[train]'",
    commands=_commands,
    commands_without_ssh=_commands_without_ssh,
    remote_programs=("ssh",),
    of_this_python=True,
    takes_ipv6=True,
)
