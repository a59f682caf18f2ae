"""TrainingArguments, and changed recipes, in Python programs: read with what is set around them, never run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.migrate.foreign_lint import lint_text
from dslpar.migrate.sources import read_text

PROGRAM = """\
import argparse
import os
from transformers import Trainer, TrainingArguments

LR = 3e-4

def main():
    args = argparse.ArgumentParser().parse_args()
    ds = {"zero_optimization": {"stage": 2}}
    ds["gradient_clipping"] = 1.0
    common = dict(output_dir=os.path.join("out", args.name), learning_rate=LR)
    unused = compute_something()
    if args.big:
        targs = TrainingArguments(**common, per_device_train_batch_size=args.size, bf16=True, deepspeed=ds)
        Trainer(model=None, args=targs).train()

if __name__ == "__main__":
    main()
"""
SFT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
training_args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    learning_rat=2e-5,
    fp16=True,
    bf16=True,
    deepspeed="ds.json",
)
SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=training_args, train_dataset=dataset).train()
"""


def test_arguments_have_the_values_that_the_program_sets() -> None:
    source = read_text(PROGRAM, "train.py")
    assert source.name == "training_arguments"
    assert source.config.root.plain() == {
        "learning_rate": 3e-4,
        "bf16": True,
        "deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0},
    }
    # What only the run knows is unknown, and no default takes its place.
    assert source.config.unknown == {"output_dir", "per_device_train_batch_size"}
    assert source.config.at("deepspeed.zero_optimization.stage").line == 9


def test_a_file_that_the_arguments_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (tmp_path / "train.py").write_text(SFT)
    source = read_text(SFT, str(tmp_path / "train.py"))
    assert source.config.root.plain()["deepspeed"] == {"zero_optimization": {"stage": 3}}
    gone = read_text(SFT, "elsewhere/train.py")
    assert [name for _, name in gone.missing] == ["ds.json"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from transformers import TrainingArguments\nTrainingArguments = 1\n", "no call"),
        ("class TrainingArguments: ...\nargs = TrainingArguments(bf16=True)\n", "neither package"),
        ("from transformers import HfArgumentParser, TrainingArguments\np = HfArgumentParser(TrainingArguments)\n", ""),
        ("from transformers import TrainingArguments\nargs = TrainingArguments(\n", "no Python"),
    ],
)
def test_other_programs_have_no_arguments(text: str, why: str) -> None:
    assert read_text(text, "train.py").name != "training_arguments", why


def test_several_calls_are_named_and_chosen() -> None:
    text = (
        "from transformers import TrainingArguments\n"
        "first = TrainingArguments(max_steps=1)\n"
        "class Late:\n"
        "    def made(self):\n"
        "        return TrainingArguments(max_steps=2)\n"
    )
    source = read_text(text, "train.py")
    assert source.config.root.plain() == {"max_steps": 1}
    assert any("--recipe TrainingArguments" in item.help for item in source.config.findings)
    assert read_text(text, "train.py", recipe="TrainingArguments").config.root.plain() == {"max_steps": 2}


def test_findings_are_at_the_programs_lines() -> None:
    found = {(item.code, item.location.line) for item in lint_text(SFT, "train.py", 8)}
    assert {("FRN201", 9), ("FRN204", 8)} <= found


def test_commands_read_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "train.py", tmp_path / "cfg.py"
    path.write_text(SFT.replace("learning_rat=", "learning_rate=").replace("    fp16=True,\n", ""))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    assert main(["lint", str(path), "--world-size", "8"]) == 0
    assert "its training_args are linted in its place" in capsys.readouterr().out
    main(["import", str(path), "-o", str(made)])
    assert "stage=3" in made.read_text()
    assert "micro_size=4" in made.read_text()


HEAD = "import os\nfrom transformers import Trainer, TrainingArguments\n"


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        # Names that only the run knows: parameters, attributes of objects, the environment.
        (
            "def f(args, lr=1):\n"
            "    return TrainingArguments(max_steps=args.n, learning_rate=lr, optim=os.environ['O'])\n",
            {},
            {"max_steps", "learning_rate", "optim"},
        ),
        # A branch, a block or a loop may have changed an earlier value; so may a call.
        ("n = 1\nif os.cpu_count():\n    n = 2\nTrainingArguments(max_steps=n)\n", {}, {"max_steps"}),
        ("n = 1\nwith open('n') as f:\n    n = int(f.read())\nTrainingArguments(max_steps=n)\n", {}, {"max_steps"}),
        ("n = 1\nfor n in (1, 2):\n    TrainingArguments(max_steps=n)\n", {}, {"max_steps"}),
        ("n = 1\nfor _ in 'ab':\n    TrainingArguments(max_steps=n)\n    n += 1\n", {}, {"max_steps"}),
        ("n = 1\nn, m = os.sizes()\nTrainingArguments(max_steps=n)\n", {}, {"max_steps"}),
        ("n = 1\nrows = [TrainingArguments(max_steps=n) for n in (2, 3)]\n", {}, {"max_steps"}),
        ("n = 1\nn *= 8\nTrainingArguments(max_steps=n)\n", {"max_steps": 8}, set()),
        # A dict that the call reads.
        (
            "kw = dict(bf16=True)\nkw.update(bf16=False, fp16=True)\nTrainingArguments(**kw)\n",
            {"bf16": False, "fp16": True},
            set(),
        ),
        # Functions of the file: what a loop sets, and a condition of a return.
        (
            "def n():\n    n = 1\n    for _ in 'ab':\n        n = n * 2\n    return n\n"
            "TrainingArguments(max_steps=n())\n",
            {},
            {"max_steps"},
        ),
        (
            "def n():\n    if os.cpu_count():\n        return 1\n    return 2\nTrainingArguments(max_steps=n())\n",
            {},
            {"max_steps"},
        ),
        # A constant below a function, and one whose last value is unknown.
        (
            "N = 1\nN = int(os.environ['N'])\n"
            "def f():\n    return TrainingArguments(max_steps=N, save_steps=M)\nM = 2\n",
            {"save_steps": 2},
            {"max_steps"},
        ),
        # Changes after the call count, until the variable is another object.
        (
            "a = TrainingArguments(fp16=True, max_steps=1)\na.fp16 = False\na.bf16 = True\n"
            "if os.cpu_count():\n    a.max_steps = 2\na = None\na.seed = 3\n",
            {"fp16": False, "bf16": True},
            {"max_steps"},
        ),
        (
            "class Run:\n    def __init__(self):\n        self.args = TrainingArguments(max_steps=1)\n"
            "        self.args.max_steps = 5\n",
            {"max_steps": 5},
            set(),
        ),
    ],
)
def test_only_what_is_certain_is_known(text: str, known: dict[str, object], unknown: set[str]) -> None:
    source = read_text(HEAD + text, "train.py")
    assert source.name == "training_arguments"
    assert (source.config.root.plain(), source.config.unknown, source.is_partial) == (known, unknown, False)


def test_keys_of_an_unknown_mapping_are_missed_by_no_rule() -> None:
    text = (
        f"{HEAD}import yaml\nconf = yaml.safe_load(open('c'))\nTrainingArguments(**conf, load_best_model_at_end=True)\n"
    )
    found = lint_text(text, "train.py", 8)
    # Without the mapping, load_best_model_at_end would be refused: its strategies differ.
    assert {item.code for item in found} == {"FRN205"}
    assert any("further keys" in item.message for item in found)


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import TrainingArguments as TA\nTA(fp16=True, bf16=True)\n",
        "import transformers as hf\nhf.TrainingArguments(fp16=True, bf16=True)\n",
        "import trl\ntrl.DPOConfig(fp16=True, bf16=True)\n",
        "from trl import *\nDPOConfig(fp16=True, bf16=True)\n",
        "from trl import DPOConfig\ntry:\n    pass\nexcept OSError:\n    DPOConfig(fp16=True, bf16=True)\n",
    ],
)
def test_the_classes_have_other_names(text: str) -> None:
    assert "FRN201" in {item.code for item in lint_text(text, "train.py")}


def test_a_path_beside_the_program_is_joined(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    text = (
        f"{HEAD}HERE = os.path.dirname(os.path.abspath(__file__))\n"
        "a = TrainingArguments(deepspeed=os.path.join(HERE, 'ds.json'))\n"
    )
    source = read_text(text, str(tmp_path / "train.py"))
    assert source.config.root.plain() == {"deepspeed": {"zero_optimization": {"stage": 3}}}


def test_an_unknown_deepspeed_file_is_told() -> None:
    text = f"{HEAD}import sys\na = TrainingArguments(deepspeed=sys.argv[1], bf16=True)\n"
    found = lint_text(text, "train.py", 8)
    assert any("only the run knows what deepspeed is" in item.message for item in found)
    script = (
        "deepspeed t.py --output_dir o --per_device_train_batch_size 4 --save_steps 9 --deepspeed $DS --bf16 True\n"
    )
    found = lint_text(script, "train.sh", 8)
    assert any("only the run knows what --deepspeed is" in item.message for item in found)


def test_trls_own_keys_are_no_mistakes() -> None:
    text = "from trl import CPOConfig\nCPOConfig(alpha=1.0, generation_kwargs={'top_k': 3, 'num_beams': 2})\n"
    assert "FRN204" not in {item.code for item in lint_text(text, "train.py")}


def test_keys_of_a_recipes_own_class_are_no_mistakes() -> None:
    text = (
        "from megatron.bridge.recipes.wan import wan\ncfg = wan()\ncfg.dataset.path = 'a'\n"
        "cfg.model.freeze_audio_model = True\ncfg.model.tensor_model_paralel_size = 2\n"
    )
    found = [item for item in lint_text(text, "train.py") if item.code == "FRN204"]
    assert [item.location.line for item in found] == [5]


def test_all_calls_are_linted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"{HEAD}def one():\n    args = TrainingArguments(max_steps=1)\n"
        "def two():\n    args = TrainingArguments(fp16=True, bf16=True)\nTrainer()\n"
    )
    assert main(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    assert "its args:4 and args:6 are linted" in out
    assert re.search(r"train.py:6:\d+: FRN201", out)
    main(["import", str(path), "--recipe", "args:6"])
    assert "fp16" in capsys.readouterr().err


BRIDGE = """\
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.pretrain import pretrain

def main(tp):
    cfg = llama3_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.sequence_parallel = True
    cfg.model.expert_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = tp
    cfg.train.train_itres = 50
    pretrain(cfg, forward_step)

if __name__ == "__main__":
    main(2)
"""


def test_changes_of_a_bridge_recipe_are_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(BRIDGE)
    source = read_text(BRIDGE, str(path))
    assert (source.name, source.is_partial) == ("megatron_bridge", True)
    assert source.config.unknown == {"model.pipeline_model_parallel_size"}
    assert main(["lint", str(path), "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "a Python program of Megatron-Bridge, and not a config; what it changes in its recipe (cfg) is linted" in out
    assert re.search(r"train.py:7:\d+: FRN202", out)  # without tensor parallelism it has no effect
    assert "train.py:10:5: FRN204" in out
    assert "num_moe_experts must be set" not in out  # the recipe may set it
    for command in ("show", "plan"):
        main([command, str(path), "--world-size", "8"])
        assert "converted in memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("from accelerate import Accelerator\na = Accelerator(mixed_precision='fp16')\n", "Accelerate"),
        ("from transformers import HfArgumentParser\np = HfArgumentParser(1)\n", "transformers"),
        (
            "from megatron.bridge.training.pretrain import pretrain\nif __name__ == '__main__':\n    1\n",
            "Megatron-Bridge",
        ),
    ],
)
def test_a_program_without_settings_is_named(
    text: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert main(["lint", str(tmp_path / "train.py")]) == 1
    out = capsys.readouterr().out
    assert f"a Python program of {title}, and not a config" in out
    assert f"of {title}, dslpar reads" in out
