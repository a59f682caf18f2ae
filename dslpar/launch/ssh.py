"""Commands on other hosts, over ssh: in this folder, with some variables, and no question asked.

words("node2", ["python", "-V"], {"A": "b"}, "/home/me")
# ssh -o BatchMode=yes ... node2 'cd /home/me || exit 97; exec env A=b python -V'
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

NO_FOLDER = 97
"""The exit status of a command whose folder is not there."""
FAILED = 255
"""ssh's own, where the command was not reached."""
ALIVE = ("ServerAliveInterval=3", "ServerAliveCountMax=3", "ConnectTimeout=10", "BatchMode=yes", "ControlPath=none")
"""So a host that is gone ends ssh, and with it whoever waits for it, after some ten seconds; ssh by itself waits for
hours. A question (a password, a new host's key) would hang the job: it is an error. A connection that is shared with
the user's other ones (ControlMaster) would have their settings, not these.
"""


def flags(settings: Sequence[str] = ALIVE) -> list[str]:
    """Settings as ssh's flags."""
    return [word for setting in settings for word in ("-o", setting)]


def words(
    host: str, command: Sequence[str], environ: Mapping[str, str], folder: str, settings: Sequence[str] = ALIVE
) -> tuple[str, ...]:
    """What runs `command` on `host`, in `folder`."""
    settled = [f"{name}={value}" for name, value in environ.items()]
    line = shlex.join(["exec", *(["env", *settled] if settled else []), *command])
    return ("ssh", *flags(settings), host, f"cd {shlex.quote(folder)} || exit {NO_FOLDER}; {line}")
