"""The subjects of a config as rules read them: values that follow from several keys, the world size and the hosts.

    cx.world        ranks and hosts
    cx.model        family, layers, vocabulary, longest sequence
    cx.pipeline     stages and chunks, from `parallel` or LiBai's `train.dist`
    cx.tensor       the cuboid of tensor ranks, with context parallelism
    cx.layout       replicas, and the batch of a step

A member raises UnknownValueError if its value is unknown.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from dslpar.core import mesh
from dslpar.layout.batch import Batch, batch_of, requested_batch
from dslpar.layout.chunks import Chunks
from dslpar.layout.modes import MODES, UNKNOWN_HEADS, combines, cuboid_of
from dslpar.layout.resolve import chunks_of, heads_of, with_experts, with_zero
from dslpar.linter.problem import UnknownValueError, require
from dslpar.schema import sections
from dslpar.schema.parallel_forms import pipeline_key, pipeline_of, stage_ids_key, tensor_key, tensor_of

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster

Family = TypeVar("Family", bound=sections.Model)


class World:
    """The ranks and the hosts of the job."""

    def __init__(self, requested_size: int | None, cluster: Cluster | None) -> None:
        self._requested_size = requested_size
        self._cluster = cluster

    @property
    def requested_size(self) -> int | None:
        """The world size that the caller passed, even if the hosts have another number of slots; None if none."""
        return self._requested_size

    @property
    def cluster(self) -> Cluster | None:
        """The hosts, or None if none were given."""
        return self._cluster

    @property
    def size_if_given(self) -> int | None:
        """The number of ranks: the requested one, else the slots of the hosts, else None."""
        cluster = self.cluster
        if self.requested_size is None and cluster is not None and not cluster.invalid and cluster.world_size:
            return cluster.world_size
        return self.requested_size

    @property
    def size(self) -> int:
        """The number of ranks. Raises UnknownValueError if it was not given."""
        if self.size_if_given is None:
            raise UnknownValueError("world size")
        return self.size_if_given

    @property
    def hosts(self) -> Cluster:
        """The hosts. Raises UnknownValueError if none were given."""
        if self.cluster is None:
            raise UnknownValueError("hostfile")
        return self.cluster


class AnyWorld(World):
    """A world of which nothing is known: reading any member raises UnknownValueError."""

    def __init__(self) -> None:
        super().__init__(None, None)

    @property
    def requested_size(self) -> int | None:
        raise UnknownValueError("world")

    @property
    def cluster(self) -> Cluster | None:
        raise UnknownValueError("world")


class RequestedModel:
    """The model of the config. A member raises UnknownValueError if its value is unknown."""

    def __init__(self, spec: sections.Spec, invalid: frozenset[str], by_program: bool) -> None:
        self._spec = spec
        self._invalid = invalid
        self.by_program = by_program
        """Whether the config has no model because a program passes it."""

    def of(self, family: type[Family]) -> Family:
        """Return the model if it is of that family, or of any family if `family` is `sections.Model`."""
        return require(self._spec.model, family)

    @property
    def other(self) -> sections.OtherModel:
        """The model, if the config names a class that is not a dslpar family."""
        return require(self._spec.model, sections.OtherModel)

    @property
    def has_weights(self) -> bool:
        """Return whether the model's weights exist (`pretrained`), so that no help may change its sizes."""
        model = self._spec.model
        if isinstance(model, sections.OtherModel):
            return model.is_of_transformers and "pretrained" in model.args
        return getattr(model, "pretrained", None) is not None

    @property
    def unlisted(self) -> str:
        """The name of the model's class if the config does not list its layers; empty if the layers are known."""
        if self.by_program:
            return "the program's model"
        for key in ("model.layers_cfg", "model.config", "model.pretrained"):
            if key in self._invalid:
                raise UnknownValueError(key)
        model = self._spec.model
        return "" if isinstance(model, sections.Model) or model.num_layers is not None else model.target

    @property
    def num_layers(self) -> int:
        """Number of layers that a pipeline partitions; unknown if the config does not determine it."""
        layers = None if self.unlisted else self._spec.model.num_layers
        if layers is None:
            raise UnknownValueError("layers")
        return layers

    @property
    def vocabulary(self) -> tuple[int, str]:
        """The size of the vocabulary, and its key."""
        model = self._spec.model
        return (
            (model.vocab_size, "model.vocab_size")
            if isinstance(model, sections.TokenModel)
            else self._size_of_transformers("vocab")
        )

    @property
    def longest_sequence(self) -> tuple[int, str]:
        """The longest sequence in tokens, and its key; unknown if a transformers config does not have it."""
        model = self._spec.model
        if isinstance(model, sections.TokenModel):
            return model.max_seq_len, "model.max_seq_len"
        found, key = self._size_of_transformers("positions")
        return found - self.unused_positions, key

    @property
    def unused_positions(self) -> int:
        """Rows of the position table that no token uses: RoBERTa's positions start after the id of its padding."""
        model = self._spec.model
        config = None if isinstance(model, sections.Model) else model.transformers
        return config.unused_positions if config is not None else 0

    def _size_of_transformers(self, size: str) -> tuple[int, str]:
        """Return a size of a transformers model, and its key; unknown if neither its config nor its class has it."""
        config = self.other.transformers
        found = config.size(size) if config is not None else None
        if config is None or found is None:
            raise UnknownValueError(size)
        return found, f"model.config.{config.key(size)}"


class Pipeline:
    """The pipeline axis."""

    def __init__(self, spec: sections.Spec) -> None:
        self._spec = spec

    @property
    def section(self) -> sections.PipelineParallel | None:
        """The PipelineParallel of `parallel` or `train.dist`, or None."""
        return pipeline_of(self._spec)

    @property
    def multi_stage(self) -> sections.PipelineParallel:
        """The PipelineParallel, if it has two stages or more."""
        section = self.section
        if section is None or section.size == 1:
            raise UnknownValueError("pipeline")
        return section

    @property
    def stages(self) -> int:
        """Number of ranks along the axis."""
        section = self.section
        return section.size if section else 1

    @property
    def chunks(self) -> Chunks:
        """The stages of the pipeline; a rank may hold several, which are its chunks."""
        return chunks_of(self._spec, self.stages)

    @property
    def key(self) -> str:
        """The key of the number of stages."""
        return pipeline_key(self._spec)

    @property
    def ids_key(self) -> str:
        """The key of the list of stage ids."""
        return stage_ids_key(self._spec)


class Tensor:
    """The tensor axis, with context parallelism."""

    def __init__(self, spec: sections.Spec, invalid: frozenset[str]) -> None:
        self._spec = spec
        self._invalid = invalid

    @property
    def section(self) -> sections.TensorParallel | None:
        """The TensorParallel of `parallel` or `train.dist`, or None."""
        return tensor_of(self._spec)

    @property
    def key(self) -> str:
        """The key of the tensor size; if there is only context parallelism, the key of its size."""
        if self.section is None and self._spec.parallel.context is not None:
            return "parallel.context.size"
        return tensor_key(self._spec)

    @cached_property
    def cuboid(self) -> mesh.TensorMesh:
        """The tensor ranks as a cuboid (docs/architecture.md, The cuboid); unknown if mode and size do not fit."""
        tensor = self.section
        if tensor is not None and (tensor.mode or tensor.size > 1):
            if tensor.mode is None or MODES[tensor.mode].axes(tensor) is None:
                raise UnknownValueError("parallel.tensor")
            if tensor.mode == "2.5d" and tensor.depth is None and tensor.size > 1:
                raise UnknownValueError("parallel.tensor.depth")
        context = self._spec.parallel.context
        if context is not None:
            if not combines(tensor, context):
                raise UnknownValueError("parallel.context")
            if context.size % (context.ulysses_size or 1):
                raise UnknownValueError("parallel.context.ulysses_size")
        heads, own_experts = UNKNOWN_HEADS, False
        with suppress(UnknownValueError):  # the cuboid's sizes are known without a model
            heads = heads_of(self._spec.model)
            own_experts = with_experts(mesh.TensorMesh(), self._spec.model, None).exchanges_tokens
        cuboid = cuboid_of(tensor, context, heads)
        exchanges_tokens = self._spec.parallel.expert is not None or own_experts
        return replace(cuboid, exchanges_tokens=True) if exchanges_tokens else cuboid

    @cached_property
    def size(self) -> int:
        """Ranks per tensor group; unknown if mode and size do not fit together, known if only the mode is invalid."""
        if "parallel.tensor.mode" not in self._invalid:
            return self.cuboid.size
        section = self.section
        return section.size if section is not None else 1

    @property
    def mode_name(self) -> str:
        """A name for messages: the tensor mode as the author wrote it, or context parallelism."""
        if self.key == "parallel.context.size":
            return "context parallelism"
        return f"mode {self.cuboid.mode!r}"


class Layout:
    """The replicas of the model, and the batch of a step."""

    def __init__(self, spec: sections.Spec, world: World, pipeline: Pipeline, tensor: Tensor) -> None:
        self._spec = spec
        self._world = world
        self._pipeline = pipeline
        self._tensor = tensor

    @property
    def cuboid(self) -> mesh.TensorMesh:
        """The cuboid of `cx.tensor`. With `data_size` it makes a layout the `KnownSizes` of `dslpar.layout.batch`."""
        return self._tensor.cuboid

    @cached_property
    def data_size(self) -> int:
        """Data-parallel replicas; unknown if the world size is not a multiple of the other sizes."""
        ranks = self._pipeline.stages * self._tensor.size
        world = self._world.size
        if world % ranks or world < ranks:
            raise UnknownValueError("data size")
        return world // ranks

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same weights and over which ZeRO shards: replicas, times axis d if ZeRO uses d.

        Axis d has the ranks of context parallelism, or of the depth of mode '2.5d'.
        """
        return self.data_size * (self.cuboid.d if self.zero_over_d else 1)

    @property
    def zero_over_d(self) -> bool:
        """Return whether ZeRO shards over axis d (see `num_copies`) as well as over replicas."""
        model, stage = self._spec.model, self._spec.zero.stage
        return with_zero(self.cuboid, model, stage, self._pipeline.stages).zero_over_d

    @property
    def requested_batch(self) -> sections.Batch:
        """The section `batch` as the author wrote it; sizes that are left out are None."""
        return requested_batch(self._spec)

    @cached_property
    def batch(self) -> Batch:
        """The sizes of a step's batch, even if global_size is not the product of the others (BAT101 reports that)."""
        return batch_of(self.requested_batch, self)
