"""`dslpar import` of torchtitan, Megatron-Bridge, ms-swift's megatron commands and Megatron-LM's YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.language.load import load_text
from dslpar.linter import check
from dslpar.migrate.convert import Import, convert
from dslpar.migrate.foreign_lint import lint_text
from dslpar.migrate.framework_rules import entries_of
from dslpar.migrate.recipes import recipes_in
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.migrate.table import Epoch
from dslpar.migrate.writer import file_of
from tests.support.paths import ROOT
from tests.unit.migrate.test_migrate import by_key, fates, made_of

TREES = ROOT / "tests/support/foreign_configs"
NAMES = ("torchtitan", "megatron_bridge", "ms_swift", "megatron_yaml")
FILES = [path for name in NAMES for path in sorted((TREES / name).iterdir())]
ACTION = re.compile(r"\b(leave (it|one of the two|both) out|choose|write|give)\b")


def written_of(made: Import) -> list[str]:
    """Return the keys that a source writes: its leaves, and what of it could not be evaluated."""
    leaves, left = [], [("", made.source.config.root)]
    while left:
        path, node = left.pop()
        if node.target is not None:
            leaves.append(f"{path}._target_")
        if node.is_mapping and (node.value or not path):
            left += [(f"{path}.{key}".lstrip("."), child) for key, child in node.value.items()]
        elif node.target is None:
            leaves.append(path)
    return [*leaves, *(made.source.config.unknown - {"*"})]


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(TREES).as_posix() for path in FILES])
def test_every_key_of_a_file_is_told_or_judged(path: Path) -> None:
    made = convert(read_text(path.read_text(), str(path)))
    assert made.source.name == path.parent.name
    assert made.source.config.complete
    told = [entry.key for entry in made.entries]
    assert [key for key in written_of(made) if told.count(key) != 1] == []
    for entry in made.entries:
        assert "no such key" not in entry.why, entry
        assert "no row" not in entry.why, entry
        if entry.fate == "needed":
            assert ACTION.search(entry.why) or "could not be read" in entry.why, entry
        if entry.key:
            assert entry.location.path == made.source.path  # a script may name a YAML file
            last = re.split(r"\W", entry.key.removesuffix("._target_"))[-1].removeprefix("__")
            line = Path(made.source.path).read_text().splitlines()[entry.location.line - 1]
            of_helper = (path.suffix == ".py" and "(" in line) or entry.key.endswith("._target_")
            assert of_helper or last in line or last.replace("_", "-") in line or "$" in line, (entry, line)
    findings = load_text(file_of(made), "made.py").findings
    assert [item for item in findings if item.severity == "error"] == []


@pytest.mark.parametrize("name", ["torchtitan", "megatron_bridge"])
def test_a_listed_key_has_a_row_and_a_mistyped_one_its_name(name: str) -> None:
    table = TABLES[name]
    assert len(table.keys) > 240
    for key in sorted(table.keys):
        assert any(row.rest(table.name_of(key)) is not None for row in table.rows), key
    wrong = {"torchtitan": "parallelism.tensor_paralel_degree", "megatron_bridge": "model.tensor_model_paralel_size"}[
        name
    ]
    right = wrong.replace("paralel", "parallel")
    section, _, key = wrong.partition(".")
    text = f"[{section}]\n{key} = 2\n" if name == "torchtitan" else f"{section}:\n  {key}: 2\n"
    source = read_text(text, "a.toml" if name == "torchtitan" else "a.yaml", name)
    entry = by_key(convert(source))[wrong]
    assert entry.fate == "needed"
    assert f"{table.title} has no such key; did you mean {right!r}?" in entry.why
    assert (entry.location.line, entry.location.column) == (2, 1 if name == "torchtitan" else 3)


def test_a_key_in_the_wrong_section_is_none_of_megatron_bridges() -> None:
    made = convert(read_text("train:\n  hidden_size: 64\n", "a.yaml", "megatron_bridge"))
    assert "no such key" in by_key(made)["train.hidden_size"].why


def test_a_mistyped_argument_of_ms_swift_has_its_name() -> None:
    made = made_of("megatron sft --model m --lora_rnk 8 --micro_batch_size 1", "a.sh")
    assert made.source.name == "ms_swift"
    assert "ms-swift has no such key; did you mean 'lora_rank'?" in by_key(made)["--lora_rnk"].why


# torchtitan -------------------------------------------------------------------------------------------------------


def titan(body: str) -> Import:
    return made_of(body, "a.toml")


def test_a_toml_of_torchtitan_is_a_config_that_passes_lint() -> None:
    path = TREES / "torchtitan/llama3_8b_tp2.toml"
    made = convert(read_text(path.read_text(), str(path)))
    text = file_of(made)
    (needed,) = [entry for entry in made.entries if entry.fate == "needed"]
    assert (needed.key, needed.to) == ("training.dataset", "data.path")
    job = check.resolve(load_text(text, "made.py"), 8)
    assert (job.mesh.data, job.mesh.tensor.size, job.mesh.tensor.mode) == (4, 2, "1d")
    assert job.spec.zero.stage == 3, "-1 is the rest of the world"
    assert made.values["model.type"] == "transformers.LlamaForCausalLM"
    sizes = made.values["model.config"]
    assert (sizes["hidden_size"], sizes["intermediate_size"], sizes["num_key_value_heads"]) == (4096, 14336, 8)
    assert made.values["optimizer.betas"] == (0.9, 0.95)
    assert made.values["precision.dtype"] == "bf16"


@pytest.mark.parametrize(
    ("model", "flavor", "class_", "size"),
    [
        ("llama3", "70B", "LlamaForCausalLM", ("intermediate_size", 28672)),
        ("llama3", "405B", "LlamaForCausalLM", ("intermediate_size", 53248)),
        ("llama3", "8B_flex", "LlamaForCausalLM", ("num_hidden_layers", 32)),
        ("qwen3", "32B", "Qwen3ForCausalLM", ("intermediate_size", 25600)),
        ("qwen3", "30B-A3B", "Qwen3MoeForCausalLM", ("num_experts", 128)),
        ("deepseek_v3", "671B", "DeepseekV3ForCausalLM", ("n_routed_experts", 256)),
        ("deepseek_v3", "16B", "DeepseekV2ForCausalLM", ("num_hidden_layers", 27)),
        ("llama4", "17bx16e", "", None),
        ("mine", "3B", "", None),
        ("llama3", "3B", "", None),
    ],
)
def test_a_flavor_is_the_sizes_it_stands_for(
    model: str, flavor: str, class_: str, size: tuple[str, int] | None
) -> None:
    made = titan(f'[model]\nname = "{model}"\nflavor = "{flavor}"\n')
    entry = by_key(made)["model.flavor"]
    if size is None:
        assert (entry.fate, entry.to) == ("needed", "model")
        assert "model.config" not in made.values
        return
    assert made.values["model.type"] == f"transformers.{class_}"
    assert made.values["model.config"][size[0]] == size[1]
    assert re.search(r"torchtitan/models/\w+/__init__\.py:\d+", entry.why)
    problems = check.lint(load_text(file_of(made), "made.py"), 8)
    assert [item.key for item in problems if item.severity == "error" and item.key.startswith("model")] == []


@pytest.mark.parametrize(
    ("body", "key", "outcome"),
    [
        ("[parallelism]\ndata_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 2\n",
         "parallelism.data_parallel_shard_degree", ("changed", "zero.stage", 3)),
        ("[parallelism]\ndata_parallel_shard_degree = 1\n", "parallelism.data_parallel_shard_degree",
         ("dropped", "", None)),
        ('[parallelism]\ndata_parallel_shard_degree = -1\nfsdp_reshard_after_forward = "never"\n',
         "parallelism.data_parallel_shard_degree", ("changed", "zero.stage", 2)),
        ("[parallelism]\ndata_parallel_shard_degree = -1\npipeline_parallel_degree = 2\n",
         "parallelism.data_parallel_shard_degree", ("changed", "zero.stage", 1)),
        ("[parallelism]\ncontext_parallel_degree = 4\n", "parallelism.context_parallel_degree",
         ("changed", "parallel.context.size", 4)),
        ("[parallelism]\nexpert_parallel_degree = 8\nexpert_tensor_parallel_degree = 2\n",
         "parallelism.expert_parallel_degree", ("changed", "parallel.expert.size", 16)),
        ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "GPipe"\n',
         "parallelism.pipeline_parallel_schedule", ("changed", "schedule.type", "1f1b")),
        ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n',
         "parallelism.pipeline_parallel_schedule", ("needed", "schedule.type", "ZBVZeroBubble")),
        ("[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_microbatch_size = 2\n", "training.local_batch_size", ("changed", "batch.micro_size", 2)),
        ("[training]\nglobal_batch_size = -1\n", "training.global_batch_size", ("dropped", "", None)),
        ('[training]\ndtype = "bfloat16"\n', "training.dtype", ("changed", "precision.dtype", "bf16")),
        ("[optimizer]\nlr = 1e-3\n[lr_scheduler]\nmin_lr_factor = 0.5\n", "lr_scheduler.min_lr_factor",
         ("changed", "lr_scheduler.min_lr", 5e-4)),
        ("[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 20\ndecay_ratio = 0.8\n",
         "lr_scheduler.decay_ratio", ("dropped", "", None)),
        ("[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 20\ndecay_ratio = 0.1\n",
         "lr_scheduler.decay_ratio", ("needed", "lr_scheduler.type", 0.1)),
        ('[activation_checkpoint]\nmode = "full"\n', "activation_checkpoint.mode",
         ("changed", "activation_checkpoint", 1)),
        ("[checkpoint]\nenable = true\ninterval = 7\n", "checkpoint.interval", ("renamed", "train.save_interval", 7)),
        ("[checkpoint]\ninterval = 7\n", "checkpoint.interval", ("dropped", "", None)),
        ("[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 20\n", "lr_scheduler.warmup_steps",
         ("changed", "lr_scheduler.warmup_steps", 10)),
        ("[training]\nsteps = 40\n[lr_scheduler]\nwarmup_steps = 20\n", "lr_scheduler.warmup_steps",
         ("kept", "lr_scheduler.warmup_steps", 20)),
        ("[compile]\nenable = true\n", "compile.enable", ("dropped", "", None)),
        ('[compile]\nenable = true\nbackend = "eager"\n', "compile.backend", ("dropped", "", None)),
        ("[training]\ncompile = false\n", "training.compile", ("renamed", "train.compile", False)),
        ("[training]\ncompile = true\n[parallelism]\ndata_parallel_shard_degree = -1\n", "training.compile",
         ("dropped", "", None)),
        ("[compile]\nenable = true\n[parallelism]\ndata_parallel_shard_degree = 1\n", "compile.enable",
         ("changed", "train.compile", True)),
        ('[compile]\nenable = true\n[parallelism]\nfsdp_reshard_after_forward = "never"\n', "compile.enable",
         ("changed", "train.compile", True)),
    ],
)  # fmt: skip
def test_keys_of_torchtitan_one_by_one(body: str, key: str, outcome: tuple[str, str, object]) -> None:
    made = titan('[model]\nname = "llama3"\nflavor = "8B"\n' + body)
    fate, to, value = fates(made)[key]
    assert (fate, to) == outcome[:2]
    assert outcome[2] is None or value == outcome[2]


def test_positions_of_torchtitan_reach_the_sequence() -> None:
    body = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = %d\n'
    assert titan(body % 500_000).values["model.config"]["max_position_embeddings"] == 500_000
    assert titan(body % 64).values["model.config"]["max_position_embeddings"] > 64


def test_a_pipeline_of_torchtitan_has_its_micro_batches_and_chunks() -> None:
    path = TREES / "torchtitan/llama3_pp4_interleaved.toml"
    values = convert(read_text(path.read_text(), str(path))).values
    assert (values["batch.micro_size"], values["batch.accumulation"]) == (1, 8)
    assert (values["schedule.type"], values["schedule.num_model_chunks"]) == ("interleaved", 2)
    path = TREES / "torchtitan/llama3_pp4_layers.toml"
    assert convert(read_text(path.read_text(), str(path))).values["schedule.num_model_chunks"] == 2, "32 layers / 4 / 4"


def test_toml_that_is_none_has_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[model]\nname = \n")
    with pytest.raises(SystemExit):
        main(["import", str(path)])
    assert f"{path}:2:" in capsys.readouterr().err


def test_the_locations_of_toml() -> None:
    text = '# head\n[a]\nb = """\n[c]\nd = 1\n"""\nlist = [1,  # one\n  [2, 3]]\nin = {x = 1, y = "a,b"}\n'
    text += '["q.r"]\ns.t = 2024-01-01\n'
    root = read_text(text, "a.toml", "torchtitan").config.root
    assert root.get("a.b").key_location[1:3] == (3, 1)  # type: ignore[union-attr, index]
    assert root.get("a.list").plain() == [1, [2, 3]]  # type: ignore[union-attr]
    node = root.get("a.in.y")
    assert node is not None
    assert (node.key_location.line, node.key_location.column, node.plain()) == (9, 14, "a,b")  # type: ignore[union-attr]
    assert root.value["q.r"].value["s"].value["t"].plain() == "2024-01-01"


# Recipes ----------------------------------------------------------------------------------------------------------


def test_a_python_config_of_torchtitan_is_followed() -> None:
    path = TREES / "torchtitan/derived.py"
    made = convert(read_text(path.read_text(), str(path)))
    assert made.values["train.steps"] == 2000, "doubled under a known condition"
    assert made.values["data.seq_len"] == 32768
    assert made.values["batch.micro_size"] == 1
    assert (made.values["parallel.context.size"], made.values["train.seed"]) == (4, 7)
    assert made.values["model.config"]["hidden_size"] == 4096, "of the folder that model_registry is imported from"


TWO = """\
from torchtitan.models.llama3 import model_registry
def one() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(steps=10))
def two() -> Trainer.Config:
    config = one()
    config.training.steps = 20
    if is_debug():
        config.training.max_norm = 2.0
    return config
"""


def test_the_recipe_to_import_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made_of(TWO, "a.py")
    assert first.values["train.steps"] == 10
    (other,) = [entry for entry in first.entries if "two is another config" in entry.why]
    assert (other.fate, other.location.line) == ("needed", 4)
    path = tmp_path / "a.py"
    path.write_text(TWO)
    main(["import", str(path), "--recipe", "two"])
    out = capsys.readouterr()
    assert "steps=20" in out.out
    assert "another config" not in out.err
    assert f"{path}:8" in out.err, "what an unknown condition sets"
    with pytest.raises(SystemExit):
        main(["import", str(path), "--recipe", "three"])
    assert "it has one, two" in capsys.readouterr().err


def test_what_an_unknown_condition_sets_is_unknown() -> None:
    made = convert(read_text(TWO, "a.py", "", "two"))
    assert fates(made)["training.max_norm"][:2] == ("needed", "train.clip_grad_norm")
    assert "train.clip_grad_norm" not in made.values


def test_functions_that_return_no_config_are_no_recipes() -> None:
    assert recipes_in("def f():\n    return dict(a=1)\n", "a.py") == []
    assert [item.name for item in recipes_in(TWO, "a.py")] == ["one", "two"]


def test_a_recipe_of_megatron_bridge_begins_with_the_common_one() -> None:
    path = TREES / "megatron_bridge/llama3_70b_pretrain.py"
    made = convert(read_text(path.read_text(), str(path)))
    values = made.values
    assert (values["parallel.tensor.size"], values["parallel.pipeline.size"]) == (4, 4)
    assert (values["schedule.type"], values["schedule.num_model_chunks"]) == ("interleaved", 5)
    assert (values["train.steps"], values["optimizer.lr"], values["lr_scheduler.warmup_steps"]) == (300000, 3e-4, 500)
    assert (values["zero.stage"], values["precision.dtype"]) == (1, "bf16")
    entry = by_key(made)["model.hf_model_id"]
    assert (entry.fate, entry.to) == ("needed", "model")
    assert "meta-llama/Meta-Llama-3-70B" in entry.why


def test_a_whole_config_of_megatron_bridge_passes_lint() -> None:
    path = TREES / "megatron_bridge/whole.py"
    made = convert(read_text(path.read_text(), str(path)))
    assert made.values["model.activation"] == "swiglu"
    assert made.values["model.bias"] is False
    assert made.values["model.positions"] == "rotary"
    assert made.values["parallel.pipeline.size"] == 2


def test_lora_of_megatron_bridge() -> None:
    path = TREES / "megatron_bridge/llama3_8b_lora_class.py"
    values = convert(read_text(path.read_text(), str(path))).values
    assert (values["model.lora.r"], values["model.lora.lora_alpha"], values["model.lora.lora_dropout"]) == (16, 32, 0.1)
    assert values["model.lora.target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


# ms-swift ---------------------------------------------------------------------------------------------------------


def swift(arguments: str, epoch: Epoch | None = None) -> Import:
    return convert(read_text(f"megatron sft --model m --micro_batch_size 1 {arguments}", "a.sh"), epoch=epoch)


def test_epochs_of_ms_swift_become_steps() -> None:
    made = swift("--num_train_epochs 3 --lr_warmup_fraction 0.1 --global_batch_size 16", Epoch(1600, 16))
    assert (made.values["train.steps"], made.values["lr_scheduler.warmup_steps"]) == (300, 30)
    assert fates(swift("--num_train_epochs 3"))["--num_train_epochs"][:2] == ("needed", "train.steps")


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [("", None), ("--bf16", "bf16"), ("--fp16 true", "fp16"), ("--torch_dtype bfloat16", "bf16")],
)
def test_ms_swift_takes_its_type_from_the_model(arguments: str, dtype: str | None) -> None:
    made = swift(arguments)
    assert made.values.get("precision.dtype") == dtype
    asked = [entry.why for entry in made.entries if entry.fate == "needed" and entry.to == "precision.dtype"]
    assert ["the model's config.json" in why for why in asked] == ([] if dtype else [True])
    text = f"megatron sft --model m --micro_batch_size 1 --tuner_type full {arguments}\n"
    assert not [item for item in lint_text(text, "a.sh") if item.code.startswith("PRE")]


@pytest.mark.parametrize(
    ("keys", "fate"),
    [
        ("model:\n  add_bias_linear: false\n", "needed"),
        ("model:\n  add_bias_linear: false\n  normalization: RMSNorm\n", "changed"),
        ("model:\n  add_bias_linear: true\n", "renamed"),
    ],
)
def test_megatron_bridges_layer_norm_keeps_its_bias(keys: str, fate: str) -> None:
    made = fates(convert(read_text(f"{keys}  num_layers: 2\ntrain:\n  train_iters: 2\n", "a.yaml", "megatron_bridge")))
    assert made["model.add_bias_linear"][:2] == (fate, "model.bias")


@pytest.mark.parametrize(
    ("arguments", "key", "outcome"),
    [
        ("--tuner_type lora --lora_rank 16", "--lora_rank", ("renamed", "model.lora.r", 16)),
        ("--tuner_type full --lora_rank 16", "--lora_rank", ("dropped", "", None)),
        ("--tensor_model_parallel_size 4", "--tensor_model_parallel_size", ("changed", "parallel.tensor.size", 4)),
        ("--expert_model_parallel_size 8 --tensor_model_parallel_size 2", "--expert_model_parallel_size",
         ("changed", "parallel.expert.size", 8)),
        ("--rlhf_type dpo", "--rlhf_type", ("needed", "", "dpo")),
        ("--rlhf_type dpo --beta 0.1", "--beta", ("dropped", "", None)),
        ("--packing true", "--packing", ("changed", "data.packing", True)),
        ("--optimizer sgd --sgd_momentum 0.8", "--sgd_momentum", ("renamed", "optimizer.momentum", 0.8)),
        ("--sgd_momentum 0.8", "--sgd_momentum", ("dropped", "", None)),
        ("--save_steps 50", "--save_steps", ("renamed", "train.save_interval", 50)),
        ("--report_to wandb", "--report_to", ("changed", "monitor.wandb.enabled", True)),
        ("--report_to swanlab", "--report_to", ("needed", "monitor", "swanlab")),
        ("--recompute_granularity none", "--recompute_granularity", ("dropped", "", None)),
    ],
)  # fmt: skip
def test_arguments_of_ms_swift_one_by_one(arguments: str, key: str, outcome: tuple[str, str, object]) -> None:
    fate, to, value = fates(swift(arguments))[key]
    assert (fate, to) == outcome[:2]
    assert outcome[2] is None or value == outcome[2]


# Rules ------------------------------------------------------------------------------------------------------------

WORDS = {"and", "or", "not", "in", "None", "True", "False", "given", "world_size"}
"""Words of conditions that are not keys."""


@pytest.mark.parametrize("name", ["torchtitan", "megatron_bridge", "ms_swift"])
def test_rules_are_of_keys_that_the_framework_has(name: str) -> None:
    table = TABLES[name]
    known = {default.key for default in table.defaults} | set(table.keys) | {row.pattern for row in table.rows}
    checks = [entry for entry in entries_of(name) if entry.kind in ("error", "warning", "info")]
    assert len(checks) >= 8
    for entry in checks:
        assert table.has(entry.subject)
        when = re.sub(r"'[^']*'|\"[^\"]*\"", "", entry.when)
        words = set(re.findall(r"[a-z_A-Z][\w.]*", when)) - WORDS
        named = words | set(re.findall(r"\{([\w.]+)\}", entry.says)) - {"world_size"}
        assert named <= known, named - known
