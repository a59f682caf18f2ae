"""Kinds of foreign files: YAML as PyYAML reads it, DeepSpeed's JSON beside a config, scripts of Trainer, overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.core.errors import Finding
from dslpar.language.load import load_text
from dslpar.migrate.convert import Converter, Entry, Import, convert
from dslpar.migrate.foreign_lint import lint_text
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from tests.support.paths import ROOT
from tests.unit.migrate.test_migrate import by_key

TREES = ROOT / "tests/support/foreign_configs"


def made_of(text: str, path: str, name: str = "") -> Import:
    return convert(read_text(text, path, name))


def errors(found: list[Finding]) -> list[Finding]:
    return [item for item in found if item.severity == "error"]


def asked(made: Import) -> dict[str, Entry]:
    return {entry.to: entry for entry in made.entries if entry.fate == "needed" and not entry.key}


# YAML -----------------------------------------------------------------------------------------------------------------

AXOLOTL = "base_model: org/tiny\ndatasets: [{path: a, type: alpaca}]\nlearning_rate: 1e-4\nsequence_len: 64\n"


def test_merge_keys_set_what_the_mapping_does_not() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], z: 5}\nd:\n  x: 6\n  <<: *a\n"
    assert load_text(text, "a.yaml", is_pyyaml=True).root.plain() == {
        "a": {"x": 1, "y": 2},
        "b": {"y": 3, "z": 4},
        "c": {"x": 1, "y": 2, "z": 5},
        "d": {"x": 6, "y": 2},
    }
    assert "CFG002" in {item.code for item in load_text(text, "a.yaml").findings}, "dslpar's own YAML has none"
    merged = load_text(text, "a.yaml", is_pyyaml=True).root.get("c.x")
    assert merged is not None
    assert (merged.location.line, merged.location.column) == (1, 11), "it is at the line that sets it"


@pytest.mark.parametrize("text", ["a: {<<: 1}", "a: {<<: [1, {b: 2}]}"])
def test_a_merge_key_without_mappings_is_refused(text: str) -> None:
    assert "CFG002" in {item.code for item in load_text(text, "a.yaml", is_pyyaml=True).findings}


def test_a_merged_size_is_no_default() -> None:
    made = made_of(f"x: &x {{micro_batch_size: 2}}\n{AXOLOTL}<<: *x\n", "a.yml")
    assert made.values["batch.micro_size"] == 2
    assert by_key(made)["micro_batch_size"].location.line == 1


def test_booleans_of_pyyaml() -> None:
    text = "a: yes\nb: Off\nc: 'no'\nd: on\ny: No\nno: 1\n"
    assert load_text(text, "a.yaml", is_pyyaml=True).root.plain() == {
        "a": True, "b": False, "c": "no", "d": True, "y": False, "no": 1,
    }  # fmt: skip
    assert load_text("a: yes\n", "a.yaml").root.plain() == {"a": "yes"}
    made = made_of(
        "train: {micro_batch_size: 1}\nmodel: {sequence_parallel: on, tensor_model_parallel_size: 2}\n", "a.yaml"
    )
    assert made.values["parallel.tensor.sequence"] is True


def test_a_key_written_twice_is_an_error_only_to_deepspeed() -> None:
    (found,) = (item for item in lint_text(f"{AXOLOTL}sequence_len: 32\n", "a.yml") if item.code == "CFG012")
    assert (found.severity, found.location.line) == ("warning", 5)
    text = '{"train_batch_size": 8, "train_batch_size": 16}'
    (found,) = (item for item in lint_text(text, "ds.json") if item.code == "CFG012")
    assert found.severity == "error"


# DeepSpeed's section --------------------------------------------------------------------------------------------------

DEEPSPEED = """{
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
  "gradient_cliping": 1.0,
  "fp16": {"enabled": true},
  "bf16": {"enabled": true}
}
"""
TRAINER = "model_name_or_path: m\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n"
NAMING = {
    "axolotl": f"{AXOLOTL}bf16: true\nmicro_batch_size: 1\ndeepspeed: ds.json\n",
    "llama_factory": f"stage: sft\nfinetuning_type: full\ncutoff_len: 64\ndataset: d\noutput_dir: o\n{TRAINER}"
    "deepspeed: ds.json\n",
    "training_arguments": f"{TRAINER}deepspeed: ds.json\n",
    "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    "deepspeed_config:\n  deepspeed_config_file: ds.json\n",
}


@pytest.mark.parametrize("name", NAMING)
def test_the_json_that_a_config_names_is_judged_at_its_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(DEEPSPEED)
    Path("a.yaml").write_text(NAMING[name])
    assert main(["lint", "a.yaml", "--format", "json"]) == 1
    found = {(item["path"], item["line"]): item for item in json.loads(capsys.readouterr().out)}
    assert "offloads a part of the optimizer only at stage 3" in found["ds.json", 2]["message"]
    assert found["ds.json", 3]["message"] == "DeepSpeed has no key 'gradient_cliping', and ignores it"
    assert "gradient_clipping" in found["ds.json", 3]["help"]
    assert "DeepSpeed refuses two half precisions" in found["ds.json", 5]["message"]
    main(["lint", "a.yaml"])
    assert '    5 |   "bf16": {"enabled": true}' in capsys.readouterr().out, "the line is shown"
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    assert main(["lint", "a.yaml"]) == 0


def test_a_section_in_the_config_itself_is_judged() -> None:
    text = f"{TRAINER}deepspeed:\n  zero_optimization: {{stage: 4}}\n"
    (found,) = errors(lint_text(text, "a.yaml"))
    assert (found.location.line, found.message) == (
        5,
        "zero_optimization.stage is 4: DeepSpeed has stages 0 to 3",
    )


def test_a_json_of_a_plugin_that_is_off_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    text = NAMING["accelerate"].replace("DEEPSPEED", "MULTI_GPU")
    assert errors(lint_text(text, str(tmp_path / "a.yaml"))) == []


@pytest.mark.parametrize(
    ("keys", "compiles"),
    [
        ("deepspeed: {zero_optimization: {stage: 3}}", False),
        ("deepspeed: {zero_optimization: {stage: 2}}", True),
        ("fsdp: full_shard auto_wrap", False),
        ("fsdp: shard_grad_op", True),
        ("fsdp: ''", True),
        ("", True),
    ],
)
def test_trainers_torch_compile_is_left_out_at_zero_3(keys: str, compiles: bool) -> None:
    made = made_of(f"{TRAINER}torch_compile: true\ntorch_compile_backend: inductor\n{keys}\n", "a.yaml")
    kept = {"train.compile": True, "train.compile_backend": "inductor"} if compiles else {}
    assert {key: value for key, value in made.values.items() if key.startswith("train.compile")} == kept
    assert compiles or "at ZeRO 3" in by_key(made)["torch_compile"].why


def test_axolotls_fsdp_2_compiles_nothing() -> None:
    text = f"{AXOLOTL}torch_compile: true\nfsdp_version: 2\nfsdp_config: {{reshard_after_forward: true}}\n"
    assert "train.compile" not in made_of(text, "a.yml").values
    assert made_of(text.replace("forward: true", "forward: false"), "a.yml").values["train.compile"] is True
    assert "depends on the machine" in by_key(made_of(f"{AXOLOTL}torch_compile: auto\n", "a.yml"))["torch_compile"].why


# Scripts --------------------------------------------------------------------------------------------------------------

SCRIPT = """
ARGS=(--model_name_or_path org/tiny --data_path own.json --bf16 True --output_dir out --save_strategy no)
torchrun --nproc_per_node=8 train.py "${ARGS[@]}" --per_device_train_batch_size 2 \\
    --learning_rate 2e-5 --model_max_length 128 --deepspeed ds.json --max_steps 10
"""


def test_a_script_of_trainers_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.sh").write_text(SCRIPT)
    Path("ds.json").write_text(
        '{"zero_optimization": {"stage": 2},\n "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "auto"}}'
    )
    assert main(["lint", "t.sh", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (wrong,) = (item for item in found if item["severity"] == "error")
    assert (wrong["path"], wrong["line"]) == ("ds.json", 2)
    assert "but per_device_train_batch_size is 2" in wrong["message"]
    assert not [item for item in found if item["code"] == "FRN204"], "--model_max_length is the program's own"
    made = made_of(SCRIPT, "t.sh")
    assert made.source.name == "training_arguments"
    values = {key: made.values[key] for key in ("zero.stage", "precision.dtype", "optimizer.lr", "train.steps")}
    assert values == {"zero.stage": 2, "precision.dtype": "bf16", "optimizer.lr": 2e-5, "train.steps": 10}
    assert by_key(made)["--deepspeed.zero_optimization.stage"].location.path == "ds.json"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # DeepSpeed-Chat has arguments of the same names, and its own parser.
        ("deepspeed main.py --model_name_or_path m --per_device_train_batch_size 4 --zero_stage 2 --output_dir o", ""),
        ("accelerate launch --config_file a.yaml train.py --model folder", ""),
        ("accelerate launch t.py --per_device_train_batch_size 1 --output_dir o --save_steps 2", "training_arguments"),
        ("llamafactory-cli train --stage sft --template t --dataset d --cutoff_len 8", "llama_factory"),
        ("llamafactory-cli train a.yaml", ""),
        ("deepspeed pretrain_gpt.py --num-layers 2 --hidden-size 8 --deepspeed --micro-batch-size 1", "megatron"),
    ],
)
def test_scripts_are_recognised_by_their_arguments(text: str, name: str) -> None:
    source = read_text(f"{text}\n", "t.sh")
    assert source.name == name


def test_megatrons_deepspeed_is_a_switch() -> None:
    text = "deepspeed pretrain_gpt.py --num-layers 2 --hidden-size 8 --deepspeed --deepspeed_config ds.json\n"
    assert read_text(text, "t.sh").config.root.plain()["--deepspeed"] is True


def test_launchers_that_name_a_file_alone_are_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text("llamafactory-cli train a.yaml\n")
    assert main(["lint", "a.sh"]) == 1
    assert "this is a file of LLaMA-Factory, which dslpar cannot judge" in capsys.readouterr().out
    Path("b.sh").write_text("llamafactory-cli train --stage sft --template t --dataset d --cutoff_len 8\n")
    assert main(["lint", "b.sh"]) == 0
    assert main(["import", "b.sh"]) == 1
    assert "(LLaMA-Factory) ->" in capsys.readouterr().err


def test_the_yaml_of_a_command_is_read_in_place_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.sh").write_text("NPROC_PER_NODE=4 \\\nmegatron sft \\\n    sft.yaml\n")
    assert main(["lint", "t.sh"]) == 1, "without the file, the script has no arguments"
    Path("sft.yaml").write_text("model: m\ntuner_type: lora\nglobal_batch_size: 6\nmicro_batch_size: 4\n")
    capsys.readouterr()
    assert main(["lint", "t.sh", "--world-size", "4", "--format", "json"]) == 1
    (found,) = (item for item in json.loads(capsys.readouterr().out) if item["severity"] == "error")
    assert (found["path"], found["line"]) == ("sft.yaml", 3)


def test_the_yaml_of_megatron_lm_replaces_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "torchrun pretrain_gpt.py --yaml-cfg gpt.yaml \\\n  --lr 1e-3\n"
    Path("t.sh").write_text(script)
    assert main(["lint", "t.sh"]) == 0, "without the file, the argument is not judged"
    sizes = "num_layers: 4, hidden_size: 96, num_attention_heads: 6"
    Path("gpt.yaml").write_text(f"language_model: {{{sizes}}}\nmodel_parallel:\n  tensor_model_parallel_size: 4\n")
    capsys.readouterr()
    assert main(["lint", "t.sh", "--format", "json"]) == 1
    found = [item for item in json.loads(capsys.readouterr().out) if item["severity"] == "error"]
    assert {item["path"] for item in found} == {"gpt.yaml"}
    made = made_of(script, "t.sh")
    (ignored,) = (entry for entry in made.entries if "reads --yaml-cfg alone, and not --lr" in entry.why)
    assert (ignored.fate, ignored.location.path, ignored.location.line) == ("needed", "t.sh", 2)


# Megatron -------------------------------------------------------------------------------------------------------------


def test_an_override_asks_for_what_its_recipe_sets() -> None:
    made = made_of("model: {tensor_model_parallel_size: 2, seq_length: 8}\ntrain: {micro_batch_size: 2}\n", "o.yaml")
    open_keys = {"lr_scheduler.type", "precision.dtype", "train.steps", "optimizer.lr", "parallel.pipeline.size"}
    assert open_keys <= asked(made).keys()
    assert "parallel.tensor.size" not in asked(made)
    assert all("write it" in asked(made)[key].why for key in open_keys)
    whole = "model: {pipeline_model_parallel_size: 1}\nmixed_precision: bf16_mixed\n"
    whole += (
        "scheduler: {lr_decay_style: cosine}\noptimizer: {lr: 1e-3}\ntrain: {train_iters: 5, micro_batch_size: 1}\n"
    )
    assert not open_keys & asked(made_of(whole, "o.yaml")).keys(), "a size of 1 is written, although it sets nothing"
    recipe = (TREES / "megatron_bridge/llama3_8b_pretrain.py").read_text()
    assert not {"lr_scheduler.type", "precision.dtype"} & asked(made_of(recipe, "r.py")).keys()


def test_a_key_of_another_data_class_is_not_called_unknown() -> None:
    text = "train: {micro_batch_size: 1}\nmodel: {seq_length: 8}\ndataset: {vae_scale_factor: 8, seq_lenght: 8}\n"
    made = by_key(made_of(text, "o.yaml"))
    assert "a class of dataset that dslpar does not know" in made["dataset.vae_scale_factor"].why
    assert "no such key; did you mean" in made["dataset.seq_lenght"].why
    recipe = RECIPE.replace(
        "cfg.model.pipe", "cfg.model = HybridModelProvider(hybrid_layer_pattern='M-')\n    cfg.model.pipe"
    )
    why = by_key(made_of(recipe, "r.py"))["model.hybrid_layer_pattern"].why
    assert "a class of model that dslpar does not know" in why
    why = by_key(made_of(recipe.replace("Hybrid", "GPT"), "r.py"))["model.hybrid_layer_pattern"].why
    assert "no such key; did you mean" in why


def test_a_saved_run_of_megatron_bridge_has_functions_for_values() -> None:
    path = TREES / "megatron_bridge/saved_run.yaml"
    made = made_of(path.read_text(), str(path))
    assert made.source.name == "megatron_bridge", "classes and ${} alone would be Hydra's"
    entry = by_key(made)["model.activation_func"]
    assert (entry.to, entry.value, entry.location.line) == ("model.activation", "swiglu", 14)
    assert by_key(made)["model.init_method"].fate == "needed"
    assert made.values["model.num_kv_heads"] == 8
    assert [item.code for item in lint_text(path.read_text(), str(path), 8)] == ["FRN205"]


VIRTUAL = "--num-layers {} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
VIRTUAL += "--hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 {}"


def test_stages_of_the_embedding_and_the_loss_have_no_layers() -> None:
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    text = f"torchrun pretrain_gpt.py {VIRTUAL.format(6, both)}\n"
    assert errors(lint_text(text, "t.sh")) == []
    assert by_key(made_of(text, "t.sh"))["--num-virtual-stages-per-pipeline-rank"].fate == "needed"
    text = f"torchrun pretrain_gpt.py {VIRTUAL.format(22, both)}\n"
    assert made_of(text, "t.sh").values["schedule.num_model_chunks"] == 2
    text = f"torchrun pretrain_gpt.py {VIRTUAL.format(6, '')}\n"
    assert "PIP101" in {item.code for item in errors(lint_text(text, "t.sh"))}


RECIPE = """from megatron.bridge.training.config import ConfigContainer, TrainingConfig

def config() -> ConfigContainer:
    layout = [["embedding"] + ["decoder"] * 2] + [["decoder"] * 2] * 2
    cfg = ConfigContainer(train=TrainingConfig(train_iters=4))
    cfg.model.pipeline_model_parallel_layout = layout
    return cfg
"""


def test_lists_of_a_recipe_are_joined_and_repeated() -> None:
    root = read_text(RECIPE, "r.py").config.root
    two = ["decoder", "decoder"]
    node = root.get("model.pipeline_model_parallel_layout")
    assert node is not None
    assert node.plain() == [["embedding", *two], two, two]


def test_a_group_of_ms_swifts_ray_has_its_arguments() -> None:
    path = TREES / "ms_swift/gkd_ray.yaml"
    made = made_of(path.read_text(), str(path))
    assert made.values["parallel.tensor.size"] == 2
    assert made.values["model.lora.r"] == 8
    assert by_key(made)["train.gpus"].fate == "dropped"
    assert by_key(made)["rollout.vllm_tensor_parallel_size"].fate == "needed"
    assert not [item for item in lint_text(path.read_text(), str(path)) if item.code == "FRN204"]


def test_a_section_of_dslpar_is_none_of_another_framework() -> None:
    made = made_of(f"{AXOLOTL}checkpoint: {{keep: 2}}\n", "a.yml")
    assert by_key(made)["checkpoint.keep"].fate == "needed"
    assert "no such key" in by_key(made)["checkpoint.keep"].why


@pytest.mark.parametrize("name", TABLES)
def test_the_index_of_rows_finds_the_first_row(name: str) -> None:
    table = TABLES[name]
    converter = Converter(read_text("", "a.yaml", name)._replace(name=name), None, None)
    keys = {row.pattern.replace("**", "some.thing") for row in table.rows}
    keys |= {row.pattern.removesuffix(".**") for row in table.rows} | {"other", "other.key"}
    for key in sorted(keys):
        rests = ((row, row.rest(key)) for row in table.rows)
        assert converter.row(key) == next(((row, rest) for row, rest in rests if rest is not None), (None, ""))


@pytest.mark.parametrize("name", TABLES)
def test_the_page_counts_the_files_that_are_tried(name: str) -> None:
    assert TABLES[name].tried == sum(path.is_file() for path in (TREES / name).rglob("*.*"))


def test_there_are_three_hundred_foreign_files() -> None:
    assert sum(table.tried for table in TABLES.values()) >= 300


# Several files, and the model -----------------------------------------------------------------------------------------

NEOX = '{"pipe-parallel-size": 1, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32,\n'
NEOX += ' "max-position-embeddings": 32, "train-iters": 5, "train_micro_batch_size_per_gpu": 1}\n'


def test_show_and_plan_merge_the_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yml").write_text(NEOX)
    Path("setup.yml").write_text('{"vocab-file": "v",\n "gradient_accumulation_steps": 3,\n "num_unique_layers": 4}\n')
    Path("gpt.py").write_text(
        "model = dict(type='GPT', num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=32)\n"
    )
    run = ["setup.yml", "small.yml", "--world-size", "2", "--model", "gpt.py"]
    main(["show", *run])
    printed = capsys.readouterr()
    assert "small.yml is a config of GPT-NeoX" in printed.err
    assert "accumulation 3" in printed.out
    assert main(["plan", *run, "--device", "h100-80g"]) == 0
    assert "small.yml is a config of GPT-NeoX" in capsys.readouterr().err
    Path("setup.yml").write_text('{"vocab-file": "v",\n "num_unique_layers": 3}\n')
    for command in (["show"], ["plan", "--device", "h100-80g"]):
        assert main([*command, *run]) == 1
        assert "setup.yml:2:23: FRN201" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "plan"])
def test_two_runs_are_no_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(NEOX)
    Path("b.yml").write_text(NEOX)
    with pytest.raises(SystemExit):
        main([command, "a.yml", "b.yml", "--world-size", "2"])
    assert f"{command} takes one config, not 2" in capsys.readouterr().err


def test_import_takes_the_model_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(sizes | {"num_attention_heads": 4}))
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}')
    main(["import", "ds.json", "--model", "hf"])
    printed = capsys.readouterr().out
    assert "type='transformers.LlamaForCausalLM'" in printed
    assert "hidden_size=64" in printed
    with pytest.raises(SystemExit):
        main(["import", "ds.json", "--model", "none.py"])
    assert "--model none.py" in capsys.readouterr().err
