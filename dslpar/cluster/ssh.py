"""ssh command lines: run a command on another host, in a given folder, with variables and without prompts.

command("node2", ["python", "-V"], {"A": "b"}, "/home/me")
# ssh -o BatchMode=yes ... node2 'cd /home/me || exit 97; exec env A=b python -V'
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

NO_FOLDER = 97
"""The exit status of a command whose folder does not exist."""
FAILED = 255
"""The exit status of ssh itself if it could not run the command, or lost the connection."""
OPTIONS = ("ServerAliveInterval=3", "ServerAliveCountMax=3", "ConnectTimeout=10", "BatchMode=yes", "ControlPath=none")
"""ssh's options. With them ssh, and the launcher that waits for ssh, end about ten seconds after a host is gone.

By default ssh waits for hours. A prompt (for a password, or for a new host's key) would hang the job, so ssh must fail
instead (BatchMode). A connection that is shared with the user's other ones (ControlMaster) would use their options, so
sharing is off.
"""


def flags(options: Sequence[str] = OPTIONS) -> list[str]:
    """Return options as ssh's flags."""
    return [word for option in options for word in ("-o", option)]


def command(
    host: str, argv: Sequence[str], environ: Mapping[str, str], folder: str, options: Sequence[str] = OPTIONS
) -> tuple[str, ...]:
    """Return the command that runs `argv` on `host`, in `folder`."""
    env = ["env", *(f"{name}={value}" for name, value in environ.items())] if environ else []
    line = shlex.join(["exec", *env, *argv])
    return ("ssh", *flags(options), host, f"cd {shlex.quote(folder)} || exit {NO_FOLDER}; {line}")
