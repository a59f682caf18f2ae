"""Compare replicated state across ranks, bit for bit, every `train.check_replicas` steps.

    check = ReplicaCheck(engine)
    difference = check.after_step()     # after each step, on all ranks together; None: nothing is known to differ
    difference = check.finish()         # read the verdict of a pending comparison now, such as before a save

Some faults raise no error, and the loss may look fine for thousands of steps: a bit that flips in device memory, a
kernel that loses an update, a module that draws different numbers on one rank of a tensor group. Copies of the same
state reveal them, since a different device computes each copy.

1. After a due step, each rank hashes its copies on their device (`engine.tensor_hash`). For each *kind* of copies, the
   state that is equal over the same axes, it adds up the hashes to one digest. A rank has a few 64-bit digests,
   regardless of model size.
2. One asynchronous all-gather over all ranks collects the digests. The device compares each digest with the digest of
   the first rank that holds the same copies. The result, whether any digest differs, is the *verdict*.
3. The verdict is read one step later, together with the loss and the norm (`HostReads`), without another host wait.
4. If digests differ, the ranks that hold these copies send the hashes of single tensors, with names.

Step 4 uses the hashes of the due step, since a later step may hide a fault: ZeRO 1 and 2 gather all weights anew.

The idea is Megatron-LM's (`--check-weight-hash-across-dp-replicas-interval`), which hashes weights on the host,
compares over data only, and waits for it. DeepSpeed and torchtitan do not compare tensor values across ranks. Sending a
digest first, and details only if it differs, is a Merkle tree of two levels.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.core.catalog import finding
from dslpar.core.errors import Finding
from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Pending
from dslpar.engine.engine import Engine
from dslpar.engine.tensor_hash import tensor_hashes
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.training.replicated_state import Copies, Item, replicated_state

_MAX_LISTED = 5


class Difference(NamedTuple):
    """The first copies that differ, by name; the same on every rank."""

    step: int
    """The step after which the copies were hashed."""
    last_equal_step: int | None
    """The step of the last comparison without a difference; None: there was none since this start of the run."""
    title: str
    """Kind and name, such as 'weight blocks.0.norm.weight'."""
    ranks: tuple[int, ...]
    """All ranks that hold a copy."""
    unlike: tuple[int, ...]
    """Ranks whose copy differs from the majority's; (): there is no majority."""
    hosts: tuple[str, ...]
    """The host of each rank in `unlike`; if that is empty, of each rank in `ranks`."""
    others: tuple[str, ...]
    """Titles of other state that differs."""

    @property
    def message(self) -> str:
        """Describe the difference in a sentence."""
        accused = self.unlike or self.ranks
        who = " and ".join(f"rank {rank} on {host}" for rank, host in zip(accused, self.hosts, strict=True))
        if self.unlike:
            majority = [rank for rank in self.ranks if rank not in self.unlike]
            verb = "differs" if len(self.unlike) == 1 else "differ"
            how = f"{who} {verb} from rank{'s' * (len(majority) > 1)} {', '.join(map(str, majority))}"
        else:
            how = f"{who} differ"
        before = "this is the first comparison"
        if self.last_equal_step is not None:
            before = f"they were equal after step {self.last_equal_step}"
        return f"{self.title} is not the same on all ranks after step {self.step}: {how}; {before}"

    def finding(self, job: Job, marked: Sequence[str]) -> Finding:
        """Return the difference as a finding; `marked`: names of checkpoints saved since copies were last equal."""
        details = [f"{title} differs too" for title in self.others[:_MAX_LISTED]]
        more = len(self.others) - _MAX_LISTED
        details += [f"and {more} more differ"] if more > 0 else []
        details += [f"{name}, saved since, is marked as suspect" for name in marked]
        hint = "--resume from a checkpoint that is not marked; test the memory and device of a rank that differs"
        return finding("PRE231", self.message, hint, job.path, "train.check_replicas", details)


class _Begun(NamedTuple):
    """A comparison whose verdict has not been read yet."""

    step: int
    """The step after which the copies were hashed."""
    items: tuple[_Key, ...]
    """This rank's replicated state, in the order of `hashes`."""
    hashes: Tensor
    """int64 [items], as of that step."""
    digests: Pending
    """int64 [ranks, kinds of copies]."""


class _Key(NamedTuple):
    """An `Item` of the replicated state, without its value."""

    name: str
    kind: str
    copies: Copies


class ReplicaCheck:
    """Compares replicated state across the ranks of a run. All ranks construct it and call its methods together.

    It does nothing if `train.check_replicas` is None or the world is one rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._world = engine, engine.groups.axis("pipe", "data", "tensor")
        self.interval = engine.job.spec.train.check_replicas if self._world.size > 1 else None
        """Steps between comparisons; None: there are none."""
        self.last_equal_step: int | None = None
        """The step of the last comparison without a difference; None: there was none yet."""
        self._begun: _Begun | None = None
        """The comparison whose verdict is still to be read."""
        self._kinds: list[Copies] = []
        """All kinds of copies that any rank has: the same list on all ranks, made at the first comparison."""
        self._first = torch.empty(0)
        """int64 [ranks, kinds]: for each rank, the first rank that holds the same copies."""
        self._weights: tuple[tuple[_Key, ...], Tensor] = (), torch.empty(0)
        """Items, and the factor of each item's hash in each digest, int64 [kinds, items]."""

    def after_step(self) -> Difference | None:
        """Return the result of the comparison begun before this step; begin another one if due.

        After the run's last step, the new comparison is concluded at once: a checkpoint may follow, but no other step.
        """
        if self.interval is None:
            return None
        engine, difference = self._engine, None
        if self._begun is not None:
            difference = self._conclude(engine.host_reads.replicas_differ)
        is_last = engine.steps_done == engine.job.spec.train.steps
        if is_last or engine.steps_done % self.interval == 0:
            self._begin()
        return difference or (self.finish() if is_last else None)

    def finish(self) -> Difference | None:
        """Wait for a verdict that has not been read yet, if any, and return the difference."""
        if self._begun is None:
            return None
        self._engine.host_reads.check = None
        return self._conclude(bool(self._differs(self._begun).item()))

    # ---- hash, send, compare ----

    def _begin(self) -> None:
        items, hashes = self._hash_items()
        if not self._kinds:
            self._find_kinds(items)
        digests = (self._digest_weights(items) * hashes).sum(1)
        begun = _Begun(self._engine.steps_done, items, hashes, collectives.start_all_gather(digests, self._world))
        self._begun, self._engine.host_reads.check = begun, lambda: self._differs(begun)

    def _hash_items(self) -> tuple[tuple[_Key, ...], Tensor]:
        """Return the items of this rank, and their hashes on the engine's device."""
        device = self._engine.deepspeed.device
        state = sorted(replicated_state(self._engine), key=lambda item: not _is_on(device, item))
        on_device = [item.value for item in state if isinstance(item.value, Tensor) and _is_on(device, item)]
        on_host = [_hash_on_host(item) for item in state[len(on_device) :]]
        parts = [tensor_hashes(on_device)] if on_device else []
        if on_host:
            hashes = torch.tensor(on_host, dtype=torch.int64)
            # From pinned memory, since the host would wait for a copy from pageable memory.
            parts.append(hashes if device.type == "cpu" else hashes.pin_memory().to(device, non_blocking=True))
        return tuple(_Key(item.name, item.kind, item.copies) for item in state), torch.cat(parts)

    def _find_kinds(self, items: Sequence[_Key]) -> None:
        """Gather all ranks' kinds of copies, and find the first rank that holds each rank's copies."""
        every = collectives.gather_objects({item.copies for item in items}, self._world)
        self._kinds = sorted(set[Copies]().union(*every))
        mesh = self._engine.groups.mesh
        first = [[mesh.rank(_first_of(mesh, rank, copies)) for copies in self._kinds] for rank in self._world.peers]
        self._first = torch.tensor(first, dtype=torch.int64).to(self._engine.deepspeed.device)

    def _digest_weights(self, items: tuple[_Key, ...]) -> Tensor:
        """Return an odd factor for each item in its kind's row, and 0 in other rows; cached, as items seldom change."""
        if self._weights[0] != items:
            weights = torch.zeros(len(self._kinds), len(items), dtype=torch.int64)
            for column, item in enumerate(items):
                weights[self._kinds.index(item.copies), column] = stable_hash(item.kind, item.name) | 1
            self._weights = items, weights.to(self._engine.deepspeed.device)
        return self._weights[1]

    def _differs(self, begun: _Begun) -> Tensor:
        """Return whether any copies differ, as a device tensor that is equal on every rank."""
        digests = begun.digests.wait().view(self._first.shape)
        return (digests.gather(0, self._first) != digests).any()

    # ---- the verdict, and the copies that differ ----

    def _conclude(self, differs: bool) -> Difference | None:
        """End the comparison, given its verdict: find the copies that differ, or note that all were equal."""
        begun, self._begun = self._begun, None
        assert begun is not None, "a verdict of a comparison that was not begun"
        if differs:
            return self._find(begun)
        self.last_equal_step = begun.step
        return None

    def _find(self, begun: _Begun) -> Difference:
        """Return the first copies that differ, from the hashes of the ranks whose digests differ."""
        reports = collectives.gather_objects((socket.gethostname(), self._report(begun)), self._world)
        found: dict[_Copy, dict[int, int]] = {}
        for rank, (_, hashes) in enumerate(reports):
            for copy, number in hashes.items():
                found.setdefault(copy, {})[rank] = number
        unequal = sorted(copy for copy, hashes in found.items() if len({*map(hashes.get, copy.ranks)}) > 1)
        assert unequal, "digests differ, and no hashes do"
        first = unequal[0]
        unlike = _minority([found[first].get(rank) for rank in first.ranks], first.ranks)
        return Difference(
            step=begun.step,
            last_equal_step=self.last_equal_step,
            title=first.title,
            ranks=first.ranks,
            unlike=unlike,
            hosts=tuple(reports[rank][0] for rank in unlike or first.ranks),
            others=tuple(dict.fromkeys(copy.title for copy in unequal[1:] if copy.title != first.title)),
        )

    def _report(self, begun: _Begun) -> dict[_Copy, int]:
        """Return this rank's hashes for each kind of copies whose digests are not equal on all ranks that hold them."""
        digests, first = begun.digests.wait().view(self._first.shape).tolist(), self._first.tolist()
        holders: dict[Copies, tuple[int, ...]] = {}
        for kind, copies in enumerate(self._kinds):
            leader = first[self._world.index][kind]
            ranks = tuple(rank for rank in self._world.peers if first[rank][kind] == leader)
            if len({digests[rank][kind] for rank in ranks}) > 1:
                holders[copies] = ranks
        named = zip(begun.items, begun.hashes.tolist(), strict=True)
        return {
            _Copy(key.name, key.kind, holders[key.copies]): number for key, number in named if key.copies in holders
        }


class _Copy(NamedTuple):
    """State that several ranks hold a copy of, such as one weight; sorts by name, kind and ranks."""

    name: str
    kind: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"


def _is_on(device: torch.device, item: Item) -> bool:
    return isinstance(item.value, Tensor) and item.value.device.type == device.type


def _hash_on_host(item: Item) -> int:
    return int(tensor_hashes([item.value]).item()) if isinstance(item.value, Tensor) else item.value


def _first_of(mesh: Mesh, rank: int, copies: Copies) -> dict[str, int]:
    """Return the coordinates of the first rank that holds the same copies as `rank`."""
    coord = mesh.coord(rank)
    first = {**coord, **{axis: 0 for axis in copies.axes if axis in coord}}
    if "expert_data" in copies.axes:  # a part of the data axis
        first["data"] = coord["data"] % mesh.tensor.e
    return first | {"pipe": copies.stages[0]} if coord["pipe"] in copies.stages else first


def _minority(hashes: Sequence[int | None], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose hash differs from the majority's; (): no hash has more than half of the ranks."""
    ((most, count),) = Counter(hashes).most_common(1)
    if 2 * count <= len(ranks):
        return ()
    return tuple(rank for rank, each in zip(ranks, hashes, strict=True) if each != most)
