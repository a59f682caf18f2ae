"""A source's silence is its framework's default: tables in dslpar/migrate/data/keys, and the arithmetic beside them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.language.load import load_text
from dslpar.linter import check
from dslpar.migrate.convert import Import, convert
from dslpar.migrate.defaults import Default, defaults_of
from dslpar.migrate.known_arguments import SWITCH, known_arguments
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.migrate.table import Epoch, Table
from dslpar.migrate.writer import file_of
from dslpar.schema import deepspeed_policy
from dslpar.schema.sections import Train

SUFFIX = {"colossalai": ".py", "libai": ".py", "deepspeed": ".json", "gpt_neox": ".yml", "megatron": ".sh",
          "torchtitan": ".toml", "megatron_bridge": ".yml", "megatron_yaml": ".yml", "ms_swift": ".yml"}  # fmt: skip
SUFFIX |= dict.fromkeys(("accelerate", "axolotl", "llama_factory", "training_arguments"), ".yaml")
BASES: Mapping[str, Mapping[str, Any]] = {
    "colossalai": {},
    "accelerate": {},
    "axolotl": {},
    "llama_factory": {"finetuning_type": "lora"},
    "training_arguments": {},
    "libai": {
        "model._target_": "GPTForPreTraining",
        "model.cfg": {"hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256},
    },
    "deepspeed": {"optimizer.type": "AdamW"},
    "gpt_neox": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "train_iters": 1000},
    "megatron": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "train_iters": 1000},
    "torchtitan": {"model.name": "llama3", "model.flavor": "8B"},
    "megatron_bridge": {"train.train_iters": 10},
    "megatron_yaml": {"language_model.num_layers": 4, "train_iters": 10},
    "ms_swift": {"model": "folder", "micro_batch_size": 1},
}


FEWEST = {"accelerate": 1, "axolotl": 11}
"""Sources that have fewer defaults with a counterpart: the program, or the model, sets the others."""


def text_of(name: str, flat: Mapping[str, Any]) -> str:
    """Return a source of the framework `name` with these dotted keys."""
    if name == "megatron":
        words = (f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}") for key, value in flat.items())
        return "python pretrain_gpt.py " + " ".join(words)
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        level = tree
        for part in above:
            level = level.setdefault(part, {})
        level[last] = {**level.get(last, {}), **value} if isinstance(value, dict) else value
    if name == "torchtitan":
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in flat.items() if value is not None)
    if SUFFIX[name] in (".json", ".yml", ".yaml"):
        return json.dumps(tree)
    head = "from libai.config import LazyCall\n" if name == "libai" else ""
    return head + "".join(f"{key} = {_expression(value)}\n" for key, value in tree.items())


def _expression(value: object) -> str:
    if not isinstance(value, dict):
        return repr(value)
    words = ", ".join(f"{key}={_expression(item)}" for key, item in value.items() if key != "_target_")
    target = value.get("_target_")
    return f"LazyCall({target!r})({words})" if target else f"dict({words})"


def made_of(name: str, flat: Mapping[str, Any], epoch: Epoch | None = None) -> Import:
    text = text_of(name, flat)
    for target in ("GPTForPreTraining", "GPTModel", "LlamaForCausalLM", "LlamaModel"):
        package = "projects.Llama.llama" if "Llama" in target else "libai.models"
        text = text.replace(f"LazyCall('{target}')", f"LazyCall({target})")
        if f"LazyCall({target})" in text:
            text = f"from {package} import {target}\n{text}"
    for target in ("AdamW", "Adam", "SGD"):
        text = text.replace(f"LazyCall('{target}')", f"LazyCall(flow.optim.{target})")
    text = text if "flow." not in text else f"import oneflow as flow\n{text}"
    for line in dict.fromkeys(part.split("'")[0] for part in text.split("LazyCall('")[1:]):
        text = f"from libai.some import {line}\n{text}".replace(f"LazyCall('{line}')", f"LazyCall({line})")
    return convert(read_text(text, f"source{SUFFIX[name]}", name), epoch=epoch)


def fate(made: Import, key: str) -> tuple[str, str, Any]:
    entry = next(entry for entry in made.entries if entry.key.lstrip("-").replace("-", "_") == key)
    return entry.fate, entry.to, made.values.get(entry.to) if entry.fate != "needed" else None


def added(made: Import) -> dict[str, tuple[object, str]]:
    return {entry.to: (entry.value, entry.why) for entry in made.entries if entry.fate == "added"}


# The cases ---------------------------------------------------------------------------------------------------------

NEOX = {
    "pipe_parallel_size": 1, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 768, "num_attention_heads": 12,
    "seq_length": 512, "max_position_embeddings": 512, "padded_vocab_size": 50304, "norm": "rmsnorm",
    "pos_emb": "rotary", "activation": "swiglu", "no_weight_tying": True, "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}}, "train_iters": 1000,
}  # fmt: skip


def test_silence_of_gpt_neox() -> None:
    made = made_of("gpt_neox", NEOX)
    assert not made.needs_you
    job = check.resolve(load_text(file_of(made), "made.py"), 4)
    model, optimizer, train = job.spec.model, job.spec.optimizer, job.spec.train
    assert (model.dropout, model.layernorm_eps, model.ffn_hidden_size) == (0.0, 1e-8, 1024)  # type: ignore[union-attr]
    assert (model.init_std, model.bias, model.rope_theta) == (0.02, True, 10000)  # type: ignore[union-attr]
    assert (optimizer.weight_decay, train.clip_grad_norm, train.eval_interval, train.seed) == (0.1, 1.0, 1000, 1234)
    assert (job.spec.lr_scheduler.type, job.spec.lr_scheduler.warmup_steps) == ("linear", 10)  # type: ignore[union-attr]
    assert added(made)["optimizer.weight_decay"] == (0.1, "GPT-NeoX's default of weight_decay (neox_args.py:1394)")


def test_silence_of_deepspeed() -> None:
    made = made_of("deepspeed", {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    assert added(made)["optimizer.weight_decay"][0] == 0.0
    assert added(made)["train.clip_grad_norm"] == (
        1.0, "DeepSpeed's default of gradient_clipping (constants.py:203)"
    )  # fmt: skip
    assert made.values["optimizer.lr"] == 1e-4
    bare = made_of("deepspeed", {"optimizer.type": "adam"})
    assert (bare.values["optimizer.lr"], bare.values["optimizer.weight_decay"]) == (1e-3, 0.0)
    program = made_of("deepspeed", {"train_batch_size": 32})
    assert [entry.to for entry in program.entries if entry.fate == "needed"] == ["optimizer", "model"]


def test_silence_of_colossalai() -> None:
    made = made_of("colossalai", {"optimizer.type": "HybridAdam", "TRAIN_ITERS": 100})
    assert (made.values["optimizer.lr"], made.values["optimizer.weight_decay"]) == (1e-3, 0)
    assert made.values["train.steps"] == 100
    half = made_of("colossalai", {"fp16.mode": "NAIVE", "optimizer.type": "Adam"})
    assert half.values["precision.initial_scale_power"] == 16
    assert half.values["optimizer.lr"] == 1e-3, "torch's Adam"


def test_silence_of_megatron_lm() -> None:
    made = made_of("megatron", {**BASES["megatron"], "fp16": True, "lr": 1e-4})
    assert made.values["model.activation"] == "gelu_tanh"
    assert "tanh" in added(made)["model.activation"][1]
    assert "sqrt(2 * num_layers)" in added(made)["model.init_std"][1]
    assert (made.values["model.dropout"], made.values["optimizer.weight_decay"]) == (0.1, 0.01)
    assert made.values["precision.initial_scale_power"] == 32
    assert not {"train.eval_interval", "train.eval_steps"} & set(made.values)


def test_silence_of_libai() -> None:
    made = made_of("libai", BASES["libai"])
    assert (made.values["train.steps"], made.values["optimizer.lr"]) == (10000, 1e-4)
    assert (made.values["lr_scheduler.type"], made.values["lr_scheduler.min_lr"]) == ("cosine", 1e-6)
    own = made_of("libai", {**BASES["libai"], "optim._target_": "AdamW", "optim.lr": 1e-3})
    assert own.values["optimizer.weight_decay"] == 0, "OneFlow's default: common/optim.py is not this optimizer"
    assert "train.clip_grad_norm" not in own.values


# Every default -----------------------------------------------------------------------------------------------------


def fulfilled(default: Default) -> dict[str, Any]:
    """Return keys under which a default applies."""
    flat: dict[str, Any] = {}
    for condition in default.conditions:
        if condition.absent:
            continue
        if condition.key == "zero.model_config":
            flat |= {"zero.model_config.shard_strategy": "S"}
        else:
            name = condition.names[0] if condition.names else True
            flat[condition.key] = {"True": True, "False": False}.get(str(name), name)
    return flat


def is_compared(name: str, default: Default) -> bool:
    """Return whether a default has a counterpart that a source can also set."""
    row = next((row for row in TABLES[name].rows if row.rest(default.key) is not None), None)
    if default.value is None or row is None or not row.to or row.to.startswith("deepspeed"):
        return False
    if any(
        default.key in (condition.key, *condition.others)
        for each in TABLES[name].defaults
        for condition in each.conditions
        if condition.others
    ):
        return False  # the key itself tells whose defaults hold
    is_silent = name == "megatron" and default.value is False  # a switch that is off is not written
    return not is_silent and "_target_" not in default.key  # a class that is named has its own defaults


@pytest.mark.parametrize("name", TABLES)
def test_silence_is_the_same_as_the_default(name: str) -> None:
    """Go over every key that both sides have."""
    defaults = [default for default in TABLES[name].defaults if is_compared(name, default)]
    assert len(defaults) > FEWEST.get(name, 15)
    for default in defaults:
        silent = {key: value for key, value in (BASES[name] | fulfilled(default)).items() if key != default.key}
        explicit = made_of(name, {**silent, default.key: default.value}).values
        assert plain(made_of(name, silent).values) == plain(explicit), default


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


OF_OTHER_RELEASES = {"context_parallel_size", "gas", "save_interval", "fp16.type"}


def test_every_row_of_gpt_neox_has_a_default_or_none() -> None:
    rows = own_rows(TABLES["gpt_neox"])
    keys = {default.key for default in TABLES["gpt_neox"].defaults} | OF_OTHER_RELEASES
    wanted = {row.pattern for row in rows if row.to and row.fate not in ("dropped", "dead", "needed")}
    assert wanted <= keys, "state each default in data/keys: the value, or None if there is none"


def own_rows(table: Table) -> list[Any]:
    return list(table.rows[: len(table.rows) - (len(table.includes.rows) if table.includes else 0)])


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_the_framework_has_a_row(name: str) -> None:
    sections = {"optimizer", "scheduler", "fp16", "bf16", "tensorboard", "wandb", "csv_monitor"}
    for key in {default.key for default in TABLES[name].defaults} - sections:
        assert any(row.rest(key) is not None for row in TABLES[name].rows), key


# The facts that are installed --------------------------------------------------------------------------------------


def test_defaults_of_deepspeed_are_those_of_the_installed_release() -> None:
    for default in TABLES["deepspeed"].defaults:
        name = default.key.rpartition(".")[2]
        if default.path.startswith("torch/"):
            known = _signature("torch.optim", default.conditions[-1].names[0])[name]
        elif default.key.startswith("optimizer."):
            symbol = default.symbol if default.symbol == "FusedAdam" else default.symbol.removeprefix("Fused")
            known = deepspeed_policy.OPTIMIZER_DEFAULTS[symbol][name]
        elif default.key.startswith("scheduler."):
            known = deepspeed_policy.LR_SCHEDULER_DEFAULTS[default.symbol][name]
        else:
            known = (deepspeed_policy.known(default.key) or ())[1]
        assert (tuple(known) if isinstance(known, list) else known) == default.value, default


def _signature(module: str, name: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def test_defaults_of_megatron_lm_are_those_of_its_parser() -> None:
    for default in TABLES["megatron"].defaults:
        known = known_arguments().get(f"--{default.key.replace('_', '-')}")
        if default.value is not None and known is not None and known.values != SWITCH:
            assert known.default == repr(default.value), default


def test_steps_that_no_config_counts_are_those_of_dslpar() -> None:
    for name in ("deepspeed", "colossalai"):
        assert TABLES[name].unset == {"train.steps": Train().steps}


# Conditions --------------------------------------------------------------------------------------------------------


def test_conditions_of_defaults() -> None:
    known = TABLES["libai"].defaults
    assert defaults_of({}, known)["optim.weight_decay"].value == 0.01
    assert defaults_of({"optim._target_": "flow.optim.SGD"}, known)["optim.momentum"].value == 0.0
    assert "optim.weight_decay" not in defaults_of({"optim._target_": "my.Own"}, known)
    assert defaults_of({"train.global_batch_size": 8}, known).get("train.num_accumulation_steps") is None


# Arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "width"),
    [
        ({}, 1024),
        ({"hidden_size": 4096, "intermediate_size": 32768, "mlp_multiple_of": 256}, 11008),
        ({"hidden_size": 4096, "intermediate_size": 32768}, 10922),
        ({"hidden_size": 1024, "mlp_multiple_of": 1}, 1365),
        ({"expansion_factor": 3.5}, 896),
        ({"activation": "gelu"}, None),
        ({"activation": "gelu", "intermediate_size": 2000}, 2000),
        ({"activation": "gelu", "intermediate_size": 2000, "mlp_multiple_of": 256}, 2048),
    ],
)
def test_the_width_of_gpt_neox(more: Mapping[str, Any], width: int | None) -> None:
    assert made_of("gpt_neox", NEOX | more).values.get("model.ffn_hidden_size") == width


WANG, SMALL = 2 / 4 / 64**0.5, (2 / (5 * 64)) ** 0.5


@pytest.mark.parametrize(
    ("name", "flat", "values"),
    [
        ("gpt_neox", {"bias_gelu_fusion": True}, {"model.activation": "gelu_tanh"}),
        ("gpt_neox", {"bias_gelu_fusion": False}, {"model.activation": "gelu"}),
        ("gpt_neox", {"init_method": "small_init", "output_layer_init_method": "wang_init"},
         {"model.init_std": SMALL, "model.init_out_std": WANG}),
        ("gpt_neox", {"init_method_std": 0.01}, {"model.init_std": 0.01, "model.init_out_std": None}),
        ("gpt_neox", {"init_method": "small_init"}, {"model.init_std": SMALL, "model.init_out_std": 0.02 / 8**0.5}),
        ("gpt_neox", {"rms_norm_epsilon": 1e-6, "norm": "rmsnorm"}, {"model.layernorm_eps": 1e-6}),
        ("gpt_neox", {"rms_norm_epsilon": 1e-6}, {"model.layernorm_eps": 1e-5}),
        ("gpt_neox", {"precision": "bfloat16"}, {"precision.dtype": "bf16", "zero.stage": 1}),
        ("gpt_neox", {"deepspeed_extra_args.bf16.enabled": True}, {"precision.dtype": "bf16"}),
        ("megatron", {"no_bias_gelu_fusion": True}, {"model.activation": "gelu"}),
        ("megatron", {"disable_bias_linear": True, "normalization": "RMSNorm"},
         {"model.activation": "gelu", "model.bias": False}),
        ("megatron", {"swiglu": True}, {"model.activation": "swiglu"}),
        ("megatron", {"openai_gelu": True}, {"model.activation": "gelu_tanh"}),
        ("megatron", {"adam_beta2": 0.95}, {"optimizer.betas": (0.9, 0.95)}),
        ("megatron", {"optimizer": "sgd"}, {"optimizer.momentum": 0.9, "optimizer.betas": None}),
        ("megatron", {"train_iters": None, "train_samples": 1000, "global_batch_size": 16, "lr_warmup_samples": 160},
         {"train.steps": 62, "lr_scheduler.warmup_steps": 10}),
        ("megatron", {"train_iters": None, "train_samples": 1600, "global_batch_size": 16, "lr_warmup_fraction": 0.1},
         {"train.steps": 100, "lr_scheduler.warmup_steps": 10}),
        ("libai", {"model.cfg.use_scaled_init_for_output_weights": False}, {"model.init_out_std": 0.02}),
        ("libai", {"model.cfg.use_scaled_init_for_output_weights": True}, {"model.init_out_std": None}),
        ("libai", {"train.warmup_ratio": 0.015}, {"lr_scheduler.warmup_steps": 150}),
        ("libai", {"train.evaluation": {"eval_period": 100, "eval_iter": 10}},
         {"train.eval_steps": 10, "train.eval_interval": 100}),
        ("libai", {"optim._target_": "AdamW", "optim.params": {"clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}},
         {"train.clip_grad_norm": 1.0}),
        ("deepspeed", {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
         {"lr_scheduler.warmup_max_lr": 0.001}),
        ("deepspeed", {"optimizer.params.torch_adam": True}, {"optimizer.weight_decay": 0.01}),
    ],
)  # fmt: skip
def test_arithmetic_of_the_source(name: str, flat: Mapping[str, Any], values: Mapping[str, object]) -> None:
    flat = {key: value for key, value in (BASES[name] | flat).items() if value is not None}
    made = made_of(name, flat)
    for key, value in values.items():
        assert made.values.get(key) == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    ("name", "flat", "key", "outcome"),
    [
        ("gpt_neox", {"clip_grad": 0.5}, "clip_grad", "dead"),
        ("gpt_neox", {"lr": 0.5}, "lr", "dead"),
        ("gpt_neox", {"hysteresis": 3}, "hysteresis", "dead"),
        ("gpt_neox", {"zero_stage": 2}, "zero_stage", "dead"),
        ("gpt_neox", {"use_bias_in_mlp": False}, "use_bias_in_mlp", "needed"),
        ("gpt_neox", {"use_mup": True}, "use_mup", "needed"),
        ("gpt_neox", {"use_mup": True, "mup_init_scale": 2.0}, "mup_init_scale", "needed"),
        ("gpt_neox", {"mup_init_scale": 2.0}, "mup_init_scale", "dropped"),
        ("gpt_neox", {"checkpoint_scale": "log", "checkpoint_factor": 2}, "checkpoint_factor", "needed"),
        ("gpt_neox", {"min_lr": 1e-5}, "min_lr", "changed"),
        ("gpt_neox", {"min_lr": 1e-5, "lr_decay_style": "cosine"}, "min_lr", "renamed"),
        ("gpt_neox", {"data_path": "x"}, "data_path", "needed"),
        ("libai", {"dataloader.train": {"_target_": "build"}}, "dataloader.train._target_", "needed"),
        ("colossalai", {"train_data.dataset": {"type": "CIFAR10"}}, "train_data.dataset.type", "needed"),
        ("megatron", {"train_iters": None, "train_samples": 1000}, "train_samples", "needed"),
        ("libai", {"train.evaluation": {"eval_period": 50, "eval_iter": 1e5}}, "train.evaluation.eval_iter", "needed"),
        ("libai", {"train.evaluation": {"eval_after_n_epoch": 1}}, "train.evaluation.eval_after_n_epoch", "needed"),
        ("libai", {"train.evaluation": {"eval_after_n_epoch": 1, "eval_period": 10}},
         "train.evaluation.eval_period", "dead"),
        ("libai", {"train.warmup_iter": 10}, "train.warmup_iter", "dead"),
        ("libai", {"optim._target_": "AdamW", "optim.params": {"clip_grad_max_norm": 1.0}},
         "optim.params.clip_grad_max_norm", "dead"),
        ("libai", {"tokenization.tokenizer": {"_target_": "GPT2Tokenizer"}}, "model.cfg.vocab_size", "needed"),
    ],
)  # fmt: skip
def test_fates_of_the_source(name: str, flat: Mapping[str, Any], key: str, outcome: str) -> None:
    flat = {key: value for key, value in (BASES[name] | flat).items() if value is not None}
    assert fate(made_of(name, flat), key)[0] == outcome


def test_epochs_between_events_become_steps() -> None:
    flat = {"train.evaluation": {"eval_after_n_epoch": 2}, "train.checkpointer": {"save_model_after_n_epoch": 1}}
    values = made_of("libai", {**BASES["libai"], **flat}, Epoch(1000, 32)).values
    assert (values["train.eval_interval"], values["train.save_interval"]) == (62, 31)


# What is unknown stays unknown -------------------------------------------------------------------------------------

UNKNOWN_SIZE = """\
from titans.model.gpt import gpt2_small
BATCH_SIZE = 64
NUM_EPOCHS = 2
NUM_MICRO_BATCHES = 6
parallel = dict(pipeline=4)
model = dict(type=gpt2_small)
"""


@pytest.mark.parametrize(
    "text", [UNKNOWN_SIZE, UNKNOWN_SIZE.replace("BATCH_SIZE = 64\n", ""), UNKNOWN_SIZE.replace("= 6\n", "= f()\n")]
)
def test_epochs_are_not_converted_by_a_default_size(
    text: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(text)
    assert main(["import", str(path), "--world-size", "4", "--num-samples", "6400"]) == 1
    out = capsys.readouterr()
    assert "steps=" not in out.out
    assert re.search(r"batch\.\w+ must be known first: settle it in the source", out.err)


def test_epochs_are_converted_by_the_size_of_the_source(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(UNKNOWN_SIZE.replace("= 6\n", "= 8\n"))
    main(["import", str(path), "--world-size", "4", "--num-samples", "6400"])
    assert "steps=200," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("colossalai", "BATCH_SIZE = 64\nNUM_MICRO_BATCHES = f()\nparallel = dict(pipeline=2)\n", "BATCH_SIZE"),
        ("colossalai", "gradient_accumulation = f()\nNUM_MICRO_BATCHES = 4\nparallel = dict(pipeline=2)\n",
         "NUM_MICRO_BATCHES"),
        ("colossalai", "from titans.model.gpt import GPT\nmodel = dict(type=GPT, hidden_size=f(), mlp_ratio=4)\n",
         "model.mlp_ratio"),
        ("libai", "train = dict(train_iter=100, train_epoch=f())\n", "train.train_iter"),
        ("megatron", "python p.py --hidden-dropout 0.1 --attention-dropout $1", "hidden_dropout"),
        ("megatron", "python p.py --train-samples 1000 --global-batch-size $1", "train_samples"),
    ],
)  # fmt: skip
def test_a_value_that_depends_on_an_unknown_one_needs_the_author(name: str, text: str, key: str) -> None:
    made = convert(read_text(text, f"source{SUFFIX[name]}", name))
    assert fate(made, key)[0] == "needed"
    assert any("could not be evaluated" in entry.why for entry in made.entries)
