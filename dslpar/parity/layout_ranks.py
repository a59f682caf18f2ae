"""Run a job under its layout on forked ranks, and return each rank's pieces of gradients and weights.

    ranks = run_layout(job, samples, steps=3)
    ranks[0].losses, ranks[0].gradients["blocks.0.mlp.up.weight"].piece

Each rank builds the same DeepSpeed engine as train.py, reads its share of the samples with the same loader, and trains.
Gradients of the first step are read where the optimizer would read them: after everything that sums them, before
clipping. A piece is a rank's shard of a tensor. Each rank returns its own pieces, with copies, so that a wrong piece or
copy can be found. Only ZeRO's shards of a piece are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dslpar import checkpoint
from dslpar.checkpoint.full_state_dict import local_piece
from dslpar.core.errors import DslparError
from dslpar.data.loader import Loader
from dslpar.data.order import Samples
from dslpar.distributed.deepspeed_patches import skip_shm_op
from dslpar.distributed.forked_ranks import run_on_ranks
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.engine.engine import Engine
from dslpar.engine.model import with_program_chunks
from dslpar.layers import placement_of
from dslpar.layers.placement import Placement
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel
from dslpar.parity.without_dropout import disable_dropout
from dslpar.reporting.logging import prints_to_log
from dslpar.schema.sections import OtherModel

ModelOf = Callable[[Job, Groups], LayeredModel | None]
"""Makes a rank's model. If it returns None, the job's own model is used."""


@dataclass(frozen=True)
class Held:
    """A rank's piece of one parameter or gradient."""

    piece: Tensor
    placement: Placement | None
    """None: equal copies on all ranks of the tensor group."""


@dataclass(frozen=True)
class RankResult:
    """The results of one rank."""

    rank: int
    losses: list[float]
    """The loss that each step reported."""
    norms: list[float]
    """The gradient norm that each step reported."""
    gradients: dict[str, Held]
    """Gradients of the first step, for the layers that this rank holds."""
    weights: dict[str, Held]
    """Weights after the last step."""
    lrs: list[float] = field(default_factory=list)
    """The learning rate that each step reported."""


def run_layout(
    job: Job,
    samples: Samples,
    steps: int,
    *,
    model_of: ModelOf = lambda job, groups: None,
    loads: str = "",
    saves: str = "",
    change: Callable[[], None] = lambda: None,
) -> list[RankResult]:
    """Train `steps` steps on the job's ranks. `loads` and `saves` are run folders to resume from and to save in.

    `change` is called first on each rank.

    Raises:
        DslparError: the engine cannot be built; the findings are those of the lowest rank that raised.
        RankError: a rank failed for another reason, or all ranks are stuck.
    """
    import_for_ranks(job)
    arguments = (job, samples, steps, model_of, loads, saves, change)
    found = run_on_ranks(job.mesh.world_size, _rank, *arguments, init="deepspeed")
    for each in found:
        if isinstance(each, DslparError):
            raise each
    return found


def import_for_ranks(job: Job) -> None:
    """Import once, before the fork, the modules that every rank would import itself, which takes seconds per rank."""
    model = job.spec.model
    names = [
        "torch.fx.experimental.symbolic_shapes",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.utils.pin_memory",
        "torch._subclasses.schema_check_mode",
        "dslpar.checkpoint.full_state_dict",
    ]
    if isinstance(model, OtherModel) and model.is_of_transformers:
        transformers = import_module("transformers")
        # The class's own module; a name that does not exist is a finding of the build.
        getattr(transformers, model.target.rpartition(".")[2], None)
        names += ["dslpar.policies.model", "dslpar.parity.plain_transformers"]
    for name in names:
        import_module(name)
    skip_shm_op()
    torch.set_num_threads(1)


def _rank(
    job: Job, samples: Samples, steps: int, model_of: ModelOf, loads: str, saves: str, change: Callable[[], None]
) -> RankResult | DslparError:
    change()
    try:
        groups = Groups(job.mesh, num_chunks=job.chunks.num)
        with prints_to_log(None):  # DeepSpeed's output is not part of the result
            model = model_of(job, groups)
            # A program's own criterion takes the mean over each micro-batch, regardless of labels.
            counted = samples.all_counted or getattr(model, "criterion", None) is not None
            job = job if model is None else with_program_chunks(job, model)
            engine = build_engine(job, groups, model=model, all_counted=counted)
        disable_dropout(engine.deepspeed.module)
        if loads:
            _load(engine, loads)
    except DslparError as error:
        return error
    gradients: dict[str, Held] = {}
    _take_gradients(engine, gradients)
    losses, norms, lrs = [], [], []
    loader = Loader(samples, engine.job, groups.coord["data"], lambda: engine.consumed_samples)
    for _ in range(steps):
        losses.append(engine.train_batch(loader.step(engine.consumed_samples)))
        norms.append(engine.grad_norm)
        lrs.append(engine.lr)
    if saves:
        _save(engine, saves)

    weights = {name: _held(p, local_piece(p)) for name, p in engine.named_parameters()}
    return RankResult(groups.rank, losses, norms, gradients, weights, lrs)


def _held(p: nn.Parameter, piece: Tensor) -> Held:
    placement = placement_of(p)
    shape = placement.local_shape if placement is not None else tuple(getattr(p, "ds_shape", p.shape))
    return Held(piece.detach().cpu().float().reshape(shape).clone(), placement)


def _take_gradients(engine: Engine, into: dict[str, Held]) -> None:
    """Store the gradients of the first step, as DeepSpeed's step finds them."""

    def take() -> None:
        if not into:
            for key, p in engine.named_parameters():
                if p.requires_grad and (gradient := full_gradient(p, engine.job.spec.zero.stage)) is not None:
                    into[key] = _held(p, gradient)

    at_optimizer_step(engine, take)


def at_optimizer_step(engine: Engine, look: Callable[[], None]) -> None:
    """Have each step call `look` after gradients are summed and before they are clipped, on all ranks together."""
    # ZeRO 1 and 2 have the whole gradient from the moment when their step computes its norm until it is clipped.
    owner, name = (
        (engine.deepspeed.optimizer, "scaled_global_norm")
        if engine.job.spec.zero.stage in (1, 2)
        else (engine.deepspeed, "_take_model_step")
    )
    method = getattr(owner, name)

    def looking(*args: Any, **kwargs: Any) -> Any:
        look()
        return method(*args, **kwargs)

    setattr(owner, name, looking)


def full_gradient(p: Any, zero_stage: int) -> Tensor | None:
    """Return the gradient of this rank's piece, gathered if ZeRO has sharded it. All replicas must call it together."""
    if zero_stage == 0:
        return p.grad  # type: ignore[no-any-return]
    if zero_stage == 3:
        return p._z3_optimizer.get_fp32_grad_for_param(p)  # type: ignore[no-any-return]
    # Not safe_get_full_grad: it returns `p.grad` if there is one, which has the samples of this replica only.
    return p.get_full_hp_grad()  # type: ignore[no-any-return]


# ---- checkpoints ----


def in_folder(job: Job, folder: str) -> Job:
    """Return the job with `folder` as its output folder."""
    train = dataclasses.replace(job.spec.train, output_dir=folder)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train), output_dir=folder)


def _save(engine: Engine, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    engine.job = in_folder(engine.job, folder)
    checkpoint.save(engine, "samples")


def _load(engine: Engine, folder: str) -> None:
    engine.job = in_folder(engine.job, folder)
    stored = checkpoint.find_checkpoint(engine.job, engine.groups.axis("pipe", "data", "tensor"))
    assert stored is not None, "the run before has saved"
    checkpoint.check(stored, engine.job, "samples")
    checkpoint.load(engine, stored)
