"""Check that all ranks, on all hosts, run the same job, before anything is built."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch.distributed as dist

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job

NO_FACTS: Mapping[str, object] = MappingProxyType({})
_MAX_SHOWN = 4
"""Number of ranks that a finding names."""
_LONGEST_POLL_S = 0.5


def check_consistency(job: Job, world: Axis, facts: Mapping[str, object] = NO_FACTS) -> None:
    """Check that all ranks have the same job and the same `facts` (name: value); file paths may differ.

    All ranks must call it together.

    Raises:
        DslparError: on every rank, if a rank differs from rank 0.
    """
    config = repr(dataclasses.replace(job, path="", output_dir=""))
    hint = "give every host the config, text and packages of rank 0"
    check_equal({"config": config, **facts}, world, "HST203", hint)


def check_equal(values: Mapping[str, object], world: Axis, code: str, hint: str) -> None:
    """Check that each named value is the same on all ranks; None: this rank has no such value.

    Raises:
        DslparError: the finding `code`, on every rank, if a rank differs from rank 0.
    """
    by_rank = collectives.gather_objects((socket.gethostname(), values), world)
    host_0, reference = by_rank[0]
    differing = []
    for rank, (host, theirs) in enumerate(by_rank):
        names = [name for name, value in theirs.items() if value is not None and value != reference[name]]
        if names:
            differing.append(f"rank {rank} on {host} has another {', another '.join(names)}")
    if differing:
        more = f"; and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
        raise_finding(code, f"{'; '.join(differing[:_MAX_SHOWN])}{more} than rank 0 on {host_0}", hint)


def first_findings(findings: Sequence[Finding], world: Axis, name: str, patience_s: float) -> Sequence[Finding]:
    """Wait for all ranks; return the findings of one rank that has any, or empty if no rank has.

    All ranks together, once per `name`. Ranks communicate through torch's store. A collective would not do: other ranks
    may still be in another collective, and torch would match the two.

    Raises:
        TimeoutError: this rank has findings, and not all other ranks have called this function within `patience_s`.
    """
    store = dist.distributed_c10d._get_default_store()
    here, told = f"dslpar/{name}/ranks", f"dslpar/{name}/findings"
    if findings:
        store.set(told, pickle.dumps(list(findings)))  # type: ignore[arg-type]  # it takes bytes, and the stub text
    store.add(here, 1)
    deadline_s, pause_s = time.monotonic() + patience_s, 0.005
    while store.add(here, 0) < world.size:
        if findings and time.monotonic() > deadline_s:
            raise TimeoutError(f"{name}: not all ranks arrived within {patience_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    if not store.check([told]):
        return ()
    found: list[Finding] = pickle.loads(store.get(told))
    return found
