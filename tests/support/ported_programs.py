"""The 36 launch programs of ColossalAI-Examples, by what becomes of each, and a run of those that dslpar runs.

A program of `colossalai_programs` has the shape of the original: its imports, its calls and their order, on small data
and models. `run` changes its import lines, as docs/porting.md does, and calls its `main`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT

FOLDER = Path(__file__).with_name("colossalai_programs")
PORTING = ROOT / "docs" / "porting.md"


class Program(NamedTuple):
    """A program that runs."""

    name: str
    ranks: int = 1
    arguments: tuple[str, ...] = ()
    tensor: str = ""
    """Another config's tensor section."""


class Refused(NamedTuple):
    """A program whose import line is refused, with a part of what is to be written."""

    line: str
    instead: str


_COLO_TENSOR = "layers of colossalai.nn"
KINDS: Mapping[str, Program | Refused] = {
    "features/amp/train.py": Program("features_amp"),
    "features/colotensor/gpt_megatron.py": Refused("from colossalai.tensor import ShardSpec", _COLO_TENSOR),
    "features/gradient_accumulation/train.py": Program("features_gradient_accumulation"),
    "features/gradient_clipping/train.py": Program("features_gradient_clipping"),
    "features/pipeline_parallel/resnet.py": Program("features_pipeline_parallel_resnet", ranks=2),
    "features/tensor_parallel/run.py": Program("features_tensor_parallel", ranks=2),
    "features/zero/train.py": Program("features_zero_v1"),
    "features/zero/train_v2.py": Program("features_zero_v2"),
    "image/detr/main.py": Program("image_detr"),
    "image/mae/main_pretrain.py": Program("image_mae"),
    "image/mlpmixer/train_data.py": Program("image_mlpmixer"),
    "image/mlpmixer/train_pipline.py": Program("image_mlpmixer_pipeline", ranks=2),
    "image/moe/train.py": Refused("from colossalai.context import MOE_CONTEXT", "dslpar.layers.Mixture"),
    "image/resnet/auto_parallel/auto_parallel_demo.py": Refused(
        "from colossalai.auto_parallel.tensor_shard.solver.solver import Solver", "dslpar plan CONFIG"
    ),
    "image/resnet/train.py": Program("image_resnet"),
    "image/simclr/train_linear.py": Program("image_simclr_linear"),
    "image/simclr/train_simclr.py": Program("image_simclr_train"),
    "image/vilt/run.py": Program("image_vilt"),
    "image/vision_transformer/colo_vit/train.py": Refused("from colossalai.tensor import ComputePattern", _COLO_TENSOR),
    "image/vision_transformer/data_parallel/train.py": Program("vit_data_parallel"),
    "image/vision_transformer/data_parallel/train_with_cifar10.py": Program("vit_data_parallel_cifar10", ranks=2),
    "image/vision_transformer/hybrid_parallel/train_with_cifar10.py": Program("vit_hybrid_cifar10", ranks=2),
    "image/vision_transformer/hybrid_parallel/train_with_engine.py": Program("vit_hybrid_engine", ranks=2),
    "image/vision_transformer/hybrid_parallel/train_with_trainer.py": Program("vit_hybrid_trainer", ranks=2),
    "language/DeepNet/train_deepnet_decoder.py": Program("language_deepnet", ranks=2, arguments=("--from_torch",)),
    "language/bert/colotensor/train.py": Refused("from colossalai.nn._ops import *", _COLO_TENSOR),
    "language/bert/hybrid_parallel/run.py": Program("language_bert_hybrid"),
    "language/bert/sequene_parallel/train.py": Refused(
        "from colossalai.nn.layer.parallel_sequence import RingQK", "dslpar.layers.Attention"
    ),
    "language/bert/zero/finetuning/glue/main.py": Program("language_bert_glue"),
    "language/bert/zero/pretraining/run_pretraining.py": Program("language_bert_pretraining"),
    "language/gpt/train_gpt.py": Program("language_gpt", arguments=("--from_torch",)),
    "language/knowledge_graph_embedding/train.py": Program("language_knowledge_graph"),
    "language/opt/run_clm.py": Program("language_opt"),
    "language/roberta/pretraining/run_pretraining.py": Program("language_roberta"),
    "utils/checkpoint/save_engine.py, load.py": Program("utils_save_engine"),
    "utils/checkpoint/save_trainer.py": Program("utils_save_trainer"),
}
"""Program of ColossalAI-Examples -> what becomes of it by its import lines alone."""
RUNNING = [kind for kind in KINDS.values() if isinstance(kind, Program)]
EACH_TIME = {
    *("features_amp", "features_gradient_accumulation", "image_mlpmixer", "image_vilt", "vit_data_parallel"),
    *("language_gpt", "features_zero_v2", "features_pipeline_parallel_resnet", "vit_data_parallel_cifar10"),
}
"""Programs that `make test` runs; `make prove` runs the others too."""
WITH_TRAINER = [Program(name, arguments=("--use_trainer",)) for name in ("features_amp", "image_resnet")]
"""The other branch of programs that have two."""
REFUSED = [kind for kind in KINDS.values() if isinstance(kind, Refused)]


def with_import_lines(text: str) -> str:
    """Change a program's import lines by the command of docs/porting.md."""
    (command,) = re.findall(r"^sed -E -i ('.*') \S", PORTING.read_text(), re.MULTILINE)
    changed = subprocess.run(["sed", "-E", command.strip("'")], input=text, capture_output=True, text=True, check=True)
    return changed.stdout


def prepare(programs: Sequence[Program], folder: Path) -> None:
    """Write each program with its changed import lines, and its config."""
    for program in programs:
        here = folder / program.name
        here.mkdir()
        text = with_import_lines((FOLDER / f"{program.name}.py").read_text())
        (here / "train.py").write_text(text)
        config = re.search(r'^CONFIG = """\n(.*?)"""$|^CONFIG = "(.*)"$', text, re.MULTILINE | re.DOTALL)
        written = "" if config is None else config[1] or config[2]
        if program.tensor:
            written = re.sub(r"tensor=dict\(.*?\)", f"tensor=dict({program.tensor})", written)
        (here / "config.py").write_text(written)


def run(programs: Sequence[Program], folder: Path) -> dict[str, list[float]]:
    """Run programs one after the other on this rank; return what each `main` returns, by name."""
    results = {}
    for program in programs:
        os.chdir(folder / program.name)
        sys.argv = ["train.py", "--config", "./config.py", *program.arguments]
        names: dict[str, Any] = {"__name__": program.name}
        exec(compile(Path("train.py").read_text(), str(folder / program.name / "train.py"), "exec"), names)
        results[program.name] = names["main"]()
    return results
