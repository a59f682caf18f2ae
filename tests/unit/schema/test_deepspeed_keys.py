"""The list of DeepSpeed's keys, against the installed DeepSpeed; each key is in one of dslpar's classes."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import deepspeed
import pytest
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from dslpar.schema import deepspeed_policy
from dslpar.schema import sections as schema_sections
from dslpar.schema.deepspeed_policy import (
    ALL_REMOVED,
    BOUNDS,
    DEPRECATED,
    KEYS,
    LR_SCHEDULER_DEFAULTS,
    OPTIMIZER_DEFAULTS,
    OTHER_NAMES,
    VERSION,
)
from dslpar.schema.torch_optimizers import OPTIMIZERS as OPTIMIZER_ROWS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS as LR_SCHEDULER_ROWS
from dslpar.schema.types import TYPES
from tools import deepspeed_keys

MODELS: Mapping[str, type] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "zero_optimization.zenflow": ZenFlowConfig,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "csv_monitor": CSVConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
}
CONSTANTS = (
    "deepspeed.runtime.constants",
    "deepspeed.profiling.constants",
    "deepspeed.comm.constants",
    "deepspeed.autotuning.constants",
    "deepspeed.runtime.swap_tensor.constants",
    "deepspeed.runtime.model_checkpointing.constants",
    "deepspeed.runtime.data_pipeline.constants",
    "deepspeed.runtime.activation_checkpointing.config",
)

# Against the installed DeepSpeed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated() -> str:
    return deepspeed_keys.text()


@pytest.fixture(scope="module")
def recorded() -> str:
    return deepspeed_keys.TARGET.read_text()


def test_the_recorded_list_is_what_the_installed_deepspeed_reads(generated: str, recorded: str) -> None:
    """Otherwise run python tools/deepspeed_keys.py, and add each new key to deepspeed_policy."""
    assert deepspeed_keys.difference(recorded, generated) == ""


def test_a_key_that_is_missing_would_be_seen(generated: str, recorded: str) -> None:
    said = deepspeed_keys.difference(
        recorded.replace('"profile_step": ["int", 1]', '"profile_step": ["int", 2]'), generated
    )
    assert '-      "profile_step": ["int", 2],' in said
    assert '+      "profile_step": ["int", 1],' in said


def test_another_version_is_said_first(generated: str, recorded: str) -> None:
    said = deepspeed_keys.difference(recorded.replace(VERSION, "0.18.0"), generated)
    assert said.startswith("recorded from another DeepSpeed: 0.18.0, installed: ")
    assert deepspeed.__version__ in said.splitlines()[0]


def test_check_tells_by_its_status(monkeypatch: pytest.MonkeyPatch, tmp_path: object, generated: str) -> None:
    said: list[str] = []
    monkeypatch.setattr(deepspeed_keys, "text", lambda: generated)
    assert deepspeed_keys.main(["--check"], said.append) == 0
    monkeypatch.setattr(deepspeed_keys, "text", lambda: generated.replace("profile_step", "profile_steps"))
    assert deepspeed_keys.main(["--check"], said.append) == 1
    assert "python tools/deepspeed_keys.py" in said[0]


def test_watching_leaves_deepspeed_and_the_log_as_they_were(generated: str) -> None:
    assert not logging.root.manager.disable
    assert DeepSpeedFP16Config(enabled=True).enabled is True
    assert deepspeed.runtime.config.get_scalar_param({"a": 1}, "a", 2) == 1


@pytest.mark.parametrize(("section", "model"), MODELS.items(), ids=list(MODELS))
def test_fields_of_models(section: str, model: type) -> None:
    """By pydantic alone, without the script: every field is listed, by its name or as another name of a listed one."""
    names = {field.alias or name for name, field in model.model_fields.items()}  # type: ignore[attr-defined]
    others = {name.rpartition(".")[2] for name in DEPRECATED if name.rpartition(".")[0] == section}
    assert set(KEYS[section]) | others == names
    for name, (type_, default) in KEYS[section].items():
        if type_ != "section":
            field = next(field for key, field in model.model_fields.items() if name in (key, field.alias))  # type: ignore[attr-defined]
            value = field.get_default(call_default_factory=True)
            assert default == getattr(value, "value", value), name


@pytest.mark.parametrize("module", CONSTANTS)
def test_no_constant_is_missing(module: str) -> None:
    """By DeepSpeed's constants alone: a name with a default is a key, and must be in the list."""
    known = {name.rpartition(".")[2] for name in (*ALL_REMOVED, *DEPRECATED, *OTHER_NAMES)}
    known |= {name for section in KEYS.values() for name in section}
    constants = vars(importlib.import_module(module))
    names = {value for name, value in constants.items() if f"{name}_DEFAULT" in constants}
    assert names
    assert names <= known


def test_arguments_of_deepspeeds_classes() -> None:
    """dslpar's tables have the types of the arguments, each of which must exist in DeepSpeed."""
    for ours, theirs in ((OPTIMIZER_ROWS, OPTIMIZER_DEFAULTS), (LR_SCHEDULER_ROWS, LR_SCHEDULER_DEFAULTS)):
        rows = {name: row for name, row in ours.items() if row.dotted.startswith("deepspeed.")}  # type: ignore[attr-defined]
        assert set(rows) == set(theirs)
        for name, row in rows.items():
            assert set(row.args) <= set(theirs[name]), name


# dslpar's classes ---------------------------------------------------------------------------------------------------


def once(*classes: object) -> Iterator[str]:
    """Yield the names that are in more than one of the classes."""
    counts = Counter(name for names in classes for name in set(names))  # type: ignore[call-overload]
    return (name for name, count in counts.items() if count > 1)


def test_each_key_of_the_top_stands_in_one_class() -> None:
    classes = (deepspeed_policy.TOP, deepspeed_policy.OURS, deepspeed_policy.REMOVED, deepspeed_policy.UNSUPPORTED)
    assert list(once(*classes)) == []
    assert {name for names in classes for name in names} == {
        *KEYS[""],
        *(name for name in ALL_REMOVED if "." not in name),
    }


def test_each_key_of_zero_stands_in_one_class() -> None:
    prefix = "zero_optimization."
    others = [
        name.removeprefix(prefix) for name in (*DEPRECATED, *OTHER_NAMES, *ALL_REMOVED) if name.startswith(prefix)
    ]
    classes = (deepspeed_policy.ZERO, deepspeed_policy.UNSUPPORTED_ZERO, others)
    assert list(once(*classes)) == []
    assert {*deepspeed_policy.ZERO, *deepspeed_policy.UNSUPPORTED_ZERO} == set(KEYS["zero_optimization"])
    for name in {*others, *deepspeed_policy.UNSUPPORTED_ZERO}:
        assert deepspeed_policy.explain(f"zero.{name}") is not None, name


def test_precision_has_all_but_enabled() -> None:
    for section, known in (("bf16", deepspeed_policy.BF16), ("fp16", deepspeed_policy.FP16)):
        assert {*known, "enabled"} == set(KEYS[section])
    assert KEYS["bf16"] == KEYS["bfloat16"]


def passed() -> dict[str, str]:
    """Return the type of every key that passes through, by dotted path."""
    sections = {
        "zero_optimization": deepspeed_policy.ZERO,
        "bf16": deepspeed_policy.BF16,
        "fp16": deepspeed_policy.FP16,
    }
    sections |= {f"zero_optimization.{name}": deepspeed_policy.types_in(f"zero_optimization.{name}") for name in NESTED}
    below = [path for path in KEYS if path.partition(".")[0] in deepspeed_policy.TOP]
    made = {path: deepspeed_policy.types_in(path) for path in below} | sections
    return {f"{path}.{name}": type_ for path, known in made.items() for name, type_ in known.items()} | {
        name: deepspeed_policy.type_of(name) for name in deepspeed_policy.TOP
    }


NESTED = ("offload_param", "offload_optimizer", "leaf_module")


@pytest.mark.parametrize(("key", "type_"), passed().items(), ids=list(passed()))
def test_types_hold_deepspeeds_defaults(key: str, type_: str) -> None:
    """A dslpar type that refuses DeepSpeed's default would be wrong."""
    row = deepspeed_policy.known(key)
    assert row is not None
    if type_ == "Section" or type_ in deepspeed_policy.TABLES:
        assert row[0] == "section"
        return
    assert type_ in TYPES
    default = row[1]
    if default is not None:
        assert type(default) in TYPES[type_].python_types
        assert TYPES[type_].holds(default)


def test_what_stands_by_hand_is_of_a_key() -> None:
    narrower = deepspeed_policy._NARROWER
    assert [key for key in narrower if deepspeed_policy.known(key) is None] == []
    assert set(BOUNDS.values()) & set(deepspeed_policy._BY_BOUNDS) == set(deepspeed_policy._BY_BOUNDS)


def test_of_an_unknown_key_nothing_is_known() -> None:
    assert deepspeed_policy.known("zero_optimization.stge") is None
    assert deepspeed_policy.known("nothing.at.all") is None
    assert deepspeed_policy.explain("zero.stge") is None
    assert deepspeed_policy.explain("optimizer.alhpa") is None


def test_an_offload_names_its_device() -> None:
    for name in ("offload_param", "offload_optimizer"):
        assert deepspeed_policy.known(f"zero_optimization.{name}.device") == ("str", "none"), "so a device must be said"


@pytest.mark.parametrize(
    ("section", "ours"),
    [
        ("csv_monitor", schema_sections.FileMonitor),
        ("tensorboard", schema_sections.FileMonitor),
        ("wandb", schema_sections.WandbMonitor),
    ],
)
def test_monitors(section: str, ours: type) -> None:
    """dslpar's keys are DeepSpeed's, and `offline`, which is for W&B."""
    assert {field.name for field in dataclasses.fields(ours)} - {"offline"} == set(KEYS[section])
