"""Lint of transformers models: config.json, defaults, and the mesh; without importing transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import Finding
from dslpar.layout.resolve import resolve
from dslpar.linter.check import check, lint, load
from tests.support.lint import codes, findings, marked, wrong
from tests.support.paths import ROOT

LLAMA = (
    "config=dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96, "
    "num_hidden_layers=6, max_position_embeddings=64, vocab_size=256)"
)
TWO = "parallel = dict(tensor=dict(size=2, mode='1d'))\n"


def model(arguments: str = LLAMA, name: str = "LlamaForCausalLM") -> str:
    return f"model = dict(type='transformers.{name}', {arguments})\n"


def lazy(arguments: str = LLAMA) -> str:
    """Return the same as `model`, by imports."""
    arguments = arguments.replace("config=dict(", "config=L(LlamaConfig)(")
    imports = "from dslpar import LazyCall as L\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    return f"{imports}model = L(LlamaForCausalLM)({arguments})\n"


@pytest.mark.parametrize("text", [model(), lazy()], ids=["type", "LazyCall"])
def test_nothing_is_wrong_with_sizes_that_fit(text: str) -> None:
    """There is not even a note on unknown layers."""
    assert (
        wrong(text + "parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=2)\n") == []
    )


@pytest.mark.parametrize(
    ("old", "new", "parallel", "code", "value"),
    [
        ("num_attention_heads=8", "num_attention_heads=4", "size=8, mode='1d'", "TEN131", "4"),
        ("num_key_value_heads=4", "num_key_value_heads=2", "size=4, mode='1d'", "TEN131", "2"),
        ("intermediate_size=96", "intermediate_size=97", "size=2, mode='1d'", "TEN131", "97"),
        ("num_key_value_heads=4", "num_key_value_heads=3", "size=1", "TEN132", "3"),
        ("hidden_size=64", "hidden_size=60", "size=1", "TEN132", "60"),
        ("vocab_size=256", "vocab_size=255", "size=1", "BAT104", "255"),
        ("max_position_embeddings=64", "max_position_embeddings=63", "size=2, mode='sequence'", "TEN204", "63"),
        ("num_hidden_layers=6", "num_hidden_layer=6", "size=1", "CFG124", "num_hidden_layer"),
    ],
)
@pytest.mark.parametrize("made", [model, lazy], ids=["type", "LazyCall"])
def test_each_size_is_found_at_its_place(made: Any, old: str, new: str, parallel: str, code: str, value: str) -> None:
    text = made(LLAMA.replace(old, new)) + f"parallel = dict(tensor=dict({parallel}))\n"
    found = next(finding for finding in findings(text) if finding.code == code)
    assert marked(text, found) == value


@pytest.mark.parametrize("value", ["0", "-4", "2.0", "'8'", "True", "2**31", "10**400"])
@pytest.mark.parametrize("key", ["num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_sizes_that_are_none(key: str, value: str) -> None:
    text = model(f"config=dict({key}={value}, max_position_embeddings=64)")
    (found,) = [item for item in findings(text + TWO) if item.severity == "error"]
    assert (found.code, marked(text, found)) == ("CFG127", value)
    assert found.message.startswith(f"{key} is ")
    assert found.help == "choose a whole number, at least 1 (and below 2**31)"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("LlamaForCausalLM", "num_key_value_heads=None, head_dim=None"),
        ("LlamaForCausalLM", f"vocab_size={2**31 - 1}"),
        ("LlamaForCausalLM", "num_hidden_layers=1"),
        ("Qwen2MoeForCausalLM", "shared_expert_intermediate_size=0"),
        ("ViTForImageClassification", "image_size=[224, 224]"),
        ("MyForCausalLM", "num_heads='four'"),
    ],
)
def test_sizes_that_are_some(name: str, given: str) -> None:
    assert "CFG127" not in codes(model(f"config=dict({given})", name))


def test_stages_and_sequences() -> None:
    found = findings(model() + "parallel = dict(pipeline=8)\n")
    assert [(item.code, item.message) for item in found] == [("PIP101", "8 stages, but the model has 6 layers")]
    assert codes(model() + "data = dict(seq_len=65)\n") == ["BAT103"]
    assert codes(model() + "parallel = dict(pipeline=dict(size=2, counts=[3, 4]))\n") == ["PIP107"]


def test_experts_are_whole_on_each_rank() -> None:
    config = "config=dict(num_local_experts=6, max_position_embeddings=64)"
    found = findings(model(config, "MixtralForCausalLM") + "parallel = dict(tensor=dict(size=4, mode='2d'))\n")
    message = "num_local_experts 6 over 4 tensor ranks: 2 of 8 places have no expert, so their ranks wait"
    assert [(item.code, item.message) for item in found] == [("PERF110", message)]


@pytest.mark.parametrize(
    ("name", "given", "message", "hint"),
    [
        (
            "DeepseekV3ForCausalLM",
            "kv_lora_rank=15, qk_rope_head_dim=6",
            "kv_lora_rank 15 and qk_rope_head_dim make 21 features, which are not divisible by y * q = 2",
            "choose another kv_lora_rank, or fewer tensor ranks",
        ),
        (
            "Glm4MoeForCausalLM",
            "head_dim=128, moe_intermediate_size=15, n_shared_experts=3",
            "moe_intermediate_size 15 and n_shared_experts make 45 features, which are not divisible by y = 2",
            "choose another moe_intermediate_size, or fewer tensor ranks",
        ),
    ],
)
def test_features_of_two_keys_divide(name: str, given: str, message: str, hint: str) -> None:
    found = findings(model(f"config=dict({given}, max_position_embeddings=64)", name) + TWO)
    assert [(item.code, item.message, item.help) for item in found if item.severity == "error"] == [
        ("TEN131", message, hint)
    ]


def test_heads_with_latents_have_sizes_of_their_own() -> None:
    given = "config=dict(hidden_size=100, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64)"
    assert "TEN132" not in codes(model(given, "DeepseekV3ForCausalLM"))
    assert "TEN132" in codes(model(given, "MixtralForCausalLM"))


def test_a_default_is_told_as_one() -> None:
    """None of Llama's 32 heads is written, so the finding is at the config, and names the source of the number."""
    found = findings(
        model("config=dict(max_position_embeddings=64)") + "parallel = dict(tensor=dict(size=64, mode='1d'))\n", 64
    )
    assert "num_attention_heads 32 is not divisible by y = 64 (the default of LlamaConfig)" in [
        item.message for item in found
    ]
    assert {item.location.line for item in found} == {1}


@pytest.mark.parametrize(
    ("name", "config", "refused"),
    [
        ("Mistral", "", ""),
        ("Qwen2", "use_sliding_window=True, ", ""),
        ("Gemma2", "", "attn_logit_softcapping"),
        ("Gemma2", "layer_types=['full_attention'] * 26, attn_logit_softcapping=None, ", ""),
        ("Gemma3", "query_pre_attn_scalar=5, ", ""),
        ("Bloom", "", "type"),
        ("GptOss", "", "type"),
        ("DeepseekV3", "", ""),
        ("Llama", "", ""),
    ],
)
def test_attention_that_context_parallelism_does_not_know(name: str, config: str, refused: str) -> None:
    text = model(f"config=dict({config}max_position_embeddings=64)", f"{name}ForCausalLM")
    for form in ("tensor=dict(size=2, mode='sequence')", "context=dict(size=2, impl='ulysses')"):
        found = findings(text + f"parallel = dict({form})\n")
        assert sorted(item.key.rpartition(".")[2] for item in found if item.code == "TEN134") == refused.split()
    assert "TEN134" not in codes(text + TWO)


@pytest.mark.parametrize(
    ("arguments", "parallel", "expected"),
    [
        ("config=dict(num_hidden_layers=2)", TWO, ["TEN133"]),
        ("config=dict(num_hidden_layers=2)", "parallel = dict(pipeline=2)\n", ["TEN133", "CFG111", "PIP110"]),
        ("config=dict(num_hidden_layers=2)", "", []),
        ("config=dict(num_hidden_layers=2), policy='derived'", TWO, []),
        ("config=dict(num_hidden_layers=2), policy='GPT2'", TWO, ["CFG126"]),
        ("config=dict(num_hidden_layers=2), policy='LlamaForCausalLM'", TWO, []),
        ("config=dict(num_hidden_layers=2), policy=dict(blocks=['a'], region={})", TWO, ["CFG126", "CFG126"]),
    ],
)
def test_classes_without_a_policy(arguments: str, parallel: str, expected: list[str]) -> None:
    found = codes(model(arguments, "MambaForCausalLM") + parallel)
    assert sorted(set(found) - {"CFG111", "PIP110"}) == sorted(set(expected) - {"CFG111", "PIP110"})


# A folder ---------------------------------------------------------------------------------------------------------

SAVED: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def in_folder(tmp_path: Path, files: Mapping[str, object], more: str = "", parallel: str = TWO) -> list[Finding]:
    """Return lint's findings for a config beside the folder `saved`."""
    (tmp_path / "saved").mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2)
        (tmp_path / "saved" / name).write_text(text)
    config = tmp_path / "cfg.py"
    config.write_text(model(f"pretrained='saved'{more}") + parallel)
    return [item for item in lint(load(str(config)), 8) if not item.code.startswith("PERF")]


def test_sizes_of_config_json_are_found_there(tmp_path: Path) -> None:
    found = in_folder(tmp_path, {"config.json": SAVED, "model.safetensors": ""}, parallel=TWO.replace("2", "4"))
    heads = next(item for item in found if item.code == "TEN131")
    assert heads.location.path.endswith("saved/config.json")
    assert (heads.location.line, heads.location.column) == (7, 26)
    assert (SAVED["num_attention_heads"], heads.message) == (6, "num_attention_heads 6 is not divisible by y = 4")


GROUPED = SAVED | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("written", "in_file"),
    [
        ("num_key_value_heads=4", "2"),
        ("num_attention_heads=4", "8"),
        ("head_dim=16", "8"),
        ("hidden_size=128", "64"),
        ("intermediate_size=128", "96"),
        ("vocab_size=512", "256"),
        ("num_hidden_layers=6", "4"),
        ("tie_word_embeddings=True", "False"),  # the class's default
        ("attention_bias=True", "False"),
        ("num_hidden_layers=2", ""),  # the first two blocks
        ("max_position_embeddings=4096", ""),  # of rotary positions
        ("attention_dropout=0.1", ""),
        ("num_key_value_heads=2", ""),
    ],
)
def test_what_a_config_changes_of_weights(tmp_path: Path, written: str, in_file: str) -> None:
    found = in_folder(tmp_path, {"config.json": GROUPED, "model.safetensors": ""}, f", config=dict({written})", "")
    key, _, value = written.partition("=")
    assert [each.code for each in found] == ["CKP101"] * bool(in_file)
    for each in found:
        assert each.message.startswith(f"{key} is {value}, but ")
        assert f" has {in_file}, and its weights are for that" in each.message
        assert each.help == f"leave {key} out"


@pytest.mark.parametrize(("labels", "expected"), [(3, []), (10, ["num_labels is 10"])])
def test_the_classes_of_a_classifier_are_weights(tmp_path: Path, labels: int, expected: list[str]) -> None:
    (tmp_path / "saved").mkdir()
    values: dict[str, object] = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    values["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(values))
    (tmp_path / "saved" / "model.safetensors").touch()
    config = tmp_path / "cfg.py"
    config.write_text(model(f"pretrained='saved', config=dict(num_labels={labels})", "ViTForImageClassification"))
    found = [item for item in lint(load(str(config)), 1) if item.code == "CKP101"]
    assert [item.message.partition(",")[0] for item in found] == expected


def test_learned_positions_are_weights(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    values = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 64, "n_layer": 2}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(values))
    (tmp_path / "saved" / "model.safetensors").touch()
    config = tmp_path / "cfg.py"
    config.write_text(model("pretrained='saved', config=dict(n_positions=128)", "GPT2LMHeadModel"))
    assert [item.message.partition(",")[0] for item in lint(load(str(config)), 1)] == ["n_positions is 128"]


@pytest.mark.parametrize(
    ("parallel", "world", "help"),
    [
        ("tensor=dict(size=8, mode='1d')", 8, "parallel.tensor.size=2"),
        ("tensor=dict(size=8, mode='1d', sequence=True)", 16, "parallel.tensor.size=2"),
        ("tensor=dict(size=16, mode='2d')", 16, "parallel.tensor.size=4"),
        ("tensor=dict(size=27, mode='3d')", 216, "parallel.tensor.size=8"),
        ("tensor=dict(size=32, mode='2.5d', depth=2)", 32, "parallel.tensor.size=8"),
        ("tensor=dict(size=3, mode='cuboid', shape=(1, 3, 1))", 3, "leave parallel.tensor out"),
        ("tensor=dict(size=3, mode='1d')", 9, "leave parallel.tensor out"),
        ("context=dict(size=8, impl='ulysses')", 8, "parallel.context.size=2"),
    ],
)
def test_a_help_never_resizes_weights(tmp_path: Path, parallel: str, world: int, help: str) -> None:
    """The help is another layout, and following it leaves no size that does not divide."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text(json.dumps(GROUPED, indent=2))
    (tmp_path / "saved" / "model.safetensors").touch()
    config = tmp_path / "cfg.py"
    config.write_text(model("pretrained='saved'") + f"parallel = dict({parallel})\n")
    found = [item for item in lint(load(str(config)), world) if item.code == "TEN131"]
    assert {item.help for item in found} == {help}
    override = "~" + help.split()[1] if help.startswith("leave") else help
    assert [item.code for item in lint(load(str(config), [override]), world) if item.code.startswith("TEN")] == []


@pytest.mark.parametrize(
    ("name", "saved", "more", "code", "help"),
    [
        ("LlamaForCausalLM", GROUPED, "data = dict(seq_len=128)", "BAT103", "at most 64"),
        ("LlamaForCausalLM", GROUPED | {"vocab_size": 100}, "", "BAT104", "choose data of the model's own tokenizer"),
        ("LlamaForCausalLM", GROUPED | {"num_key_value_heads": 3}, "", "TEN132", "choose the sizes of the weights"),
        ("LlamaForCausalLM", SAVED, "", "TEN132", "choose the sizes of the weights"),
    ],
)
def test_other_helps_leave_the_weights_sizes_alone(
    tmp_path: Path, name: str, saved: Mapping[str, Any], more: str, code: str, help: str
) -> None:
    found = in_folder(tmp_path, {"config.json": saved, "model.safetensors": ""}, parallel=f"{more}\n")
    assert [item.help.startswith(help) for item in found if item.code == code] == [True]
    assert not any(f"{key}=" in item.help for item in found for key in ("vocab_size", "hidden_size", "num_key_value"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "saved' has no config.json"),
        ({"config.json": "{"}, "cannot read config.json: it is not JSON"),
        ({"config.json": "[1]"}, "cannot read config.json: it is not a JSON object"),
        ({"config.json": SAVED}, "has neither model.safetensors nor model.safetensors.index.json"),
        (
            {"config.json": SAVED, "model.safetensors.index.json": {"weight_map": {"a": "1.safetensors", "b": "2"}}},
            "lacks '1.safetensors', and 1 more, of 2 files of weights",
        ),
        ({"config.json": SAVED, "model.safetensors.index.json": "{}"}, "has no weight_map that can be read"),
        (
            {"config.json": SAVED | {"architectures": ["GPT2LMHeadModel"]}, "model.safetensors": ""},
            "this is a config of GPT2LMHeadModel, but the model's type is LlamaForCausalLM",
        ),
        (
            {"config.json": {"model_type": "gpt2", "max_position_embeddings": 8}, "model.safetensors": ""},
            "this is a config of model_type 'gpt2', but the model's type is LlamaForCausalLM",
        ),
        ({"config.json": {"hidden_size": 64}, "model.safetensors": ""}, "neither architectures nor a model_type"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, files: Mapping[str, object], said: str) -> None:
    found = [item for item in in_folder(tmp_path, files, parallel="") if item.code == "CKP101"]
    assert len(found) == 1
    assert said in found[0].message
    assert found[0].help


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel"])
def test_folders_that_can_be_used(tmp_path: Path, name: str) -> None:
    saved = SAVED | {"architectures": [name], "num_attention_heads": 8}
    assert in_folder(tmp_path, {"config.json": saved, "model.safetensors": ""}) == []


def test_a_folder_that_is_not_here(tmp_path: Path) -> None:
    config = tmp_path / "cfg.py"
    config.write_text(model("pretrained='saved'"))
    assert [item.code for item in lint(load(str(config)), 8) if item.severity != "info"] == ["CKP102"]


@pytest.mark.parametrize("written", ["meta-llama/Llama-3.1-8B", "org/model"])
@pytest.mark.parametrize("parent", [False, True])
def test_the_name_of_a_model_on_a_hub_is_not_read(tmp_path: Path, written: str, parent: bool) -> None:
    if parent:
        (tmp_path / written).parent.mkdir()
    config = tmp_path / "cfg.py"
    config.write_text(model(f"pretrained='{written}'"))
    (found,) = [item for item in lint(load(str(config)), 1) if item.severity != "info"]
    assert (found.code, marked(config.read_text(), found)) == ("CKP102", f"'{written}'")
    assert "hub ids are not read" in found.message
    assert found.help == f"download it (hf download {written} --local-dir FOLDER) and name the folder"


def test_lint_show_and_the_run_have_one_cut(tmp_path: Path) -> None:
    """A large vocabulary relieves the last stage, as with dslpar's own GPT."""
    config = LLAMA.replace("vocab_size=256", "vocab_size=2048")
    path = tmp_path / "cfg.py"
    path.write_text(model(config) + "parallel = dict(pipeline=2)\n")
    job = resolve(check(load(str(path)), 8).context.reading.spec, 8, str(path))
    assert job.stages.counts == (5, 1)
    assert job.stages.auto_ids == (0, 0, 0, 0, 0, 1)


def test_lint_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(lazy() + "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n")
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dslpar.cli", "lint", str(path), "--world-size", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "dslpar" in imported
    assert imported.isdisjoint({"torch", "transformers", "numpy", "huggingface_hub", "dataclasses_json"})


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("ResNet", "size=2, mode='1d'", "ResNetForImageClassification cannot be split over 2 tensor ranks"),
        ("ResNet", "size=4, mode='2d'", "ResNetForImageClassification cannot be split over 4 tensor ranks"),
        ("Swin", "size=2, mode='1d', sequence=True", "SwinForImageClassification arranges tokens on a grid"),
        ("Swin", "size=2, mode='sequence'", "SwinForImageClassification arranges tokens on a grid"),
        ("Swin", "size=2, mode='1d'", ""),
        ("Swin", "size=4, mode='2d'", ""),
        ("ViT", "size=2, mode='1d', sequence=True", ""),
    ],
)
def test_modes_that_a_class_of_images_refuses(name: str, tensor: str, said: str) -> None:
    """The run ends with TEN235; tests/distributed/policies/test_families.py has the runs."""
    text = f"model = dict(type='transformers.{name}ForImageClassification')\nparallel = dict(tensor=dict({tensor}))\n"
    found = [item.message for item in findings(text) if item.code == "TEN135"]
    assert len(found) == bool(said)
    assert all(message.startswith(said) for message in found)


@pytest.mark.parametrize(
    ("name", "image", "tensor", "said"),
    [
        ("ViTForImageClassification", 8, "mode='1d', sequence=True", "image_size 8 makes 17 tokens, with the class"),
        ("ViTForImageClassification", 6, "mode='1d', sequence=True", ""),  # 9 patches and the class's
        ("ViTForImageClassification", 8, "mode='sequence'", "image_size 8 makes 17 tokens, with the class"),
        ("ViTForImageClassification", 8, "mode='1d'", ""),
        ("ViTMAEForPreTraining", 8, "mode='1d', sequence=True", "image_size 8 makes 5 tokens that its encoder sees"),
        ("ViTMAEForPreTraining", 6, "mode='1d', sequence=True", "image_size 6 makes 3 tokens that its encoder sees"),
    ],
)
def test_tokens_of_an_image_divide(name: str, image: int, tensor: str, said: str) -> None:
    config = f"config=dict(image_size={image}, patch_size=2)"
    text = f"model = dict(type='transformers.{name}', {config})\nparallel = dict(tensor=dict(size=2, {tensor}))\n"
    found = [item for item in findings(text) if item.code == "TEN136"]
    assert len(found) == bool(said)
    assert all(item.message.startswith(said) and marked(text, item) == str(image) for item in found)


@pytest.mark.parametrize(
    ("given", "tensor", "code_at", "message"),
    [
        (
            "decoder_num_attention_heads=3",
            "size=2, mode='1d'",
            "3",
            "the decoder has 3 heads, which are not divisible by y",
        ),
        ("decoder_hidden_size=511", "size=4, mode='2d'", "511", "the decoder has 511 features"),
        ("decoder_intermediate_size=7", "size=2, mode='1d'", "7", "the decoder has 7 features"),
        (
            "num_attention_heads=9, hidden_size=288",
            "size=3, mode='1d'",
            "dict(",
            "decoder_num_attention_heads: the dec",
        ),
        ("decoder_num_attention_heads=4", "size=2, mode='1d'", "", ""),
    ],
)
def test_sizes_of_a_decoder_divide(given: str, tensor: str, code_at: str, message: str) -> None:
    """ViTMAE's decoder has its own sizes; for a default that does not divide, the finding is at the config."""
    text = model(f"config=dict({given})", "ViTMAEForPreTraining") + f"parallel = dict(tensor=dict({tensor}))\n"
    found = [item for item in findings(text, 12) if item.code == "TEN131"]
    said = [one for one in found if message and message in one.message]
    assert bool(found) == bool(said) == bool(message)
    assert all(marked(text, one).startswith(code_at) for one in said)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("Swin", "depths=[2, '2']", "depths is [2, '2'], but must be a list of whole numbers, each at least 1"),
        ("Swin", "num_heads=4", "num_heads is 4, but must be a list"),
        ("Swin", "num_heads='4'", "num_heads is '4', but must be a list"),
        ("Swin", "depths=[1, 1, 1, 1, 1]", "num_heads has 4 numbers, but depths has 5"),
        ("Swin", "num_attention_heads=[3, True, 12, 24]", "num_attention_heads is [3, True, 12, 24]"),
        ("Swin", "num_heads=[3, 6]", "num_heads has 2 numbers, but depths has 4: one for each stage"),
        ("Swin", "num_heads=[3, 6], depths=[2, 2]", ""),
        ("Swinv2", "pretrained_window_sizes=[0, 0, 0, -1]", "each at least 0"),
        ("ResNet", "hidden_sizes=[]", "hidden_sizes is [], but must be a list"),
        ("ResNet", "depths=[1, 1], hidden_sizes=[8, 16]", ""),
        ("ResNet", "depths=[1, 1]", "hidden_sizes has 4 numbers, but depths has 2"),
    ],
)
def test_lists_have_a_number_for_each_stage(name: str, given: str, message: str) -> None:
    text = model(f"config=dict({given})", f"{name}ForImageClassification") + "data = dict(type='images', path='.')\n"
    found = [item for item in findings(text) if item.code == "CFG127"]
    assert len(found) == bool(message)
    for one in found:
        assert message in one.message
        assert marked(text, one) == given.partition("=")[2]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ViTMAEForPreTraining", "decoder_num_attention_heads=0"),
        ("ViTMAEForPreTraining", "decoder_intermediate_size=2.5"),
        ("SwinForImageClassification", "embed_dim='a'"),
        ("SwinForImageClassification", "mlp_ratio='4'"),
        ("Swinv2ForImageClassification", "mlp_ratio=float('inf')"),
    ],
)
def test_sizes_that_classes_of_images_alone_have(name: str, given: str) -> None:
    text = model(f"config=dict({given})", name) + "data = dict(type='images', path='.')\n"
    (found,) = [item for item in findings(text) if item.code == "CFG127"]
    assert marked(text, found) == given.partition("=")[2]


def test_a_decoder_s_heads_divide_its_features() -> None:
    text = model("config=dict(decoder_num_attention_heads=3)", "ViTMAEForPreTraining")
    (found,) = [item for item in findings(text) if item.code == "TEN132"]
    assert found.message.startswith("decoder_hidden_size 512 is not a multiple of decoder_num_attention_heads 3")
    assert found.help == "decoder_hidden_size=510 or 513"


@pytest.mark.parametrize(
    ("config", "code_at", "message"),
    [
        ("num_labels=5", "dict(", "num_heads: a stage has 3 heads, which are not divisible by y = 2 (the default of"),
        ("num_heads=[2, 4, 8, 16], embed_dim=95", "95", "embed_dim: a stage has 95 features"),
        ("num_heads=[2, 4, 9, 18], embed_dim=36", "[2", "num_heads: a stage has 9 heads"),
        ("num_heads=[2, 4, 8, 16], embed_dim=32", "", ""),
        ("num_heads=[2, 4, 9, 18], embed_dim=36, depths=[2, 2]", "", ""),
        ("num_heads=[2, 4, 8, 16], embed_dim=96, mlp_ratio=2.51", "2.51", "mlp_ratio: a stage has 481 features"),
        ("num_heads=[2] * 1100, depths=[1] * 1100", "", ""),
    ],
)
def test_sizes_of_stages_divide(config: str, code_at: str, message: str) -> None:
    """Swin has a list of heads, and a build refuses the first that does not divide."""
    text = (
        model(f"config=dict({config})", "SwinForImageClassification") + TWO + "data = dict(type='images', path='.')\n"
    )
    found = [item for item in findings(text) if item.code == "TEN131"]
    if not message:
        assert found == []
        return
    (one,) = found
    assert message in one.message
    assert marked(text, one).startswith(code_at)
