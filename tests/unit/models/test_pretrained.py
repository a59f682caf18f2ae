"""Pretrained weights: each rank reads only its pieces, and errors in the folder are reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.layouts import LAYOUTS
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.layers.parameter import placement_of
from dslpar.models import pretrained
from dslpar.models.layered import build_module
from dslpar.models.pretrained import merged
from dslpar.policies import hf_parity
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import parameters_with_sources
from tests.support import hugging_face as hf

FAMILIES = ("llama, tied", "gpt2", "phi3", "cohere")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders by family; Phi-3's has many files."""
    made = {}
    for name in FAMILIES:
        model, _ = hf.plain(hf.FAMILIES[name])
        made[name] = tmp_path_factory.mktemp("saved")
        model.float().save_pretrained(made[name], max_shard_size="20KB" if name == "phi3" else "5GB")
    return made


def opened(family: str, folder: Path) -> HuggingFaceModel:
    return HuggingFaceModel(hf.FAMILIES[family].classes()[0], pretrained=str(folder))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the elements of each slice that is read."""
    numbers: list[int] = []
    real = pretrained._read

    def counted(*args: object) -> torch.Tensor:
        part = real(*args)
        numbers.append(part.numel())
        return part

    monkeypatch.setattr(pretrained, "_read", counted)
    return numbers


@pytest.mark.parametrize("layout", ["1d-2", "1d-4", "2d-4", "2.5d-8-depth-2", "3d-8", "cuboid-1-2-2-replicated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_pieces_and_no_others(
    family: str, layout: str, folders: dict[str, Path], read: list[int]
) -> None:
    _, weights = hf.plain(hf.FAMILIES[family])
    model, mesh = opened(family, folders[family]), Mesh(tensor=LAYOUTS[layout])
    groups = Groups.without_processes(mesh)
    looked_at = 0
    for layer in model.layers(groups):
        for name, p, sources in parameters_with_sources(layer.build()):
            at = placement_of(p)
            assert at is not None
            full = merged(sources, weights.__getitem__).float()
            for rank in range(mesh.world_size):
                read.clear()
                piece = p.init.piece(at, mesh.coord(rank), 1, name)
                assert torch.equal(piece, at.cut(full, mesh.coord(rank))), (name, rank)
                assert sum(read) <= piece.numel()
                assert sum(read) == piece.numel() or at.padded_rows is not None, "but for the vocabulary's padding"
                looked_at += 1
    assert looked_at > 15 * mesh.world_size


def test_training_begins_with_the_folder_s_weights(folders: dict[str, Path]) -> None:
    """The logits are those of transformers, in float32."""
    plain, _ = hf.plain(hf.FAMILIES["gpt2"])
    module = build_module(opened("gpt2", folders["gpt2"]), Groups(Mesh()), seed=1)
    ids = hf_parity.make_inputs(hf.FAMILIES["llama"].config())["input_ids"]
    torch.testing.assert_close(module(ids), plain.float()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_a_config_says_what_differs(folders: dict[str, Path]) -> None:
    cls = hf.FAMILIES["gpt2"].classes()[0]
    model = HuggingFaceModel(cls, {"attn_pdrop": 0.3}, pretrained=str(folders["gpt2"]))
    assert (model.config.attn_pdrop, model.config.n_embd) == (0.3, 32)
    with pytest.raises(DslparError, match=r"CFG223 .*a dict of what differs"):
        HuggingFaceModel(cls, cls.config_class(), pretrained=str(folders["gpt2"]))


def test_a_folder_that_does_not_fit_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    cls = hf.FAMILIES["gpt2"].classes()[0]
    with pytest.raises(DslparError, match=r"CKP205 .*config\.json: there is no such file"):
        HuggingFaceModel(cls, pretrained=str(tmp_path))
    config = json.loads((folders["gpt2"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DslparError, match=r"CKP205 .*cannot read the weights in"):
        build_module(HuggingFaceModel(cls, pretrained=str(tmp_path)), Groups(Mesh()), seed=1)
    (tmp_path / "model.safetensors").symlink_to(folders["gpt2"] / "model.safetensors")
    with pytest.raises(DslparError, match=r"CKP207 .*transformer\.wte\.weight .* has shape \(70, 32\), .* \(71, 32\)"):
        build_module(HuggingFaceModel(cls, {"vocab_size": 71}, pretrained=str(tmp_path)), Groups(Mesh()), seed=1)
    with pytest.raises(DslparError, match=r"CKP207 .*has no 'transformer\.h\.3\."):
        build_module(HuggingFaceModel(cls, {"n_layer": 4}, pretrained=str(tmp_path)), Groups(Mesh()), seed=1)


def test_damaged_files_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["phi3"], tmp_path / "phi3")

    def refusal() -> str:
        with pytest.raises(DslparError) as raised:
            build_module(opened("phi3", folder), Groups(Mesh()), seed=1)
        return str(raised.value)

    first = min(folder.glob("*.safetensors"))
    intact = first.read_bytes()
    first.write_bytes(intact[: len(intact) // 2])
    assert f"CKP205 no-checkpoint: cannot read {first}: " in refusal()
    first.unlink()
    assert f"CKP205 no-checkpoint: cannot read {first}: " in refusal()
    (folder / "model.safetensors.index.json").write_text('{"weight_map"')
    assert f"CKP205 no-checkpoint: cannot read the weights in {folder}: " in refusal()


def test_a_model_without_a_config_is_told() -> None:
    with pytest.raises(DslparError, match=r"CFG223 .*without a config"):
        HuggingFaceModel(hf.FAMILIES["gpt2"].classes()[0])
