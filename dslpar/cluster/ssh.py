"""Commands on other hosts, over ssh: in this folder, with some variables, and no question asked.

command("node2", ["python", "-V"], {"A": "b"}, "/home/me")
# ssh -o BatchMode=yes ... node2 'cd /home/me || exit 97; exec env A=b python -V'
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

NO_FOLDER = 97
"""The exit status of a command whose folder is not there."""
FAILED = 255
"""ssh's own exit status, where the command was not reached."""
OPTIONS = ("ServerAliveInterval=3", "ServerAliveCountMax=3", "ConnectTimeout=10", "BatchMode=yes", "ControlPath=none")
"""So a host that is gone ends ssh, and with it whoever waits for it, after some ten seconds; ssh by itself waits for
hours. A question (a password, a new host's key) would hang the job: it is an error. A connection that is shared with
the user's other ones (ControlMaster) would have their options, not these.
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
