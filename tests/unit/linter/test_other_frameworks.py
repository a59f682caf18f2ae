"""Files that are no configs of dslpar: another framework's, or a program. One finding says whose the file is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.cli.main import main
from dslpar.core.errors import has_errors
from dslpar.language.load import load_text
from dslpar.linter.check import lint, load
from dslpar.schema import keys
from dslpar.schema.other_frameworks import OtherFramework, other_frameworks, recognise
from dslpar.schema.python_programs import program_in
from dslpar.schema.sections_reader import SECTIONS
from tests.support.lint import MODEL
from tests.support.paths import ROOT

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nnum_machines: 1\nnum_processes: 8\n"
SWIFT = "{} \\\n    --model folder \\\n    --tensor_model_parallel_size 8 \\\n    --micro_batch_size 2\n"
FILES = [
    ("a.sh", "accelerate launch --config_file a.yaml train.py --model folder\n", "Accelerate"),
    ("a.sh", SWIFT.format("NPROC_PER_NODE=8 \\\nmegatron export"), "ms-swift"),
    ("a.sh", SWIFT.format("CUDA_VISIBLE_DEVICES=0,1 swift rlhf"), "ms-swift"),
    ("a.yaml", "model: folder\ntrain_type: lora\ndataset: mine\nsplit_dataset_ratio: 0.1\n", "ms-swift"),
    ("a.yaml", "rlhf_type: grpo\nmodel: folder\nmax_completion_length: 64\ntrain:\n  gpus: 4\n", "ms-swift"),
    (
        "a.yaml",
        "job: {dump_folder: out}\nmodel: {name: llama3, flavor: 8B}\noptimizer: {lr: 3e-4}\n"
        "training: {local_batch_size: 8, steps: 10}\nparallelism: {tensor_parallel_degree: 2}\n",
        "torchtitan",
    ),
    ("a.sh", "torchrun --nproc-per-node 8 -m torchtitan.train --job.config_file a.toml\n", "torchtitan"),
    ("a.sh", "accelerate launch -m axolotl.cli.train a.yml\n", "Axolotl"),
    ("a.sh", "#!/bin/bash\nFORCE_TORCHRUN=1 llamafactory-cli train a.yaml\n", "LLaMA-Factory"),
    ("a.yaml", "defaults:\n  - _self_\n  - model: gpt\n  - optional local: default\ntrain: true\n", "Hydra"),
    ("a.yaml", "# @package _global_\ndefaults:\n  - override /model: gpt\nmodel:\n  lr: 0.1\n", "Hydra"),
    ("a.yaml", "_target_: my.Net\noptimizer:\n  _target_: torch.optim.Adam\n  _partial_: true\n", "Hydra"),
    ("a.yaml", "hydra:\n  run:\n    dir: ${paths.log_dir}/runs\n", "Hydra"),
    (  # its sections `data`, `cluster` and `logger` are dslpar's names, and `policy.optimizer` ColossalAI's
        "a.yaml",
        "grpo:\n  num_prompts_per_step: 32\npolicy:\n  model_name: org/model\n  train_micro_batch_size: 4\n"
        "  megatron_cfg:\n    tensor_model_parallel_size: 2\ndata:\n  shuffle: true\ncluster:\n  num_nodes: 1\n",
        "NeMo RL",
    ),
    ("a.yaml", "defaults: grpo_8b.yaml\ndata_plane:\n  enabled: true\n", "NeMo RL"),
    (
        "a.yaml",
        "defaults:\n  - ppo_trainer\n  - _self_\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 64\n"
        "trainer:\n  nnodes: 2\n  n_gpus_per_node: 8\n",
        "verl",
    ),
    ("a.sh", "python3 -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=grpo trainer.nnodes=2\n", "verl"),
]

CONVERTED = [
    ("a.yaml", ACCELERATE.format("MULTI_GPU"), "Accelerate"),
    ("a.yml", ACCELERATE.format("DEEPSPEED") + "deepspeed_config:\n  zero_stage: 2\nuse_cpu: false\n", "Accelerate"),
    ("a.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nmixed_precision: bf16\n", "Accelerate"),
    ("a.json", '{"distributed_type": "NO", "num_processes": 1, "mixed_precision": "no"}', "Accelerate"),
    (
        "a.yml",
        "base_model: org/model\nload_in_8bit: false\ndatasets:\n  - path: mine\n    type: alpaca\nsequence_len: 64\n"
        "sample_packing: true\nmicro_batch_size: 1\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\n",
        "Axolotl",
    ),
    (
        "a.yaml",
        "model_name_or_path: org/model\nstage: sft\nfinetuning_type: lora\nlora_target: all\ncutoff_len: 64\n",
        "LLaMA-Factory",
    ),
]
"""Files that `dslpar import` converts."""


@pytest.mark.parametrize(("name", "text", "title"), FILES)
def test_a_file_of_another_framework_has_one_finding(tmp_path: Path, name: str, text: str, title: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    for by_program in (False, True):
        (found,) = lint(load(str(path)), 8, by_program=by_program)
        assert (found.code, found.location.path, found.location.line) == ("CFG128", str(path), 1)
        assert found.message == f"this is a file of {title}, which dslpar cannot judge"
        assert "dslpar init" in found.help


@pytest.mark.parametrize(("name", "text", "title"), FILES)
@pytest.mark.parametrize("flags", [[], ["--from", "deepspeed"], ["--from", "megatron"]])
def test_import_names_it_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, title: str, flags: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["import", str(path), "-o", str(tmp_path / "mine.py"), *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{path}:1:1: CFG128 config-not-judged: this is a file of {title}, which dslpar cannot convert" in said
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize(("name", "text", "title"), CONVERTED)
def test_a_file_that_import_converts_is_no_foreign_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, title: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert "CFG128" not in {item.code for item in lint(load(str(path)), 8)}
    main(["import", str(path), "-o", str(tmp_path / "mine.py")])
    said = capsys.readouterr()
    assert f"({title}) ->" in said.out + said.err
    assert "CFG128" not in said.out + said.err
    assert (tmp_path / "mine.py").exists()


# The table --------------------------------------------------------------------------------------------------------

FRAMEWORKS = st.sampled_from([each for each in other_frameworks() if each.name != "hydra" and each.keys])


def test_each_key_has_a_source_and_one_framework() -> None:
    known = {each.key for each in keys.declared()}
    all_keys = [key for framework in other_frameworks() for key in framework.keys]
    assert len(all_keys) == len(set(all_keys))
    assert known.isdisjoint(all_keys)
    for framework in other_frameworks():
        assert all(source.startswith("https://") for source in (*framework.keys.values(), *framework.commands.values()))
        assert framework.least > 1


def nested(dotted: list[str]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key in dotted:
        level = made
        *above, last = key.split(".")
        for name in above:
            level = level.setdefault(name, {})  # type: ignore[assignment]
        level[last] = 1
    return made


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), FRAMEWORKS)
def test_any_keys_of_a_framework_are_enough(data: st.DataObject, framework: OtherFramework) -> None:
    chosen = data.draw(
        st.lists(st.sampled_from(sorted(framework.keys)), min_size=framework.least, max_size=8, unique=True)
    )
    found = recognise(nested(chosen), "", f"a{framework.endings[-1]}")
    if framework.endings[-1] != ".toml":
        assert found is not None
        assert found.name == framework.name


# Our own configs --------------------------------------------------------------------------------------------------

OURS = sorted(path for path in (ROOT / "configs").rglob("*.py"))
VALUES = [json.loads(json.dumps(load(str(path)).root.plain(), default=str)) for path in OURS]


def misspelt(value: object, data: st.DataObject) -> object:
    """Return the value with typing mistakes in its keys."""
    if not isinstance(value, dict):
        return value
    return {_misspelt_key(str(key), data): misspelt(below, data) for key, below in value.items()}


def _misspelt_key(key: str, data: st.DataObject) -> str:
    at = data.draw(st.integers(0, len(key) * 3))
    kind = data.draw(st.sampled_from(["drop", "double", "swap"]))
    if at + 1 >= len(key):
        return key
    return {
        "drop": key[:at] + key[at + 1 :],
        "double": key[:at] + key[at] + key[at:],
        "swap": key[:at] + key[at + 1] + key[at] + key[at + 2 :],
    }[kind]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(VALUES), st.sampled_from([".yaml", ".yml", ".json", ".toml"]))
def test_a_config_of_ours_with_mistakes_is_none_of_others(data: st.DataObject, values: object, ending: str) -> None:
    made = misspelt(values, data)
    assert isinstance(made, dict)
    assert recognise(made, "", f"a{ending}") is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(OURS))
def test_a_python_config_with_mistakes_is_no_program(data: st.DataObject, path: Path) -> None:
    text = path.read_text()
    at = data.draw(st.integers(0, len(text) - 2))
    damaged = text[:at] + data.draw(st.sampled_from(["", "(", "=", "x", text[at + 1]])) + text[at + 1 :]
    assert program_in(damaged, "a.py", ()) is None


@pytest.mark.parametrize(
    "text",
    [
        f"{MODEL}compute_environment = 'LOCAL_MACHINE'\nnum_processes = 8\nnum_machines = 2\ntrain = dict(stps=1)\n",
        f"num_processes = 8\nnum_machines = 2\nparallel = dict(data=num_processes, pipline=2)\n{MODEL}",
        f"def size(n):\n    return n\n{MODEL}",
        "def size(n):\n    return n\nparallel = dict(pipeline=2)\ntrain = dict(steps=3)\n",
        "class Mine:\n    pass\ntrain = dict(steps=3)\ndata = dict(type='text')\n",
        f"{MODEL}if __name__ == '__main__':\n    pass\n",
    ],
)
def test_a_config_of_ours_in_python_keeps_its_findings(text: str) -> None:
    found = lint(load_text(text, "a.py"), 8)
    assert has_errors(found)
    assert not {"CFG128", "CFG129"} & {item.code for item in found}


# Programs ---------------------------------------------------------------------------------------------------------

NET = "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n    pass\n"
MAIN = "if __name__ == '__main__':\n    main()\n"
PROGRAMS = [
    (f"{NET}import dslpar\ndef main():\n    args = dslpar.arguments(config='cfg.py')\n{MAIN}", 9, "cfg.py"),
    (
        f"{NET}import dslpar\nmodel = Net()\nengine = dslpar.initialize('conf/gpt.yaml', model=model)\n",
        8,
        "conf/gpt.yaml",
    ),
    ("import colossalai\ncolossalai.launch_from_torch(config='cfg.py')\n", 2, "cfg.py"),
    (
        "import argparse\nimport dslpar\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--config', default='cfg.py')\nrun = dslpar.start(parser.parse_args().config)\n",
        3,
        "cfg.py",
    ),
    ("import dslpar\nrun = dslpar.start(path)\n", 2, "CONFIG"),
    (NET, 4, ""),
    (f"def main():\n    print(1)\n{MAIN}", 3, ""),
    ("import deepspeed\nengine, *_ = deepspeed.initialize(model=net, config='ds.json')\n", 2, ""),
]


@pytest.mark.parametrize(("text", "line", "config"), PROGRAMS)
def test_a_program_has_one_finding_that_names_its_config(tmp_path: Path, text: str, line: int, config: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    (found,) = lint(load(str(path)), 8)
    assert (found.code, found.location.line) == ("CFG129", line)
    assert found.message.startswith("this is a Python program")
    if config:
        expected = str(tmp_path / config) if config != "CONFIG" else config
        assert found.help == f"choose its config: dslpar lint {expected} --program"
    elif "import deepspeed" in text:
        assert found.help == "of DeepSpeed, dslpar reads the JSON file that the program gives to deepspeed.initialize"
    else:
        assert found.help == "choose a config, which has sections such as model = dict(...)"


def test_import_names_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAMS[0][0])
    with pytest.raises(SystemExit) as ended:
        main(["import", str(path)])
    assert ended.value.code == 2
    assert "CFG129 python-program" in capsys.readouterr().err


def test_a_section_makes_a_file_with_definitions_a_config() -> None:
    assert {"model", "parallel"} <= set(SECTIONS)
    assert program_in(NET, "train.py", ["model"]) is None
    assert program_in(NET, "train.py", ["data"]) is None
    assert program_in(NET, "train.yaml", []) is None
