"""Exports of `--format hf`: byte for byte the files that transformers would write."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from dslpar.checkpoint import export_transformers as exporting
from dslpar.checkpoint import folder
from dslpar.checkpoint.export_transformers import export_transformers
from dslpar.checkpoint.folder import Checkpoint
from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from dslpar.layout.resolve import resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from tests.support import hugging_face as hf

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe 2, 1d 2": (
        4,
        {
            "pipeline": sections.PipelineParallel(size=2),
            "tensor": sections.TensorParallel(size=2, mode="1d"),
        },
    ),
    "2d 4": (4, {"tensor": sections.TensorParallel(size=4, mode="2d")}),
    "pipe 2, data 2": (4, {"pipeline": sections.PipelineParallel(size=2)}),
    "1d 2, expert 4": (
        4,
        {
            "tensor": sections.TensorParallel(size=2, mode="1d"),
            "expert": sections.ExpertParallel(size=4),
        },
    ),
}
WITH_EXPERTS = "1d 2, expert 4"
"""The layout of mixtures alone."""
UNCUT = "pipe 2, data 2"
"""The layout of a family that no tensor mode shards."""
EACH_TIME = {("phi3", "2d 4"), ("mixtral, 5 experts", WITH_EXPERTS)}
"""Always run; tests below export GPT-2 and load it back."""


def saved(model: Any, path: Path, layout: str = "pipe 2, 1d 2", zero: int = 0, **parallel: Any) -> Checkpoint:
    """Return the checkpoint of a run before its first step."""
    job = job_of(model, path, layout, zero, **parallel)
    on_ranks(job.mesh.world_size, _save, job, init="deepspeed")
    return folder.open_checkpoint(path / "checkpoints" / "step_000000")


def job_of(model: Any, path: Path, layout: str, zero: int = 0, **parallel: Any) -> Any:
    world, given = LAYOUTS[layout]
    return resolve(
        sections.Spec(
            model=model,
            parallel=sections.Parallel(**given, **parallel),
            optimizer=sections.SGD(lr=0.1),
            zero=sections.Zero(stage=zero),
            batch=sections.Batch(global_size=8, accumulation=2),
            train=sections.Train(steps=2, output_dir=str(path)),
        ),
        world,
        "export.py",
    )


def _save(job: Any) -> None:
    from dslpar import checkpoint
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    checkpoint.save(build_engine(job, Groups(job.mesh), all_counted=True), "text")


def of_transformers(family: hf.Family, path: Path, **more: Any) -> sections.OtherModel:
    name = family.classes()[0].__name__
    return sections.OtherModel(target=f"transformers.{name}", args={"pretrained": str(path), **more})


def written(family: str, path: Path, **options: Any) -> Path:
    """Return a folder that transformers wrote, with weights that are neither zeros nor ones."""
    hf.plain(hf.FAMILIES[family])[0].float().save_pretrained(path, **options)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


MIXTURES = [name for name in hf.FAMILIES if "xtral" in name or "moe" in name]
CELLS = [
    cell
    for cell in product(hf.FAMILIES, LAYOUTS)
    if (cell[0] == "resnet") == (cell[1] == UNCUT) and (cell[0] in MIXTURES or cell[1] != WITH_EXPERTS)
]


@pytest.mark.parametrize(("family", "layout"), sampled(CELLS, EACH_TIME))
def test_there_and_back_the_bytes_are_the_same(family: str, layout: str, tmp_path: Path) -> None:
    """Weights go from transformers into a layout and back without a step: each file is equal, with config and
    generation config.
    """
    before = written(family, tmp_path / "before")
    stored = saved(of_transformers(hf.FAMILIES[family], before), tmp_path / "run", layout)
    export_transformers(stored, tmp_path / "after")
    assert contents(tmp_path / "after") == contents(before)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    """Return a folder of many files with a tokenizer's, and the checkpoint of a ZeRO 1 run that began with it."""
    root = tmp_path_factory.mktemp("gpt2")
    before = written("gpt2", root / "before", max_shard_size="20KB")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
        (before / name).write_text(f"{name} of somebody's")
    (before / "notes.txt").write_text("mine")
    generation = transformers.GenerationConfig(max_length=99, temperature=0.5, do_sample=True)
    generation.save_pretrained(before)
    return before, saved(of_transformers(hf.FAMILIES["gpt2"], before), root / "run", zero=1)


def test_files_are_as_large_as_they_may_be_and_a_tokenizer_comes_along(
    gpt2: tuple[Path, Checkpoint], tmp_path: Path
) -> None:
    before, stored = gpt2
    export_transformers(stored, tmp_path / "after", max_shard_bytes=20_000)
    found = contents(tmp_path / "after")
    assert found == {name: text for name, text in contents(before).items() if name != "notes.txt"}
    assert {"model.safetensors.index.json", "tokenizer.json", "merges.txt"} <= found.keys()
    assert len(found) > 8


@pytest.mark.parametrize("kind", ["folder", "file", "tokens", "blend", "bytes"])
def test_the_tokenizer_of_the_text_comes_along(gpt2: tuple[Path, Checkpoint], tmp_path: Path, kind: str) -> None:
    """The run did not begin with a folder of transformers."""
    texts = {"tokenizer.json": b"{}", "tokenizer_config.json": b"its config"}
    (tmp_path / "mine" / "tokenizer").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "mine" / "tokenizer" / name).write_bytes(text)
    folder = str(tmp_path / "mine" / "tokenizer")
    data = {
        "folder": {"type": "text", "tokenizer": folder},
        "file": {"type": "text", "tokenizer": f"{folder}/tokenizer.json"},
        "tokens": {"type": "tokens", "path": str(tmp_path / "mine")},
        "blend": {"type": "blend", "parts": [{"type": "tokens", "path": str(tmp_path / "mine"), "weight": 2.0}]},
        "bytes": {"type": "text"},
    }[kind]
    stored = changed(gpt2[1], {"type": "transformers.GPT2LMHeadModel", "config": hf.FAMILIES["gpt2"].sizes})
    stored.manifest["config"]["data"] = data
    export_transformers(stored, tmp_path / "after")
    found = {name: text for name, text in contents(tmp_path / "after").items() if name.startswith("tokenizer")}
    assert found == ({} if kind == "bytes" else texts)


def test_transformers_loads_what_is_written_in_half_precision(gpt2: tuple[Path, Checkpoint], tmp_path: Path) -> None:
    """The weights are the rounded master weights, and config.json has their dtype."""
    before, stored = gpt2
    export_transformers(stored, tmp_path / "after", "BF16")
    assert json.loads((tmp_path / "after" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "after")
    full = transformers.GPT2LMHeadModel.from_pretrained(before)
    assert loaded.dtype == torch.bfloat16
    for name, weight in full.state_dict().items():
        assert torch.equal(weight.bfloat16(), loaded.state_dict()[name]), name


@pytest.mark.prove
def test_a_model_in_half_precision_comes_back_in_it(tmp_path: Path) -> None:
    before = tmp_path / "before"
    hf.plain(hf.FAMILIES["llama, tied"])[0].bfloat16().save_pretrained(before)
    stored = saved(of_transformers(hf.FAMILIES["llama, tied"], before), tmp_path / "run", "2d 4")
    export_transformers(stored, tmp_path / "after", "BF16")
    assert contents(tmp_path / "after") == contents(before)


LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "layernorm_eps": 1e-6, "bias": False}
SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 8, "vocab_size": 70, "max_seq_len": 32}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "ffn_hidden_size": 48},
    "llama": {**LLAMA, "tie_embeddings": False, "num_kv_heads": 4, "ffn_hidden_size": 48},
    "llama, tied": {**LLAMA, "num_kv_heads": 4, "ffn_hidden_size": 48},
    "mixtral, 5 experts": {
        **LLAMA,
        "num_kv_heads": 4,
        "layernorm_eps": 1e-5,
        "rope_theta": 1e6,
        "experts": sections.Experts(num=5, ffn_hidden_size=48, balance=0.0),
    },
}
OWN_CELLS = [cell for cell in product(OWN, LAYOUTS) if cell[0] in MIXTURES or cell[1] != WITH_EXPERTS]


@pytest.mark.parametrize(
    ("family", "layout"), sampled(OWN_CELLS, [("llama", "2d 4"), ("mixtral, 5 experts", WITH_EXPERTS)])
)
def test_a_gpt_takes_such_weights_and_gives_them_back(family: str, layout: str, tmp_path: Path) -> None:
    before = written(family, tmp_path / "before")
    model = section.GPT(**SIZES, **OWN[family], pretrained=str(before))
    export_transformers(saved(model, tmp_path / "run", layout), tmp_path / "after")
    assert contents(tmp_path / "after") == contents(before)


def test_a_resume_says_which_buffers_the_model_has_no_more(tmp_path: Path) -> None:
    """Without `bias_update` there is no bias; 0 would keep it."""
    with_bias = section.GPT(**SIZES, experts=sections.Experts(num=4, bias_update=0.1))
    found = saved(with_bias, tmp_path, UNCUT)
    for rate, expected in ((None, "has buffers blocks."), (0.0, "")):
        model = section.GPT(**SIZES, experts=sections.Experts(num=4, bias_update=rate))
        for said in on_ranks(4, _resumed_with, job_of(model, tmp_path / "again", UNCUT), found, init="deepspeed"):
            assert expected in said
            assert bool(said) == bool(expected)


def _resumed_with(job: Any, found: Checkpoint) -> str:
    """Return the warnings of a resume."""
    import logging

    from dslpar import checkpoint
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    logging.getLogger("dslpar").addHandler(handler)
    checkpoint.load(engine, found)
    return "\n".join(line for line in said if "buffers" in line)


@pytest.mark.parametrize("is_family", [True, False])
def test_generation_stops_at_the_end_of_the_text_that_the_run_read(
    is_family: bool, gpt2: tuple[Path, Checkpoint], tmp_path: Path
) -> None:
    """The tokenizer's end of text is the token that the weights find most probable after the prompt."""
    before, stored = gpt2
    sizes = {key: value for key, value in hf.FAMILIES["gpt2"].sizes.items() if not key.endswith("_token_id")}
    model: dict[str, Any] = {"type": "transformers.GPT2LMHeadModel", "config": sizes}
    if is_family:
        before, model = written("llama", tmp_path / "before"), {"type": "GPT", **SIZES, **OWN["llama"]}
        stored = saved(section.GPT(**SIZES, **OWN["llama"], pretrained=str(before)), tmp_path / "run", "2d 4")
    plain = transformers.AutoModelForCausalLM.from_pretrained(before)
    prompt = torch.tensor([[3, 9, 4]])
    end = int(plain(prompt).logits[0, -1].argmax())
    vocabulary = {f"t{id}": id for id in range(70) if id != end} | {"<|endoftext|>": end}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (tmp_path / "mine" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    stored = changed(stored, model)
    stored.manifest["config"]["data"] = {"type": "text", "tokenizer": str(tmp_path / "mine")}
    export_transformers(stored, tmp_path / "after")
    config, generation = (
        json.loads((tmp_path / "after" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert [config[f"{each}_token_id"] for each in ("eos", "bos", "pad")] == [end, end, None]
    assert [generation[f"{each}_token_id"] for each in ("eos", "bos", "pad")] == [end] * 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    mask = torch.ones_like(prompt)
    assert loaded.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False).tolist() == [
        [*prompt[0].tolist(), end]
    ]


# ---- refused exports ----


def changed(stored: Checkpoint, model: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint with another model in its config."""
    config = {**stored.manifest["config"], "model": model}
    return stored._replace(manifest={**stored.manifest, "config": config})


GPT = {"type": "GPT", "num_layers": 3, "hidden_size": 32, "num_heads": 8, "vocab_size": 70, "max_seq_len": 32}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            GPT | {"norm": "rmsnorm", "activation": "swiglu"},
            r"CKP222 .*\n.*GPT2LMHeadModel has norm='layernorm', activation='gelu' or 'gelu_tanh'\n"
            r".*LlamaForCausalLM has positions='rotary'",
        ),
        (GPT | {"num_kv_heads": 4}, r"CKP222 .*\n.*GPT2LMHeadModel has num_kv_heads=8\n"),
        (
            {"type": "Sequential", "layers_cfg": [{"type": "Linear", "in_features": 2, "out_features": 2}]},
            r"CKP222 .* is neither a transformers model nor a GPT\n.*leave --format out",
        ),
        (
            {"type": "transformers.GPT2LMHeadModel", "pretrained": "here", "lora": {"target_modules": ["c_attn"]}},
            r"CKP222 .*trains adapters",
        ),
        (
            {"type": "transformers.GPT2LMHeadModel", "pretrained": "nowhere"},
            r"CKP205 .*cannot read .*/nowhere/config\.json: there is no such file",
        ),
        (
            {"type": "transformers.GPT2LMHeadModel", "config": hf.FAMILIES["gpt2"].sizes | {"vocab_size": 71}},
            r"CKP207 .*'transformer\.wte\.weight' has shape \(70, 32\), but \(71, 32\) in the model",
        ),
        (
            {"type": "transformers.GPT2LMHeadModel", "config": hf.FAMILIES["gpt2"].sizes | {"n_layer": 4}},
            r"CKP207 .*has no 'transformer\.h\.3\.",
        ),
        (
            {"type": "transformers.GPT2LMHeadModel", "config": hf.FAMILIES["gpt2"].sizes | {"n_layer": 2}},
            r"CKP207 .*the model has no 'transformer\.h\.2\.",
        ),
    ],
    ids=[
        "between",
        "grouped queries",
        "other layers",
        "adapters",
        "folder is gone",
        "vocabulary",
        "more layers",
        "fewer layers",
    ],
)
def test_what_is_no_model_of_transformers_is_refused(
    model: dict[str, Any], said: str, gpt2: tuple[Path, Checkpoint], tmp_path: Path
) -> None:
    with pytest.raises(DslparError, match=said):
        export_transformers(changed(gpt2[1], model), tmp_path / "after")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_folder_that_has_moved_may_be_named(
    gpt2: tuple[Path, Checkpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, stored = gpt2
    moved = changed(stored, {"type": "transformers.GPT2LMHeadModel", "pretrained": "nowhere"})
    export_transformers(moved, tmp_path / "after", pretrained=before, max_shard_bytes=20_000)
    assert (tmp_path / "after" / "config.json").read_bytes() == (before / "config.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", stored.path, "-o", str(tmp_path / "x"), "--pretrained", str(before)])
    assert "--pretrained is for --format hf and peft" in capsys.readouterr().err


def test_the_command_writes_all_of_it_or_nothing(
    gpt2: tuple[Path, Checkpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["checkpoint", "export", gpt2[1].path, "--format", "hf", "-o", str(tmp_path / "after")]
    real = exporting.write_lazy_tensors

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_lazy_tensors", full)
    assert main(words) == 1
    assert "CKP205 no-checkpoint: cannot write to" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(exporting, "write_lazy_tensors", real)
    assert main(words) == 0
    assert f"{tmp_path / 'after' / 'model.safetensors'}  " in capsys.readouterr().out
    assert main(words) == 1
    assert "CKP221 already-there" in capsys.readouterr().err


def test_without_transformers_it_is_said(
    gpt2: tuple[Path, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(DslparError, match=r"CKP222 .*cannot be imported"):
        export_transformers(changed(gpt2[1], GPT), tmp_path / "after")


# ---- reads of a rank ----


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes that are read from files."""
    from dslpar.models import pretrained

    numbers: list[int] = []
    real = pretrained.Folder._slice

    class Counted:
        def __init__(self, of: Any) -> None:
            self.of, self.get_shape = of, of.get_shape

        def __getitem__(self, index: Any) -> torch.Tensor:
            read: torch.Tensor = self.of[index]
            numbers.append(read.numel() * read.element_size())
            return read

    monkeypatch.setattr(pretrained.Folder, "_slice", lambda self, name: Counted(real(self, name)))
    return numbers


def _read_and_held(job: Any, numbers: list[int]) -> tuple[int, int, int]:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    held = padding = 0
    for _, p in engine.named_parameters():
        at = p.placement  # type: ignore[attr-defined]
        held += p.numel() * p.element_size()
        if at.padded_rows is not None:
            box = rows_held(at, engine.groups.coord)
            padding += (p.shape[0] - box) * p[0].numel() * p.element_size()
    return sum(numbers), held, padding


def rows_held(at: Any, coord: Any) -> int:
    """Return the rows of a table on this rank, without padding."""
    from dslpar.checkpoint.slices import box_of

    return sum(max(0, min(each.start + each.length, at.shape[0]) - each.start) for each in box_of(at, coord)[0])


@pytest.mark.parametrize(
    ("family", "layout", "shard"),
    [
        pytest.param("gpt2", "2d 4", "20KB", id="2d 4, sharded index"),
        pytest.param("gpt2", "2d 4", "5GB", id="2d 4, one file", marks=pytest.mark.prove),
        pytest.param("gpt2", "pipe 2, 1d 2", "20KB", id="pipe 2, 1d 2, sharded index", marks=pytest.mark.prove),
        pytest.param("mixtral, 5 experts", "2d 4", "20KB", id="experts", marks=pytest.mark.prove),
    ],
)
def test_a_rank_reads_the_bytes_that_it_holds(
    family: str, layout: str, shard: str, counted: list[int], tmp_path: Path
) -> None:
    before = written(family, tmp_path / "before", max_shard_size=shard)
    world, given = LAYOUTS[layout]
    spec = sections.Spec(
        model=of_transformers(hf.FAMILIES[family], before),
        parallel=sections.Parallel(**given),
        optimizer=sections.SGD(lr=0.1),
        batch=sections.Batch(global_size=8, accumulation=2),
    )
    whole = sum(each.stat().st_size for each in before.glob("*.safetensors"))
    paddings = set()
    for read, held, padding in on_ranks(
        world, _read_and_held, resolve(spec, world, "read.py"), counted, init="deepspeed"
    ):
        assert read == held - padding
        assert 0 < read < whole * 0.6
        paddings.add(padding)
    assert (paddings != {0}) == (layout == "2d 4"), "70 rows are not divisible by 4"


# ---- a class without a policy, whole in one layer ----

RESNET = """
from dslpar.config import LazyCall
from transformers import ResNetConfig
model = dict(type='transformers.ResNetForImageClassification', config=LazyCall(ResNetConfig)(
    depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8, num_labels=3))
optimizer = dict(type='AdamW', lr=1e-2)
batch = dict(global_size=8)
train = dict(steps=2, output_dir='OUT')
"""


def _train_resnet(path: str) -> dict[str, torch.Tensor]:
    def criterion(output: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, labels)

    engine = dslpar.initialize(path, criterion=criterion, train_data=iter(())).engine
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(8, 3, 32, 32, generator=generator), torch.randint(3, (8,), generator=generator)
    size, index = engine.groups.mesh.data, engine.groups.coord["data"]
    for _ in range(2):
        engine.train_batch([(images.chunk(size)[index], labels.chunk(size)[index])])
    engine.save()
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def test_buffers_that_are_saved_come_along(tmp_path: Path) -> None:
    """Statistics of batch norms come from the first replica."""
    path = tmp_path / "resnet.py"
    path.write_text(RESNET.replace("OUT", str(tmp_path / "run")))
    first, _ = on_ranks(2, _train_resnet, str(path), init="deepspeed")
    (stored,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    export_transformers(folder.open_checkpoint(stored), tmp_path / "after")
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "after").state_dict()
    trained = {re.sub("^(front|back)[.]", "", name): value for name, value in first.items()}
    assert loaded.keys() == trained.keys()
    assert [name for name, value in loaded.items() if not torch.equal(value, trained[name])] == []
    assert loaded["resnet.embedder.embedder.normalization.num_batches_tracked"] == 2
