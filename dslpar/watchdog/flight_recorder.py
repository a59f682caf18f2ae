"""Flight record: which collectives a rank has enqueued and not seen end, as torch's flight recorder has them.

    text = record()                 # in the rank, by a thread that does not hang: lines for people, and for `parse`
    parse(text)                     # in a guard: of each process group, how far the rank has come

torch records the last collectives of NCCL and of gloo by itself (TORCH_FR_BUFFER_SIZE says how many; 0: none), by
process group and number. Its own `torchfrtrace` compares the records of all ranks after they were dumped to files; here
they are compared while the job hangs. What was taken from it: a rank that has enqueued less than its peers of a group
is who they wait for. Sends between two ranks are left out, and a ring holds the last ones of all groups together: of a
rank without a group in its record nothing is known.

It imports the standard library alone: guards load it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

HEADER = "Collectives, by torch's flight recorder:"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""NCCL's recorder, and that of gloo and whatever else is on a CPU: two of them, which a job over NCCL may both have."""
_LINE = re.compile(r"^  (\S+) \(group (\S+)\): (\d+) enqueued, (\d+) done(?:; waits in (.*))?$", re.MULTILINE)


class GroupRecord(NamedTuple):
    """What a rank has done in one process group. Collectives are counted from 1, on all ranks of a group alike."""

    name: str
    """What the group is for: tensor, data, ...; or torch's own word."""
    enqueued: int
    done: int
    """All up to this number have ended."""
    waits_in: str
    """The first that has not ended: all_reduce of [3, 4] Float; empty: none."""

    @property
    def operation(self) -> str:
        """The name of that one."""
        return self.waits_in.partition(" ")[0]


def record() -> str:
    """Return this process's record; empty where torch has none. It imports nothing: a lock may be held."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    return format_entries([entry for dump in dumps for entry in json.loads(dump(True, False)).get("entries", ())])


def format_entries(entries: Any) -> str:
    """Return the record of a dump's entries, a line a process group; empty where there are none."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry["is_p2p"]:  # numbered by pairs of ranks
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
    """Return the record with which a rank's text begins, empty where there is none, and its stacks."""
    record, blank, stacks = text.partition("\n\n")
    return (record + blank, stacks) if text.startswith(HEADER) else ("", text)


def parse(text: str) -> dict[str, GroupRecord]:
    """Return what `record` wrote, by torch's names of the groups, which are the same on all their ranks."""
    found = _LINE.findall(split(text)[0])
    return {group: GroupRecord(name, int(last), int(done), waits) for name, group, last, done, waits in found}
