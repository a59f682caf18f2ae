"""Random configs of each framework's own keys: every key gets one verdict, and the verdict is true.

The keys are those of the framework's code (dslpar/migrate/data/keys; DeepSpeed's: data/deepspeed_keys.json). Verdicts
are the fates of a report: converted (kept, renamed, changed), added, dead there too, not here (dropped), needs you.
"""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dslpar.language.load import load_text
from dslpar.migrate.convert import Entry, Import, convert
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.migrate.writer import file_of
from dslpar.schema import deepspeed_policy

IN_TEST, ALL = 6, 400
SOURCES = ("colossalai", "deepspeed", "gpt_neox", "libai")
SHARE = 0.5
"""Share of the keys without a counterpart that are tried without their value, which must change nothing."""
CONVERTED = ("kept", "renamed", "changed")
POOL = (True, False, 0, 1, 2, 64, 0.1, 2.5, "x", "auto", [1, 2])
"""Values of keys without a default."""
READ_BY_OTHERS = {
    "gpt_neox": {
        "bias_gelu_fusion", "onnx_safe", "mlp_multiple_of", "checkpoint_num_layers", "soft_prompt_tuning.enabled",
    },
    "libai": {
        "train.evaluation.enabled", "train.zero_optimization.enabled", "optim.params.clip_grad_norm_type",
        "optim.params.weight_decay_norm", "optim.params.weight_decay_bias",
    },
    "colossalai": {"optimizer.adamw_mode"},
    "deepspeed": {
        "optimizer.params.adam_w_mode", "optimizer.params.torch_adam", "expert_parallel.enabled",
        "expert_parallel.expert_tensor_parallel_size",
    },
}  # fmt: skip
"""Dropped keys that the conversion of another key reads; the report names that key as the reason."""


def keys_of(name: str) -> dict[str, list[Any]]:
    """Return the framework's keys, each with its defaults."""
    keys: dict[str, list[Any]] = {}
    for default in TABLES[name].defaults:
        keys.setdefault(default.key, []).append(default.value)
    if name == "deepspeed":
        for section, names in deepspeed_policy.KEYS.items():
            for key, (kind, value) in names.items():
                if kind != "section":
                    keys.setdefault(f"{section}.{key}".removeprefix("."), []).append(value)
    below = {key.rpartition(".")[0] for key in keys}
    sections = {"optimizer", "scheduler", "fp16", "bf16", "tensorboard", "wandb", "csv_monitor", "zero_optimization"}
    return {key: values for key, values in keys.items() if key not in below | sections}


def value_of(name: str, key: str, defaults: list[Any], draw: random.Random) -> Any:
    """Return a plausible value of a key."""
    row = next((row for row in TABLES[name].rows if row.rest(key) is not None), None)
    if row is not None and row.conversion == "choice":
        return draw.choice([*ast.literal_eval(row.argument), "another"])
    default = draw.choice(defaults)
    if key.endswith("_target_"):
        return default
    if isinstance(default, bool):
        return draw.random() < 0.5
    if isinstance(default, (int, float)) and draw.random() < 0.7:
        return draw.choice([default, default, 0, type(default)(2), type(default)(default * 2)])
    return draw.choice(POOL) if default is None else default


def config_of(name: str, seed: int) -> dict[str, Any]:
    """Return a random config: dotted keys and their values."""
    draw, keys = random.Random(seed), keys_of(name)
    flat: dict[str, Any] = dict(BASES[name]) if draw.random() < 0.7 else {}
    for key in draw.sample(sorted(keys), 25):
        flat.setdefault(key, value_of(name, key, keys[key], draw))
    return {key: value for key, value in flat.items() if not any(other.startswith(f"{key}.") for other in flat)}


BASES: Mapping[str, Mapping[str, Any]] = {
    "colossalai": {"optimizer.type": "HybridAdam", "BATCH_SIZE": 8, "model.type": "gpt2_small"},
    "deepspeed": {"optimizer.type": "AdamW", "train_batch_size": 8},
    "gpt_neox": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "train_iters": 100},
    "libai": {"model._target_": "GPTForPreTraining", "model.cfg.hidden_layers": 2, "model.cfg.hidden_size": 64},
}


def made_of(name: str, flat: Mapping[str, Any]) -> Import:
    """Convert a config, written in the framework's language."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        level = tree
        for part in above:
            level = level.setdefault(part, {})
        level[last] = value
    if name in ("deepspeed", "gpt_neox"):
        return convert(read_text(json.dumps(tree), {"deepspeed": "a.json", "gpt_neox": "a.yml"}[name], name))
    targets = {value.partition(".")[0] for key, value in flat.items() if key.endswith("_target_")}
    head = "from libai.config import LazyCall\n" + "".join(f"from libai.models import {item}\n" for item in targets)
    body = "".join(f"{key} = {_expression(value)}\n" for key, value in tree.items())
    return convert(read_text((head if name == "libai" else "") + body, "a.py", name))


def _expression(value: object) -> str:
    if not isinstance(value, dict):
        return repr(value)
    words = ", ".join(f"{key}={_expression(item)}" for key, item in value.items() if key != "_target_")
    return f"LazyCall({value['_target_']})({words})" if "_target_" in value else f"dict({words})"


def untrue(name: str, flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is untrue in the report of a config."""
    made = made_of(name, flat)
    counts = Counter(entry.key for entry in made.entries if entry.key)
    yield from (f"{key}: {counts[key]} verdicts" for key in flat if counts[key] != 1)
    text = file_of(made)
    yield from (f"file: {item.message}" for item in load_text(text, "made.py").findings if item.severity == "error")
    for entry in made.entries:
        if "has no such key" in entry.why or "no row for this key" in entry.why:
            yield f"{entry.key}: {entry.why}"
        yield from _of_entry(name, flat, made, entry)


def _of_entry(name: str, flat: Mapping[str, Any], made: Import, entry: Entry) -> Iterator[str]:
    if entry.fate in (*CONVERTED, "added") and entry.to and entry.to not in made.values:
        yield f"{entry.key}: {entry.fate} to {entry.to}, which the result does not have"
    if entry.fate not in CONVERTED and not entry.why:
        yield f"{entry.key}: {entry.fate} without a reason"
    if entry.fate in ("dead", "dropped") and entry.key and _is_tried(name, entry.key, flat):
        without = made_of(name, {**flat, entry.key: None})
        if _differs(made, without, entry):
            yield f"{entry.key} = {flat[entry.key]!r} is {entry.fate} ({entry.why}), but it changes the result"
    if entry.fate == "added" and "'s default of " in entry.why:
        key = entry.why.partition("'s default of ")[2].partition(" ")[0]
        if flat.get(key) is not None:
            yield f"{key} is set, and not silent"


def _is_tried(name: str, key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether the config is also converted without this key's value."""
    if key in READ_BY_OTHERS[name] or key.endswith("_target_"):
        return False
    return random.Random(f"{key}{len(flat)}").random() < SHARE


def _differs(made: Import, without: Import, entry: Entry) -> bool:
    """Return whether a key that has no counterpart changes what the result trains."""
    if "sets the same value" in entry.why or "sets it" in entry.why:
        return False  # without it, another key or a default may set the value
    mine = {key: value for key, value in made.values.items() if made.values.get(key) != without.values.get(key)}
    theirs = {key for key in without.values if key not in made.values}
    silent = {
        item.to for item in without.entries if "default of " in item.why and f"default of {entry.key} " in item.why
    }
    return bool(mine) or bool(theirs - silent)


def check(name: str, seeds: range) -> None:
    """Fail with the first untrue verdicts."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        flat = config_of(name, seed)
        said = list(untrue(name, flat))
        assert not said, (seed, said[:5])
        seen.update(entry.fate for entry in made_of(name, flat).entries)
    print(name, dict(seen))
    assert {"needed", "added", "dropped"} <= set(seen)
    assert seen.keys() & set(CONVERTED)


@pytest.mark.parametrize("name", SOURCES)
def test_every_key_has_a_true_verdict(name: str) -> None:
    check(name, range(ALL, ALL + IN_TEST))


@pytest.mark.prove
@pytest.mark.minutes(4)
@pytest.mark.parametrize("name", SOURCES)
def test_every_key_has_a_true_verdict_in_400_configs(name: str) -> None:
    check(name, range(ALL))


@pytest.mark.parametrize("name", SOURCES)
def test_the_configs_cover_the_keys(name: str) -> None:
    drawn = {key for seed in range(ALL) for key in config_of(name, seed)}
    assert set(keys_of(name)) <= drawn


def test_an_untrue_verdict_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READ_BY_OTHERS, "gpt_neox", set())  # type: ignore[arg-type]
    monkeypatch.setitem(globals(), "SHARE", 1)
    flat = {**BASES["gpt_neox"], "activation": "gelu", "bias_gelu_fusion": True}
    assert [said.partition(" = ")[0] for said in untrue("gpt_neox", flat)] == ["bias_gelu_fusion"]
