"""Flight record: the collectives that a rank has enqueued and that have not ended, from torch's flight recorder.

    text = record()                 # in the rank, by a thread that does not hang: lines for people, and for `parse`
    parse(text)                     # in a guard: the rank's progress in each process group

torch records the last collectives of NCCL and gloo by process group and number (TORCH_FR_BUFFER_SIZE of them; 0: none).
torch's `torchfrtrace` compares all ranks' records after they were dumped to files. dslpar compares them while the job
hangs (hang_analysis.py), by the same rule: if a rank has enqueued fewer collectives in a group than its peers, the
peers wait for this rank. Sends between two ranks are left out. One ring buffer holds the last collectives of all groups
together, so a group that is missing from a rank's record may have been used or not.

This module imports only the standard library, because guards load it and start in milliseconds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

HEADER = "Collectives, by torch's flight recorder:"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch has one recorder for NCCL, and one for gloo and other CPU backends. A job over NCCL may have both."""
_LINE = re.compile(r"^  (\S+) \(group (\S+)\): (\d+) enqueued, (\d+) done(?:; waits in (.*))?$", re.MULTILINE)


class GroupRecord(NamedTuple):
    """A rank's progress in one process group. Collectives have numbers from 1, the same on all ranks of the group."""

    name: str
    """The group's purpose (tensor, data, ...), or torch's own name."""
    enqueued: int
    """The number of the last collective that the rank has enqueued."""
    done: int
    """Every collective up to this number has ended."""
    waits_in: str
    """The first collective that has not ended, such as "all_reduce of [3, 4] Float"; empty: none."""

    @property
    def operation(self) -> str:
        """The name of the collective that the rank waits in."""
        return self.waits_in.partition(" ")[0]


def record() -> str:
    """Return this process's flight record; empty if torch has recorded nothing.

    This function imports nothing, because a hanging thread may hold the import lock.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    return format_entries([entry for dump in dumps for entry in json.loads(dump(True, False)).get("entries", ())])


def format_entries(entries: Any) -> str:
    """Format a dump's entries, one line per process group; empty without entries."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry["is_p2p"]:  # sends and receives are left out: they are numbered per pair of ranks
            groups.setdefault(" ".join(entry["process_group"]), []).append(entry)
    lines = [_line(group) for _, group in sorted(groups.items())]
    return "\n".join([HEADER, *lines]) + "\n\n" if lines else ""


def _line(entries: list[Mapping[str, Any]]) -> str:
    group, name = entries[0]["process_group"]
    last = max(entry["collective_seq_id"] for entry in entries)
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    first = min(pending, key=lambda entry: entry["collective_seq_id"], default=None)
    done, waits = last, ""
    if first is not None:
        operation = first["profiling_name"].rpartition(":")[2]
        shapes = " and ".join(map(str, first["input_sizes"])) or "nothing"
        done = first["collective_seq_id"] - 1
        waits = f"; waits in {operation} of {shapes} {' '.join(sorted({*first['input_dtypes']}))}"
    return f"  {'_'.join(name.split()) or 'unnamed'} (group {group}): {last} enqueued, {done} done{waits}"


def split(text: str) -> tuple[str, str]:
    """Split a rank's text into its flight record, which may be empty, and its stacks."""
    record, blank, stacks = text.partition("\n\n")
    return (record + blank, stacks) if text.startswith(HEADER) else ("", text)


def parse(text: str) -> dict[str, GroupRecord]:
    """Parse the text of `record`. Keys are torch's group names, which are the same on all ranks of a group."""
    found = _LINE.findall(split(text)[0])
    return {group: GroupRecord(name, int(last), int(done), waits) for name, group, last, done, waits in found}
