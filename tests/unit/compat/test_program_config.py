"""A program's config, as the program and dslpar read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.compat.colossalai.amp import AMP_TYPE
from dslpar.compat.colossalai.zero import TensorShardStrategy
from dslpar.compat.program_config import read, with_overrides
from dslpar.core.errors import DslparError
from dslpar.language.load import Config
from dslpar.linter import check

SEED = 1024
"""ColossalAI's default of `launch`."""
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"parallel": {"pipeline": 2}, "NUM_EPOCHS": 3}, {"parallel": {"pipeline": 2}}),
    (
        {"fp16": {"mode": AMP_TYPE.TORCH}},
        {
            "precision": {"dtype": "fp16", "initial_scale_power": 16, "loss_scale_window": 2000},
            "train": {"seed": SEED},
            "zero": {"stage": 1},
        },
    ),
    (
        {"clip_grad_norm": 1.0, "gradient_accumulation": 4},
        {"train": {"clip_grad_norm": 1.0, "seed": SEED}, "batch": {"accumulation": 4}},
    ),
    (
        {"NUM_MICRO_BATCHES": 4, "parallel": {"pipeline": 2}},
        {"batch": {"accumulation": 4}, "parallel": {"pipeline": 2}, "train": {"seed": SEED}},
    ),
    ({"NUM_MICRO_BATCHES": 4, "parallel": {"pipeline": 1}}, {"parallel": {"pipeline": 1}, "train": {"seed": SEED}}),
    (
        {"zero": {"model_config": {"shard_strategy": TensorShardStrategy()}, "optimizer_config": {}}},
        {
            "zero": {"stage": 3, "reduce_bucket_size": 25 * 2**20 // 2},  # 25 MiB of fp16
            "precision": {
                "dtype": "fp16",
                "initial_scale_power": 32,
                "min_loss_scale": 1,
                "loss_scale_window": 1000,
                "hysteresis": 2,
            },
            "train": {"seed": SEED},
        },
    ),
    ({"model": {"type": torch.nn.Linear}, "optimizer": {"type": torch.optim.Adam}, "seed": 7}, {"train": {"seed": 7}}),
    ({"dataset": {"root": "x"}, "lr_drop": 200, "train": {"steps": 5}}, {"train": {"steps": 5, "seed": SEED}}),
]


@pytest.mark.parametrize(("values", "sections"), ROWS)
def test_sections_of_a_dict(values: dict[str, Any], sections: dict[str, Any]) -> None:
    config = read(values)
    assert config.source == sections
    assert config.values == values


def test_a_file_is_run_where_the_program_needs_its_objects(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        "from pathlib import Path\nfrom torch.nn import Linear\n"
        "model = dict(type=Linear, in_features=2, out_features=3)\nOUTPUT = Path('x')\n"
    )
    config = read(str(tmp_path / "config.py"))
    assert config.values.model.pop("type")(**config.values.model).out_features == 3
    assert (config.values.OUTPUT, config.source) == (Path("x"), {"train": {"seed": SEED}})


def test_dslpar_reads_its_own_config_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("EPOCHS = 2\nbatch = dict(micro_size=4)\n")
    assert read(path).source == path
    assert read(path).values.EPOCHS == 2


def test_a_key_that_colossalai_ignores_too_is_noted() -> None:
    (note,) = read({"gradient_clipping": 2.0}).notes
    assert note == "gradient_clipping has no effect: ColossalAI reads clip_grad_norm"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fp16": {"mode": "NAIV"}}, "unknown AMP_TYPE"),
        ({"clip_grad_nrm": 1.0}, "did you mean 'clip_grad_norm'"),
        ({"gradient_accumulation": "4"}, "not a whole number"),
    ],
)
def test_a_key_that_needs_a_decision_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(DslparError, match=text):
        read(values)


def test_a_loaded_config_keeps_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text("batch = dict(global_size=8)\nNUM_EPOCHS = 3\ntrain = dict(steps=5)\n")
    loaded = check.load(str(path), ["train.steps=7"])
    made = read(loaded)
    assert made.source is loaded
    assert made.values.train.steps == 7
    assert made.values.NUM_EPOCHS == 3
    more = with_overrides(loaded, ["train.seed=3"])
    assert isinstance(more, Config)
    assert more.root.plain()["train"] == {"steps": 7, "seed": 3}
    assert with_overrides(loaded, []) is loaded
