"""Our lists of DeepSpeed's keys, held against the DeepSpeed that is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import deepspeed.runtime.constants as constants
import pytest
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from dslpar import ds_keys, spec

DEPRECATED = {
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "stage3_gather_fp16_weights_on_model_save",
}


OFFLOAD = [
    (DeepSpeedZeroOffloadOptimizerConfig, ds_keys.OFFLOAD_OPTIMIZER),
    (DeepSpeedZeroOffloadParamConfig, ds_keys.OFFLOAD_PARAM),
]


def names_of(model: type) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}  # type: ignore[attr-defined]


def test_zero() -> None:
    assert set(ds_keys.ZERO) == names_of(DeepSpeedZeroConfig) - DEPRECATED


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (DeepSpeedZeroConfig, ds_keys.ZERO),
        (DeepSpeedBF16Config, ds_keys.BF16),
        (DeepSpeedFP16Config, ds_keys.FP16),
        *OFFLOAD,
    ],
)
def test_types(model: type, kinds: Mapping[str, str]) -> None:
    """A kind of ours for each type of theirs."""
    types = {
        "Flag": ("bool",),
        "Size": ("int",),
        "Rate": ("float",),
        "Table": ("Config",),
        "ZeroStage": ("ZeroStageEnum",),
        "OffloadParam": ("OffloadParamConfig",),
        "OffloadOptimizer": ("OffloadOptimizerConfig",),
        "Device": ("OffloadDeviceEnum",),
        "Text": ("Path",),
        "Share": ("float",),
    }
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        key = field.alias or name
        if key in kinds:
            assert any(word in str(field.annotation) for word in types[kinds[key]]), key


@pytest.mark.parametrize(("model", "kinds"), OFFLOAD)
def test_offload(model: type, kinds: Mapping[str, str]) -> None:
    assert set(kinds) == names_of(model)
    assert model().device == "none", "so a device must be said"


@pytest.mark.parametrize(
    ("model", "ours"),
    [(CSVConfig, spec.FileMonitor), (TensorBoardConfig, spec.FileMonitor), (WandbConfig, spec.WandbMonitor)],
)
def test_monitors(model: type, ours: type) -> None:
    """Ours are DeepSpeed's, and `offline`, which is W&B's own."""
    assert {field.name for field in dataclasses.fields(ours)} - {"offline"} == names_of(model)


def test_precision() -> None:
    assert {*ds_keys.BF16, "enabled"} == names_of(DeepSpeedBF16Config)
    assert {*ds_keys.FP16, "enabled"} == names_of(DeepSpeedFP16Config)


def test_top_level_keys_occur_in_deepspeed() -> None:
    """DeepSpeed keeps no list of its top-level keys; each of ours must at least be a string of its source."""
    root = Path(constants.__file__).parents[1]
    source = "\n".join(path.read_text(errors="replace") for path in root.rglob("*.py"))
    for name in (*ds_keys.TOP, *ds_keys.OURS, *ds_keys.REMOVED, *ds_keys.UNSUPPORTED):
        assert f'"{name}"' in source or f"'{name}'" in source, name


def test_each_key_stands_in_one_list() -> None:
    lists = [*ds_keys.TOP, *ds_keys.OURS, *ds_keys.REMOVED, *ds_keys.UNSUPPORTED]
    assert len(lists) == len(set(lists))
