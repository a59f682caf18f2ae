"""The engine beyond invariance: what it reports, averages and refuses, and DeepSpeed bugs that tests watch."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.language.tree import Reference
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks

# ---- reports ----


def _steps(made: Job) -> list[tuple[float, float, float, int]]:
    engine = engine_of(made)
    rows = []
    for step in range(3):
        fed = batches(made, engine.groups.coord["data"], step)
        held = engine.eval_batch(fed)
        loss = engine.train_batch(fed)
        assert held == pytest.approx(loss, rel=1e-6), "evaluation is the same loss, without a step"
        rows.append((loss, engine.grad_norm, engine.lr, engine.consumed_samples))
    return rows


PIPE = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))


@pytest.mark.parametrize("parallel", [schema_sections.Parallel(), PIPE], ids=["data 2", "pipe 2"])
def test_it_reports_the_lr_it_used_and_where_it_stands(parallel: schema_sections.Parallel) -> None:
    made = job(
        2,
        parallel=parallel,
        optimizer=schema_sections.SGD(lr=0.3),
        lr_scheduler=schema_sections.LRScheduler(type="linear", warmup_steps=2),
        train=schema_sections.Train(steps=3),
    )
    ranks = on_ranks(2, _steps, made, init="deepspeed")
    assert ranks[0] == ranks[1], "all ranks report the same"
    assert [lr for _, _, lr, _ in ranks[0]] == pytest.approx([0.15, 0.3, 0.0])
    assert [consumed for *_, consumed in ranks[0]] == [4, 8, 12]


def test_the_norm_is_there_and_unclipped_at_every_zero_stage() -> None:
    norms = []
    for stage in (0, 1, 2, 3):
        for clip in (None, 0.01):
            made = job(
                1,
                zero=schema_sections.Zero(stage=stage),
                train=schema_sections.Train(clip_grad_norm=clip),
                optimizer=schema_sections.SGD(),
            )
            norms.append(on_ranks(1, _steps, made, init="deepspeed")[0][0][1])
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-6)
    assert norms[0] > 0.1


# ---- counted tokens ----


def _losses(made: Job, ignored: int) -> tuple[float, float, float]:
    engine = engine_of(made, all_counted=False)
    fed = batches(made, engine.groups.coord["data"], 0, ignored)
    return engine.eval_batch(fed), engine.train_batch(fed), engine.grad_norm


@pytest.mark.parametrize("ignored", [13, 4 * LENGTH])
def test_the_loss_is_over_counted_tokens_of_the_global_batch(ignored: int) -> None:
    """13 ignored tokens are more than a sample, so data ranks and micro-batches have different counts."""
    whole = on_ranks(1, _losses, job(1), ignored, init="deepspeed")[0]
    batch = schema_sections.Batch(global_size=4, accumulation=2)
    for parallel in (schema_sections.Parallel(), PIPE):
        ranks = on_ranks(2, _losses, job(2, parallel=parallel, batch=batch), ignored, init="deepspeed")
        assert ranks[0] == ranks[1] == pytest.approx(whole, rel=1e-6)
    assert (whole == (0.0, 0.0, 0.0)) == (ignored == 4 * LENGTH)


# ---- a non-finite gradient ----


def _overflow(made: Job) -> tuple[bool, float, bool]:
    engine = engine_of(made)
    before = [p.detach().clone() for p in engine.module.parameters()]
    (ids, labels), *_ = batches(made, 0)
    engine._loss_fn = lambda logits, labels: logits.float().sum() * math.inf
    engine.train_batch([(ids, labels)])
    same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    return engine.skipped, engine.grad_norm, same


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_is_not_finite_is_skipped(stage: int, dtype: str, clip: float | None) -> None:
    """At every ZeRO stage, the weights stay, and momentum and decay do nothing."""
    sections = {"zero": schema_sections.Zero(stage=stage), "precision": schema_sections.Precision(dtype=dtype)}
    made = job(1, **sections, train=schema_sections.Train(clip_grad_norm=clip))
    skipped, norm, same = on_ranks(1, _overflow, made, init="deepspeed")[0]
    assert (skipped, math.isfinite(norm), same) == (True, False, True)


def _overflow_on_the_first_stage(made: Job) -> tuple[bool, bool]:
    engine = engine_of(made)
    before = [p.detach().clone() for p in engine.module.parameters()]
    next(iter(engine.module.parameters())).register_hook(lambda grad: grad * math.inf)
    engine.train_batch(batches(made, 0))
    same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    return engine.skipped, same


@pytest.mark.parametrize("clip", [None, 1.0])
def test_all_stages_of_a_pipeline_skip_together(clip: float | None) -> None:
    parallel = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))
    made = job(2, parallel=parallel, train=schema_sections.Train(clip_grad_norm=clip))
    assert on_ranks(2, _overflow_on_the_first_stage, made, init="deepspeed") == [(True, True)] * 2


# ---- decay, dropout, users' models ----


def test_matrices_decay_and_vectors_do_not() -> None:
    from dslpar.engine.build import parameter_groups

    decayed, rest = parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3)))
    assert [p.dim() for p in decayed["params"]] == [2, 2]
    assert "weight_decay" not in decayed
    assert [p.dim() for p in rest["params"]] == [1, 1, 1]
    assert rest["weight_decay"] == 0.0


def test_frozen_parameters_are_not_trained() -> None:
    from dslpar.engine.build import parameter_groups

    layer = nn.Linear(2, 3)
    layer.weight.requires_grad = False
    assert parameter_groups(layer) == [{"params": [layer.bias], "weight_decay": 0.0}]


def _dropout_losses(made: Job) -> list[float]:
    engine = engine_of(made)
    return [engine.train_batch(batches(made, engine.groups.coord["data"], step)) for step in range(2)]


def test_dropout_gives_the_same_run_again() -> None:
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, dropout=0.2)
    made = job(2, model=gpt, parallel=PIPE)
    runs = [on_ranks(2, _dropout_losses, made, init="deepspeed")[0] for _ in range(2)]
    assert runs[0] == runs[1]


class Bigram(nn.Module):
    """A user's model from ids to logits."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)  # type: ignore[no-any-return]


def foreign(target: str) -> schema_sections.OtherModel:
    return schema_sections.OtherModel(target=target, args={"vocab": VOCAB})


@pytest.mark.parametrize("stage", [0, 2])
def test_any_module_trains_with_data_parallelism(stage: int) -> None:
    results = []
    for world in (1, 2):
        made = job(
            world,
            model=foreign(f"{__name__}.Bigram"),
            zero=schema_sections.Zero(stage=stage),
            optimizer=schema_sections.SGD(lr=5.0),
        )
        results.append(on_ranks(world, _steps, made, init="deepspeed")[0])
    losses = [[loss for loss, *_ in rows] for rows in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert [row[1] for row in results[0]] == pytest.approx([row[1] for row in results[1]], rel=1e-6)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("no_such_package.Model", "CFG006"),
        ("torch.nn.Nothing", "CFG006"),
        ("torch.sqrt", "CFG201"),
        ("math.sqrt", "CFG122"),
    ],
)
def test_what_is_no_model_is_refused(target: str, code: str) -> None:
    from dslpar.engine.model import model_from_job

    with pytest.raises(DslparError, match=code):
        model_from_job(job(1, model=foreign(target)))


@pytest.mark.parametrize("target", ["os.mkdir", "my_pkg.make"])
def test_a_run_calls_nothing_that_lint_refuses(target: str, tmp_path: Path) -> None:
    """This holds for a job that was never linted, too, and a user's class is judged before its arguments are made."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.gradient_handlers import handler_classes
    from dslpar.engine.model import model_from_job
    from dslpar.engine.optimizers import optimizer_factory

    call = {"_target_": Reference(target), "path": str(tmp_path / "made")}
    cfg = [{"type": "Linear", "in_features": call, "out_features": 4}]
    models = [("torch.nn.Linear", {"in_features": call}), ("Sequential", {"layers_cfg": cfg})]
    for cls, args in models:
        described = job(1, model=schema_sections.OtherModel(target=cls, args=args))
        with pytest.raises(DslparError, match="CFG122"):
            model_from_job(described).layers(Groups(Mesh(), rank=0))
    optimizer = schema_sections.OtherOptimizer(target="torch.optim.RMSprop", lr=0.1, args={"alpha": call})
    with pytest.raises(DslparError, match="CFG122"):
        optimizer_factory(job(1, optimizer=optimizer))
    handlers = (schema_sections.GradientHandler(target="torch.nn.Linear", args={"x": call}),)
    with pytest.raises(DslparError, match="CFG224"):  # it is no handler: nothing was made for it
        handler_classes(job(1, gradient_handler=handlers))
    assert list(tmp_path.iterdir()) == []


def test_a_plain_module_is_not_copied_over_tensor_ranks() -> None:
    from dslpar.engine.model import model_from_job

    parallel = schema_sections.Parallel(tensor=schema_sections.TensorParallel(size=2, mode="1d"))
    with pytest.raises(DslparError, match="TEN111"):
        model_from_job(job(2, model=foreign(f"{__name__}.Bigram"), parallel=parallel))


# ---- DeepSpeed's behaviour: when one of these fails, the patch of its number in deepspeed_patches can go ----


def test_m1_the_shm_op_still_ignores_its_group() -> None:
    from deepspeed.comm.torch import TorchBackend

    assert "build_shm_op()" in inspect.getsource(TorchBackend.__init__)
    source = inspect.getsource(TorchBackend.inference_all_reduce)
    assert "torch.ops.deepspeed.inference_all_reduce_(tensor)" in source


def _has_shm_op() -> bool:
    import deepspeed.comm.comm as comm

    return comm.cdb.shm_comm_op is not None


def test_m1_no_rank_makes_the_shm_op() -> None:
    assert on_ranks(1, _has_shm_op, init="deepspeed") == [False]


def _old_names() -> list[bool]:
    import deepspeed.comm

    warned = []
    for module in (torch.distributed, deepspeed.comm):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.all_gather_into_tensor(torch.zeros(1), torch.zeros(1))
        warned.append(any("all_gather_into_tensor` is deprecated" in str(warning.message) for warning in caught))
    return warned


def test_m2_deepspeed_still_uses_torch_s_old_names() -> None:
    """torch 2.13 warns of them, and 2.15 no longer does."""
    ((torchs, deepspeeds),) = on_ranks(1, _old_names, init="deepspeed")
    if not torchs:
        pytest.skip("this torch does not warn of the old names")
    assert deepspeeds


def _counts_a_tied_copy() -> float:
    from deepspeed.runtime.utils import clip_grad_norm_

    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.full((1,), 3.0)
    p.ds_pipe_replicated, p.tensor_model_parallel = True, True  # type: ignore[attr-defined]
    return float(clip_grad_norm_([p], max_norm=10.0))


def test_m4_tied_copies_still_count_without_zero() -> None:
    assert on_ranks(1, _counts_a_tied_copy, init="deepspeed")[0] == 3.0


def _norm_of_deepspeed() -> object:
    made = job(1)
    engine = engine_of(made)
    del engine.deepspeed._take_model_step  # the wrapped one is the instance's
    engine.deepspeed.backward(engine.deepspeed(batches(made, 0)[0][0]).sum())
    engine.deepspeed.step()
    return engine.deepspeed.get_global_grad_norm()


def test_m11_deepspeed_still_has_no_norm_without_zero() -> None:
    assert on_ranks(1, _norm_of_deepspeed, init="deepspeed")[0] is None
