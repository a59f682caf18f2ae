"""The input of the rules: the config, its typed sections (the spec), the world size and the hosts.

A rule need not check its input. `cx.spec` has the fields of the spec, but reading an invalid field raises
`UnknownValueError`, as does `cx.world` if no world size was given. The exception ends the rule without a finding: the
invalid value already has one from another rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dslpar.core import mesh
from dslpar.core.errors import Finding, Location
from dslpar.core.frozen import is_frozen
from dslpar.core.project import trusted_packages
from dslpar.language.load import Config
from dslpar.layout.batch import Batch, batch_of, requested_batch
from dslpar.layout.chunks import Chunks
from dslpar.layout.modes import MODES, UNKNOWN_HEADS, combines, cuboid_of
from dslpar.layout.resolve import Job, chunks_of, heads_of, resolve, with_zero
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.schema import sections
from dslpar.schema.datasets import BlendData, Data, part_key
from dslpar.schema.parallel_forms import pipeline_key, pipeline_of, stage_ids_key, tensor_key, tensor_of
from dslpar.schema.sections_reader import Reading

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster
    from dslpar.schema.frameworks import Framework

Section = TypeVar("Section")
Family = TypeVar("Family", bound=sections.Model)


class Guarded:
    """Wrapper of a section that raises UnknownValueError when an invalid field is read; made by `guarded`.

    Its `__class__` is the class of the wrapped section, so that `isinstance` works in rules.
    """

    def __init__(self, section: object, key: str, invalid: frozenset[str]) -> None:
        self._section, self._key, self._invalid = section, key, invalid

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._section)

    def __getattr__(self, name: str) -> Any:
        key = f"{self._key}.{name}" if self._key else name
        if key in self._invalid:
            raise UnknownValueError(key)
        value = getattr(self._section, name)
        value = Guarded(value, key, self._invalid) if is_frozen(value) else value
        self.__dict__[name] = value  # rules read the same few values again and again
        return value


def guarded(section: Section, key: str, invalid: frozenset[str]) -> Section:
    """Wrap a section in `Guarded`. For mypy the result has the type of the section, so it finds misspelt fields."""
    return cast(Section, Guarded(section, key, invalid))


def _require(value: object, cls: type[Section]) -> Section:
    """Return `value` if it is an instance of `cls`. Raises UnknownValueError if not, which ends the rule."""
    if not isinstance(value, cls):
        raise UnknownValueError(cls.__name__)
    return value


class Context:
    """One config under lint. A property whose value is unknown raises UnknownValueError."""

    def __init__(
        self,
        config: Config,
        reading: Reading,
        world_size: int | None = None,
        cluster: Cluster | None = None,
        by_program: bool = False,
        of_any_world: bool = False,
        forecasts: bool = True,
    ) -> None:
        self.config = config
        self.reading = reading
        self.spec = guarded(reading.spec, "", reading.invalid)
        self._world_size = world_size
        self._cluster = cluster
        self.by_program = by_program and not config.has("model") and "model" not in config.unknown
        """Whether the config has no model because a program passes it."""
        self._of_any_world = of_any_world
        self.forecasts = forecasts
        """Whether rules forecast memory; False for commands that make a forecast of their own."""
        self.comment_problems: Callable[[str], Iterable[Problem]] = lambda code: ()
        """Code -> problems of `# dslpar: ignore` comments; set by the engine if the sources contain any."""
        self.is_legal: Callable[[], bool] = lambda: False
        """Whether the rules that ran so far found no error; set by the engine."""

    def of_any_world(self) -> Context:
        """Return a context without a world size and hosts: a rule ends as soon as it reads either.

        If a rule runs to its end with this context, its findings do not depend on the world size or the hosts.
        """
        return Context(self.config, self.reading, by_program=self.by_program, of_any_world=True)

    @property
    def trusted(self) -> tuple[str, ...]:
        """Packages that the config may call: passed to `load`, or listed in the working folder's pyproject.toml."""
        return trusted_packages(self.config.trusted)

    # The world -----------------------------------------------------------------------------------------------

    @property
    def requested_world_size(self) -> int | None:
        """The world size that the caller passed, even if the hosts have another number of slots; None if none."""
        self._demand_a_world()
        return self._world_size

    @property
    def cluster(self) -> Cluster | None:
        """The hosts, or None if none were given."""
        self._demand_a_world()
        return self._cluster

    @property
    def world_size(self) -> int | None:
        """The number of ranks: the requested one, else the slots of the hosts, else None."""
        cluster = self.cluster
        if self._world_size is None and cluster is not None and not cluster.invalid and cluster.world_size:
            return cluster.world_size
        return self._world_size

    @property
    def world(self) -> int:
        """The number of ranks of the job."""
        if self.world_size is None:
            raise UnknownValueError("world size")
        return self.world_size

    @property
    def hosts(self) -> Cluster:
        """The hosts of the job."""
        if self.cluster is None:
            raise UnknownValueError("hostfile")
        return self.cluster

    def _demand_a_world(self) -> None:
        if self._of_any_world:
            raise UnknownValueError("world")

    # Locations -----------------------------------------------------------------------------------------------

    def source_key(self, key: str) -> str:
        """Return the key as the author wrote it, for instance an alias or the key of a shorthand."""
        return self.reading.written.get(key, key)

    def given(self, key: str) -> bool:
        """Return whether the author wrote the key."""
        return key in self.reading.written

    def at(self, *keys: str) -> Location:
        """Return the location of the first key that the author wrote; if none was, of the last key's section."""
        return self.config.at(self.source_key(self._first_given(keys)))

    def at_item(self, key: str, index: int) -> Location:
        """Return the location of an item of a list."""
        return self.config.at(f"{self.source_key(key)}.{index}")

    def problem(self, keys: str | tuple[str, ...], message: str, hint: str) -> Problem:
        """Make a problem at the value of the first key that the author wrote (see `at`)."""
        key = keys if isinstance(keys, str) else self._first_given(keys)
        return Problem(self.at(key), message, hint, self.source_key(key))

    def problem_of_key(self, key: str, message: str, hint: str) -> Problem:
        """Make a problem at the name of a key; `problem` makes one at its value."""
        return Problem(self.config.key_at(key), message, hint, key)

    def _first_given(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.given(key)), keys[-1])

    @property
    def sources(self) -> Mapping[str, str]:
        """Path -> text of all files that findings may point into."""
        return self.config.sources

    @property
    def datasets(self) -> list[tuple[str, Data]]:
        """(key, data) pairs: the section `data`, or each part of a blend."""
        data, invalid = self.spec.data, self.reading.invalid
        if not isinstance(data, BlendData):
            return [("data", data)]
        keys = map(part_key, range(len(data.parts)))
        return [(key, guarded(part.dataset, key, invalid)) for key, part in zip(keys, data.parts, strict=True)]

    # Findings of earlier stages ------------------------------------------------------------------------------

    def language(self, code: str) -> Iterator[Finding]:
        """Yield the findings with that code that evaluating the file made."""
        return (finding for finding in self.config.findings if finding.code == code)

    def misreads(self, code: str) -> Iterator[Problem]:
        """Yield the problems with that code that reading the sections found."""
        for misread in self.reading.misreads:
            if misread.code == code:
                yield Problem(misread.location, misread.message, misread.help, misread.key, misread.fix)

    @property
    def foreign(self) -> Framework | None:
        """The framework that the config was written for; None for a dslpar config, with or without mistakes.

        A config is foreign if it has mistakes, its model is not of a dslpar family, and it imports a framework's
        packages or sets that framework's keys. A Python config must set two such keys, since a single one may be the
        author's own variable. If a program passes the model, the config is never foreign.
        """
        model = self.reading.spec.model
        ours = isinstance(model, sections.Model) or model.target == "Sequential"
        if ours or self.by_program or not (self.reading.misreads or self.config.findings):
            return None
        from dslpar.schema import frameworks  # few configs get here

        path, root = self.config.path, self.config.root
        is_python = path.endswith(".py")
        text = self.config.sources.get(path, "")
        imported = set(frameworks.imported_packages(text, path)) if is_python else set()
        is_script = not path.endswith((".py", ".yaml", ".yml", ".json"))
        found = None if "dslpar" in imported else frameworks.recognise(root, path, imported, text if is_script else "")
        if found is None or not imported.isdisjoint(found.packages) or not is_python:
            return found
        return found if len(list(frameworks.names_in(root, found))) > 1 else None

    # Sections with several classes ---------------------------------------------------------------------------

    def model_of(self, family: type[Family]) -> Family:
        """Return the model if it is of that family, or of any family if `family` is `sections.Model`."""
        return _require(self.spec.model, family)

    @property
    def other_model(self) -> sections.OtherModel:
        """The model, if the config names a class that is not a dslpar family."""
        return _require(self.spec.model, sections.OtherModel)

    @property
    def own_lr_scheduler(self) -> sections.LRScheduler:
        """The learning-rate scheduler, if it is one of dslpar's."""
        return _require(self.spec.lr_scheduler, sections.LRScheduler)

    @property
    def other_lr_scheduler(self) -> sections.OtherLRScheduler:
        """The learning-rate scheduler, if it is one of DeepSpeed's or torch's."""
        return _require(self.spec.lr_scheduler, sections.OtherLRScheduler)

    @property
    def other_optimizer(self) -> sections.OtherOptimizer:
        """The optimizer, if it is not one of dslpar's own sections."""
        return _require(self.spec.optimizer, sections.OtherOptimizer)

    @property
    def unlisted(self) -> str:
        """The name of the model's class if the config does not list its layers; empty if the layers are known."""
        if self.by_program:
            return "the program's model"
        if "model.layers_cfg" in self.reading.invalid:
            raise UnknownValueError("model.layers_cfg")
        model = self.spec.model
        return "" if isinstance(model, sections.Model) or model.num_layers is not None else model.target

    @property
    def num_layers(self) -> int:
        """Number of layers that a pipeline partitions; unknown if the config does not determine it."""
        layers = None if self.unlisted else self.spec.model.num_layers
        if layers is None:
            raise UnknownValueError("layers")
        return layers

    @property
    def vocabulary(self) -> tuple[int, str]:
        """The size of the model's vocabulary, and its key."""
        if isinstance(self.spec.model, sections.TokenModel):
            return self.spec.model.vocab_size, "model.vocab_size"
        return self._size_of_transformers("vocab")

    @property
    def longest_sequence(self) -> tuple[int, str]:
        """The model's longest sequence in tokens, and its key; unknown if a transformers config does not have it."""
        if isinstance(self.spec.model, sections.TokenModel):
            return self.spec.model.max_seq_len, "model.max_seq_len"
        found, key = self._size_of_transformers("positions")
        return found - self.unused_positions, key

    @property
    def unused_positions(self) -> int:
        """Rows of the position table that no token uses: RoBERTa's positions start after the id of its padding."""
        model = self.spec.model
        config = None if isinstance(model, sections.Model) else model.transformers
        return config.unused_positions if config is not None else 0

    def _size_of_transformers(self, size: str) -> tuple[int, str]:
        """Return a size of a transformers model, and its key; unknown if neither its config nor its class has it."""
        config = self.other_model.transformers
        found = config.size(size) if config is not None else None
        if config is None or found is None:
            raise UnknownValueError(size)
        return found, f"model.config.{config.key(size)}"

    # Sizes, from `parallel` or `train.dist` ------------------------------------------------------------------

    @property
    def pipeline(self) -> sections.PipelineParallel | None:
        """The PipelineParallel of `parallel` or `train.dist`, or None."""
        return pipeline_of(self.spec)

    @property
    def tensor(self) -> sections.TensorParallel | None:
        """The TensorParallel of `parallel` or `train.dist`, or None."""
        return tensor_of(self.spec)

    @property
    def multi_stage_pipeline(self) -> sections.PipelineParallel:
        """The pipeline, if it has two stages or more."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.size == 1:
            raise UnknownValueError("pipeline")
        return pipeline

    @property
    def stages(self) -> int:
        """Number of ranks along the pipeline axis."""
        pipeline = self.pipeline
        return pipeline.size if pipeline else 1

    @property
    def chunks(self) -> Chunks:
        """The stages of the pipeline; a rank may hold several, which are its chunks."""
        return chunks_of(self.spec, self.stages)

    def from_parallel(self, axis: str) -> bool:
        """Return whether the axis comes from `parallel`, not from LiBai's `train.dist`."""
        return getattr(self.spec.parallel, axis) is not None

    @property
    def pipeline_key(self) -> str:
        """The key of the number of stages."""
        return pipeline_key(self.spec)

    @property
    def tensor_key(self) -> str:
        """The key of the tensor size; if there is only context parallelism, the key of its size."""
        if self.tensor is None and self.from_parallel("context"):
            return "parallel.context.size"
        return tensor_key(self.spec)

    @property
    def ids_key(self) -> str:
        """The key of the list of stage ids."""
        return stage_ids_key(self.spec)

    @cached_property
    def cuboid(self) -> mesh.Tensor:
        """The tensor ranks as a cuboid (docs/architecture.md, The cuboid); unknown if mode and size do not fit."""
        tensor = self.tensor
        if tensor is not None and (tensor.mode or tensor.size > 1):
            if tensor.mode is None or MODES[tensor.mode].axes(tensor) is None:
                raise UnknownValueError("parallel.tensor")
            if tensor.mode == "2.5d" and tensor.depth is None and tensor.size > 1:
                raise UnknownValueError("parallel.tensor.depth")
        context = self.spec.parallel.context
        if context is not None:
            if not combines(tensor, context):
                raise UnknownValueError("parallel.context")
            if context.size % (context.ulysses_size or 1):
                raise UnknownValueError("parallel.context.ulysses_size")
        heads = UNKNOWN_HEADS
        with suppress(UnknownValueError):  # the cuboid's sizes are known without a model
            heads = heads_of(self.spec.model)
        return cuboid_of(tensor, context, heads)

    @cached_property
    def tensor_size(self) -> int:
        """Ranks per tensor group; unknown if mode and size do not fit together, known if only the mode is invalid."""
        if "parallel.tensor.mode" not in self.reading.invalid:
            return self.cuboid.size
        tensor = self.tensor
        return tensor.size if tensor is not None else 1

    @property
    def mode_name(self) -> str:
        """A name for messages: the tensor mode as the author wrote it, or context parallelism."""
        if self.tensor_key == "parallel.context.size":
            return "context parallelism"
        return f"mode {self.cuboid.mode!r}"

    @property
    def context_beside(self) -> int:
        """Ranks of context parallelism if it is combined with a tensor mode, else 1."""
        context = self.spec.parallel.context
        return context.size if context is not None and self.tensor is not None else 1

    @cached_property
    def data_size(self) -> int:
        """Data-parallel replicas; unknown if the world size is not a multiple of the other sizes."""
        ranks = self.stages * self.tensor_size
        if self.world % ranks or self.world < ranks:
            raise UnknownValueError("data size")
        return self.world // ranks

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same weights and over which ZeRO shards: replicas, times axis d if ZeRO uses d.

        Axis d has the ranks of context parallelism, or of the depth of mode '2.5d'.
        """
        return self.data_size * (self.cuboid.d if self.zero_over_d else 1)

    @property
    def zero_over_d(self) -> bool:
        """Return whether ZeRO shards over axis d (see `num_copies`) as well as over replicas."""
        return with_zero(self.cuboid, self.spec.model, self.spec.zero.stage, self.stages).zero_over_d

    @cached_property
    def batch(self) -> Batch:
        """The sizes of a step's batch, even if global_size is not the product of the others (BAT101 reports that)."""
        return batch_of(self.requested_batch, self)

    @cached_property
    def job(self) -> Job:
        """The resolved job; unknown if a rule found an error, or if there is no world size."""
        if not self.is_legal():
            raise UnknownValueError("job")
        return resolve(self.reading.spec, self.world, self.config.path, self.trusted)

    @property
    def requested_batch(self) -> sections.Batch:
        """The section `batch` as the author wrote it; sizes that are left out are None."""
        return requested_batch(self.spec)
