"""Rendezvous of ranks at torch's store."""

from __future__ import annotations

import re
import socket

import pytest

from dslpar.core.errors import DslparError
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.distributed.rendezvous import meet


def test_a_taken_port_is_a_finding_that_names_another_one() -> None:
    with socket.socket() as other_job:
        other_job.bind(("0.0.0.0", 0))
        other_job.listen()
        port = other_job.getsockname()[1]
        with pytest.raises(DslparError, match=f"HST216 port-taken: port {port} of this host is in use") as raised:
            meet(DistributedEnv(0, 2, 0, 2, "127.0.0.1", port), {}, None)
        free = re.search(r"deepspeed --master_port (\d+), or MASTER_PORT=\1", str(raised.value))
    assert free is not None
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", int(free[1])))
