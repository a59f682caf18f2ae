"""A user's own tensors over the mesh: LiBai's documented example, stages, gradients, and refusals."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from dslpar.core.errors import DslparError
from dslpar.core.mesh import LEGACY_ORDER, Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, gather, initialize, placement_of
from tests.support.paths import ROOT
from tests.support.plain_models import written
from tests.support.ranks import on_ranks
from tests.support.versions import TORCH, needs_torch

if TORCH < (2, 5):
    pytest.skip("torch before 2.5: its DTensor squares a partial sum part by part", allow_module_level=True)

from dslpar.layers import dtensor
from dslpar.layers.dtensor import broadcast, partial_sum, split

FOUR = Mesh(data=2, tensor=TensorMesh(y=2, mode="1d"))
EIGHT = Mesh(pipe=2, data=2, tensor=TensorMesh(y=2, mode="1d"))
NOISE = torch.arange(16 * 8, dtype=torch.float64).view(16, 8)
PARALLEL = "parallel = dict(data=2, tensor=dict(size=2, mode='1d'))\nbatch = dict(micro_size=1)\n"


def _example(path: str) -> Any:
    run = dslpar.start(path)
    mesh = run.get_layer_placement(0)
    found = []
    for words in ([split(0), split(1)], [split(1), split(0)], [split(0), broadcast]):
        noise = run.distribute(NOISE, run.get_nd_sbp(words), mesh)
        found.append((tuple(noise.shape), noise.to_local(), noise.full_tensor()))
    in_place_of_the_mesh = run.distribute(NOISE, run.get_nd_sbp([split(0), split(1)])).to_local()
    return mesh.mesh.tolist(), mesh.mesh_dim_names, found, in_place_of_the_mesh, run.device_mesh("tensor").mesh.tolist()


def test_the_documented_example(tmp_path: Path) -> None:
    """Noise of 16 x 8, split (0, 1) and (1, 0), over ranks [[0, 1], [2, 3]]."""
    ranks = on_ranks(4, _example, written(tmp_path, PARALLEL), init="deepspeed")
    for rank, (mesh, names, found, default, tensor) in enumerate(ranks):
        data, inner = divmod(rank, 2)
        assert mesh == [[0, 1], [2, 3]]
        assert names == ("data", "tensor")
        assert tensor == [2 * data, 2 * data + 1]
        (shape, one, whole), (_, other, whole_too), (_, rows, _) = found
        assert shape == (16, 8)
        assert torch.equal(one, NOISE[8 * data : 8 * data + 8, 4 * inner : 4 * inner + 4])
        assert torch.equal(default, one)
        assert torch.equal(other, NOISE[8 * inner : 8 * inner + 8, 4 * data : 4 * data + 4])
        assert one.shape == other.shape == (8, 4)
        assert torch.equal(rows, NOISE[8 * data : 8 * data + 8])
        assert torch.equal(whole, NOISE)
        assert torch.equal(whole_too, NOISE)


def _of_stages(mesh: Mesh) -> Any:
    groups = Groups(mesh)
    found = []
    for stage in range(2):
        placement = dtensor.stage_mesh(groups, stage)
        noise = dtensor.distribute(NOISE, [split(0), split(1)], placement)
        found.append(
            (placement.mesh.tolist(), placement.get_coordinate(), noise.to_local(), tuple(noise.full_tensor().shape))
        )
    return groups.coord["pipe"], found


@pytest.mark.parametrize("order", [EIGHT.order, LEGACY_ORDER])
def test_a_rank_of_another_stage_holds_nothing(order: Any) -> None:
    mesh = Mesh(pipe=2, data=2, tensor=EIGHT.tensor, order=order)
    ranks_of = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] if order == EIGHT.order else [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for rank, (mine, found) in enumerate(on_ranks(8, _of_stages, mesh)):
        for stage, (ranks, coordinate, local, whole) in enumerate(found):
            assert ranks == ranks_of[stage]
            if stage != mine:
                assert (coordinate, local.numel(), whole) == (None, 0, (0,))
                continue
            assert ranks[coordinate[0]][coordinate[1]] == rank
            rows, columns = 8 * coordinate[0], 4 * coordinate[1]
            assert torch.equal(local, NOISE[rows : rows + 8, columns : columns + 4])
            assert whole == (16, 8)


def _gradients() -> Any:
    groups = Groups(FOUR)
    mesh = dtensor.device_mesh(groups, "data", "tensor")
    x = dtensor.distribute(NOISE, [split(0), split(1)], mesh).requires_grad_()
    weight = dtensor.distribute(NOISE.t().contiguous()[:, :4] / 7, [broadcast, split(0)], mesh).requires_grad_()
    y = x @ weight
    y.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [str(each) for each in y.placements], y.full_tensor(), x.grad.full_tensor(), weight.grad.full_tensor()


def test_gradients_through_a_product() -> None:
    """Compared with full tensors in float64: the sums have 16 terms of one sign, so 1e-12 is a thousand roundings."""
    x, weight = NOISE.clone().requires_grad_(), (NOISE.t()[:, :4] / 7).clone().requires_grad_()
    y = x @ weight
    y.square().sum().backward()
    for placements, *found in on_ranks(4, _gradients):
        assert placements == ["S(0)", "P(sum)"]
        for one, whole in zip(found, (y.detach(), x.grad, weight.grad), strict=True):
            torch.testing.assert_close(one.detach(), whole, rtol=1e-12, atol=0)


def _meshes() -> Any:
    groups = Groups(Mesh(data=2, tensor=TensorMesh(q=2, y=2, mode="2d", residual="hidden")))
    asked = [("y", "q"), ("x", "y"), ("tensor", "data"), ("data",), ("pipe", "z", "y")]
    rank = groups.rank
    mine = torch.full((4,), float(rank))
    kept = dtensor.distribute(mine, [broadcast], dtensor.device_mesh(groups, "tensor")).to_local()
    assert mine.tolist() == [rank] * 4, "what is given is not written to"
    own = dtensor.distribute(mine, [split(0)], dtensor.device_mesh(groups, "tensor"), source=None).to_local()
    uneven = dtensor.distribute(torch.arange(5), [split(0)], dtensor.device_mesh(groups, "tensor")).to_local()
    parts = dtensor.distribute(torch.ones(2), [partial_sum], dtensor.device_mesh(groups, "tensor"))
    meshes = [dtensor.device_mesh(groups, *names).mesh.tolist() for names in asked]
    return meshes, kept.tolist(), own.tolist(), uneven.tolist(), parts.full_tensor().tolist()


@needs_torch(7, "whose tensor counts cannot be chosen")
def test_any_axes_in_any_order_and_whose_tensor_counts() -> None:
    """(y, q) is the transposed square. The first rank's tensor counts, or each rank's own."""
    for rank, (meshes, kept, own, uneven, parts) in enumerate(on_ranks(8, _meshes)):
        first = rank // 4 * 4
        square = [[first, first + 2], [first + 1, first + 3]]
        assert meshes[0] == square
        assert meshes[1] == [list(row) for row in zip(*square, strict=True)]
        assert meshes[2] == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert meshes[3] == [rank % 4, rank % 4 + 4]
        assert meshes[4] == [[[rank // 2 * 2, rank // 2 * 2 + 1]]]
        assert kept == [first] * 4
        assert own == [rank]
        assert uneven == [[0, 1], [2, 3], [4], []][rank % 4]
        assert parts == [1, 1]


CUBE = TensorMesh(q=2, y=2, z=2, mode="3d", residual="hidden", inner="heads")


def _parameters() -> Any:
    """Return whether each parameter, gathered by torch, equals the layers' own gather, and the arguments of blocks."""
    groups = Groups(Mesh(tensor=CUBE))
    layers = [Linear(groups, 16, 24, role="inward"), Linear(groups, 24, 16, role="outward")]
    equal = []
    for index, layer in enumerate(layers):
        initialize(layer, groups, seed=3, prefix=f"{index}.")
        for p in layer.parameters():
            at = placement_of(p)
            assert at is not None
            with torch.no_grad():
                p.copy_(at.cut(torch.arange(float(p.numel() * CUBE.size)).resize_(at.shape), groups.coord))
            shown = dtensor.as_dtensor(p, groups)
            equal.append(tuple(shown.shape) == at.shape and torch.equal(shown.full_tensor(), gather(p, at, groups)))
    shown.to_local().sum().backward()
    plain = dtensor.as_dtensor(torch.ones(3), groups)
    try:
        dtensor.as_dtensor(Linear(groups, 16, (16, 8, 8), role="inward").weight, groups)
    except DslparError as error:
        return equal, p.grad is not None, tuple(plain.shape), str(error)


def test_a_layer_s_parameter_as_a_dtensor() -> None:
    for equal, has_grad, plain, message in on_ranks(8, _parameters):
        assert equal == [True] * 4
        assert has_grad
        assert plain == (3,)
        assert "TEN233 blocks-are-no-shards: the parameter has blocks of 16, 8, 8 rows" in message


README = ROOT / "layers" / "README.md"


def _of_the_readme(code: str) -> Any:
    names: dict[str, Any] = {
        "torch": torch,
        "groups": Groups(Mesh(tensor=TensorMesh(q=2, y=2, mode="2d", residual="hidden"))),
    }
    exec(code, names)
    return names["mesh"].mesh.tolist(), names["noise"].full_tensor()


def test_the_code_of_the_readme_runs() -> None:
    section = README.read_text().partition("\n## Tensors of your own\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    ranks = on_ranks(4, _of_the_readme, code)
    assert all(mesh == [[0, 1], [2, 3]] and torch.equal(noise, ranks[0][1]) for mesh, noise in ranks)


def _refused() -> list[str]:
    groups, messages = Groups(FOUR), []
    mesh = dtensor.device_mesh(groups, "data", "tensor")
    for wrong in (
        lambda: dtensor.device_mesh(groups, "data", "tensors"),
        lambda: dtensor.device_mesh(groups, "tensor", "y"),
        lambda: dtensor.device_mesh(groups),
        lambda: dtensor.nd_sbp([split(0)]),
        lambda: dtensor.nd_sbp([0, 1]),  # type: ignore[list-item]
        lambda: dtensor.distribute(NOISE, [split(0)], mesh),
        lambda: dtensor.distribute(NOISE, [split(2), broadcast], mesh),
        lambda: dtensor.distribute(NOISE, [broadcast, split(-3)], mesh),
        lambda: dtensor.distribute(NOISE, [0, 1], mesh),  # type: ignore[list-item]
        lambda: dtensor.distribute(torch.tensor(1.0), [split(0), broadcast], mesh),
    ):
        with pytest.raises(DslparError) as error:
            wrong()
        messages.append(str(error.value))
    with pytest.raises(RuntimeError, match="leaf"):
        dtensor.distribute(NOISE.clone().requires_grad_() * 2, [broadcast, broadcast], mesh)
    return messages


def test_placements_that_do_not_fit_are_refused() -> None:
    for messages in on_ranks(4, _refused):
        expected = [
            "TEN231 no-such-mesh: there is no mesh over 'data', 'tensors'",
            "TEN231 no-such-mesh: there is no mesh over 'tensor', 'y'",
            "TEN231 no-such-mesh: there is no mesh over no axes",
            "TEN232 placements-do-not-fit: [Shard(dim=0)] are not",
            "TEN232 placements-do-not-fit: [0, 1] are not",
            "TEN232 placements-do-not-fit: 1 placements over a mesh of 2 dims ('data', 'tensor')",
            "TEN232 placements-do-not-fit: split(2) of a tensor of shape (16, 8)",
            "TEN232 placements-do-not-fit: split(-3) of a tensor of shape (16, 8)",
            "TEN232 placements-do-not-fit: 0 is not a placement",
            "TEN232 placements-do-not-fit: split(0) of a tensor of shape ()\nhelp: broadcast or partial_sum",
        ]
        assert all(words in text for words, text in zip(expected, messages, strict=True)), messages


def _without_dtensor() -> str:
    sys.modules["torch.distributed.tensor"] = None  # type: ignore[assignment]  # in this forked rank alone
    sys.modules.pop("dslpar.layers.dtensor", None)
    with pytest.raises(ImportError) as refused:
        import_module("dslpar.layers.dtensor")
    return str(refused.value)


def test_a_torch_without_a_right_dtensor_is_named() -> None:
    (said,) = on_ranks(1, _without_dtensor, init=None)
    assert said.startswith(f"torch {torch.__version__} has no DTensor that computes right: 2.5 is the first")
