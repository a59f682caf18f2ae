"""Samples of data replicas: warn if all replicas train on the same ones.

    engine.replica_samples = ReplicaSamples(groups)    # for data that the program reads itself
    engine.replica_samples.compare(batches)            # at the first step; later calls do nothing

dslpar's own loaders give each replica its share. A program's DataLoader over a whole data set yields the same samples
on every rank: each step then counts them once per replica, and an epoch takes as many times longer. Loss and gradients
look right, so nothing else shows it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.engine.tensor_hash import tensor_hashes
from dslpar.reporting.logging import log


class ReplicaSamples:
    """Compares the replicas' samples, once. All ranks of a data axis must call `compare` together."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self.is_compared = groups, groups.mesh.data == 1

    def compare(self, batches: Any) -> None:
        """Warn, on rank 0, if the tensors of `batches` are bitwise equal on all replicas."""
        if self.is_compared:
            return
        self.is_compared = True
        tensors = [each for each in tree_leaves(batches) if isinstance(each, Tensor)]
        hashes = collectives.gather_objects([int(tensor_hashes([each])) for each in tensors], self.groups.axis("data"))
        if tensors and all(each == hashes[0] for each in hashes) and self.groups.rank == 0:
            num = len(hashes)
            log.warning(
                "all %d data replicas read the same samples, so each sample counts %d times in a step: pass the data "
                "set itself, of which each replica reads its share; or give your DataLoader "
                "sampler=DistributedSampler(dataset, %d, run.groups.axis('data').index)",
                *(num, num, num),
            )
