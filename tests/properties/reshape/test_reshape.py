"""Resume on another layout: bitwise equal tensors, and the curve of an uninterrupted run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from dslpar.layout.resolve import Job
from tests.properties.invariance.layouts import MODELS, Layout, bound_of, pipe, tensor
from tests.properties.reshape.layouts import EACH_TIME, LAYOUTS, PAIRS, SAMPLE, TENSOR, Pair
from tests.properties.reshape.save_and_resume import Run, deviation, differing, resumed_under, saved_under
from tests.support.layouts import mode_of
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each layout saves, once."""
    return tmp_path_factory.mktemp("saved")


@cache
def saved(name: str, root: Path) -> tuple[Path, Run]:
    """Return the folder of a run that saved under that layout, and the run."""
    folder = root / str(list(LAYOUTS).index(name))
    return folder, saved_under(LAYOUTS[name], folder)


def marks(pair: Pair) -> list[pytest.MarkDecorator]:
    missing = LAYOUTS[pair[0]].model.startswith("transformers'") and not HAS_TRANSFORMERS
    skip = [pytest.mark.skip(reason=NO_TRANSFORMERS)] if missing else []
    return skip if pair in EACH_TIME else [*skip, pytest.mark.prove]


@pytest.mark.parametrize("pair", [pytest.param(pair, marks=marks(pair), id=" -> ".join(pair)) for pair in PAIRS])
def test_what_one_layout_saves_another_resumes(pair: Pair, root: Path) -> None:
    folder, before = saved(pair[0], root)
    after = resumed_under(LAYOUTS[pair[1]], folder)
    assert_one_curve(LAYOUTS[pair[1]], before, after)


def assert_one_curve(layout: Layout, before: Run, after: Run) -> None:
    """Compare five steps before and five after with ten of one run in double precision."""
    differ, loss, norm = deviation(layout, before, after)
    assert differ == []
    assert loss <= bound_of(layout).loss
    assert norm <= bound_of(layout).grad_norm


BERT, RESNET = "transformers' BERT", "transformers' ResNet"
SWIN = ("transformers' Swin", "transformers' SwinV2")
CUBOID = tensor("cuboid", 4, shape=(1, 2, 2))
OF_TRANSFORMERS: list[tuple[str, Layout, Layout]] = [
    (
        f"{model}: {names}",
        before._replace(model=model, ignoring=model == BERT),  # its masked positions have no label
        after._replace(model=model, ignoring=model == BERT),
    )
    for model in MODELS
    if model.startswith("transformers'") and model != RESNET  # which no tensor mode shards
    for names, before, after in (
        (
            "data 2, 1d 2, ZeRO 3 -> pipe 2, 2d 4",
            Layout(4, tensor("1d", 2), zero=3),
            Layout(8, pipe(2) | tensor("2d", 4)),
        )
        if model in SWIN  # its first blocks have two heads, which a cuboid of depth 1 would split in 4
        else (
            "data 2, 1d 2, ZeRO 3 -> pipe 2, cuboid (1, 2, 2)",
            Layout(4, tensor("1d", 2), zero=3),
            Layout(8, pipe(2) | CUBOID),
        ),
    )
]
OF_TRANSFORMERS.append(
    (
        f"{RESNET}: data 2, ZeRO 1 -> pipe 2",
        Layout(2, {}, zero=1, model=RESNET),
        Layout(2, pipe(2), model=RESNET, accumulation=4),  # a BatchNorm's micro-batches are part of the maths
    )
)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, id=name) for name, *pair in OF_TRANSFORMERS],
)
@pytest.mark.prove  # `make test` has rows of dslpar's own models, whose pieces are stored in the same way
def test_a_model_of_transformers_resumes_on_another_layout(before: Layout, after: Layout, tmp_path: Path) -> None:
    """The cases have weights under other modules' names, three in one of a region's entrance, and a table on two
    stages.
    """
    saved_run = saved_under(before, tmp_path / "run")
    assert_one_curve(after, saved_run, resumed_under(after, tmp_path / "run"))


# ---- what the table has ----


def jobs(pairs: list[Pair]) -> list[tuple[Job, Job]]:
    return [(LAYOUTS[source].job(), LAYOUTS[target].job()) for source, target in pairs]


@pytest.mark.parametrize("pairs", [SAMPLE, PAIRS], ids=["sample", "all"])
def test_the_pairs_cover_modes_stages_and_what_changes(pairs: list[Pair]) -> None:
    pairs_of_jobs = jobs(pairs)
    for at in (0, 1):  # as source, and as target
        cubes = {mode_of(pair[at].mesh.tensor) for pair in pairs_of_jobs}
        assert cubes == {"None", *(mode_of(Layout(8, section).job().mesh.tensor) for section in TENSOR.values())}
        assert {pair[at].spec.zero.stage for pair in pairs_of_jobs} == {0, 1, 2, 3}
        assert len({pair[at].mesh.order for pair in pairs_of_jobs}) == 2
        assert {pair[at].batch.accumulation for pair in pairs_of_jobs} == {1, 2, 4}
        assert {pair[at].mesh.world_size for pair in pairs_of_jobs} >= {1, 2, 4, 8}
        assert any(pair[at].stages.counts not in (None, (4,), (2, 2), (1, 1, 1, 1)) for pair in pairs_of_jobs), (
            "uneven stages"
        )
    for axis in ("pipe", "data", "world_size"):
        signs = {
            (getattr(b.mesh, axis) > getattr(a.mesh, axis)) - (getattr(b.mesh, axis) < getattr(a.mesh, axis))
            for a, b in pairs_of_jobs
        }
        assert signs >= {1, -1}, f"{axis} both grows and shrinks"
    assert all(a.mesh != b.mesh or a.spec.zero.stage != b.spec.zero.stage for a, b in pairs_of_jobs)


def test_there_are_enough_of_them() -> None:
    assert len(PAIRS) >= 40
    assert {name for pair in PAIRS for name in pair} == set(LAYOUTS)
    assert all(LAYOUTS[a].problem == LAYOUTS[b].problem for a, b in PAIRS), "one run"


# ---- it can fail ----


def test_a_bit_that_differs_is_seen() -> None:
    one = {"weight": torch.tensor([1.0, 2.0])}
    other = {
        "weight": torch.tensor([1.0, 2.0])
        .view(torch.int32)
        .add(torch.tensor([0, 1]))
        .to(torch.int32)
        .view(torch.float32)
    }
    assert differing(one, one) == []
    assert differing(one, other) == ["weight"]


def test_a_lost_momentum_is_seen(root: Path) -> None:
    """Without the optimizer's state the curve leaves the bound, so the comparison checks what is restored."""
    name = "one process"
    folder, before = saved(name, root)
    after = resumed_under(LAYOUTS[name], folder, forgets="momentum_buffer")
    assert differing(before.whole, after.whole) == [], "as it was loaded"
    with pytest.raises(AssertionError):
        assert_one_curve(LAYOUTS[name], before, after)
    bent = before._replace(losses=[loss * (1 + 2e-6) for loss in before.losses])
    with pytest.raises(AssertionError):
        assert_one_curve(LAYOUTS[name], bent, resumed_under(LAYOUTS[name], folder))
