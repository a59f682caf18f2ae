"""Full state dicts: bitwise equal after saving and loading, over all modes, pipelines and ZeRO.

Initial weights are drawn by name, so a layout must save the same weights as one process. The loaded weights come from
another seed, and must come back unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout.resolve import Job, resolve
from dslpar.models import GPT, build_module
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.layouts import CUBOIDS, LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_heads": 12, "vocab_size": 17, "max_seq_len": 12}
MODEL = GPT(**SIZES, init_std=0.2)
State = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def import_once() -> None:
    """Import once here, not on every rank: DeepSpeed takes a second."""
    import dslpar.checkpoint  # noqa: F401


def drawn(seed: int) -> State:
    module = build_module(MODEL, Groups(Mesh(), rank=0), seed)
    return {name: p.detach() for name, p in module.named_parameters()}


def assert_equal(state: State, wanted: State) -> None:
    assert state.keys() == wanted.keys()
    for name, value in state.items():
        assert torch.equal(value, wanted[name].to(value.dtype)), name


# ---- every mode ----

CHAIN = ("1d-3", "2d-4", "ring-2", "2.5d-8-depth-2", "1d-sequence-2", "3d-8", "ulysses-2", "cuboid-1-2-3-hidden-heads")


def saved_and_loaded(tensor: mesh.TensorMesh, other: State) -> tuple[State, State]:
    """Return the state of a model with seed 3, and the state after other weights were loaded."""
    from dslpar.checkpoint import full_state, load_full_state

    groups = Groups(Mesh(tensor=tensor))
    module = build_module(MODEL, groups, seed=3)
    before = full_state(module, groups)
    load_full_state(module, other, groups)
    for name, p in module.named_parameters():
        assert torch.equal(p, p.placement.cut(other[name], groups.coord)), name  # padding is zeros
    return before, full_state(module, groups)


@pytest.mark.prove
def test_weights_go_from_mode_to_mode() -> None:
    """Each layout loads the previous one's save, and saves the same as one process: so all pairs agree."""
    state = drawn(4)
    for name in CHAIN:
        tensor = (LAYOUTS | CUBOIDS)[name]
        for before, after in on_ranks(tensor.size, saved_and_loaded, tensor, state):
            assert_equal(before, drawn(3))
            assert_equal(after, drawn(4))
        state = after


def saved_by_the_first(tensor: mesh.TensorMesh) -> State:
    from dslpar.checkpoint import full_state

    groups = Groups(Mesh(tensor=tensor))
    return full_state(build_module(MODEL, groups, seed=3), groups, everywhere=False)


def test_the_first_rank_alone_may_keep_them() -> None:
    first, *others = on_ranks(3, saved_by_the_first, LAYOUTS["1d-3"])
    assert_equal(first, drawn(3))
    assert others == [{}, {}]


# ---- engines ----


def job(world: int, zero: int = 0, dtype: str = "fp32", offload: bool = False, **parallel: Any) -> Job:
    extra: dict[str, Any] = {"stage3_param_persistence_threshold": 0} if zero == 3 else {}
    extra |= {"offload_optimizer": {"device": "cpu"}} if offload else {}
    return resolve(
        sections.Spec(
            model=section.GPT(**SIZES, init_std=0.2),
            parallel=sections.Parallel(**parallel),
            optimizer=sections.SGD(lr=0.1),
            zero=sections.Zero(stage=zero, extra=extra),
            precision=sections.Precision(dtype=dtype),
            batch=sections.Batch(global_size=8),
        ),
        world,
        "cfg.py",
    )


def batch(samples: slice) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(17, (8, 13), generator=torch.Generator().manual_seed(1))[samples]
    return tokens[:, :-1], tokens[:, 1:]


def trained(made: Job, given: State | None) -> tuple[State, list[float], State]:
    """Load a state, evaluate, and take a step. Return the state before it, both losses, and the state after it."""
    from dslpar.checkpoint import full_state, load_full_state
    from dslpar.engine.build import build_engine

    engine = build_engine(made, Groups(made.mesh), all_counted=True)
    if given is not None:
        load_full_state(engine.module, given, engine.groups)
    loaded = full_state(engine.module, engine.groups)
    size, index = made.batch.micro_size, engine.groups.coord["data"]
    ours = batch(slice(index * size, (index + 1) * size))
    losses = [engine.eval_batch([ours]), engine.train_batch([ours]), engine.eval_batch([ours])]
    return loaded, losses, full_state(engine.module, engine.groups)


def together(ranks: list[tuple[State, list[float], State]]) -> tuple[State, list[float], State]:
    """Return the union over stages; ranks with the same tensor must agree."""
    loaded: State = {}
    after: State = {}
    for held, losses, held_after in ranks:
        assert losses == ranks[0][1]
        for union, part in ((loaded, held), (after, held_after)):
            assert all(torch.equal(union.setdefault(name, value), value) for name, value in part.items())
    return loaded, ranks[0][1], after


ENGINES = {
    "2d 4": job(4, tensor=sections.TensorParallel(size=4, mode="2d")),
    "data 2, 1d 2, ZeRO 3": job(4, 3, tensor=sections.TensorParallel(size=2, mode="1d")),
    "pipe 2, 1d 2, ZeRO 1": job(
        4, 1, pipeline=sections.PipelineParallel(size=2), tensor=sections.TensorParallel(size=2, mode="1d")
    ),
    "data 2, ZeRO 2, offload": job(2, 2, offload=True),
}


@pytest.mark.filterwarnings("default")  # warnings of DeepSpeed
@pytest.mark.parametrize("name", sampled(ENGINES, {"pipe 2, 1d 2, ZeRO 1", "data 2, ZeRO 2, offload"}))
def test_a_model_of_one_process_goes_on_in_any_layout(name: str) -> None:
    """Compare the losses before and after a step, and the weights: ZeRO's master weights follow. fp32 rounds by 6e-8,
    and sums have some hundred terms.
    """
    given = {key: value + 0.01 for key, value in drawn(5).items()}
    loaded, true, after = together(on_ranks(1, trained, job(1), given, init="deepspeed"))
    assert_equal(loaded, given)
    made = ENGINES[name]
    loaded, losses, moved = together(on_ranks(made.mesh.world_size, trained, made, given, init="deepspeed"))
    assert_equal(loaded, given)
    assert losses == pytest.approx(true, rel=1e-6)
    for key, value in after.items():
        assert (moved[key] - value).abs().max() <= 1e-6 * value.abs().max(), key
        assert not torch.equal(value, given[key]), "a step was taken"


@pytest.mark.filterwarnings("default")  # warnings of DeepSpeed
@pytest.mark.parametrize("zero", [1, 3])
def test_masters_of_half_precision_are_returned_and_loaded(zero: int) -> None:
    given = {key: value + 0.01 for key, value in drawn(5).items()}
    made = job(2, zero, dtype="bf16")
    loaded, _, after = together(on_ranks(2, trained, made, given, init="deepspeed"))
    assert_equal(loaded, given)
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in after.values())


# ---- weights of another model ----


def refused(tensor: mesh.TensorMesh, given: State, strict: bool) -> str:
    from dslpar.checkpoint import full_state, load_full_state

    groups = Groups(Mesh(tensor=tensor))
    module = build_module(MODEL, groups, seed=3)
    before = full_state(module, groups)
    try:
        load_full_state(module, given, groups, strict=strict, source="weights.pt")
    except DslparError as error:
        assert_equal(full_state(module, groups), before)  # nothing is changed
        return str(error)
    return f"loaded {full_state(module, groups)['norm.bias'].sum():.1f}"


def test_all_mismatches_are_reported_at_once() -> None:
    given = drawn(4)
    given["norm.gain"] = given.pop("norm.weight")
    given["norm.bias"] = given["norm.bias"][1:]
    del given["blocks.1.mlp.up.bias"]
    for message in on_ranks(2, refused, LAYOUTS["1d-2"], given, True):
        assert message.count("weights.pt:1:1: CKP207 other-weights: ") == 4
        assert "'norm.bias' has shape (23,), and the model's (24,)" in message
        assert "no tensor for 'norm.weight' (24,)" in message
        assert "did you mean 'norm.gain'?" in message
        assert "the model has no 'norm.gain' (24,)" in message
        assert "no tensor for 'blocks.1.mlp.up.bias' (96,)" in message


def test_a_part_may_be_loaded() -> None:
    given = {"norm.bias": torch.ones(24), "unknown": torch.ones(1)}
    assert on_ranks(2, refused, LAYOUTS["1d-2"], given, False) == ["loaded 24.0"] * 2
    given["norm.bias"] = torch.ones(25)
    assert "has shape (25,)" in on_ranks(2, refused, LAYOUTS["1d-2"], given, False)[0]
