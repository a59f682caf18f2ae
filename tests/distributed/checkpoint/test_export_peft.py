"""Exported adapters: `--format peft` and `--format hf --merge-lora` load in peft and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dslpar.checkpoint import folder
from dslpar.checkpoint.adapters import Contents
from dslpar.checkpoint.export_peft import export_peft
from dslpar.checkpoint.export_transformers import export_transformers
from dslpar.checkpoint.folder import Checkpoint
from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from dslpar.layout.resolve import resolve
from dslpar.schema import sections
from tests.distributed.checkpoint.test_export_transformers import written
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS or find_spec("peft") is None:
    pytest.skip(f"{NO_TRANSFORMERS}; and peft", allow_module_level=True)

import peft
import transformers
from safetensors import safe_open

from tests.support import hugging_face as hf

IDS = torch.arange(24).view(2, 12) % 70
CASES: dict[str, sections.LoRA] = {
    "gpt2": sections.LoRA(r=3, lora_alpha=6, target_modules=("c_attn", "mlp.c_proj")),
    "llama, tied": sections.LoRA(r=4, use_rslora=True),
    "qwen2": sections.LoRA(
        r=3, target_modules=("q_proj", "v_proj"), bias="all", modules_to_save=("lm_head", "input_layernorm")
    ),
    "phi3": sections.LoRA(r=2, lora_dropout=0.1, target_modules=("qkv_proj",)),
    "mixtral": sections.LoRA(
        r=2, target_modules=("q_proj",), target_parameters=("experts.down_proj", "experts.gate_up_proj")
    ),
}
"""By family: three linears in one, transposed; every linear, tied; biases and whole modules; different lengths; two
weights of experts.
"""


def _trained(job: Any) -> Tensor:
    """Return full logits after three steps, with a checkpoint saved."""
    from dslpar import checkpoint
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.layers import gather, placement
    from tests.properties.invariance.run_and_reference import Samples

    engine = build_engine(job, Groups(job.mesh))
    samples = Samples(ignoring=False)
    samples.tokens %= 70
    samples.labels %= 70
    for _ in range(3):
        at, index = engine.consumed_samples, engine.groups.coord["data"]
        engine.train_batch(micro_batches(samples, job.batch, 1, at, job.mesh.data, index))
    checkpoint.save(engine, "samples")
    engine.module.eval()
    with torch.no_grad():
        logits = engine.module(IDS)
    table = placement.table(job.mesh.tensor, 70, 32).padded[0]
    return gather(logits, placement.inner(job.mesh.tensor, *IDS.shape, table), engine.groups)[..., :70]


def run(family: str, root: Path, tensor: Any, world: int) -> tuple[Path, Checkpoint, Tensor]:
    """Return the folder that the run begins with, its checkpoint, and its logits."""
    before = written(family, root / "before")
    name = hf.FAMILIES[family].classes()[0].__name__
    model = sections.OtherModel(target=f"transformers.{name}", args={"pretrained": str(before)}, lora=CASES[family])
    spec = sections.Spec(
        model=model,
        parallel=sections.Parallel(tensor=tensor),
        optimizer=sections.SGD(lr=0.5),
        batch=sections.Batch(global_size=8, accumulation=2),
        train=sections.Train(steps=3, output_dir=str(root / "run")),
    )
    logits = on_ranks(world, _trained, resolve(spec, world, "peft.py"), init="deepspeed")[0]
    return before, folder.open_checkpoint(root / "run" / "checkpoints" / "step_000003"), logits


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits


def assert_close(one: Tensor, other: Tensor) -> None:
    """Compare logits of order 1, with the tolerance of float32 sums in another order, three blocks deep."""
    assert float((one - other).abs().max()) < 2e-5 * float(other.abs().max())


@pytest.mark.prove
@pytest.mark.parametrize("family", CASES)
def test_peft_and_transformers_compute_what_the_run_did(family: str, tmp_path: Path) -> None:
    world, mode = (2, "1d") if family == "gpt2" else (4, "2d")
    before, stored, logits = run(family, tmp_path, sections.TensorParallel(size=world, mode=mode), world)
    export_peft(stored, tmp_path / "adapter")
    export_transformers(stored, tmp_path / "merged", merges_lora=True)
    cls = hf.FAMILIES[family].classes()[0]
    base = logits_of(cls.from_pretrained(before))
    assert float((base - logits).abs().max()) > 1e-2 * float(base.abs().max()), "it has learned"
    assert_close(logits_of(peft.PeftModel.from_pretrained(cls.from_pretrained(before), tmp_path / "adapter")), logits)
    assert_close(logits_of(cls.from_pretrained(tmp_path / "merged")), logits)


@pytest.mark.prove
def test_merging_reads_the_adapters_of_one_expert_at_a_time(tmp_path: Path) -> None:
    """The files have a tensor per expert: with all experts' updates for each, a large mixture would take hours."""
    _, stored, _ = run("mixtral", tmp_path, None, 1)
    read, delta = list[int](), Contents.delta_of_experts

    def counted(self: Contents, reader: Any, state: str, experts: slice) -> Tensor:
        read.append(experts.stop - experts.start)
        return delta(self, reader, state, experts)

    with patch.object(Contents, "delta_of_experts", counted):
        export_transformers(stored, tmp_path / "merged", merges_lora=True)
    assert set(read) == {1}
    assert len(read) == 3 * 8 * 3, "gate, up and down of eight experts in three blocks"


def keys(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


@pytest.mark.prove
@pytest.mark.parametrize("family", CASES)
def test_the_file_is_the_one_that_peft_writes(family: str, tmp_path: Path) -> None:
    """Compare names, shapes, and the config apart from defaults."""
    before, stored, _ = run(family, tmp_path, None, 1)
    export_peft(stored, tmp_path / "ours")
    lora = CASES[family]
    given: Any = lora.target_modules
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        bias=lora.bias,
        target_modules=given if isinstance(given, str) else list(given),
        modules_to_save=list(lora.modules_to_save) or None,
        target_parameters=list(lora.target_parameters) or None,
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    cls = hf.FAMILIES[family].classes()[0]
    peft.get_peft_model(cls.from_pretrained(before), config).save_pretrained(tmp_path / "theirs")
    assert keys(tmp_path / "ours") == keys(tmp_path / "theirs")
    own, true = (json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs"))
    assert {name: in_order(value) for name, value in own.items()} == {name: in_order(true[name]) for name in own}


@pytest.mark.prove
def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """docs/transformers.md, "Fine-tuning": trained on two ranks, exported, and loaded by peft."""
    text = Path("docs/transformers.md").read_text(encoding="utf-8").partition("## Fine-tuning")[2]
    example = text.partition("```python\n")[2].partition("```")[0]
    base = tmp_path / "base"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    more = f"""
parallel = dict(tensor=dict(size=2, mode='1d'))
data = dict(seq_len=16)
train = dict(steps=2, output_dir={str(tmp_path / "run")!r})
"""
    path = tmp_path / "example.py"
    path.write_text(example.replace("'folder'", repr(str(base))) + more)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", "--config", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are trained" in (tmp_path / "run" / "log.txt").read_text()
    assert main(["checkpoint", "export", str(tmp_path / "run"), "-o", str(tmp_path / "a"), "--format", "peft"]) == 0
    model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), tmp_path / "a")
    b = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(b) == 4
    assert all(p.any() for p in b), "two steps have moved them from zero"


# ---- refused exports ----


def test_a_run_without_adapters_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = Checkpoint("run", {"config": {"model": {"type": "transformers.GPT2LMHeadModel", "pretrained": "here"}}})
    with pytest.raises(DslparError, match=r"CKP222 .*no model\.lora\n.*--format hf"):
        export_peft(stored, tmp_path / "after")
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", str(tmp_path), "-o", str(tmp_path / "x"), "--merge-lora"])
    assert "--merge-lora is for --format hf" in capsys.readouterr().err
