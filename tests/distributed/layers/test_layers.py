"""Every layer, and GPT, in every mode against dense float64: output, input gradient, every parameter's gradient.

compare_dense.py explains the tolerance. The default run is a sample that covers every feature (sampled_rows.py).
`prove` runs all layouts with all cases.
"""

from __future__ import annotations

import pytest

from dslpar.core.mesh import TensorMesh
from dslpar.distributed import gloo_collectives
from tests.distributed.layers.cases import CASES, errors
from tests.distributed.layers.sampled_rows import EACH_SIZE, EACH_TIME, KINDS, OTHER_SIZES, PROOF, PROVEN, seen, seen_in
from tests.support.compare_dense import TOLERANCE
from tests.support.layouts import INNERS, KEEPS, LAYOUTS, RESIDUALS, everything, mode_of
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled


def assert_exact(tensor: TensorMesh, *cases: str) -> None:
    for rank, found in enumerate(on_ranks(tensor.size, errors, tensor, *cases)):
        wrong = {what: error for what, error in found.items() if not error <= TOLERANCE}
        assert not wrong, f"rank {rank} of {tensor}: {wrong}"


@pytest.mark.parametrize("name", sampled(PROOF, EACH_TIME))
def test_layers_equal_dense_ones(name: str) -> None:
    assert_exact(PROVEN[name], *PROOF[name])


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in PROVEN if name in KINDS or name not in LAYOUTS])
def test_all_layers_equal_dense_ones(name: str) -> None:
    assert_exact(PROVEN[name])


def test_first_tokens_of_samples_that_are_cut_beside_their_tokens() -> None:
    """The layout is a context over a square: samples are first sharded over q alone, [tokens, H] over d and then q."""
    assert_exact(PROVEN["ring-2-2d-4"], "poolings")


QUICK = {"1d-sequence-2", "cuboid-1-2-2-sequence-batch", "3d-8-sequence-heads"}


@pytest.mark.parametrize("name", sampled(PROOF, QUICK))
def test_layers_equal_dense_ones_as_over_nccl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gloo's shortcuts, layers use the collectives that NCCL runs."""
    monkeypatch.setattr(gloo_collectives, "serves", lambda group: False)
    assert_exact(PROVEN[name], *PROOF[name])


def test_one_process_equals_dense() -> None:
    assert_exact(TensorMesh())


NINE = TensorMesh(q=3, y=3, mode="2d", residual="hidden")


@pytest.mark.prove
def test_2d_on_nine_ranks() -> None:
    """Of the proof's sizes, 9 divides the MLP's features, but not attention's."""
    assert_exact(NINE, "inward", "outward", "mlp", "norm", "positions", "embedding", "head")


EVERYTHING = everything()


@pytest.mark.prove
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_cuboid(name: str) -> None:
    assert_exact(EVERYTHING[name], "inward", "outward", "block", "gpt_tied")


# ---- coverage ----


def test_the_sample_has_what_the_whole_has() -> None:
    whole = {name: tuple(case.__name__ for case in CASES) for name in PROVEN}
    assert seen_in(PROVEN, PROOF, seen) == seen_in(PROVEN, whole, seen)
    less = {name: cases[1:] for name, cases in PROOF.items()}
    assert seen_in(PROVEN, less, seen) != seen_in(PROVEN, whole, seen)


def test_the_sample_has_what_it_should() -> None:
    assert {*EACH_SIZE} | OTHER_SIZES == {*PROOF}
    assert {*EACH_SIZE} > EACH_TIME
    tensors = [PROVEN[name] for name in EACH_SIZE]
    modes = {"1d, replicated", "1d, sequence", "2d", "2.5d", "3d", "cuboid", "ring", "ulysses", "zigzag", "context"}
    assert {tensor.size for tensor in tensors} >= {2, 3, 4, 6, 8, 12}
    assert {tensor.d for tensor in tensors if tensor.mode == "2.5d"} >= {2, 3}
    assert {tensor.shape for tensor in tensors} >= {(2, 3, 1), (1, 2, 3), (2, 3, 2), (2, 2, 2)}
    assert {tensor.keep for tensor in tensors} == {*KEEPS}
    for mode in ("3d", "cuboid"):
        held = {(tensor.residual, tensor.inner) for tensor in tensors if tensor.mode == mode}
        assert held == {(residual, inner) for residual in RESIDUALS for inner in INNERS}
    for case in CASES:
        held_in = {mode_of(PROVEN[name]) for name, cases in EACH_SIZE.items() if case.__name__ in cases}
        assert held_in == modes, case.__name__
