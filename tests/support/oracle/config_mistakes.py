"""Mistakes of config authors: each function breaks a legal config in one place, and may change the world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from dslpar.schema import deepspeed_policy as ds_keys
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.types import TENSOR_MODES
from tests.support.oracle import values

Sections = dict[str, Any]
Breaking = Callable[[Random, Sections, int], "int | None"]


def _places(section: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key at any depth."""
    if isinstance(section, dict):
        for key, value in section.items():
            yield (*path, key)
            yield from _places(value, (*path, key))


def _home(sections: Sections, path: tuple[Any, ...]) -> Sections:
    for key in path[:-1]:
        sections = sections[key]
    return sections


def _misspelt(rng: Random, sections: Sections, world: int) -> None:
    """Leave out a letter of a key, or swap two."""
    path = rng.choice([path for path in _places(sections) if len(path[-1]) > 3])
    home, key = _home(sections, path), path[-1]
    at = rng.randrange(1, len(key) - 1)
    wrong = rng.choice((key[:at] + key[at + 1 :], key[:at] + key[at + 1] + key[at] + key[at + 2 :]))
    value = home.pop(key)
    home[wrong] = value


def _other_value(rng: Random, sections: Sections, world: int) -> None:
    """Put a value of another kind."""
    path = rng.choice(list(_places(sections)))
    _home(sections, path)[path[-1]] = rng.choice(values.WRONG)


def _other_option(rng: Random, sections: Sections, world: int) -> None:
    """Give an option of DeepSpeed's sections a value of another kind."""
    name, keys = rng.choice((("zero", ds_keys.ZERO), ("precision", {**ds_keys.BF16, **ds_keys.FP16})))
    shorthand = {"zero": "stage", "precision": "dtype"}[name]
    _mapping(sections, name, shorthand)[rng.choice(list(keys))] = rng.choice(values.WRONG)


def _any_raw(rng: Random, sections: Sections, world: int) -> None:
    """Give a raw key a value of another kind."""
    _mapping(sections, "deepspeed")[rng.choice(ds_keys.TOP)] = rng.choice(values.WRONG)


def _not_raw(rng: Random, sections: Sections, world: int) -> None:
    """Add a raw key that a section decides, that DeepSpeed has removed, that dslpar leaves out, or that is unknown."""
    name = rng.choice((*ds_keys.OURS, *ds_keys.REMOVED, *ds_keys.UNSUPPORTED, "zero_optimisation", "fp32"))
    _mapping(sections, "deepspeed")[name] = rng.choice((True, {"enabled": True}, 1, {}))


def _left_out(rng: Random, sections: Sections, world: int) -> None:
    """Leave out a key."""
    path = rng.choice(list(_places(sections)))
    del _home(sections, path)[path[-1]]


def _other_world(rng: Random, sections: Sections, world: int) -> int:
    return max(1, rng.choice((world + 1, world - 1, world // 2, world * 3 // 2)))


def _zero_2_and_pipeline(rng: Random, sections: Sections, world: int) -> None:
    _mapping(sections, "zero", "stage")["stage"] = rng.choice((2, 3))
    sections["parallel"] = {"pipeline": 2}


def _half_without_zero(rng: Random, sections: Sections, world: int) -> None:
    sections |= {"zero": 0, "precision": rng.choice(("bf16", "fp16"))}


def _wrong_offload(rng: Random, sections: Sections, world: int) -> None:
    what, stage = rng.choice((("offload_optimizer", 0), ("offload_param", 1), ("offload_param", 2)))
    zero = _mapping(sections, "zero", "stage")
    zero |= {"stage": stage, what: rng.choice(("cpu", "nvme", {"device": "cpu"}))}


def _optimizer_elsewhere(rng: Random, sections: Sections, world: int) -> None:
    """Choose any optimizer of the tables, whatever the stage, tensor size and offload."""
    sections["optimizer"] = {"type": rng.choice([*OPTIMIZERS, "MyOptimizer", "tests.support.oracle.models.Descent"])}


def _any_schedule(rng: Random, sections: Sections, world: int) -> None:
    sections["lr_scheduler"] = {"type": rng.choice([*LR_SCHEDULERS, "polynomial"])}


def _masters(rng: Random, sections: Sections, world: int) -> None:
    dtype = rng.choice(("bf16", "fp16"))
    sections["precision"] = {"dtype": dtype, f"{dtype}_master_weights_and_grads": True}
    sections["precision"] |= {"bf16_optimizer_states": True} if dtype == "bf16" and rng.random() < 0.5 else {}


def _no_momentum(rng: Random, sections: Sections, world: int) -> None:
    sections["optimizer"] = {"type": "SGD", "nesterov": True, "momentum": rng.choice((0, 0.0))}


def _batch(rng: Random, sections: Sections, world: int) -> None:
    sizes = ("micro_size", "accumulation", "global_size")
    sections["batch"] = {name: rng.choice((1, 2, 3, 5, 8, 12)) for name in rng.sample(sizes, rng.randint(1, 3))}


def _cut(rng: Random, sections: Sections, world: int) -> None:
    """Set a partition that may not fit the layers."""
    ids = [rng.randint(0, 2) for _ in range(rng.randint(1, 5))]
    cuts = (
        {"stage_ids": ids},
        {"counts": ids},
        {"method": "unifrom"},
        {"method": "type:Nothing"},
        {"method": "type:("},
    )
    sections["parallel"] = {"pipeline": {"size": rng.choice((1, 2, 3, 9))} | rng.choice(cuts)}


def _tensor(rng: Random, sections: Sections, world: int) -> None:
    """Set any size in any mode, with options of any mode."""
    size = rng.choice((1, 2, 3, 4, 5, 6, 8))
    tensor = {"size": size, "mode": rng.choice((*TENSOR_MODES, "1D", "4d", None))}
    tensor |= rng.choice(({}, {"depth": 2}, {"shape": (2, 1, 2)}, {"sequence": True}, {"impl": "ring"}))
    tensor |= rng.choice(({}, {"residual": "batch"}, {"inner": "batch"}, {"keep": "both"}))
    sections["parallel"] = {"tensor": tensor}


def _model(rng: Random, sections: Sections, world: int) -> None:
    """Set sizes that do not fit together."""
    sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len", "num_kv_heads", "ffn_hidden_size")
    model = sections["model"]
    inner = model["cfg"] if isinstance(model.get("cfg"), dict) else model
    for name in rng.sample(sizes, 2):
        inner[name] = rng.choice((1, 2, 3, 5, 7, 10, 30, 97, 255, 256))


def _other_model(rng: Random, sections: Sections, world: int) -> None:
    layer = {"type": "Linear", "in_features": 4, "out_features": 4}
    idle = {"type": "ReLU"}
    sections["model"] = rng.choice(
        (
            {"type": "Net"},
            {"type": "tests.support.oracle.models.Nothing"},
            {"type": "tests.support.oracle.models.Handler"},
            {"type": "Sequential", "layers_cfg": [layer, idle, idle, layer]},
            {"type": "Sequential", "layers_cfg": [idle, idle]},
            {"type": "Sequential", "layers_cfg": [layer | {"layer_idx": 1}, layer | {"layer_idx": 0}]},
            {"type": "Sequential", "layers_cfg": [layer, {"type": "Linaer"}]},
            {"type": "Sequential", "layers_cfg": [{"type": "Linear", "in_features": 4}]},
            {"type": "Sequential", "layers_cfg": [layer | {"width": 3}]},
            {"type": "Sequential", "layers_cfg": []},
            {"type": "Sequential", "layers_cfg": [layer, {"type": "BatchNorm1d", "num_features": 4}]},
        )
    )


def _two_forms(rng: Random, sections: Sections, world: int) -> None:
    train = _mapping(sections, "train")
    train["dist"] = {"pipeline_parallel_size": rng.choice((2, 3)), "tensor_parallel_size": rng.choice((1, 2))}
    train["dist"] |= {"pipeline_num_layers": rng.choice((4, 5))} if rng.random() < 0.3 else {}


def _handler(rng: Random, sections: Sections, world: int) -> None:
    names = (
        "MoeGradientHandler",
        "MyHandler",
        "tests.support.oracle.models.Handler",
        "tests.support.oracle.models.Module",
    )
    sections["gradient_handler"] = [{"type": rng.choice(names)}]


def _pipeline_schedule(rng: Random, sections: Sections, world: int) -> None:
    choices: tuple[Sections, ...] = (
        {"type": "gpipe"}, {"type": "interleaved", "num_chunks": 2}, {"num_chunks": 2}, {"num_microbatches": 3}
    )  # fmt: skip
    sections["schedule"] = rng.choice(choices)


def _mapping(sections: Sections, name: str, shorthand: str = "") -> Sections:
    """Return the section as a mapping, made if it is missing."""
    made = sections.get(name)
    if not isinstance(made, dict):
        made = sections[name] = {} if made is None or not shorthand else {shorthand: made}
    return made


BREAKINGS: Mapping[str, Breaking] = {
    function.__name__.strip("_"): function
    for function in (
        _misspelt, _other_value, _other_value, _other_option, _any_raw, _not_raw, _left_out, _other_world,
        _zero_2_and_pipeline, _half_without_zero, _wrong_offload, _optimizer_elsewhere, _any_schedule, _masters,
        _no_momentum, _batch, _cut, _tensor, _model, _other_model, _two_forms, _handler, _pipeline_schedule,
    )
}  # fmt: skip
"""Breakings by name."""
