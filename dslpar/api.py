"""Training from your own program: the steps of train.py as two functions, under any launcher or without one.

    engine, train_data, eval_data, lr_scheduler = dslpar.initialize("configs/gpt_3d.py")
    for step in range(100):
        loss = engine.train_batch(...)

    run = dslpar.start("configs/resnet.py")          # this rank's stages and groups, before there is a model
    model = dslpar.Stage(first_half() if run.stage == 0 else second_half())
    engine, train_data, *_ = dslpar.initialize(run, model=model, criterion=nn.CrossEntropyLoss(), train_data=images)
    dslpar.fit(run, engine, train_data)              # train.py's loop, instead of your own

Arguments replace the config's sections; the config supplies everything else. The interface follows ColossalAI's
`initialize`, but without global state: `start` returns a Run, and `initialize` takes it.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError, Location
from dslpar.data.loader import Loader
from dslpar.data.order import Samples
from dslpar.data.pairs import PairSamples, is_dataset
from dslpar.data.shuffled_loader import seed_shuffle
from dslpar.data.source import find_source, make_samples
from dslpar.distributed import collectives
from dslpar.distributed.consistency import check_consistency, check_equal
from dslpar.distributed.groups import Groups
from dslpar.distributed.rank_session import ProgramRank
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.engine.initial_weights import check_equal_weights
from dslpar.engine.model import CustomModel, as_layered_model, check_criterion, model_from_job, with_program_chunks
from dslpar.engine.optimizers import read_only
from dslpar.engine.replica_samples import ReplicaSamples
from dslpar.engine.user_optimizer import OptimizerOrFactory
from dslpar.language.load import Config
from dslpar.layout.resolve import Job, Stages
from dslpar.layout.transformers_data_types import check_data, inputs_of
from dslpar.linter import check
from dslpar.linter.registry import rule_finding
from dslpar.models import LayeredModel
from dslpar.parity.prove import STEPS, Program, Proof
from dslpar.parity.prove import prove as prove_job
from dslpar.parity.samples import samples_of_pairs
from dslpar.reporting import logging
from dslpar.schema import paths
from dslpar.schema import sections as schema_sections
from dslpar.schema.class_registry import registered, registered_classes
from dslpar.training.session import NO_LIMIT, Session
from dslpar.training.started_run import Run as Run
from dslpar.training.user_loop_engine import ProgramEngine

NO_MODEL, UNKNOWN_MODEL = "CFG107", "CFG111"
Batches = Iterable[Any]
"""Micro-batches that the program yields, or a map-style dataset that it passes."""
Data = Samples | Batches | None


class Initialized(NamedTuple):
    """Objects that a program trains with. `train_data` or `eval_data` is None if there is no such data."""

    engine: ProgramEngine
    train_data: Batches | None
    eval_data: Batches | None
    lr_scheduler: Any


def start(config: Config | check.Source, overrides: Sequence[str] = (), trusted: Sequence[str] = ()) -> Run:
    """Lint the config for this world, set up torch.distributed, and check that all ranks run the same job.

    All ranks must call it together. If the config has no model, the program must pass one to `initialize`. It also
    seeds torch with train.seed, on every rank alike. So build the model after `start`: weights that were drawn before
    depend on the program's own seed, or on none.

    trusted: packages whose classes and functions the config may call.

    Raises:
        DslparError: the config has errors for this world, or is not the same on all ranks.
    """
    loaded = config if isinstance(config, Config) or not trusted else check.load(config, overrides, trusted=trusted)
    return _start(loaded, () if trusted else overrides, by_program=False)


def initialize(
    config: Config | check.Source | Run,
    *,
    model: nn.Module | LayeredModel | None = None,
    criterion: Callable[[Any, Any], Tensor] | None = None,
    optimizer: OptimizerOrFactory | None = None,
    train_data: Batches | None = None,
    eval_data: Batches | None = None,
    lr_scheduler: Any = None,
    overrides: Sequence[str] = (),
) -> Initialized:
    """Return the engine, loaders of micro-batches, and the LR scheduler. All ranks must call it together.

    `engine.save()` and `engine.resume()` write and read checkpoints that any layout can load.

    If dslpar sets up torch.distributed, and the program has no handlers of its own, three things follow. SIGTERM saves
    after the current step and ends the program at the next one, with train.requeue_status. A call of the engine that
    takes longer than train.step_timeout ends the job. The output folder is locked for this run. With
    train.save_interval=0, dslpar saves and locks only if the program asks for it.

    model: a module, an nn.Sequential (partitioned over stages), a LayeredModel, the result of build_pipeline_model, or
        a Stage with a module for each of this rank's stages. Build it after `start`, which seeds torch.
    criterion: maps (output, label) to the mean over the micro-batch; by default cross-entropy.
    optimizer: an instance over the model's parameters, or a class (or other callable) that takes parameter groups.
    train_data, eval_data: dslpar loads a map-style dataset of (input, label) pairs in an order that does not depend on
        the layout. Each iteration over the returned loader is one epoch. A resumed run continues train_data at its
        first unused sample. Any other iterable must yield micro-batches and is read unchanged: each data rank must
        supply its own samples, the same on all ranks of a replica. DataLoader(shuffle=True) shuffles by train.seed.
        Default: the config's data, if the model comes from the config or the config has a `data` section.
    lr_scheduler: an instance over the optimizer, or a callable that takes the optimizer and returns one. A pipeline
        needs the callable, since its stages may have fewer parameter groups. The engine steps it after each optimizer
        step.

    Raises:
        DslparError: train.py would refuse the config, or the model, optimizer or data passed here cannot be used.
    """
    run = config if isinstance(config, Run) else _start(config, overrides, by_program=model is not None)
    return initialize_run(run, ProgramEngine, model, criterion, optimizer, train_data, eval_data, lr_scheduler)


def initialize_run(
    run: Run,
    engine_class: type[ProgramEngine],
    model: nn.Module | LayeredModel | None,
    criterion: Callable[[Any, Any], Tensor] | None,
    optimizer: OptimizerOrFactory | None,
    train_data: Batches | None,
    eval_data: Batches | None,
    lr_scheduler: Any,
) -> Initialized:
    """Build the engine of a started run; see `initialize`. `engine_class` may add another interface's methods."""
    if model is None and not run.config.has("model"):
        hint = "write a model in the config, or give model=..."
        raise DslparError([rule_finding(NO_MODEL, "there is no model", hint, Location(run.job.path))])
    check_criterion(criterion, run.job.path)
    job, groups = run.job, run.groups
    layered = as_layered_model(model, job.path) if model is not None else None
    if layered is not None:
        check_equal_weights(layered, groups, job.path)
        job = with_program_model(job, model)
        groups = groups.with_chunks(job.chunks.num)
        if run.monitor is not None:
            run.monitor.page.location = groups.stage_name
        layered = layered if criterion is None else CustomModel(layered, criterion)
    elif criterion is not None:
        layered = CustomModel(model_from_job(job, has_criterion=True), criterion)
    *samples, text = _resolve_data(run, job, train_data, eval_data, model_from_config=model is None)
    # The order of samples depends on their number. A stage between the first and the last may have no data.
    train_size, eval_size = (getattr(data, "num_samples", None) for data in samples)
    sizes = {"number of training samples": train_size, "number of evaluation samples": eval_size}
    hint = "give every rank the whole data set: each reads its own share of it"
    check_equal(sizes, groups.axis("pipe", "data", "tensor"), "HST203", hint)
    all_counted = criterion is not None or (isinstance(samples[0], Samples) and samples[0].all_counted)
    session = Session(job, run.config, groups.axis("pipe", "data", "tensor"), run.monitor, text)
    if session.stops_on_signal and job.spec.train.save_interval != 0:
        session.lock_folder(job)
    with logging.prints_to_log(None), session.inside("building", times=NO_LIMIT):
        engine = build_engine(
            *(job, groups),
            model=layered,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            all_counted=all_counted,
            engine_class=partial(engine_class, session=session),
        )
    assert isinstance(engine, ProgramEngine)
    if session.monitor is not None:
        session.extend_timeouts()
        atexit.register(session.enter_ending)
    if train_data is not None and not isinstance(samples[0], Samples):
        engine.replica_samples = ReplicaSamples(groups)
    train_loader = _make_loader(engine, samples[0], lambda: engine.consumed_samples)
    eval_loader = _make_loader(engine, samples[1], lambda: 0)
    return Initialized(engine, train_loader, eval_loader, read_only(engine.deepspeed.lr_scheduler, job.path))


def prove(
    config: Config | check.Source,
    *,
    world_size: int,
    model: nn.Module | LayeredModel | Callable[[Run], nn.Module | LayeredModel] | None = None,
    loss: Callable[..., Any] | None = None,
    data: Sequence[Any] | None = None,
    overrides: Sequence[str] = (),
    ranks: int = 8,
    steps: int = STEPS,
    resume_on: Sequence[str] | None = None,
    full: bool = False,
) -> Proof:
    """Compare the config's layout with one process, gradient by gradient, on CPU ranks that fork from this process.

    The comparison needs no launcher, and no torch.distributed in this process. It runs a miniature of the job: fewer
    ranks and, unless `full` is set, smaller sizes of the config's model. `proof.verdict` is "proved", "differs" or
    "refused", and `proof.first_difference` describes the first difference. See docs/proving.md.

    Args:
        config: a file, its sections as a dict, or the result of `dslpar.load`.
        world_size: number of ranks of the layout. The miniature has at most `ranks` ranks. If all parallel axes
            together need more, several miniatures run, each with some of the axes.
        model: a module, or a function that takes a `Run` and returns a module. Layers of dslpar.layers need
            `run.groups`, and a `dslpar.Stage` needs `run.stage`. The function is called on each rank of the miniature,
            and for the one process. None: the config's model.
        loss: maps (output, label) to the mean over the micro-batch; or a function that takes the `Run` and returns
            such a loss.
        data: (input, label) pairs, at least one global batch of the miniature. Default: the config's text, or random
            samples.
        overrides: `key=value`, as on the command line.
        ranks: maximum number of CPU ranks.
        steps: number of optimizer steps to compare.
        resume_on: overrides that give a second layout, which resumes from a checkpoint of the first.
        full: keep the sizes of the config's model. A program's model always keeps its sizes.

    Raises:
        DslparError: lint finds errors in the config, or in the config that `resume_on` gives.
        ValueError: an axis needs more ranks, there are too few steps, or `resume_on` changes what a resume must keep.
        RankError: a rank failed for another reason.
    """
    torch.set_num_threads(1)  # ranks fork
    loaded = config if isinstance(config, Config) else check.load(config, overrides)
    by_program = model is not None
    job = _load_job(loaded, world_size, rank=1, by_program=by_program)
    other = None
    if resume_on is not None:
        if isinstance(config, Config):
            raise TypeError("resume_on needs the config's file or sections, because it overrides their keys")
        changed = check.load(config, [*overrides, *resume_on])
        other = _load_job(changed, world_size, rank=1, by_program=by_program)
    program = None
    if model is not None:
        job = with_program_model(job, model)
        other = with_program_model(other, model) if other is not None else None
        samples = samples_of_pairs(data, job.path) if data is not None else None
        program = Program(partial(_program_model, loaded, model, loss), samples)
    return prove_job(job, max_ranks=ranks, steps=steps, full=full, resume_on=other, program=program)


def _program_model(config: Config, model: Any, loss: Any, job: Job, groups: Groups) -> LayeredModel:
    """Build the program's model for one rank. The seed makes its weights equal on all ranks and in the one process."""
    run = Run(config, job, groups)
    torch.manual_seed(job.spec.train.seed)
    made = model if isinstance(model, nn.Module | LayeredModel) else model(run)
    layered = as_layered_model(made, job.path)
    if loss is None:
        return layered
    check_criterion(loss, job.path)
    takes_run = not isinstance(loss, nn.Module) and len(inspect.signature(loss).parameters) == 1
    return CustomModel(layered, loss(run) if takes_run else loss)


# ---- start ----


def _start(config: Config | check.Source, overrides: Sequence[str], by_program: bool) -> Run:
    """Implement `start`; `by_program`: the program passes the model, which replaces the config's."""
    if isinstance(config, Config) and overrides:
        raise TypeError("overrides go to dslpar.load, which applies them")
    program_rank = ProgramRank(os.environ)
    with program_rank.preparing() as (rank, world_size):
        loaded = config if isinstance(config, Config) else check.load(config, overrides)
        job = _load_job(loaded, world_size, rank, by_program or not loaded.has("model"))
    monitor = program_rank.meet(job)
    groups = Groups(job.mesh, num_chunks=job.chunks.num)
    logging.warn_on_rank_0(groups.rank)
    world = groups.axis("pipe", "data", "tensor")
    check_consistency(job, world)
    # If one rank has its own handler for errors or SIGTERM, no rank stops on signals: all must stop at the same step.
    all_can_stop = all(collectives.gather_objects(monitor is not None and monitor.can_stop_on_signal, world))
    if monitor is not None:
        if all_can_stop:
            monitor.stop_on_signal(job.spec.train.term_grace, job.spec.train.requeue_status)
        monitor.page.location = groups.stage_name
    # The seed of weights: a model that the program builds from here on is the same on every rank, and in every run.
    torch.manual_seed(job.spec.train.seed)
    return Run(loaded, job, groups, monitor)


def with_overrides(run: Run, source: check.Source, overrides: Sequence[str]) -> Run:
    """Return a started run of a program's model with other values, from its config's source and `key=value` overrides.

    The overrides must not change the mesh. All ranks must call it together.

    Raises:
        DslparError: the config has errors with these values, or ranks have different values.
    """
    config = check.load(source, overrides)
    job = _load_job(config, run.groups.mesh.world_size, run.groups.rank, by_program=True)
    check_consistency(job, run.groups.axis("pipe", "data", "tensor"))
    return dataclasses.replace(run, config=config, job=job)


def _load_job(config: Config, world_size: int, rank: int, by_program: bool) -> Job:
    """Lint the config and resolve its job; `by_program`: ignore the config's `model` section."""
    if by_program:
        sections = {name: node for name, node in config.root.value.items() if name != "model"}
        config = config._replace(root=config.root._replace(value=sections))
    config = config._replace(trusted=(*config.trusted, *registered_classes()))
    checked = check.check(config, world_size, registered=registered(), by_program=by_program)
    job = checked.job  # raises the errors, so that they are not also printed here
    folder = None if by_program else paths.pretrained_folder(job.spec, job.path)
    paths.check([folder] if folder is not None else [], job.path)
    if rank == 0:
        # The linter does not know a program's model. Errors in that model are found when it is built.
        shown = [item for item in checked.findings if not (by_program and item.code == UNKNOWN_MODEL)]
        logging.print_findings(shown, config.sources)
    return job


# ---- the program's model and data ----


def with_program_model(job: Job, model: object) -> Job:
    """Return the job with a program's model: its class, its stages per rank, and a partition that is not known yet.

    Raises:
        DslparError: the job cannot have as many stages per rank (chunks) as the model requests.
    """
    cls = type(model)
    section = schema_sections.OtherModel(target=f"{cls.__module__}.{cls.__qualname__}")
    spec = dataclasses.replace(job.spec, model=section)
    job = dataclasses.replace(job, spec=spec, stages=Stages(None, None, None), has_program_model=True)
    return with_program_chunks(job, model) if isinstance(model, LayeredModel) else job


def _resolve_data(
    run: Run, job: Job, train_data: Batches | None, eval_data: Batches | None, model_from_config: bool
) -> tuple[Data, Data, str]:
    """Return the training data, the evaluation data, and the identity of the config's data.

    The config's data replace arguments that are None. The identity is a text that a resume must not change. It is empty
    for a program's data.
    """
    passed = (train_data, eval_data)
    for data in passed:
        seed_shuffle(data, job.spec.train.seed)
    readable: list[Data] = [PairSamples(data, job.path) if is_dataset(data) else data for data in passed]  # type: ignore[arg-type]
    train, held_out = readable
    text = ""
    if train_data is None and (model_from_config or run.config.has("data")):
        check_data(job)
        source, inputs = find_source(job), inputs_of(job)
        train, text = make_samples(job, source.train, inputs), source.identity
        if held_out is None and job.spec.train.eval_interval:
            held_out = make_samples(job, source.held_out, inputs)
    return train, held_out, text


def _make_loader(engine: Engine, samples: Data, consumed_samples: Callable[[], int]) -> Batches | None:
    if not isinstance(samples, Samples):
        return samples
    return Loader(samples, engine.job, engine.groups.coord["data"], consumed_samples)
