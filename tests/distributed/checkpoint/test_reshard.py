"""Offline `dslpar checkpoint`: shards and exports equal what ranks would read, and corrupted files are named."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import reshard_memory
from dslpar import checkpoint
from dslpar.checkpoint import export, folder, index, manifest, reshard, tensor_reader, writer
from dslpar.cli import checkpoint as command
from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from dslpar.core.mesh import LEGACY_ORDER
from dslpar.inference.trained import find_checkpoint
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections
from tests.distributed.checkpoint import test_resume
from tests.distributed.checkpoint.test_resume import zero
from tests.support import checkpoint_page
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import FOUR_LAYERS, PIPED, held_by, parallel, run, scheduled
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

STEPS = 2
GPT = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=257, max_seq_len=8, dropout=0.1)
NUM_ELEMENTS = 10_832
TARGETS: dict[str, tuple[int, dict[str, Any]]] = {
    "2d 4, ZeRO 1": (4, {"parallel": parallel(size=4, mode="2d"), "batch": PIPED, "zero": zero(1)}),
    "order of ColossalAI, pipe 2, data 2": (4, {"parallel": parallel(2, order=LEGACY_ORDER), "batch": PIPED}),
    "data 2, 1d sequence 2, ZeRO 3": (
        4,
        {"parallel": parallel(size=2, mode="1d", sequence=True), "batch": PIPED, "zero": zero(3)},
    ),
    "one process": (1, {"batch": PIPED}),
}
EACH_TIME = {"2d 4, ZeRO 1"}


def job_of(output_dir: Path, world: int, **sections: Any) -> Job:
    return test_resume.job_of(output_dir, world, model=GPT, **sections)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> folder.Checkpoint:
    """Return a checkpoint of 2 stages and 2 tensor ranks with ZeRO 1, its table tied over stages and padded."""
    root = tmp_path_factory.mktemp("source")
    job = job_of(root, 4, parallel=parallel(2, size=2, mode="1d"), batch=PIPED, zero=zero(1))
    on_ranks(4, run, job, STEPS, init="deepspeed")
    return folder.open_checkpoint(root / "checkpoints" / f"step_{STEPS:06d}")


def loaded(job: Job, path: str) -> dict[str, torch.Tensor]:
    """Return everything that a rank holds after loading a checkpoint."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    stored = folder.open_checkpoint(Path(path))
    checkpoint.check(stored, job, "text")
    checkpoint.load(engine, stored)
    return held_by(engine)


# ---- reshard ----


@pytest.mark.parametrize("name", sampled(TARGETS, EACH_TIME))
def test_resuming_from_it_is_resuming_from_the_original(source: folder.Checkpoint, tmp_path: Path, name: str) -> None:
    """Weights, master weights and optimizer states are bitwise equal."""
    world, sections = TARGETS[name]
    job = job_of(tmp_path, world, **sections)
    written = reshard.reshard(source, job, tmp_path)
    stored = folder.open_checkpoint(written)
    assert folder.verify(stored) == []
    assert index.load_index(written).incomplete() == []
    assert not manifest.same_layout(stored, job), "there are no random states in it"
    assert {key: stored.manifest[key] for key in ("step", "consumed_samples", "fixed")} == {
        key: source.manifest[key] for key in ("step", "consumed_samples", "fixed")
    }
    originals = on_ranks(world, loaded, job, source.path, init="deepspeed")
    resharded = on_ranks(world, loaded, job, str(written), init="deepspeed")
    for one, other in zip(originals, resharded, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_there_and_back_is_the_same_tensors(source: folder.Checkpoint, tmp_path: Path) -> None:
    """The path is 3d on eight ranks, then one rank, all offline: each weight and state is equal in full."""
    eight = job_of(tmp_path, 8, parallel=parallel(size=8, mode="3d"))
    there = folder.open_checkpoint(reshard.reshard(source, eight, tmp_path / "there"))
    back = folder.open_checkpoint(reshard.reshard(there, job_of(tmp_path, 1), tmp_path / "back"))
    first, last = (tensor_reader.TensorReader(Path(at.path), index.load_index(Path(at.path))) for at in (source, back))
    for name, entry in first.index.parameters.items():
        assert last.index.parameters[name].scalars == entry.scalars
        for key in ("", *entry.states):
            assert torch.equal(first.full(name, key), last.full(name, key)), f"{name} {key}"
    assert any("exp_avg" in entry.states for entry in first.index.parameters.values())


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> folder.Checkpoint:
    """Return a checkpoint of two stages per rank on two ranks, with two replicas and ZeRO 1; the table is tied."""
    root = tmp_path_factory.mktemp("interleaved")
    job = test_resume.job_of(root, 4, **scheduled("interleaved", 2, zero=zero(1)))
    on_ranks(4, run, job, STEPS, init="deepspeed")
    return folder.open_checkpoint(root / "checkpoints" / f"step_{STEPS:06d}")


OF_SCHEDULES: dict[str, tuple[int, dict[str, Any], list[list[str]]]] = {
    "1F1B, pipe 4": (4, scheduled("1f1b", 1, parallel=parallel(4)), [["0"], ["1"], ["2"], ["3"]]),
    "zero bubble 2, 1d 2": (
        4,
        scheduled("zero_bubble", 2, parallel=parallel(2, size=2, mode="1d")),
        [["0", "2"], ["1", "3"]],
    ),
    "one process": (1, {"batch": PIPED, "model": FOUR_LAYERS}, [["0", "1", "2", "3"]]),
}


@pytest.mark.parametrize("name", sampled(OF_SCHEDULES, {"zero bubble 2, 1d 2"}))
def test_chunks_are_cut_anew(interleaved: folder.Checkpoint, tmp_path: Path, name: str) -> None:
    """Each rank of the target's pipeline has the blocks of its stages, and together they equal the original."""
    world, sections, blocks = OF_SCHEDULES[name]
    job = test_resume.job_of(tmp_path, world, **sections)
    assert interleaved.manifest["layout"]["counts"] == [1, 1, 1, 1]
    written = reshard.reshard(interleaved, job, tmp_path)
    stored, found = folder.open_checkpoint(written), index.load_index(written)
    assert folder.verify(stored) == []
    assert found.incomplete() == []
    assert stored.manifest["layout"]["num_chunks"] == job.chunks.num
    by_file: dict[int, set[str]] = {}
    for parameter, entry in found.parameters.items():
        for piece in entry.pieces if parameter.startswith("blocks.") else ():
            by_file.setdefault(job.mesh.coord(piece.file)["pipe"], set()).add(parameter.split(".")[1])
    assert [sorted(by_file[pipe]) for pipe in sorted(by_file)] == blocks
    originals = on_ranks(world, loaded, job, interleaved.path, init="deepspeed")
    resharded = on_ranks(world, loaded, job, str(written), init="deepspeed")
    for one, other in zip(originals, resharded, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_an_interleaved_run_is_verified_and_exported_as_any_other(
    interleaved: folder.Checkpoint, tmp_path: Path
) -> None:
    """After a round trip through one process, the exported weights are the same bytes."""
    assert folder.verify(interleaved) == []
    alone = test_resume.job_of(tmp_path, 1, batch=PIPED, model=FOUR_LAYERS)
    whole = folder.open_checkpoint(reshard.reshard(interleaved, alone, tmp_path / "alone"))
    exported = []
    for number, each in enumerate((interleaved, whole)):
        export.export(each, tmp_path / str(number))
        exported.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).glob("*.safetensors")})
    assert exported[0]
    assert exported[0] == exported[1]


def test_each_rank_of_the_target_has_its_file(source: folder.Checkpoint, tmp_path: Path) -> None:
    """Only owners have one: those of data rank 0."""
    job = job_of(tmp_path, 8, parallel=parallel(2, size=2, mode="1d"), batch=PIPED)
    written = reshard.reshard(source, job, tmp_path)
    ranks = {job.mesh.rank({"pipe": pipe, "y": y}) for pipe in (0, 1) for y in (0, 1)}
    assert {int(path.stem) for path in (written / "tensors").iterdir()} == ranks


def test_each_replica_takes_the_buffers_that_it_would_have_found(tmp_path: Path) -> None:
    """They are statistics of a norm on stage 1 of two replicas. A third replica, which did not exist, gets the first
    one's.
    """
    before = job_of(tmp_path, 4, parallel=parallel(2), batch=PIPED)
    for rank in range(4):
        at = before.mesh.coord(rank)
        kept = {"norm.mean": torch.tensor([10.0 + at["data"]])} if at["pipe"] else {}
        (tmp_path / "ranks").mkdir(exist_ok=True)
        torch.save({"buffers": kept}, folder.rank_path(tmp_path, rank))
    stored = folder.Checkpoint(str(tmp_path), {"layout": manifest.layout_of(before) | {manifest.OFFLINE: True}})
    after = job_of(tmp_path, 4, batch=schema_sections.Batch(global_size=8))
    found = {rank: buffers["norm.mean"].item() for rank, buffers in reshard._buffers(stored, after)}
    assert found == {0: 10.0, 1: 11.0, 2: 10.0, 3: 10.0}


@pytest.mark.parametrize(
    ("sections", "code"),
    [({"optimizer": schema_sections.SGD(lr=0.1)}, "CKP202"), ({"train": schema_sections.Train(seed=7)}, "CKP202")],
)
def test_another_run_is_refused(source: folder.Checkpoint, tmp_path: Path, sections: Any, code: str) -> None:
    with pytest.raises(DslparError) as raised:
        reshard.reshard(source, job_of(tmp_path, 2, **sections), tmp_path / "out")
    assert [finding.code for finding in raised.value.findings] == [code]
    assert not (tmp_path / "out").exists()


def test_a_model_with_other_parameters_is_refused(source: folder.Checkpoint, tmp_path: Path) -> None:
    """A class may have changed behind its name: the config is the same then, and the tensors are not."""
    found = index.load_index(Path(source.path))
    parameters = {name.replace("norm.w", "norms.w"): entry for name, entry in found.parameters.items()}
    job, shares = reshard.shares_of(job_of(tmp_path, 2, parallel=parallel(2), batch=PIPED), found)
    assert job.stages.counts == (1, 1)
    reshard._check_fits(source, shares, found)
    with pytest.raises(DslparError, match=r"CKP207 other-weights: .*the model has no 'norms\.weight'"):
        reshard._check_fits(source, shares, index.Index(parameters))


def test_nothing_is_overwritten_and_nothing_half_written_is_left(source: folder.Checkpoint, tmp_path: Path) -> None:
    job = job_of(tmp_path, 1)
    taken = tmp_path / "taken" / "checkpoints"
    taken.mkdir(parents=True)
    (taken / "mine").write_text("mine")
    with pytest.raises(DslparError, match="CKP221"):
        reshard.reshard(source, job, tmp_path / "taken")
    with pytest.raises(DslparError, match="CKP221"):
        export.export(source, taken)
    assert [path.name for path in taken.iterdir()] == ["mine"]
    with pytest.raises(DslparError, match="CKP205 no-checkpoint: cannot write to"):
        export.export(source, taken / "mine" / "below")


def test_what_fails_on_the_way_leaves_nothing(
    source: folder.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for module in (export, reshard):
        monkeypatch.setattr(module, "write_lazy_tensors", full)
    job = job_of(tmp_path, 1)
    for act in (lambda: export.export(source, tmp_path / "w"), lambda: reshard.reshard(source, job, tmp_path)):
        with pytest.raises(DslparError, match="No space left"):
            act()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.prove
def test_memory_is_bounded_by_the_largest_tensor() -> None:
    """The memory is anonymous; `python -m benchmarks reshard_memory` compares two models."""
    took = reshard_memory.peak(num_layers=1, vocab_size=8192)
    assert took.anonymous_bytes < reshard_memory.MOST_TENSORS * took.largest_bytes < took.stored_bytes / 2
    assert took.anonymous_bytes > took.largest_bytes / 2, "else it was not seen"


@pytest.mark.prove
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_memory_of_an_export_to_transformers_is_too() -> None:
    took = reshard_memory.peak(num_layers=1, vocab_size=8192, command=reshard_memory.COMMANDS[1])
    assert took.anonymous_bytes < reshard_memory.MOST_TENSORS * took.largest_bytes < took.stored_bytes / 2
    assert took.anonymous_bytes > took.largest_bytes / 2, "else it was not seen"


# ---- export ----


def weights_after_load(job: Job, files: list[str]) -> dict[str, torch.Tensor]:
    """Return exported weights, loaded into a new model and read from it again."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
    checkpoint.load_full_state(engine.module, whole, engine.groups)
    return checkpoint.full_state(engine.module, engine.groups)


def test_exported_weights_load_into_any_layout(source: folder.Checkpoint, tmp_path: Path) -> None:
    files = export.export(source, tmp_path / "w", max_shard_bytes=10_000)
    shards = [str(path) for path in files if path.suffix == ".safetensors"]
    job = job_of(tmp_path, 2, parallel=parallel(size=2, mode="1d"))
    (found, _) = on_ranks(2, weights_after_load, job, shards, init="deepspeed")
    stored = tensor_reader.TensorReader(Path(source.path), index.load_index(Path(source.path)))
    assert found.keys() == stored.index.parameters.keys()
    assert all(torch.equal(tensor, stored.full(name)) for name, tensor in found.items())
    assert found["embedding.tokens.weight"].shape == (257, 16), "without padding"


def test_shards_are_as_full_as_they_may_be_and_the_index_says_where(source: folder.Checkpoint, tmp_path: Path) -> None:
    export.export(source, tmp_path / "w", "BF16", 9_000)
    weight_index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "w").glob("*.safetensors")}
    assert weight_index["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
    sizes = {file: sum(2 * tensor.numel() for tensor in shard.values()) for file, shard in shards.items()}
    assert weight_index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 9_000 for size in sizes.values())
    assert len(shards) == int(re.findall(r"of-(\d+)", min(shards))[0]) > 2
    assert {tensor.dtype for shard in shards.values() for tensor in shard.values()} == {torch.bfloat16}


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_transformers_loads_what_was_trained_and_computes_the_same(source: folder.Checkpoint, tmp_path: Path) -> None:
    """A GPT gives the same logits as in dslpar, which loads the weights in its own format."""
    from transformers import AutoModelForCausalLM

    from dslpar.checkpoint.export_transformers import export_transformers
    from dslpar.core.mesh import Mesh
    from dslpar.distributed.groups import Groups
    from dslpar.models import build_module
    from dslpar.models.gpt import model

    (file,) = (path for path in export.export(source, tmp_path / "w") if path.suffix == ".safetensors")
    export_transformers(source, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    own = build_module(model.GPT(**vars(GPT)), Groups(Mesh()), seed=2).eval()
    checkpoint.load_full_state(own, load_file(file), Groups(Mesh()))
    ids = torch.randint(257, (3, 8))
    torch.testing.assert_close(own(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.double()(ids), theirs.double()(ids).logits, rtol=1e-12, atol=1e-12)


def test_a_weight_that_fp16_cannot_hold_is_no_weight_of_an_export() -> None:
    weights = torch.tensor([1.0, -7e4, float("inf"), 65_504.0])
    with pytest.raises(DslparError) as caught:
        export.convert("head.weight", weights, torch.float16)
    message = (
        "CKP217 weight-out-of-range: 1 of the weights in head.weight exceed 65504, the largest number of torch.float16"
    )
    assert message in str(caught.value)
    assert export.convert("head.weight", weights, torch.bfloat16).isfinite().tolist() == [True, True, False, True]


def test_the_config_beside_it_is_the_run_s(source: folder.Checkpoint, tmp_path: Path) -> None:
    import dslpar

    export.export(source, tmp_path / "w")
    job = dslpar.resolve(tmp_path / "w" / "config.yaml", 4)
    assert manifest.config_of(job) == source.manifest["config"]
    assert dslpar.load(tmp_path / "w" / "config.yaml").root.get("model.rope_theta") is None, "a default"


# ---- the command ----


@pytest.fixture
def copy(source: folder.Checkpoint, tmp_path: Path) -> Path:
    """Return a copy of the run's folder to modify."""
    return Path(shutil.copytree(Path(source.path).parents[1], tmp_path / "run"))


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run `dslpar checkpoint WORDS`, and return status, standard output and standard error."""

    def run_(*words: object) -> tuple[int, str, str]:
        try:
            status = main(["checkpoint", *map(str, words)])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return (status, *capsys.readouterr())

    return run_


def test_list(copy: Path, say: Say) -> None:
    status, out, _ = say("list", copy)
    assert status == 0
    head, row = out.splitlines()
    assert head.split() == ["name", "samples", "bytes", "state", "layout"]
    assert row.endswith("intact  pipeline 2 * data 1 * tensor 2 (1d), ZeRO 1, layers 1+1")
    (copy / "checkpoints" / "step_000002" / "state.pt").unlink()
    (copy / "checkpoints" / "step_000003").mkdir()
    status, out, _ = say("list", copy, "--format", "json")
    states = {row["name"]: row["state"] for row in json.loads(out)}
    assert states["step_000002"] == "corrupted: state.pt"
    assert states["step_000003"].startswith("corrupted: ")


def test_the_newest_is_by_its_number_among_what_a_resume_would_choose_from(
    copy: Path, tmp_path: Path, say: Say
) -> None:
    """The run's folder has a job's number as its name, and contains a copy and a checkpoint that was set aside."""
    run = copy.rename(copy.with_name("123456"))
    root = run / "checkpoints"
    for step, name in ((999_999, "step_999999"), (1_000_000, "step_1000000")):
        data = manifest.manifest_of(job_of(tmp_path, 1), "text", step)
        (root / name).mkdir()
        writer.write_file(root / name / folder.MANIFEST, [folder.serialize({**data, "files": {}})])
    for name in ("step_best", "step_1000002.aside", "step_1000003.part"):
        (root / name).mkdir()
    parser = argparse.ArgumentParser()
    names = ["step_000002", "step_999999", "step_1000000"]
    assert [place.name for place in command._folders(run, parser)] == names
    assert command._source(str(run), parser).step == 1_000_000
    (root / "step_1000000" / folder.MANIFEST).unlink()
    status, out, err = say("export", run, "--output", run / "w")
    assert (status, out) == (1, ""), "not an older one, without a word"
    assert "CKP215 damaged-checkpoint: step_1000000 is corrupted:\n    checkpoint.json: missing" in err


def test_list_says_of_a_later_format_that_it_is_one(tmp_path: Path, say: Say) -> None:
    place = tmp_path / "checkpoints" / "step_000005"
    place.mkdir(parents=True)
    later = {"format": 3, "step": 5, "fixed": {}, "files": {"a": {"sha": "x"}}, "layout": {"axes": []}}
    (place / folder.MANIFEST).write_bytes(folder.serialize(later))
    assert "format 3" in say("list", tmp_path)[1]
    assert "CKP204" in say("show", tmp_path)[2]


def test_show(copy: Path, say: Say) -> None:
    status, out, _ = say("show", copy)
    assert status == 0
    assert "step 2, 16 samples\npipeline 2 * data 1 * tensor 2 (1d), ZeRO 1, layers 1+1\n" in out
    assert f"28 parameters of {NUM_ELEMENTS:,} elements" in out
    assert "  hidden_size: 16\n" in out
    shown = json.loads(say("show", copy, "--format", "json")[1])
    assert shown["config"]["model"]["hidden_size"] == 16


def test_verify_names_each_corrupted_file(copy: Path, say: Say) -> None:
    place = copy / "checkpoints" / "step_000002"
    assert say("verify", copy) == (0, f"{place}: intact\n", "")
    corrupted = place / "tensors" / "00001.safetensors"
    data = bytearray(corrupted.read_bytes())
    data[-3] ^= 1
    corrupted.write_bytes(data)
    (place / "ranks" / "00002.pt").unlink()
    status, out, _ = say("verify", place)
    assert status == 1
    assert "CKP215 damaged-checkpoint: step_000002 is corrupted:" in out
    assert "    ranks/00002.pt: missing\n    tensors/00001.safetensors: altered\n" in out
    status, out, _ = say("verify", copy, "--format", "json")
    assert (status, json.loads(out)[0]["whole"]) == (1, False)
    for words in (("export", copy, "--output", copy / "w"), reshard_words(copy)):
        status, out, err = say(*words)
        assert (status, "CKP215" in err, (copy / "w").exists()) == (1, True, False), err


def reshard_words(copy: Path) -> tuple[object, ...]:
    config = copy / "wider.yaml"
    config.write_text(_config(copy))
    return ("reshard", copy, "--config", config, "--world-size", 4, "--output", copy / "w", "~parallel", "zero.stage=0")


def _config(copy: Path) -> str:
    from dslpar.language import yaml_io

    return yaml_io.dump_plain(folder.open_checkpoint(copy / "checkpoints" / "step_000002").manifest["config"])


def test_reshard_and_export(copy: Path, say: Say) -> None:
    status, out, err = say(*reshard_words(copy))
    assert status == 0, err
    assert out.endswith(f"{copy / 'w' / 'checkpoints' / 'step_000002'} (pipeline 1 * data 4 * tensor 1, ZeRO 0)\n")
    status, out, _ = say("show", copy / "w")
    assert "resharded by `dslpar checkpoint reshard`" in out
    status, out, err = say("export", copy / "w", "--output", copy / "x", "--dtype", "fp16", "--max-shard-size", "10KB")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == len(list((copy / "x").iterdir())) == 2 + math.ceil(NUM_ELEMENTS * 2 / 10_000)


def _as_step_1(checkpoint: Path) -> Path:
    """Return a copy beside it that claims to be of step 1."""
    first = Path(shutil.copytree(checkpoint, checkpoint.with_name("step_000001")))
    values = {key: value for key, value in folder.open_checkpoint(checkpoint).manifest.items() if key != "digest"}
    (first / folder.MANIFEST).write_bytes(folder.serialize({**values, "step": 1}))
    return first


def test_a_suspect_checkpoint_is_taken_where_it_is_named_and_stays_one(copy: Path, say: Say) -> None:
    """Otherwise a later resume from the result would silently continue from wrong numbers."""
    place = copy / "checkpoints" / "step_000002"
    writer.mark_suspect(place, "copies differ")
    for words in (("export", copy, "--output", copy / "x"), reshard_words(copy)):
        status, _, err = say(*words)
        assert (status, (copy / "x").exists(), (copy / "w").exists()) == (1, False, False)
        assert "CKP232 suspect-checkpoint: step_000002 is suspect: copies differ" in err
        assert "name it to use it anyway" in err
    note = "step_000002 is suspect, and is used because it was named: copies differ\n"
    verb, _, *options = reshard_words(copy)
    for words in (("export", place, "--output", copy / "x"), (verb, place, *options)):
        status, _, err = say(*words)
        assert status == 0
        assert note in err
    made = folder.open_checkpoint(copy / "w" / "checkpoints" / "step_000002")
    assert made.suspect == "copies differ"
    _as_step_1(Path(made.path))
    status, _, err = say("export", copy / "w", "--output", copy / "y")
    assert (status, "name it to use it anyway" in err) == (1, True), "the one before it is suspect, too"


def test_a_suspect_checkpoint_is_used_where_it_is_named(
    copy: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    """eval and generate use it, and suggest an earlier unmarked one."""
    newest = copy / "checkpoints" / "step_000002"
    first = _as_step_1(newest)
    writer.mark_suspect(newest, "copies differ")
    with pytest.raises(DslparError, match=rf"CKP232 .*\n.*take the one before it, {re.escape(str(first))}"):
        find_checkpoint(copy)
    assert say("export", copy, "--output", copy / "x")[0] == 1
    assert find_checkpoint(copy, "step_000001").suspect == ""
    assert capsys.readouterr().err == ""
    for found in (lambda: find_checkpoint(copy, "step_000002"), lambda: find_checkpoint(newest)):
        assert found().path == str(newest)
        assert "is suspect, and is used because it was named: copies differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lst",), "unknown command 'lst'; did you mean 'list'?"),
        (("verify", "nowhere"), "nowhere is not a folder"),
        (("show", "."), "no checkpoint in ."),
        (("verify", "."), "no checkpoint in ."),
        (("export", ".", "--output", "x", "--max-shard-size", "big"), "'big' is not a size such as 5GB or 500MB"),
        (
            ("reshard", ".", "--config", str(ROOT / "configs/gpt_3d.py"), "--output", "x"),
            "--world-size N or --hostfile FILE",
        ),
    ],
)
def test_a_usage_error_is_reported(
    words: tuple[str, ...], message: str, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = say(*words)
    assert (status, message in err) == (2, True), err


def test_each_action_has_its_help(say: Say) -> None:
    for action in ("list", "show", "verify", "reshard", "export"):
        status, out, _ = say(action, "--help")
        assert status == 0
        assert "exit status: 0" in out
        assert max(map(len, out.splitlines())) <= 100
    status, out, _ = say()
    assert status == 2
    assert "  reshard " in out


def test_a_checkpoint_of_an_earlier_dslpar_is_refused(tmp_path: Path, say: Say) -> None:
    place = tmp_path / "checkpoints" / "step_000002"
    place.mkdir(parents=True)
    (place / "checkpoint.json").write_text('{"format": 1, "step": 2, "fixed": {}, "files": {}}')
    assert "CKP220" in say("show", tmp_path)[2]
    assert say("verify", tmp_path)[0] == 1
    assert "format 1" in say("list", tmp_path)[1]


# ---- docs/checkpoints.md ----


def test_the_page_says_what_is_printed(source: folder.Checkpoint, tmp_path: Path) -> None:
    page = checkpoint_page.PAGE.read_text()
    made = checkpoint_page.printed(page, Path(source.path).parents[1], tmp_path)
    written = [text for _, _, text in checkpoint_page.blocks(page)]
    assert list(map(checkpoint_page.without_bytes, written)) == list(map(checkpoint_page.without_bytes, made)), (
        f"{checkpoint_page.PAGE} is out of date: python -m tests.support.checkpoint_page {Path(source.path).parents[1]}"
    )
    assert len(written) == 7
