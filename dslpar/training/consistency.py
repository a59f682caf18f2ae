"""All ranks run the same job, text, command line and versions, whatever their hosts: asked before anything is built."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping

from dslpar.checkpoint import text_identity
from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import Corpus
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.reporting import run_dir

Identity = Mapping[str, str]
"""What a rank runs: a text by each thing that must be equal."""

_SHOWN = 4
"""Ranks that a finding names."""


def identity(job: Job, corpus: Corpus, flags: Mapping[str, bool]) -> Identity:
    """What must be the same on all ranks; where files lie may differ."""
    return {
        "config": repr(dataclasses.replace(job, path="", output_dir="")),
        "text": text_identity((*corpus.train, *corpus.held_out)),
        "command line": repr(dict(flags)),
    } | {f"version of {name}": number for name, number in run_dir.versions().items()}


def demand(mine: Identity, world: Axis) -> None:
    """All ranks together.

    Raises:
        DslparError: on every rank, if one differs from rank 0.
    """
    seen = collectives.gather_objects((socket.gethostname(), mine), world)
    host_0, first = seen[0]
    differ = [
        f"rank {rank} on {host} has another {', another '.join(what for what in its if its[what] != first[what])}"
        for rank, (host, its) in enumerate(seen)
        if its != first
    ]
    if differ:
        message = "; ".join(differ[:_SHOWN]) + (f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else "")
        hint = f"give every host the config, text and packages of rank 0, on {host_0}"
        raise_finding("HST203", message, hint)
