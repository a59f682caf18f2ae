"""`DistributedEnv`: a rank's place in its job, which `bootstrap` reads from the environment."""

from __future__ import annotations

from typing import NamedTuple

from dslpar.cluster.command import DEFAULT_PORT, LOCALHOST

LOOPBACKS = (LOCALHOST, "localhost", "::1")


class DistributedEnv(NamedTuple):
    """This process's place in its job, and the rendezvous address."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Number of ranks on this host."""
    master_addr: str = LOCALHOST
    master_port: int = DEFAULT_PORT

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are on this host, even if MASTER_ADDR is its name, as under `torchrun --standalone`."""
        return self.local_size == self.world_size or self.master_addr in LOOPBACKS
