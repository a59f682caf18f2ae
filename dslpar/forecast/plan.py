"""Forecast a step of a workload on a machine: a verdict on memory, and the step's time.

    made = forecast(workload, Machine.usual(device_named("h100-80g")))
    made.verdict, made.binding.total, made.time.step_s

The verdict depends on the share of the device's memory that the fullest rank needs at its peak:

============  ===============  ========================================================
verdict       forecast share   nanotron's 2,436 runs on 80 GB cards
============  ===============  ========================================================
fits          up to 84 %       1,215 of 1,331 ran at full speed
tight         84 to 92 %       31 of 46 ran at full speed
..            92 to 100 %      7 of 47 ran at full speed: it *thrashes*
does not fit  above 100 %      3 of 1,012 ran at full speed
============  ===============  ========================================================

A step thrashes near the end of the memory: the allocator frees cached blocks and allocates them again. No layout that
thrashes is suggested, and FIT102 warns of it. FIT101 reports what does not fit. 168 published runs, from several
frameworks, are the fastest of their kind. None of them is above 92 % (`python -m benchmarks.forecast_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dslpar.costs.any_model import flops_per_token
from dslpar.forecast.constants import DEFAULT, ENOUGH_RUNS, ERROR, RATIO, Constants, Error, widest
from dslpar.forecast.coverage import SENT, effects_of
from dslpar.forecast.device import Device
from dslpar.forecast.host_memory import host_bytes
from dslpar.forecast.links import Nodes
from dslpar.forecast.stage_memory import (
    StageMemory,
    WithoutActivations,
    binding_at_uneven_load,
    stage_memory,
    without_activations,
)
from dslpar.forecast.step_time import ReplicaTerms, StepTime, replica_terms, step_time
from dslpar.forecast.workload import Workload
from dslpar.layout.bubble import bubble_of

Verdict = Literal["fits", "tight", "does not fit"]

COMFORTABLE, FULL = 0.84, 1.0
"""Shares of a device's memory: a layout fits up to the first, and is tight up to the second."""
AT_FULL_SPEED = 0.92
"""Share of a device's memory up to which a step runs at the forecast speed. Above it, a step thrashes."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A job's device type, the nodes of these devices, and the fitted constants of the time forecast."""

    device: Device
    nodes: Nodes
    constants: Constants = DEFAULT
    error: Error = ERROR
    """Error of step times forecast with `constants`."""
    num_runs: int = 0
    """Your own runs that `constants` were fitted to; 0 for defaults and for `dslpar measure`."""
    covers: frozenset[str] = frozenset()
    """Effects of these runs that no fitted run has."""

    @property
    def is_calibrated(self) -> bool:
        """Return whether enough runs of this machine were measured for an error of their own."""
        return self.num_runs >= ENOUGH_RUNS

    @property
    def comparison_error(self) -> Error:
        """Error of the ratio of two layouts' times."""
        return self.error if self.is_calibrated else RATIO

    @classmethod
    def usual(cls, device: Device) -> Machine:
        """Return a machine of the device's usual nodes."""
        return cls(device=device, nodes=Nodes.usual(device))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Memory and time of a step."""

    workload: Workload
    machine: Machine
    memory: tuple[StageMemory, ...]
    """Memory of pipeline ranks: of all, or only of those that `Fitting` tests. Other ranks of a stage hold as much."""
    replicas: ReplicaTerms | None = None
    """Terms of the traffic between replicas, if computed before."""

    @cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        machine = self.machine
        return step_time(self.workload, self._device, machine.nodes, machine.constants, self.replicas)

    @cached_property
    def effects(self) -> Mapping[str, Error]:
        """Effects that no fitted run has, published or your own, and their errors (`dslpar.forecast.coverage`)."""
        found = effects_of(self.workload, self.machine.device)
        return {name: error for name, error in found.items() if name not in self.machine.covers}

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Effects that no measured run has, published or your own; of `SENT` there are published steps."""
        return tuple(name for name in self.effects if name != SENT)

    @property
    def error(self) -> Error:
        """Error of the step time: that of the constants, or a wider one for effects that no fitted run has."""
        return widest(self.machine.error, *self.effects.values())

    @property
    def _device(self) -> Device:
        return self.machine.device.computing_in(self.workload.dtype)

    @property
    def binding_rank(self) -> int:
        """The pipeline rank that needs the most memory."""
        return self.binding.pipe_rank

    @cached_property
    def binding(self) -> StageMemory:
        """Memory of the binding rank: the pipeline rank that needs the most."""
        return max(self.memory, key=lambda each: each.total)

    @property
    def share(self) -> float:
        """Share of the device's memory that the binding rank needs."""
        return self.binding.total / self.machine.device.memory_bytes

    @cached_property
    def at_uneven_load(self) -> StageMemory | None:
        """Memory of the binding rank if its experts get `uneven_load` times the even load; None unless it can."""
        return binding_at_uneven_load(self.workload)

    @cached_property
    def host_bytes(self) -> float:
        """Memory of the host that the offloaded state of a rank takes, the most of all pipeline ranks."""
        return max(host_bytes(self.workload, rank) for rank in range(self.workload.mesh.pipe))

    @property
    def uneven_verdict(self) -> Verdict | None:
        """Verdict on `at_uneven_load`."""
        found = self.at_uneven_load
        return None if found is None else verdict_of(found.total / self.machine.device.memory_bytes)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the share of the device's memory."""
        return verdict_of(self.share)

    @property
    def thrashes(self) -> bool:
        """Return whether a step would be slower than forecast, or fail: the verdict is "does not fit", or nearly so."""
        return self.share > AT_FULL_SPEED

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank is idle, as of equal stages; 0 without a pipeline."""
        return bubble_of(self.workload.schedule, recomputes=self.workload.recompute == "full")

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.workload.global_size * self.workload.seq_len

    @property
    def tokens_per_s_gpu(self) -> float:
        """Tokens per second per device."""
        return self.tokens / self.time.step_s / self.workload.mesh.world_size

    @property
    def mfu_causal(self) -> float:
        """MFU: the model's FLOP/s over the devices' peak, counting half of attention's scores (`mfu_causal`)."""
        flops = self.workload.costs.flops or flops_per_token(self.workload.model, self.workload.seq_len)
        assert flops is not None, "a model whose costs are known"
        return flops.mfu_causal * self.tokens_per_s_gpu / self._device.flops_per_s


def verdict_of(share: float) -> Verdict:
    """Return the verdict on a share of the device's memory: the only place that decides what fits."""
    if share <= COMFORTABLE:
        return "fits"
    return "tight" if share <= FULL else "does not fit"


def forecast(workload: Workload, machine: Machine) -> Forecast:
    """Return the forecast of a workload on a machine."""
    memory = tuple(stage_memory(workload, rank) for rank in range(workload.chunks.pipe))
    return Forecast(workload=workload, machine=machine, memory=memory)


class Fitting:
    """Forecasts the workloads of one layout (`dslpar.forecast.candidate.SameLayout`).

    It rejects those that do not fit, or that leave the allocator too little memory to run at full speed.

    Values that these workloads share are cached. Only the pipeline ranks that usually need the most memory are tested:
    the first, which has the most micro-batches in flight, the last, which has the head, the one with the most layers,
    and if layers differ the one with the most weights.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self._most = machine, AT_FULL_SPEED * machine.device.memory_bytes
        self._ranks: list[int] = []
        self._replicas: ReplicaTerms | None = None
        self._fixed: dict[tuple[int, bool], WithoutActivations] = {}

    def forecast(self, workload: Workload) -> Forecast | None:
        """Return the forecast of a workload; None if a tested rank thrashes, or does not fit."""
        self._ranks = self._ranks or _fullest_ranks(workload)
        memory = []
        for rank in self._ranks:
            memory.append(stage_memory(workload, rank, self._without_activations(workload, rank)))
            if memory[-1].total > self._most:
                return None
        if self._replicas is None:
            device = self.machine.device.computing_in(workload.dtype)
            self._replicas = replica_terms(workload, device, self.machine.nodes)
        return Forecast(workload=workload, machine=self.machine, memory=tuple(memory), replicas=self._replicas)

    def _without_activations(self, workload: Workload, rank: int) -> WithoutActivations:
        # Among the workloads of one layout it depends only on whether gradients accumulate.
        key = rank, workload.micro_batches > 1
        if key not in self._fixed:
            self._fixed[key] = without_activations(workload, rank)
        return self._fixed[key]


def _fullest_ranks(workload: Workload) -> list[int]:
    pipe, layers = workload.chunks.pipe, workload.counts
    if workload.chunks.num > 1:
        layers = tuple(sum(layers[rank::pipe]) for rank in range(pipe))
    fullest = {0, layers.index(max(layers)), pipe - 1}
    if workload.costs.units:  # the layers differ, so fewer may need more
        weights = [workload.weights(rank) for rank in range(pipe)]
        fullest.add(weights.index(max(weights)))
    return sorted(fullest)
