"""`dslpar import`: configs of three frameworks, in their own shapes, to dslpar files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.core.errors import has_errors
from dslpar.language.load import load_text
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.migrate import report
from dslpar.migrate.convert import Entry, Import, convert
from dslpar.migrate.page import page
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text, without_comments
from dslpar.migrate.table import Epoch
from dslpar.migrate.writer import file_of
from dslpar.schema import deepspeed_policy
from tests.support.paths import ROOT
from tests.unit.test_repository import heavy_imports

COLOSSAL = """\
from colossalai.amp import AMP_TYPE
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small
from torch.optim import Adam

BATCH_SIZE = 16
SEQ_LEN = 512
NUM_MICRO_BATCHES = 4
WIDTH = 8
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**8, growth_interval=500)
parallel = dict(pipeline=2, tensor=dict(size=WIDTH, mode='2.5d', depth=2))
optimizer = dict(type=Adam, lr=1.5e-4, weight_decay=1e-2)
model = dict(type=gpt2_small, checkpoint=True)
loss = dict(type=GPTLMLoss)
gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]
gradient_accumulation = 3
clip_grad_norm = 1.0
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES // 2, SEQ_LEN, 768 // 2)
cudnn_benchmark = True
seed = 7
"""
ZERO = """\
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.shard_utils import TensorShardStrategy

zero = dict(
    model_config=dict(shard_strategy=TensorShardStrategy(), tensor_placement_policy='cpu',
                      reduce_scatter_bucket_size_mb=25),
    optimizer_config=dict(initial_scale=2**5, min_scale=1, growth_factor=2, gpu_margin_mem_ratio=0.8),
)
optimizer = dict(type=HybridAdam, lr=1e-4)
NUM_EPOCHS = 60
"""
OLD_ZERO = """\
from colossalai.amp import AMP_TYPE
zero = dict(level=2, cpu_offload=True, overlap_comm=True, clip_grad=0.5, levle=1)
fp16 = dict(mode=None)
parallel = dict(pipeline=dict(size=1), tensor=dict(size=1, mode=None))
"""
LIBAI = """\
from libai.config import LazyCall
from libai.models import GPTForPreTraining
from libai.scheduler import WarmupCosineLR
from .common.train import train
from .common.optim import optim, sizes

cfg = dict(hidden_layers=4, vocab_size=256, hidden_size=64, num_attention_heads=4, max_seq_length=32,
           embedding_dropout_prob=0.1, attention_dropout_prob=0.1, output_dropout_prob=0.1, bias_gelu_fusion=True)
model = LazyCall(GPTForPreTraining)(cfg=cfg)
train.dist.pipeline_parallel_size = 2
train.dist.pipeline_num_layers = model.cfg.hidden_layers
train.amp.enabled = True
train.warmup_ratio = 0.015
train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.5, warmup_method='linear')
optim.lr = 1e-3
"""
LIBAI_TRAIN = """\
train = dict(train_micro_batch_size=4, num_accumulation_steps=2, global_batch_size=None, train_iter=101, train_epoch=0,
             train_samples=None, warmup_ratio=0, amp=dict(enabled=False), activation_checkpoint=dict(enabled=True),
             zero_optimization=dict(enabled=True, stage=1), checkpointer=dict(period=50, max_to_keep=3),
             evaluation=dict(enabled=True, eval_period=10, eval_iter=1e1), log_period=20, rdma_enabled=True,
             dist=dict(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1), seed=5)
"""
LIBAI_OPTIM = """\
import oneflow as flow
from libai.config import LazyCall
from libai.optim import get_default_optimizer_params
sizes = None
optim = LazyCall(flow.optim.AdamW)(
    params=LazyCall(get_default_optimizer_params)(
        clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_norm=0.0),
    lr=1e-4, betas=(0.9, 0.95), do_bias_correction=True)
"""
DEEPSPEED = """\
{
  // as their examples have it
  "train_batch_size": 64, # and this
  "gradient_accumulation_steps": 4, /* and
  this */
\t"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "adam_w_mode": true}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.001}},
  "zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": "auto", "overlap_comm": true},
  "fp16": {"enabled": true, "initial_scale_power": 15},
  "gradient_clipping": 1.0,
  "tensorboard": {"enabled": true, "output_path": "http://not/a/comment"},
  "activation_checkpointing": {"partition_activations": true},
  "flops_profiler": {"enabled": false},
  "compression_training": {"layer_reduction": {"enabled": false}},
}
"""
GPT = "model = dict(type='GPT', num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=32)\n"


def made_of(text: str, path: str = "source.py", name: str = "") -> Import:
    """Return a converted text."""
    return convert(read_text(text, path, name))


def by_key(made: Import) -> dict[str, Entry]:
    return {entry.key: entry for entry in made.entries if entry.key}


def fates(made: Import) -> dict[str, tuple[str, str, Any]]:
    return {key: (entry.fate, entry.to, entry.value) for key, entry in by_key(made).items()}


def explicit(made: Import) -> Import:
    """Return an import without what the source leaves out: neither defaults, nor what only a program sets."""
    silent = [entry for entry in made.entries if not entry.key and ("default" in entry.why or entry.to == "optimizer")]
    values = {key: value for key, value in made.values.items() if key not in {entry.to for entry in silent}}
    return made._replace(entries=tuple(entry for entry in made.entries if entry not in silent), values=values)


def job_of(text: str, world: int, path: str = "made.py") -> Job:
    return check.resolve(load_text(text, path), world)


def errors_of(text: str, world: int | None = None) -> list[str]:
    return [item.concise() for item in check.lint(load_text(text, "made.py"), world) if item.severity == "error"]


# ColossalAI -------------------------------------------------------------------------------------------------------


def test_a_config_of_colossalai() -> None:
    made = made_of(COLOSSAL)
    text = file_of(made)
    assert errors_of(text, 16) == []
    assert not made.needs_you
    job = job_of(text, 16)
    assert (job.mesh.tensor.shape, job.batch, job.seq_len) == ((4, 2, 1), (48, 4, 12), 512)
    model = job.spec.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.dropout) == (12, 768, 12, 0.1)  # type: ignore[union-attr]
    assert (job.spec.precision.dtype, job.spec.zero.stage, job.spec.train.seed) == ("fp16", 1, 7)
    assert job.spec.precision.extra == {"initial_scale_power": 8, "loss_scale_window": 500, "hysteresis": 2}
    assert job.spec.activation_checkpoint is not None
    told = fates(made)
    assert told["parallel.tensor.size"] == ("kept", "parallel.tensor.size", 8)
    assert told["clip_grad_norm"] == ("renamed", "train.clip_grad_norm", 1.0)
    assert told["BATCH_SIZE"] == ("changed", "batch.micro_size", 4)
    assert told["NUM_MICRO_BATCHES"] == ("changed", "batch.accumulation", 12)
    assert told["gradient_accumulation"][0] == "dropped", "it is in the product already"
    assert {key for key, (fate, *_) in told.items() if fate == "dropped"} == {
        "WIDTH", "loss.type", "gradient_handler", "gradient_accumulation", "TENSOR_SHAPE", "cudnn_benchmark",
    }  # fmt: skip
    assert "DeepSpeed sums the gradients of tied layers" in by_key(made)["gradient_handler"].why


HOOKS = """\
parallel = dict(pipeline=2)
lr_scheduler = dict(type='LinearWarmupLR', total_steps=100, warmup_steps=5)
hooks = [
    dict(type='LogMetricByEpochHook'),
    dict(type='Accuracy3DHook'),
    dict(type='LRSchedulerHook', by_epoch=False),
    dict(type='TensorboardHook', log_dir='./tb'),
    dict(type='SaveCheckpointHook', interval=2, checkpoint_dir='./ckpt'),
    dict(type='MyHook', k=3),
]
"""


def test_hooks_by_their_names() -> None:
    entry = by_key(made_of(HOOKS, name="colossalai"))["hooks"]
    assert (entry.fate, entry.to) == ("needed", "train.save_interval"), "of epochs only the data tell"
    for said in (
        "LogMetricByEpochHook: log.txt and metrics.jsonl have it",
        "Accuracy3DHook: dslpar eval RUN --metrics accuracy@1",
        "LRSchedulerHook: the engine steps lr_scheduler",
        "MyHook: a hook of the author's own: a program gives it to dslpar.fit(hooks=[...])",
    ):
        assert said in entry.why
    epoch = convert(read_text(HOOKS, "source.py", "colossalai"), epoch=Epoch(1000, 8))
    assert by_key(epoch)["hooks"].fate == "dropped"
    assert (epoch.values["train.save_interval"], epoch.values["monitor.tensorboard"]) == (250, True)
    steps = made_of(HOOKS.replace("interval=2", "interval=30, save_by_iter=True"), name="colossalai")
    assert steps.values["train.save_interval"] == 30
    assert errors_of(file_of(steps) + GPT, 2) == []
    assert fates(made_of("hooks = []\n", name="colossalai"))["hooks"][0] == "dropped"


def test_a_comment_stands_at_what_changed_in_meaning() -> None:
    text = file_of(made_of(COLOSSAL))
    line = next(line for line in text.split("\n") if "micro_size" in line)
    assert line.startswith("    micro_size=4,  # BATCH_SIZE: ")
    assert max(map(len, text.split("\n"))) <= 120
    sections = [line.partition(" = ")[0] for line in text.split("\n") if " = dict(" in line and line[0].isalpha()]
    assert sections == ["parallel", "model", "data", "optimizer", "zero", "precision", "batch", "train"]


def test_the_file_says_the_same_when_it_is_imported_or_formatted_by_hand() -> None:
    text = file_of(made_of(COLOSSAL))
    assert read_text(text, "made.py").name == "dslpar"
    assert text == file_of(made_of(COLOSSAL))


def test_a_sharded_model_is_zero_3() -> None:
    made = made_of(ZERO)
    told = fates(made)
    assert told["zero.model_config.shard_strategy"] == ("changed", "zero.stage", 3)
    assert by_key(made)["zero.model_config.shard_strategy"].location[1:3] == (5, 38), "where the call stands"
    assert told["zero.model_config.reduce_scatter_bucket_size_mb"] == ("changed", "zero.reduce_bucket_size", 13107200)
    assert told["zero.optimizer_config.initial_scale"] == ("changed", "precision.initial_scale_power", 5)
    assert told["optimizer.type"] == ("changed", "optimizer.type", "AdamW")
    assert told["NUM_EPOCHS"][:2] == ("needed", "train.steps")
    text = file_of(made)
    assert "# needs you: steps: NUM_EPOCHS = 60: dslpar counts optimizer steps" in text
    assert "# needs you: the source names no model" in text
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 32}
    with_model = file_of(convert(read_text(ZERO, "source.py"), {"type": "GPT", **sizes}))
    assert errors_of(with_model, 4) == []
    zero = job_of(with_model, 4).spec.zero
    assert (zero.stage, zero.extra["offload_param"], zero.extra["offload_optimizer"]) == (
        3,
        {"device": "cpu"},
        {"device": "cpu"},
    )


def test_what_needs_the_author_stands_in_the_file_too() -> None:
    text = "from titans.model.gpt import gpt2_small\nmodel = dict(type=gpt2_small, activation_offload=True)\n"
    written = file_of(convert(read_text(text, "old.py")))
    assert "# needs you: activation_checkpoint: model.activation_offload = True" in written


def test_adams_of_torch_packages_keep_their_name() -> None:
    made = convert(read_text("optimizer = dict(type='torchx.CPUAdam', adamw_mode=False)\n", "old.py", "colossalai"))
    assert [entry.fate for entry in made.entries if entry.key == "optimizer.type"] == ["kept"]


def test_the_old_zero() -> None:
    told = fates(made_of(OLD_ZERO))
    assert told["zero.level"] == ("renamed", "zero.stage", 2)
    assert told["zero.cpu_offload"] == ("changed", "zero.offload_optimizer.device", "cpu")
    assert told["zero.overlap_comm"] == ("kept", "zero.overlap_comm", True)
    assert told["zero.clip_grad"] == ("renamed", "train.clip_grad_norm", 0.5)
    assert told["zero.levle"][0] == "needed"
    assert "did you mean 'zero.level'?" in by_key(made_of(OLD_ZERO))["zero.levle"].why
    assert told["fp16.mode"][0] == "dropped"


def test_sections_inside_config() -> None:
    made = made_of(
        "from colossalai.amp import AMP_TYPE\nCONFIG = dict(fp16=dict(mode=AMP_TYPE.TORCH), parallel=dict(data=2))\n"
    )
    told = fates(made)
    assert told["CONFIG.fp16.mode"] == ("changed", "precision.dtype", "fp16")
    assert told["CONFIG.parallel.data"] == ("kept", "parallel.data", 2)


@pytest.mark.parametrize(
    ("written", "fate"),
    [
        ("model = dict(type='gpt2_small')", "changed"),
        ("model = dict(type='GPT')", "kept"),
        ("from titans.model.gpt import GPT\nmodel = dict(type=GPT, depth=3)", "changed"),
        ("model = dict(type='my_package.MyModel', depth=3, width=4)", "changed"),
        ("model = dict(type='vit_tiny')", "needed"),
        ("from colossalai.nn import Thing\nmodel = dict(type=Thing)", "needed"),
        ("model = 'pvt_tiny'", "needed"),
    ],
)
def test_models_of_colossalai(written: str, fate: str) -> None:
    made = made_of(f"{written}\nBATCH_SIZE = 2\n")
    entry = next(entry for entry in made.entries if entry.key in ("model.type", "model"))
    assert entry.fate == fate
    assert explicit(made).needs_you == (fate == "needed")
    if "my_package" in written:
        assert fates(made)["model.depth"] == ("kept", "model.depth", 3)
        assert fates(made)["model.width"] == ("kept", "model.width", 4)


def test_what_could_not_be_read_stands_in_its_line_and_once() -> None:
    made = explicit(
        made_of("import os\nclip_grad_norm = 1.0\nLOG_PATH = os.getenv('A')\nROOT = os.environ['B']\n", "a.py")
    )
    told = [(entry.key, entry.fate, entry.location.line) for entry in made.entries if entry.to != "model"]
    assert told == [("clip_grad_norm", "renamed", 2), ("LOG_PATH", "needed", 3), ("ROOT", "dropped", 4)]
    assert by_key(made)["LOG_PATH"].why == "could not be read: cannot call os.getenv() in a config"


def test_each_key_has_the_reason_that_is_its_own() -> None:
    text = "clip_grad_norm = 1.0\noptimizer = dict(type=one, lr=two)\nmodel = dict(type='my.M', a=[dict(n=four)])\n"
    made = explicit(made_of(text + "zero = dict(stage=five, **six)\nwhile True: pass\n"))
    left = {entry.key: (entry.to, entry.why) for entry in made.entries if entry.fate == "needed"}
    assert left == {
        "optimizer.type": ("optimizer.type", "could not be read: name 'one' is not defined"),
        "optimizer.lr": ("optimizer.lr", "could not be read: name 'two' is not defined"),
        "model.a.0.n": ("model.a.0.n", "could not be read: name 'four' is not defined"),
        "zero": ("", "could not be read: name 'five' is not defined; name 'six' is not defined"),
        "": ("", "could not be read: `while` is not part of the config language"),
    }
    assert sorted(entry.key for entry in made.entries if entry.fate != "needed") == [
        "clip_grad_norm",
        "model.a",
        "model.type",
    ]


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ("clip_grad_norm = (\n", [], "CFG001 syntax-error"),
        ("clip_grad_norm = 1\n", ["--model", "missing.py"], "--model missing.py: cannot read 'missing.py'"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import", written(tmp_path, text), *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_name_that_is_nearly_the_frameworks_needs_the_author() -> None:
    made = by_key(made_of("clip_grad_norm = 1.0\ngradient_acumulation = 4\nnum_workers = 4\nDEPT = 3\n"))
    assert {key: entry.fate for key, entry in made.items() if key} == {
        "clip_grad_norm": "renamed",
        "gradient_acumulation": "needed",
        "num_workers": "dropped",
        "DEPT": "dropped",
    }
    assert made["gradient_acumulation"].why == "ColossalAI has no such key; did you mean 'gradient_accumulation'?"


@pytest.mark.parametrize(
    ("mode", "name"), [("", "AdamW"), (", adamw_mode=True", "AdamW"), (", adamw_mode=False", "Adam")]
)
def test_colossalais_adams(mode: str, name: str) -> None:
    head = "from colossalai.nn.optimizer import HybridAdam\nclip_grad_norm = 0.0\n"
    made = made_of(f"{head}optimizer = dict(type=HybridAdam, lr=1e-3, nvme_offload_fraction=0.0{mode})\n")
    assert explicit(made).values == {"optimizer.type": name, "optimizer.lr": 1e-3}
    assert (made.values["optimizer.weight_decay"], made.values["optimizer.eps"]) == (0, 1e-8)
    other = made_of(head + "optimizer = dict(type='my.Adam', bias_correction=False)\n")
    assert explicit(other).values == {"optimizer.type": "my.Adam", "optimizer.bias_correction": False}
    refused = by_key(made_of(f"{head}optimizer = dict(type=HybridAdam, nvme_offload_fraction=0.5)\n"))
    assert refused["optimizer.nvme_offload_fraction"].fate == "needed"


@pytest.mark.parametrize("policy", ["cpu", "cuda", "auto"])
def test_a_zero_model_is_sharded_whatever_is_said_of_it(policy: str) -> None:
    made = made_of(f"clip_grad_norm = 1.0\nzero = dict(model_config=dict(tensor_placement_policy={policy!r}))\n")
    assert (made.values["zero.stage"], made.values["precision.dtype"]) == (3, "fp16")


# Epochs -----------------------------------------------------------------------------------------------------------

BY_EPOCH = """\
BATCH_SIZE = 64
NUM_EPOCHS = 30
WARMUP_EPOCHS = 3
gradient_accumulation = 2
"""
SCHEDULE = "lr_scheduler = dict(type='CosineAnnealingWarmupLR', warmup_steps={}, total_steps={})\n"
LIBAI_EPOCHS = """\
train = dict(train_micro_batch_size=4, num_accumulation_steps=2, train_epoch=3, train_iter={}, warmup_ratio=0.1)
"""


@pytest.mark.parametrize(
    ("text", "samples", "steps", "warmup"),
    [
        (BY_EPOCH, 1000, 30 * 7, 3 * 7),  # 128 per step: 7 full steps per epoch
        (BY_EPOCH + SCHEDULE.format("WARMUP_EPOCHS", "NUM_EPOCHS"), 1000, 30 * 7, 3 * 7),
        (BY_EPOCH + SCHEDULE.format("5", "NUM_EPOCHS"), 1000, 30 * 7, 5 * 7),
        (BY_EPOCH + SCHEDULE.format("5", "210"), 1000, 210, 5),
        (LIBAI_EPOCHS.format(10), 1001, 376, 38),  # 1001 * 3 / 8, rounded up; a tenth, rounded up
        (LIBAI_EPOCHS.format(0), 1001, 376, 38),
        (LIBAI_EPOCHS.format(1000), 1001, 1000, 100),
    ],
)
def test_epochs_are_steps_where_the_samples_are_known(text: str, samples: int, steps: int, warmup: int) -> None:
    source = read_text(text, "source.py", "libai" if text.startswith("train") else "colossalai")
    size = 8 if source.name == "libai" else 128
    made = convert(source, epoch=Epoch(samples, size))
    assert (made.values["train.steps"], made.values["lr_scheduler.warmup_steps"]) == (steps, warmup)
    without = convert(source)
    assert [entry.to for entry in without.entries if "--num-samples" in entry.why]
    assert without.values.get("train.steps") in (None, 210)


@pytest.mark.parametrize(("fraction", "left"), [("TRAIN_ITERS = 505", 50), ("x = 1", None)])
def test_a_fraction_of_warm_up(fraction: str, left: int | None) -> None:
    made = made_of(f"clip_grad_norm = 1.0\nWARMUP_FRACTION = 0.1\n{fraction}\n")
    assert made.values.get("lr_scheduler.warmup_steps") == left
    assert by_key(made)["WARMUP_FRACTION"].fate == ("needed" if left is None else "changed")


def test_fewer_samples_than_a_step_takes_need_the_author() -> None:
    made = convert(read_text(BY_EPOCH, "source.py"), epoch=Epoch(100, 128))
    assert by_key(made)["NUM_EPOCHS"].why == "30 epochs of 100 samples, 128 per step, do not make a number of steps"


def test_the_command_finds_out_how_many_samples_a_step_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, BY_EPOCH)
    assert main(["import", source, "--num-samples", "1000", "--world-size", "2"]) == 1
    assert "steps=90,  # NUM_EPOCHS: 30 epochs of 1000 samples // 256 per step" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["import", source, "--num-samples", "1000"])
    assert ended.value.code == 2
    assert "the number of samples per step is unknown; --world-size N may help" in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["GLOBAL_BATCH_SIZE = 8\n", ""])
def test_samples_without_epochs_are_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: str) -> None:
    source = written(tmp_path, f"clip_grad_norm = 1.0\n{batch}")
    status = main(["import", source])
    converted = capsys.readouterr().out
    assert main(["import", source, "--num-samples", "1000"]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"note: --num-samples has no effect: {source} counts no epochs\n")
    assert captured.out == converted


@pytest.mark.parametrize(
    "written", ["NUM_MICRO_BATCHES = 8", "schedule = dict(num_microbatches=8, tensor_shape=(1, 2))"]
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipelines_batch_is_cut_by_either_name(written: str, stages: int) -> None:
    made = made_of(f"BATCH_SIZE = 16\n{written}\nparallel = dict(pipeline={stages})\ngradient_accumulation = 3\n")
    cut = 8 if stages == 2 else 1
    assert (made.values["batch.micro_size"], made.values["batch.accumulation"]) == (16 // cut, 3 * cut)
    assert all(entry.fate != "needed" or entry.to == "model" for entry in explicit(made).entries)


INTERLEAVED = "from colossalai.engine.schedule import InterleavedPipelineSchedule\n"
SCHEDULE = "schedule = dict(type=InterleavedPipelineSchedule, num_microbatches=4, num_model_chunks={})\n"
TITANS = "from titans.model.gpt import gpt2_small\nmodel = dict(type=gpt2_small, num_chunks={})\n"


@pytest.mark.parametrize(
    ("written", "chunks"),
    [
        (TITANS.format(2) + "NUM_MICRO_BATCHES = 4\n", 2),
        (TITANS.format(1) + "NUM_MICRO_BATCHES = 4\n", 1),
        (TITANS.format(2) + INTERLEAVED + SCHEDULE.format(2), 2),
        (TITANS.format(1) + INTERLEAVED + SCHEDULE.format(3), 3),
        (TITANS.format(1) + INTERLEAVED + SCHEDULE.format(1), 1),
        (TITANS.format(1) + "schedule = dict(type='PipelineSchedule', num_microbatches=4)\n", 1),
        (TITANS.format(1) + "schedule = dict(num_microbatches=4, num_chunks=2)\n", 2),
    ],
)
def test_the_interleaved_schedule_of_colossalai(written: str, chunks: int) -> None:
    made = made_of(f"{written}BATCH_SIZE = 8\nparallel = dict(pipeline=2)\n", name="colossalai")
    assert not explicit(made).needs_you
    text = file_of(made)
    assert errors_of(text, 2) == []
    assert job_of(text, 2).chunks == (2, chunks)
    assert made.values.get("schedule.num_model_chunks", 1) == chunks
    assert made.values.get("schedule.type", "1f1b") == ("1f1b" if chunks == 1 else "interleaved")


def test_chunks_without_a_pipeline_have_no_effect() -> None:
    made = made_of(TITANS.format(2) + INTERLEAVED + SCHEDULE.format(2), name="colossalai")
    keys = ("model.num_chunks", "schedule.type", "schedule.num_model_chunks")
    assert [fates(made)[key][0] for key in keys] == ["dropped"] * 3


def test_chunks_of_a_pipeline_of_unknown_size() -> None:
    made = made_of(TITANS.format(2) + "import os\nparallel = dict(pipeline=int(os.environ['P']))\n", name="colossalai")
    assert fates(made)["parallel.pipeline"][0] == "needed"
    assert (made.values["schedule.num_model_chunks"], made.values["schedule.type"]) == (2, "interleaved")


@pytest.mark.parametrize(
    ("written", "key"),
    [
        (TITANS.format(2) + INTERLEAVED + SCHEDULE.format(3), "schedule.num_model_chunks"),
        (TITANS.format(0), "model.num_chunks"),
        (INTERLEAVED + SCHEDULE.partition(", num_model")[0] + ")\n", "schedule.type"),
        ("schedule = dict(type='MySchedule', num_microbatches=4)\n", "schedule.type"),
    ],
)
def test_chunks_that_need_the_author(written: str, key: str) -> None:
    made = made_of(f"{written}parallel = dict(pipeline=2)\n", name="colossalai")
    assert fates(made)[key][0] == "needed"


def test_two_keys_that_say_different_things_need_the_author() -> None:
    made = made_of("clip_grad_norm = 1.0\nzero = dict(level=1, clip_grad=2.0)\nfp16 = dict()\n")
    assert [fates(made)[key][0] for key in ("clip_grad_norm", "zero.clip_grad")] == ["renamed", "needed"]
    same = made_of("clip_grad_norm = 1.0\nzero = dict(level=1, clip_grad=1.0)\nfp16 = dict()\n")
    assert fates(same)["zero.clip_grad"][0] == "dropped"


def test_the_example_of_the_readme_gives_the_job_that_loading_gives() -> None:
    parallel = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))\n"
    text = f"{parallel}{GPT}batch = dict(micro_size=4, accumulation=4)\n"
    imported = file_of(explicit(made_of(text, name="colossalai")))
    assert job_of(imported, 8) == job_of(text, 8)


# LiBai ------------------------------------------------------------------------------------------------------------


def libai_folder(folder: Path) -> Path:
    (folder / "common").mkdir()
    (folder / "common/train.py").write_text(LIBAI_TRAIN)
    (folder / "common/optim.py").write_text(LIBAI_OPTIM)
    path = folder / "gpt.py"
    path.write_text(LIBAI)
    return path


@pytest.mark.parametrize(
    ("evaluator", "said"),
    [
        ("LazyCall(ClsEvaluator)(topk=(1, 3))", "--metrics accuracy@1,accuracy@3 measures it"),
        ("LazyCall(PPLEvaluator)()", "--metrics perplexity measures it"),
        ("LazyCall(RegEvaluator)()", "none of RegEvaluator's metrics"),
    ],
)
def test_evaluators_of_libai_by_their_names(evaluator: str, said: str) -> None:
    text = f"""\
from libai.config import LazyCall
from libai.evaluation import ClsEvaluator, PPLEvaluator, RegEvaluator
train = dict(dist=dict(tensor_parallel_size=2), evaluation=dict(
    enabled=True, eval_period=5, eval_metric='Acc@1', evaluator={evaluator}))
"""
    told = by_key(made_of(text))
    assert said in told["train.evaluation.evaluator._target_"].why
    assert "keeps the best" in told["train.evaluation.eval_metric"].why
    assert told["train.evaluation.eval_period"].to == "train.eval_interval"


def test_a_config_of_libai(tmp_path: Path) -> None:
    path = libai_folder(tmp_path)
    made = made_of(LIBAI, str(path))
    text, told = file_of(made), fates(made)
    assert made.source.name == "libai"
    assert errors_of(text, 8) == []
    assert [entry for entry in made.entries if entry.fate == "needed"] == []
    job = job_of(text, 8)
    assert (job.mesh.pipe, job.batch, job.stages.auto_ids) == (2, (32, 4, 2), (0, 0, 1, 1))
    assert (job.spec.train.steps, job.spec.train.eval_steps, job.spec.train.clip_grad_norm) == (101, 10, 1.0)
    assert told["train.warmup_ratio"] == ("changed", "lr_scheduler.warmup_steps", 2), "the ceiling of 1.515"
    assert told["train.scheduler.alpha"] == ("changed", "lr_scheduler.min_lr", 0.5e-3)
    assert told["model.cfg.hidden_layers"] == ("renamed", "model.num_layers", 4)
    assert told["train.dist.pipeline_parallel_size"] == ("kept", "train.dist.pipeline_parallel_size", 2)
    assert [told[f"model.cfg.{name}_dropout_prob"][0] for name in ("embedding", "attention")] == ["changed", "dropped"]
    assert by_key(made)["train.train_iter"].location.path == str(tmp_path / "common/train.py")


@pytest.mark.parametrize(
    "text",
    [
        "BATCH_SIZE = 8\nSEQ_LEN = 32\noptim = dict(lr=1e-3)\ntrain = dict(train_micro_batch_size=BATCH_SIZE)\n",
        "loss = 1\noptim = dict(lr=0.1)\n",
        "from libai.config import LazyCall\nfrom colossalai.amp import AMP_TYPE\noptim = dict(lr=0.1)\n",
    ],
)
def test_a_config_of_libai_may_have_variables_by_names_of_colossalai(text: str) -> None:
    source = read_text(text, "old.py")
    assert source.name == "libai"
    assert "optimizer.lr" in {entry.to for entry in convert(source).entries}


def test_a_config_of_libai_alone_says_what_is_missing(tmp_path: Path) -> None:
    made = made_of(LIBAI, str(tmp_path / "gpt.py"))
    said = [entry.why for entry in explicit(made).entries if not entry.key and entry.fate == "needed"]
    assert said == [
        f"missing file 'common/{name}.py': what it sets is not in the result" for name in ("train", "optim")
    ]
    told = fates(made)
    assert told["train.dist.pipeline_parallel_size"][0] == "kept"
    assert told["optim.lr"] == ("renamed", "optimizer.lr", 1e-3)
    assert by_key(made)["train.amp.enabled"].location[1] == 12
    assert told["train.warmup_ratio"] == ("changed", "lr_scheduler.warmup_steps", 150), "of LiBai's 10000 steps"


def test_absolute_imports_of_configs_are_read_by_position(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    libai_folder(tmp_path / "configs")
    (tmp_path / "projects/Mine/configs").mkdir(parents=True)
    imports = "from configs.common.train import train as train\nfrom projects.Other.configs.x import model\n"
    text = f"{imports}train.update(dict(seed=9))\n"
    made = made_of(text, str(tmp_path / "projects/Mine/configs/mine.py"))
    assert made.source.name == "libai"
    assert fates(made)["train.seed"] == ("kept", "train.seed", 9)
    assert fates(made)["train.train_iter"] == ("renamed", "train.steps", 101)
    assert made.entries[0].why == "missing file 'projects/Other/configs/x.py': what it sets is not in the result"


def test_get_config_of_what_is_missing(tmp_path: Path) -> None:
    text = (
        "from libai.config import get_config\ntrain = get_config('common/nothing.py').train\ntrain.amp.enabled = True\n"
    )
    made = made_of(text, str(tmp_path / "mine.py"))
    assert made.entries[0].why.startswith("missing file 'common/nothing.py'")
    assert fates(made)["train.amp.enabled"] == ("changed", "precision.dtype", "fp16")


def test_llama_is_the_gpt_by_its_fields() -> None:
    text = """\
from libai.config import LazyCall
from projects.Llama.llama import LlamaForCausalLM
model = LazyCall(LlamaForCausalLM)(cfg=dict(hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256,
    num_key_value_heads=2, intermediate_size=128, max_position_embeddings=32, rms_norm_eps=1e-6, hidden_act='silu',
    tie_word_embeddings=False, temperature=0.9))
"""
    made = made_of(text)
    model = job_of(file_of(made), 1).spec.model
    assert (model.norm, model.activation, model.positions, model.bias) == ("rmsnorm", "swiglu", "rotary", False)  # type: ignore[union-attr]
    assert (model.num_kv_heads, model.ffn_hidden_size, model.tie_embeddings) == (2, 128, False)  # type: ignore[union-attr]
    assert not explicit(made).needs_you
    assert fates(made_of(text.replace("tie_word_embeddings=False", "tie_word_embeddings=True")))[
        "model.cfg.tie_word_embeddings"
    ] == ("dead", "", None), "its head has its own weight"


IN_LIBAI_S_WORDS = [
    path
    for path in sorted((ROOT / "configs/libai").glob("*.py"))
    if "import pretrain_model as model" in path.read_text()  # the others have sections that LiBai does not know
]


@pytest.mark.parametrize("path", IN_LIBAI_S_WORDS, ids=lambda path: path.stem)
def test_a_layout_of_libai_gives_the_job_that_loading_gives(path: Path) -> None:
    loaded = check.load(path)
    made = explicit(convert(read_text(path.read_text(), str(path), "libai")))
    imported = load_text(file_of(made), str(path))
    assert not made.needs_you
    for world in (8, 16):
        if not has_errors(check.lint(loaded, world)):
            assert check.resolve(imported, world) == check.resolve(loaded, world)


# DeepSpeed --------------------------------------------------------------------------------------------------------


def test_a_json_of_deepspeed() -> None:
    made = made_of(DEEPSPEED, "ds.json")
    told = fates(made)
    assert told["train_batch_size"] == ("renamed", "batch.global_size", 64)
    assert told["optimizer.type"] == ("changed", "optimizer.type", "AdamW"), "its Adam decays as AdamW does"
    assert told["optimizer.params.betas"] == ("renamed", "optimizer.betas", [0.9, 0.95])
    assert told["zero_optimization.cpu_offload"] == ("changed", "zero.offload_optimizer.device", "cpu")
    assert told["zero_optimization.reduce_bucket_size"][0] == "dropped"
    assert told["fp16.initial_scale_power"] == ("renamed", "precision.initial_scale_power", 15)
    assert told["tensorboard.output_path"] == ("renamed", "monitor.tensorboard.output_path", "http://not/a/comment")
    assert told["flops_profiler.enabled"] == ("renamed", "deepspeed.flops_profiler.enabled", False)
    assert told["compression_training.layer_reduction.enabled"][0] == "dropped"
    assert [entry.to for entry in made.entries if entry.fate == "needed"] == ["model"]
    assert by_key(made)["optimizer.type"].location[1] == 6
    assert errors_of(file_of(made) + GPT, 8) == []


def test_auto_needs_the_author() -> None:
    text = """{"train_batch_size": "auto", "bf16": {"enabled": "auto"},
               "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}"""
    told = fates(made_of(text, "ds.json"))
    assert {key for key, (fate, *_) in told.items() if fate == "needed"} == set(told) - {"optimizer.type"}
    assert set(told) == {"train_batch_size", "bf16.enabled", "optimizer.type", "optimizer.params.lr"}


def test_half_precision_at_stage_0_becomes_1() -> None:
    made = made_of('{"zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}', "ds.json")
    assert fates(made)["zero_optimization.stage"] == ("changed", "zero.stage", 1)


def test_comments_leave_every_place_where_it_is() -> None:
    text = without_comments(DEEPSPEED)
    assert [len(line) for line in text.split("\n")] == [len(line) for line in DEEPSPEED.split("\n")]
    assert '"http://not/a/comment"' in text
    assert "as their" not in text


def test_an_unknown_key_of_deepspeed_is_asked_back() -> None:
    made = made_of(
        '{"zero_optimization": {"stage3_param_persitance_threshold": 1e5}, "trian_batch_size": 4}', "x.hjson"
    )
    said = [
        by_key(made)[key].why for key in ("zero_optimization.stage3_param_persitance_threshold", "trian_batch_size")
    ]
    assert "did you mean 'zero_optimization.stage3_param_persistence_threshold'?" in said[0]
    assert "did you mean 'train_batch_size'?" in said[1]


# Recognising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "name"),
    [
        (COLOSSAL, "a.py", "colossalai"),
        ("BATCH_SIZE = 4\nparallel = dict(pipeline=2)\n", "a.py", "colossalai"),
        ("CONFIG = dict(parallel=dict(pipeline=2))\n", "a.py", "colossalai"),
        (LIBAI, "a.py", "libai"),
        ("train = dict(train_iter=3)\n", "a.py", "libai"),
        (DEEPSPEED, "a.json", "deepspeed"),
        ("{}", "a.hjson", "deepspeed"),
        (GPT, "a.py", "dslpar"),
        ('{"model": {"type": "GPT"}}', "a.json", "dslpar"),
        ("x = 1\n", "a.py", ""),
        ("this is no python", "a.py", ""),
    ],
)
def test_whose_config_it_is(text: str, path: str, name: str) -> None:
    assert read_text(text, path).name == name


@pytest.mark.parametrize("path", [*(ROOT / "configs").glob("*.py"), *(ROOT / "configs/libai").glob("*.py")], ids=str)
def test_our_own_configs_are_recognised(path: Path) -> None:
    assert read_text(path.read_text(), str(path)).name == "dslpar"


# The command ------------------------------------------------------------------------------------------------------


def written(folder: Path, text: str, name: str = "source.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_file_goes_to_stdout_and_the_report_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", written(tmp_path, COLOSSAL), "--world-size", "16"]) == 0
    told = capsys.readouterr()
    assert told.out == file_of(made_of(COLOSSAL))
    assert "changed in meaning:\n" in told.err
    assert told.err.endswith("or vocab_size=256 (for a model that reads bytes)\n1 warning\n"), "titans' vocabulary"


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    assert heavy_imports("-m", "dslpar.cli", "import", written(tmp_path, COLOSSAL)) == set()


def test_out_is_written_and_never_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written(tmp_path, COLOSSAL), str(tmp_path / "made.py")
    assert main(["import", source, "-o", out]) == 0
    assert Path(out).read_text() == file_of(made_of(COLOSSAL))
    assert "-> batch.micro_size" in capsys.readouterr().out
    Path(out).write_text("mine")
    with pytest.raises(SystemExit) as error:
        main(["import", source, "-o", out])
    assert error.value.code == 2
    assert Path(out).read_text() == "mine"
    assert main(["import", source, "-o", out, "--force"]) == 0
    assert Path(out).read_text() != "mine"


def test_what_needs_the_author_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path, DEEPSPEED, "ds.json")
    assert main(["import", source]) == 1
    assert "needs you:\n" in capsys.readouterr().err
    model = written(tmp_path, GPT, "model.py")
    assert main(["import", source, "--model", model, "--world-size", "8"]) == 0
    assert "\nmodel = dict(" in capsys.readouterr().out


def test_the_report_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "made.py")
    assert main(["import", written(tmp_path, ZERO), "--format", "json", "-o", out]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["from"], record["out"], [item["code"] for item in record["findings"]][-1]) == (
        "colossalai",
        out,
        "CFG112",
    )
    entry = next(item for item in record["entries"] if item["key"] == "zero.optimizer_config.min_scale")
    assert {key: entry[key] for key in ("fate", "to", "value", "line")} == {
        "fate": "renamed", "to": "precision.min_loss_scale", "value": 1, "line": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (GPT, "a.py", "is already a dslpar config"),
        ("x = 1\n", "a.py", "a.py: give --from accelerate, axolotl, colossalai"),
        ("fp16 = (\n", "a.py", "CFG001 syntax-error"),
        ("[1, 2", "a.json", "cannot read"),
        ("{\n  a: 1\n  fp16: {}\n}", "a.hjson", "a.hjson:3:7: CFG001"),
        ("{\n  a: 1\n  fp16: {}\n}", "a.hjson", "HJSON without commas or braces is not"),
        ("", "missing.py", "cannot read"),
    ],
)
def test_what_cannot_be_imported_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, name: str, said: str
) -> None:
    path = written(tmp_path, text, name) if text else str(tmp_path / name)
    with pytest.raises(SystemExit) as error:
        main(["import", path])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


# The docs ---------------------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_tables() -> None:
    assert (ROOT / "docs/import.md").read_text() == page(), "python -m dslpar.migrate.page > docs/import.md"


@pytest.mark.parametrize("name", TABLES)
def test_every_row_can_be_met(name: str) -> None:
    """No row is hidden by an earlier one that takes all its keys."""
    table = TABLES[name]
    rows = table.rows[: len(table.rows) - len(table.includes.rows)] if table.includes else table.rows
    for number, row in enumerate(rows):
        rests = tuple(row.among) or ("some.thing",)
        keys = [row.pattern.replace("**", rest) for rest in rests] if row.pattern.endswith("**") else [row.pattern]
        met = [key for key in keys if not any(other.rest(key) is not None for other in rows[:number])]
        assert met, row.pattern


# Keys that the framework itself accepts, ignores or leaves to others ----------------------------------------------

HUGGING_FACE = """{
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "optimizer": {"type": "OnebitAdam", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
  "zero_optimization": {"stage": 3, "max_live_parameters": 1e9, "max_reuse_distance": 1e9, "overlap_com": null,
    "gather_16bit_weights_on_model_save": true, "zenflow": {"topk_ratio": 0.1}, "reduce_bucket_size": "auto"},
  "bfloat16": {"enabled": true}, "train_batch_siz": null, "my_own": null, "another": 3
}"""


def test_keys_that_deepspeed_accepts_under_another_name() -> None:
    told = fates(made_of(HUGGING_FACE, "ds.json"))
    section = "zero_optimization"
    assert told[f"{section}.max_live_parameters"] == ("renamed", "zero.stage3_max_live_parameters", 1e9)
    assert told[f"{section}.max_reuse_distance"] == ("renamed", "zero.stage3_max_reuse_distance", 1e9)
    gather = "gather_16bit_weights_on_model_save"
    assert told[f"{section}.{gather}"] == ("renamed", f"zero.stage3_{gather}", True)
    assert told["bfloat16.enabled"] == ("changed", "precision.dtype", "bf16")
    unknown = [key for key, entry in by_key(made_of(HUGGING_FACE, "ds.json")).items() if "no such key" in entry.why]
    assert unknown == [f"{section}.overlap_com"]


@pytest.mark.parametrize(
    ("section", "fate"),
    [
        ({"enabled": True, "autoep_size": 4}, ("changed", "parallel.expert.size", 4)),
        (
            {"enabled": True, "autoep_size": 4, "expert_tensor_parallel_size": 2},
            ("changed", "parallel.expert.size", 8),
        ),
        ({"enabled": True, "autoep_size": 1}, ("dropped", "", None)),
        ({"enabled": False, "autoep_size": 4}, ("dropped", "", None)),
    ],
)
def test_autoep_becomes_expert_parallelism(section: dict[str, Any], fate: tuple[str, str, object]) -> None:
    more = {"preset_model": "mixtral", "use_grouped_mm": True, "load_balance_coeff": 0.1}
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "expert_parallel": section | more}
    told = fates(made_of(json.dumps(config), "ds.json"))
    assert told["expert_parallel.autoep_size"] == fate
    assert told["expert_parallel.load_balance_coeff"][0] == "needed"
    assert {told[f"expert_parallel.{key}"][0] for key in ("enabled", "preset_model", "use_grouped_mm")} == {"dropped"}


def test_every_key_of_autoep_has_a_row() -> None:
    patterns = {row.pattern for row in TABLES["deepspeed"].rows}
    assert {f"expert_parallel.{key}" for key in deepspeed_policy.KEYS["expert_parallel"]} <= patterns


def test_every_other_name_of_deepspeeds_has_a_row() -> None:
    patterns = {row.pattern.removesuffix(".**") for row in TABLES["deepspeed"].rows}
    names = {name for name in (*deepspeed_policy.OTHER_NAMES, *deepspeed_policy.DEPRECATED) if name.startswith("zero")}
    names |= {f"zero_optimization.{name}" for name in deepspeed_policy.UNSUPPORTED_ZERO}
    assert len(names) > 10
    assert names - {"zero_optimization.cpu_offload_param"} <= patterns


@pytest.mark.parametrize("name", ["OnebitAdam", "onebitadam", "OneBitAdam"])
def test_deepspeed_takes_names_of_optimizers_in_any_case(name: str) -> None:
    made = made_of('{"optimizer": {"type": "%s"}}' % name, "ds.json")  # noqa: UP031
    assert by_key(made)["optimizer.type"].why == f"{name}: DeepSpeed 0.19 has removed it"
    found = check.lint(load_text(f"{GPT}optimizer = dict(type={name!r})\n", "a.py"), 2)
    assert [item.message for item in found] == ["optimizer cannot be 'OneBitAdam': DeepSpeed 0.19 has removed it"]
    assert fates(made_of('{"optimizer": {"type": "ADAMW"}}', "ds.json"))["optimizer.type"][2] == "AdamW"


def test_none_hides_no_unknown_key_and_what_deepspeed_ignores_is_dead_there_too() -> None:
    told = by_key(made_of(HUGGING_FACE, "ds.json"))
    assert (told["zero_optimization.overlap_com"].fate, told["my_own"].fate, told["another"].fate) == (
        "needed", "dead", "dead",
    )  # fmt: skip
    assert "did you mean 'train_batch_size'?" in told["train_batch_siz"].why
    theirs = by_key(made_of("train = dict(seed=None, sede=None, train_iter=3)\n", name="libai"))
    assert (theirs["train.seed"].fate, theirs["train.sede"].fate) == ("dropped", "needed")


def test_what_libai_does_not_read_is_dead_there_too_and_lint_names_the_same_key() -> None:
    entry = by_key(made_of("train = dict(eval_period=5, train_iter=3)\n", name="libai"))["train.eval_period"]
    assert entry.fate == "dead"
    (found,) = check.lint(load_text(f"{GPT}train = dict(eval_period=5)\n", "a.py"), 2)
    assert found.help.removeprefix("here that is ") in entry.why


def test_a_micro_batch_without_a_pipeline_is_dead_there_too() -> None:
    assert fates(made_of("NUM_MICRO_BATCHES = 4\nclip_grad_norm = 1.0\n"))["NUM_MICRO_BATCHES"][0] == "dead"


def test_the_report_folds_keys_that_share_a_section_and_a_reason() -> None:
    made = made_of(HUGGING_FACE, "ds.json")
    text = report.text(made, None)
    assert text.count('"auto": Hugging Face') == 3
    assert "optimizer.params.{lr, betas, eps} -> optimizer.{lr, betas, eps}: " in text
    assert len(json.loads(report.as_json(made, None, []))["entries"]) == len(made.entries)
    assert '# needs you: optimizer.lr: "auto": ' in file_of(made)
    assert "likewise betas, eps" in " ".join(file_of(made).replace("#", "").split())


def test_a_folded_line_names_every_key_or_says_how_many_more() -> None:
    keys = [f"k{number}" for number in range(20)]
    listed = ", ".join(f"{key}=1" for key in keys)
    text = report.text(
        made_of(f"dataloader = dict(train=dict({listed}), test=dict(x=1))\ntrain = dict(train_iter=1)\n"), None
    )
    (line,) = [line for line in text.split("\n") if "dataloader" in line]
    assert "dataloader.{train.k0, train.k1, " in line
    assert "and 9 more (--format json lists them)}" in line


def test_a_project_of_libais_has_the_values_of_its_checkout_not_ours() -> None:
    path = ROOT / "tests/support/foreign_configs/libai/projects/RWKV_V4/configs/config.py"
    made = made_of(path.read_text(), str(path))
    assert made.source.missing == ()
    theirs = {"train.output_dir": "./out", "batch.micro_size": 12, "optimizer.lr": 1e-4, "train.seed": 1234}
    assert {key: made.values[key] for key in theirs} == theirs
    assert by_key(made)["train.output_dir"].location.path.endswith("libai/configs/common/train.py")
