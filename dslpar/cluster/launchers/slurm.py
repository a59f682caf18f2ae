"""Slurm's srun. Untested on a cluster: its command line follows the manual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.cluster import nodelist
from dslpar.cluster.command import Command
from dslpar.cluster.launcher import Launcher, RankVariables
from dslpar.core.catalog import finding

if TYPE_CHECKING:
    from dslpar.cluster.request import Context
    from dslpar.core.errors import Finding


def _commands(context: Context) -> Iterator[Command]:
    """Make srun's command line.

    Ranks take MASTER_ADDR from Slurm's node list. If no port is given, they derive it from the job's variables.
    """
    request = context.request
    flags = [context.facts.programs["srun"], "--nodes", str(len(context.hosts) or 1)]
    flags += ["--ntasks", str(request.world_size), "--ntasks-per-node", str(context.slots)]
    flags += ["--kill-on-bad-exit=1", "--export=ALL"]
    if context.remote:
        flags += ["--nodelist", nodelist.compress([host.name for host in context.hosts])]
    # Since Slurm 22.05, srun does not take --cpus-per-task from the job. Without the flag, a rank would get one core.
    if cores := context.facts.environ.get("SLURM_CPUS_PER_TASK"):
        flags += ["--cpus-per-task", cores]
    threads = {"OMP_NUM_THREADS": context.environ["OMP_NUM_THREADS"]}
    port = {"MASTER_PORT": str(request.port)} if request.port else {}
    yield Command({**threads, **port, **request.environ}, (*flags, *context.program))


def _findings(context: Context) -> Iterator[Finding]:
    if any(host.devices for host in context.hosts):
        message = "accelerators are selected, and Slurm assigns them itself"
        yield finding("HST219", message, "whole hosts in --include and --exclude, or --launcher torchrun")


LAUNCHER = Launcher(
    title="Slurm",
    # These variables describe a step that srun has started. In the batch script itself there is only one process.
    variables=RankVariables(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),  # a job may have several steps on one host at once
    ),
    processes=(),  # a rank's parent is slurmstepd, which ends the step by itself
    program="srun",
    install="srun comes with Slurm: start this on a node of the cluster",
    commands=_commands,
    findings=_findings,
    scheduler="slurm",
)
