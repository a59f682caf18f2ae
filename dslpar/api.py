"""Training from a program of one's own: the flow of train.py as two functions, under any launcher or none.

    engine, train_data, eval_data, lr_scheduler = dslpar.initialize("configs/gpt_3d.py")
    for step in range(100):
        loss = engine.train_batch(...)

    run = dslpar.start("configs/resnet.py")          # where this process stands, before there is a model
    model = dslpar.Stage(first_half() if run.stage == 0 else second_half())
    engine, train_data, *_ = dslpar.initialize(run, model=model, criterion=nn.CrossEntropyLoss(), train_data=images)

What the program gives takes the place of the config's section; what it leaves out comes from the config. The shape is
ColossalAI's `initialize`; nothing here is global: a Run is passed.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import deepspeed
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Location
from dslpar.data.corpus import load_corpus
from dslpar.data.loader import Loader, PairSamples, is_dataset
from dslpar.data.order import Samples
from dslpar.data.text import TextSamples
from dslpar.distributed import bootstrap, collectives
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.engine.user_optimizer import OptimizerOrFactory
from dslpar.language.load import Config
from dslpar.layout.resolve import Job, Stages, pipeline_of
from dslpar.layout.stages import ids_of
from dslpar.linter import check
from dslpar.linter.registry import rule_finding
from dslpar.models import LayeredModel, Sequential
from dslpar.models.build import Given, given_model, model_of
from dslpar.reporting import logging
from dslpar.schema import sections as schema_sections
from dslpar.schema.registry import registered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

NO_MODEL = "CFG107"


@dataclasses.dataclass(frozen=True)
class Run:
    """A job on its ranks, before there is a model; what `start` gives and `initialize` takes."""

    config: Config
    """What the author wrote."""
    job: Job
    """What will run; where the program gives the model, without its layers."""
    groups: Groups
    """The mesh made real."""

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.groups.coord["pipe"]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.groups.mesh.pipe

    def get_layer_stage_id(self, layer_idx: int) -> int:
        """The stage of a layer by its index; -1 is the last one (LiBai's words).

        Raises:
            DslparError: there is no such layer, or nothing says yet how layers are cut.
        """
        return layer_stage_id(self.job, layer_idx)

    # Tensors of your own (dslpar.layers.dtensor), which is imported here: DTensor takes as long as the half of torch.

    def device_mesh(self, *names: str) -> DeviceMesh:
        """torch's DeviceMesh over our axes, a dim each: "pipe", "data", "tensor", "x", "d", "q", "y", "z".

        Raises:
            DslparError: an axis that does not exist, or two that overlap.
        """
        from dslpar.layers import dtensor

        return dtensor.device_mesh(self.groups, *names)

    def get_layer_placement(self, layer_idx: int) -> DeviceMesh:
        """The ranks of the stage that holds the layer, as a mesh of (data, tensor) (LiBai's words).

        Every rank may ask; one of another stage has no place in it (`get_coordinate()` is None), and holds nothing of
        what is laid over it.

        Raises:
            DslparError: there is no such layer, or nothing says yet how layers are cut.
        """
        from dslpar.layers import dtensor

        return dtensor.stage_mesh(self.groups, self.get_layer_stage_id(layer_idx))

    def get_nd_sbp(self, placements: Sequence[Placement]) -> tuple[Placement, Placement]:
        """What happens to a tensor over data, and over tensor: `dslpar.layers.dtensor`' split(dim), broadcast,
        partial_sum.

        Raises:
            DslparError: not two placements.
        """
        from dslpar.layers import dtensor

        return dtensor.nd_sbp(placements)

    def distribute(
        self, tensor: Tensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, source: int | None = 0
    ) -> DTensor:
        """A whole tensor, laid over the mesh; left out: (data, tensor) of this rank's stage. See `tensors.distribute`.

        Raises:
            DslparError: the placements do not fit the mesh or the tensor.
        """
        from dslpar.layers import dtensor

        mesh = dtensor.stage_mesh(self.groups, self.stage) if mesh is None else mesh
        return dtensor.distribute(tensor, placements, mesh, source)


class Initialized(NamedTuple):
    """What a program trains with; a loader is None where there are no such data."""

    engine: Engine
    train_data: Iterable[Any] | None
    eval_data: Iterable[Any] | None
    lr_scheduler: Any


def start(config: Config | check.Path, overrides: Sequence[str] = ()) -> Run:
    """Find this process's place, meet the other ranks, and decide what runs. All ranks must call it together.

    A config without a model is one whose model the program will give.

    Raises:
        DslparError: the config has errors for this world, or the ranks do not have the same.
    """
    return _start(config, overrides, by_program=False)


def initialize(
    config: Config | check.Path | Run,
    *,
    model: nn.Module | LayeredModel | None = None,
    criterion: Callable[[Any, Any], Tensor] | None = None,
    optimizer: OptimizerOrFactory | None = None,
    train_data: Iterable[Any] | None = None,
    eval_data: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    overrides: Sequence[str] = (),
) -> Initialized:
    """The engine, loaders of micro-batches, and the schedule of the learning rate. All ranks must call it together.

    model: a module, an nn.Sequential (cut over stages), a LayeredModel, what build_pipeline_model gives, or a Stage.
    criterion: (output, label) to the mean over the micro-batch; else cross-entropy.
    optimizer: an instance over the model's parameters, or a class (or other callable) that takes parameter groups.
    train_data, eval_data: a map-style data set of (input, label) pairs is read in an order that the layout does not
        change, a pass an epoch, from where the run stands. Any other iterable of micro-batches is used as it is: then
        each data rank must bring its own samples, and all ranks of one replica the same. Left out: the config's text,
        where the model or the data are the config's too.
    lr_scheduler: an instance over the optimizer, or what makes one of it (in a pipeline, whose stages may hold fewer
        parameter groups, that). The engine steps it, once an optimizer step.

    Raises:
        DslparError: what train.py says of the config, or of the model, optimizer and data given here.
    """
    run = config if isinstance(config, Run) else _start(config, overrides, by_program=model is not None)
    if model is None and run.config.root.child("model") is None:
        hint = "write a model in the config, or give model=..."
        raise DslparError([rule_finding(NO_MODEL, "there is no model", hint, Location(run.job.path))])
    if isinstance(criterion, nn.Module) and any(True for _ in criterion.parameters()):
        message, hint = "the criterion has parameters, which nothing would train", "make them part of the model"
        raise_finding("CFG227", message, hint, run.job.path)
    job, groups = run.job, run.groups
    layered = given_model(model, job.path) if model is not None else None
    if layered is not None:
        _check_equal_weights(job, layered, groups)
        job = _of_program(job, model)
        layered = layered if criterion is None else Given(layered, criterion)
    elif criterion is not None:
        layered = Given(model_of(job), criterion)
    samples = _samples(run, job, train_data, eval_data, from_config=model is None)
    _check_equal_numbers(samples, groups)
    all_counted = criterion is not None or isinstance(samples[0], TextSamples)
    with logging.prints_to_log(None):
        engine = build_engine(
            job, groups, model=layered, optimizer=optimizer, lr_scheduler=lr_scheduler, all_counted=all_counted
        )
    train, held_out = (
        _loader(engine, each, position)
        for each, position in zip(samples, (lambda: engine.consumed_samples, lambda: 0), strict=True)
    )
    return Initialized(engine, train, held_out, _by_engine(engine.deepspeed.lr_scheduler, job.path))


def layer_stage_id(job: Job, layer_idx: int) -> int:
    """The stage of a layer, as the job's cut has it, or the ids or counts that the config gives."""
    pipeline = pipeline_of(job.spec)
    ids: tuple[int, ...] | dict[int, int] | None = job.stages.actual_ids
    if not ids and pipeline is not None:
        ids = pipeline.stage_ids or ids_of(pipeline.counts or ())
    if job.mesh.pipe == 1:
        num = job.stages.counts[0] if job.stages.counts else None
        ids = (0,) * num if num else {layer_idx: 0}
    if not ids:
        message = "nothing says how the layers are cut before the model is there"
        hint = "write parallel.pipeline.stage_ids (LiBai's custom_pipeline_stage_id), or counts"
        raise_finding("PIP208", message, hint, job.path)
    try:
        return ids[layer_idx]
    except (IndexError, KeyError):
        message = f"there is no layer {layer_idx}: the model has {len(ids)}"
        raise_finding("PIP208", message, f"from 0 to {len(ids) - 1}, or -1 for the last", job.path)


# ---- where this process stands ----


def _start(config: Config | check.Path, overrides: Sequence[str], by_program: bool) -> Run:
    loaded = config if isinstance(config, Config) else check.load(config, overrides)
    if isinstance(config, Config) and overrides:
        raise TypeError("overrides go to dslpar.load, which applies them")
    by_program = by_program or loaded.root.child("model") is None
    rank, world_size = _place()
    job = _job(loaded, world_size, rank, by_program)
    _meet()
    groups = Groups(job.mesh)
    _agree(job, groups)
    return Run(loaded, job, groups)


def _place() -> tuple[int, int]:
    """(rank, world size), of torch.distributed where it runs already."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = bootstrap.read_distributed_env(os.environ)
    return place.rank, place.world_size


def _meet() -> None:
    """torch.distributed and DeepSpeed upon it, where the program has not started them itself."""
    if not dist.is_initialized():
        place, monitor = bootstrap.read_distributed_env(os.environ), None
        if sys.excepthook is sys.__excepthook__:  # else the program has its own way with errors
            monitor = bootstrap.monitor_rank(place, os.environ)
        bootstrap.setup_distributed(place, os.environ, monitor)
        atexit.register(_stop)
    elif not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def _stop() -> None:
    """Not together: a rank that ends early must not wait for the others."""
    if dist.is_initialized():
        bootstrap.teardown_distributed(together=False)


def _job(config: Config, world_size: int, rank: int, by_program: bool) -> Job:
    """The job, linted; of a model that the program gives, the config's own section is not read."""
    names = registered()
    if by_program:
        config = _without_model(config)
    checked = check.check(config, world_size, registered=names)
    if by_program:
        checked = checked.without(NO_MODEL)
    job = checked.job
    if rank == 0:
        logging.print_findings(checked.findings, config.sources)
    return job


def _without_model(config: Config) -> Config:
    sections = {name: node for name, node in config.root.value.items() if name != "model"}
    return config._replace(root=config.root._replace(value=sections))


def _agree(job: Job, groups: Groups) -> None:
    """All ranks have the same job, wherever its files lie."""
    mine = hashlib.sha256(repr(dataclasses.replace(job, path="", output_dir="")).encode()).hexdigest()
    _demand_equal(mine, groups, "HST203", "another config", "give every rank the same config")


def _check_equal_weights(job: Job, model: LayeredModel, groups: Groups) -> None:
    """Of modules that each rank has built whole, a pipeline takes each stage's from another rank."""
    if not isinstance(model, Sequential) or job.mesh.pipe == 1:
        return
    weights = [p.detach().double().sum().item() for _, module in model.modules for p in module.parameters()]
    hint = "call torch.manual_seed(...) before the model is built, or build_pipeline_model_from_cfg"
    _demand_equal(repr(weights), groups, "HST221", "other weights", hint)


def _check_equal_numbers(samples: Sequence[Any], groups: Groups) -> None:
    """Of the data sets: their order depends on their length. A stage between the first and the last may have none."""
    numbers = [getattr(each, "num_samples", None) for each in samples]
    hint = "give every rank the whole data set: each reads its own share of it"
    for name, number in zip(("training", "evaluation"), numbers, strict=True):
        _demand_equal(number, groups, "HST203", f"another number of {name} samples", hint)


def _demand_equal(mine: object, groups: Groups, code: str, what: str, hint: str) -> None:
    seen = collectives.gather_objects(mine, groups.axis("pipe", "data", "tensor"))
    differ = [str(rank) for rank, theirs in enumerate(seen) if theirs != seen[0] and theirs is not None]
    if differ:
        message = f"rank {', '.join(differ[:8])} {'has' if len(differ) == 1 else 'have'} {what} than rank 0"
        raise_finding(code, message, hint)


# ---- what the program gives ----


def _of_program(job: Job, model: object) -> Job:
    """The job of a model that is known when it is built."""
    cls = type(model)
    section = schema_sections.OtherModel(target=f"{cls.__module__}.{cls.__qualname__}")
    stages = Stages(None, None, None)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, model=section), stages=stages)


def _samples(
    run: Run, job: Job, train_data: Iterable[Any] | None, eval_data: Iterable[Any] | None, from_config: bool
) -> tuple[Samples | Iterable[Any] | None, Samples | Iterable[Any] | None]:
    """What is trained on and evaluated on: the config's text where the program brings nothing."""
    wants_text = train_data is None and (from_config or run.config.root.child("data") is not None)
    text: tuple[Samples | None, Samples | None] = _text(job) if wants_text else (None, None)
    given = [PairSamples(data, job.path) if is_dataset(data) else data for data in (train_data, eval_data)]  # type: ignore[arg-type]
    train, held_out = (mine if mine is not None else theirs for mine, theirs in zip(given, text, strict=True))
    return train, held_out


def _text(job: Job) -> tuple[TextSamples, TextSamples | None]:
    corpus = load_corpus(job)
    held_out = TextSamples.from_files(corpus.held_out, job.seq_len) if job.spec.train.eval_interval else None
    return TextSamples.from_files(corpus.train, job.seq_len), held_out


def _loader(engine: Engine, samples: Any, position: Callable[[], int]) -> Iterable[Any] | None:
    if samples is None or not hasattr(samples, "batch"):
        return samples  # type: ignore[no-any-return]
    return Loader(samples, engine.job, engine.groups.coord["data"], position)


def _by_engine(scheduler: Any, path: str) -> Any:
    """The schedule, whose `step` is the engine's alone: a second one a step would halve the run."""
    if scheduler is None:
        return None

    class ByEngine(type(scheduler)):  # type: ignore[misc]
        """Reads as the schedule does."""

        def __init__(self) -> None:
            self.__dict__ = scheduler.__dict__

        def step(self, *_: Any, **__: Any) -> NoReturn:
            message = "lr_scheduler.step(): the engine steps the schedule, once an optimizer step"
            hint = "leave the call out: engine.step() and engine.train_batch() do it"
            raise_finding("BAT209", message, hint, path)

    return ByEngine()
