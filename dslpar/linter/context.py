"""What rules look at: the config, what was read of it, the world and the hosts; values guarded by what is known.

`cx.spec` is the spec, except that an attribute whose value could not be read raises `UnknownValueError`, which ends the
rule: its mistake has a finding already. `cx.world` does the same where no world size was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dslpar.core import mesh
from dslpar.core.errors import Finding, Location
from dslpar.language.load import Config
from dslpar.layout.divisors import least_micro_size
from dslpar.layout.resolve import MODES, Batch, asked_batch, batch_of, cuboid_of, pipeline_of, tensor_of
from dslpar.linter.rule import Problem, UnknownValueError
from dslpar.schema import sections
from dslpar.schema.reader import Registered
from dslpar.schema.sections_reader import Reading, read

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster
    from dslpar.linter.suppressions import Ignores


class Guarded:
    """A section of the spec; reading an invalid field of it raises UnknownValueError."""

    def __init__(self, section: Any, key: str, reading: Reading) -> None:
        self._section, self._key, self._reading = section, key, reading

    def __getattr__(self, name: str) -> Any:
        key = f"{self._key}.{name}" if self._key else name
        if key in self._reading.invalid:
            raise UnknownValueError(key)
        value = getattr(self._section, name)
        value = Guarded(value, key, self._reading) if is_dataclass(value) else value
        self.__dict__[name] = value  # rules ask for the same few values again and again
        return value


class Context:
    """One config under lint; every property is known, or raises UnknownValueError."""

    def __init__(
        self,
        config: Config,
        world_size: int | None = None,
        cluster: Cluster | None = None,
        registered: Registered | None = None,
    ) -> None:
        self.config = config
        self.reading = read(config, registered)
        self.spec: Any = Guarded(self.reading.spec, "", self.reading)
        self.cluster = cluster
        self.world_size = world_size
        if world_size is None and cluster is not None and not cluster.broken and cluster.world_size:
            self.world_size = cluster.world_size
        self.asked_world_size = world_size
        self.found: set[Finding] = set()
        """What the rules have found so far; those of comments, which ask for it, come last."""

    # Places --------------------------------------------------------------------------------------------------

    def source_key(self, key: str) -> str:
        """The key as the author wrote it: an alias, or the shorthand's own key."""
        return self.reading.written.get(key, key)

    def given(self, key: str) -> bool:
        """Whether somebody wrote the key."""
        return key in self.reading.written

    def at(self, *keys: str) -> Location:
        """Where the first of the keys that was written stands; else where its section does."""
        key = next((key for key in keys if self.given(key)), keys[-1])
        return self.config.at(self.source_key(key))

    def at_item(self, key: str, index: int) -> Location:
        """Where one item of a list stands."""
        return self.config.at(f"{self.source_key(key)}.{index}")

    def problem(self, keys: str | tuple[str, ...], message: str, hint: str) -> Problem:
        """A problem at the first of the keys that was written."""
        names = (keys,) if isinstance(keys, str) else keys
        key = next((name for name in names if self.given(name)), names[-1])
        return Problem(self.at(key), message, hint, self.source_key(key))

    @cached_property
    def ignores(self) -> Ignores | None:
        """The comments that silence findings; None where no file has any."""
        if not any("dslpar:" in text for text in self.sources.values()):
            return None
        from dslpar.linter.engine import RULES
        from dslpar.linter.suppressions import Ignores

        return Ignores(self.config, RULES)

    # What other stages found ---------------------------------------------------------------------------------

    def language(self, code: str) -> Iterator[Finding]:
        """Findings of the evaluator, by code."""
        return (finding for finding in self.config.findings if finding.code == code)

    def misreads(self, code: str) -> Iterator[Problem]:
        """Problems of the reader, by code."""
        for misread in self.reading.misreads:
            if misread.code == code:
                yield Problem(misread.location, misread.message, misread.help, misread.key, misread.fix)

    # Values --------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Ranks of the job."""
        if self.world_size is None:
            raise UnknownValueError("world size")
        return self.world_size

    @property
    def gpt(self) -> Any:
        """The model, if it is one whose layers dslpar knows."""
        if "model" in self.reading.invalid or not isinstance(self.reading.spec.model, sections.GPT):
            raise UnknownValueError("model")
        return self.spec.model

    @property
    def unlisted(self) -> str:
        """The class of a model whose layers the config does not tell; empty if it does."""
        model = self.spec.model
        if "model.layers_cfg" in self.reading.invalid:
            raise UnknownValueError("model.layers_cfg")
        return "" if model.num_layers is not None else str(model.target)

    @property
    def num_layers(self) -> int:
        """Layers that a pipeline cuts, of a model whose layers the config tells."""
        layers: int | None = None if self.unlisted else self.spec.model.num_layers
        if layers is None:
            raise UnknownValueError("layers")
        return layers

    @property
    def own_schedule(self) -> Any:
        """The schedule, if it is dslpar's own."""
        if "lr_scheduler" in self.reading.invalid or not isinstance(
            self.reading.spec.lr_scheduler, sections.LRScheduler
        ):
            raise UnknownValueError("lr_scheduler")
        return self.spec.lr_scheduler

    @property
    def other_schedule(self) -> Any:
        """The schedule, if it is DeepSpeed's or torch's."""
        if "lr_scheduler" in self.reading.invalid or not isinstance(
            self.reading.spec.lr_scheduler, sections.OtherSchedule
        ):
            raise UnknownValueError("lr_scheduler")
        return self.spec.lr_scheduler

    @property
    def other_optimizer(self) -> Any:
        """The optimizer, if it is not one of dslpar's own sections."""
        if "optimizer" in self.reading.invalid or not isinstance(self.reading.spec.optimizer, sections.OtherOptimizer):
            raise UnknownValueError("optimizer")
        return self.spec.optimizer

    @property
    def pipeline(self) -> Any:
        """The PipelineParallel of either form, or None."""
        return pipeline_of(self.spec)

    @property
    def tensor(self) -> Any:
        """The TensorParallel of either form, or None."""
        return tensor_of(self.spec)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        pipeline = self.pipeline
        return pipeline.size if pipeline else 1

    @property
    def pipeline_key(self) -> str:
        """The key that gives the number of stages."""
        return "parallel.pipeline.size" if self.from_parallel("pipeline") else "train.dist.pipeline_parallel_size"

    @property
    def tensor_key(self) -> str:
        """The key that gives the size of tensor parallelism."""
        return "parallel.tensor.size" if self.from_parallel("tensor") else "train.dist.tensor_parallel_size"

    @property
    def ids_key(self) -> str:
        """The key that gives the stage of each layer."""
        both = "parallel.pipeline.stage_ids", "train.dist.custom_pipeline_stage_id"
        return both[0] if self.from_parallel("pipeline") else both[1]

    def from_parallel(self, axis: str) -> bool:
        """Whether `parallel`, and not LiBai's form, speaks of the axis."""
        return getattr(self.spec.parallel, axis) is not None

    @cached_property
    def cuboid(self) -> mesh.Tensor:
        """The tensor cuboid; unknown while mode and size do not fit."""
        tensor = self.tensor
        if tensor is not None and (tensor.mode or tensor.size > 1):
            if tensor.mode not in MODES or MODES[tensor.mode].axes(tensor) is None:
                raise UnknownValueError("parallel.tensor")
            if tensor.mode == "2.5d" and tensor.depth is None and tensor.size > 1:
                raise UnknownValueError("parallel.tensor.depth")
        return cuboid_of(tensor)

    @cached_property
    def data_size(self) -> int:
        """Data-parallel replicas; unknown while the world is no multiple of the other sizes."""
        ranks = self.stages * self.cuboid.size
        if self.world % ranks or self.world < ranks:
            raise UnknownValueError("data size")
        return self.world // ranks

    @cached_property
    def batch(self) -> Batch:
        """The batch; whether its product fits is for BAT101 to say."""
        return batch_of(self.asked_batch, self.data_size, least_micro_size(self.cuboid))

    @property
    def asked_batch(self) -> sections.Batch:
        """What the config says of the batch."""
        return asked_batch(self.spec)

    @property
    def sources(self) -> Mapping[str, str]:
        """Texts of all files that findings may point into."""
        return self.config.sources
