"""DeepSpeed's launcher: on this host alone, on several hosts over pdsh, or host by host with its own flag --no_ssh."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dslpar.cluster import filter, hostfile, ssh
from dslpar.cluster.command import FILES, LOCALHOST, Command
from dslpar.cluster.launcher import TORCH_VARIABLES, Launcher
from dslpar.core.catalog import finding

if TYPE_CHECKING:
    from dslpar.cluster.request import Context
    from dslpar.core.errors import Finding

JOB_HOSTFILE = "/job/hostfile"
"""DeepSpeed always reads this file if it exists."""
_NOT_FOR_PDSH = r"[^\w@%+=:,./~-]|%[hnu%]"
"""Characters that a shell or pdsh would interpret."""


def _commands(context: Context) -> Iterator[Command]:
    request, facts = context.request, context.facts
    flags, files = _host_flags(context)
    program = ("--module", request.module)
    start = (facts.programs["deepspeed"], "--quiet", *flags, "--master_port", context.master_port, *program)
    if not context.remote:
        yield Command(context.environ, (*start, *request.arguments), files=files)
        return
    users_flags = facts.environ.get("PDSH_SSH_ARGS_APPEND")
    ssh_flags = " ".join([*([users_flags] if users_flags else []), *ssh.flags()])
    environ = {"PDSH_SSH_ARGS_APPEND": ssh_flags, "DS_ENV_FILE": f"{FILES}/deepspeed_env"}
    files = {**files, "deepspeed_env": _environment_file(context)}
    yield Command(environ, (*start, *map(_quote_for_pdsh, request.arguments)), files=files)


def _commands_without_ssh(context: Context) -> Iterator[Command]:
    flags, files = _host_flags(context)
    start = (context.facts.programs["deepspeed"], "--quiet", *(flag for flag in flags if flag != "--force_multi"))
    for number, host in enumerate(context.hosts):
        node = ("--no_ssh", "--node_rank", str(number), "--master_port", context.master_port)
        argv = (*start, *node, "--module", context.request.module, *context.request.arguments)
        yield Command(context.environ, argv, host.name, files)


def _host_flags(context: Context) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return flags that name the hosts, and the files that they need.

    If the user's hostfile is not in DeepSpeed's syntax, a file `hostfile` in that syntax is made. Without --master_addr
    DeepSpeed runs `ssh HOST hostname -I`, even if HOST is this host.
    """
    facts, cluster = context.facts, context.request.cluster
    if cluster is not None and (context.remote or cluster.filtered):
        own = cluster.readable_by_deepspeed
        file = ("--hostfile", cluster.path if own else f"{FILES}/hostfile")
        include = ("--include", filter.as_deepspeed(cluster.hosts)) if cluster.filtered else ()
        # DeepSpeed takes a single host for this host, whatever its name, without --force_multi.
        single = ("--force_multi",) if context.remote and len(context.hosts) == 1 else ()
        local = () if context.remote else ("--no_ssh_check",)
        # DeepSpeed checks --include against the file's slots, so each host has enough for its highest selected device.
        enough = [host._replace(slots=max(host.devices) + 1) if host.devices else host for host in cluster.hosts]
        flags = (*file, *include, *single, *local, "--master_addr", context.master_addr)
        return flags, ({} if own else {"hostfile": hostfile.format_hosts(enough)})
    no_hostfile = ("--hostfile", os.devnull) if os.path.isfile(JOB_HOSTFILE) else ()
    if facts.accelerators and facts.visible_devices:
        # --num_gpus and a hostfile's slots would select the host's first devices, even if they are not visible.
        devices = ",".join(facts.visible_devices[: context.request.world_size])
        return (*no_hostfile, "--include", f"localhost:{devices}"), {}
    if cluster is not None and cluster.readable_by_deepspeed:
        return ("--hostfile", cluster.path, "--no_ssh_check", "--master_addr", LOCALHOST), {}
    return (*no_hostfile, "--num_gpus", str(context.request.world_size)), {}


def _environment_file(context: Context) -> str:
    """Return the text of a .deepspeed_env: the user's own lines, then this job's variables that they do not set.

    Three things need care. DeepSpeed cannot read comments or blank lines. It puts a value into double quotes if a shell
    needs them, but escapes no characters inside. And pdsh replaces %h, %n, %u and %%.
    """
    users = [line for line in _users_lines(context) if line.strip() and not line.lstrip().startswith("#")]
    names = {line.partition("=")[0].strip() for line in users}
    quoted = {name: re.sub(r'([\\"$`])', r"\\\1", value) for name, value in context.environ.items()}
    ours = [f"{name}={value.replace('%', '%%')}" for name, value in quoted.items() if name not in names]
    return "".join(f"{line}\n" for line in [*users, *ours])


def _users_lines(context: Context) -> Iterator[str]:
    """Yield the lines of the .deepspeed_env files that DeepSpeed would read: in the home folder, then in this one."""
    name = context.facts.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in dict.fromkeys(Path(folder, name) for folder in (os.path.expanduser("~"), ".")):
        if path.is_file():
            yield from path.read_text(encoding="utf-8").splitlines()


def _quote_for_pdsh(word: str) -> str:
    """Quote an argument that DeepSpeed passes to pdsh, ssh and a shell.

    DeepSpeed puts words with spaces into double quotes, and escapes double quotes in them. pdsh replaces %h, %n, %u and
    %%. The shell interprets all other special characters.
    """
    quoted = re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")


# ---- requests that DeepSpeed would misread ----


def _findings(context: Context) -> Iterator[Finding]:
    facts = context.facts
    if context.remote:
        lines = [line.strip() for line in _users_lines(context)]
        bad = [line for line in lines if line and not line.startswith("#") and "=" not in line]
        if bad:
            message = f"DeepSpeed cannot parse a line of .deepspeed_env: {bad[0]!r}"
            yield finding("HST218", message, "one NAME=value per line")
        if not context.request.no_ssh:
            # DeepSpeed has pdsh run `cd FOLDER; PYTHON ...` on the hosts, and quotes neither path.
            for name, path in (("folder", facts.folder), ("Python", facts.programs["python"])):
                if unsafe := re.search(_NOT_FOR_PDSH, path):
                    message = (
                        f"this {name} is {path}, and DeepSpeed does not quote {unsafe[0]!r} for pdsh and the shell"
                    )
                    yield finding("HST222", message, "another path, or --launcher torchrun")
    elif facts.accelerators:
        # --include accepts only numbers
        for name in [name for name in facts.visible_devices or () if not name.isdecimal()][:1]:
            message = f"CUDA_VISIBLE_DEVICES holds {name}, but DeepSpeed's launcher takes only device numbers"
            yield finding("HST208", message, "--launcher torchrun, or the devices' numbers")


LAUNCHER = Launcher(
    title="deepspeed",
    variables=TORCH_VARIABLES,
    marks=("CROSS_SIZE",),
    processes=("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    ends_with_job={"deepspeed.launcher.launch": ""},  # the runner ends with the launcher that it runs
    program="deepspeed",
    install="pip install 'dslpar[train]'",
    commands=_commands,
    commands_without_ssh=_commands_without_ssh,
    findings=_findings,
    remote_programs=("pdsh", "ssh"),
    of_this_python=True,
)
