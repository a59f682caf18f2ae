"""Each value of DeepSpeed's dict: the key of dslpar's that it came from, dslpar's own choice, or DeepSpeed's default.

The dict itself is made by dslpar.layout.deepspeed_config; here stands where each of its keys comes from. A key that is
not in it has
DeepSpeed's own default, of the list that is generated from DeepSpeed (dslpar.schema.deepspeed_policy).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dslpar.layout.deepspeed_config import ds_config
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.subject import Case
from dslpar.provenance.values import Value
from dslpar.schema.keys import deepspeed_keys

PREFIX = "deepspeed."


class Origin(NamedTuple):
    """Where a key of DeepSpeed's dict comes from."""

    sources: tuple[str, ...]
    """Keys of dslpar's; the first one is the value itself where nothing else is said."""
    why: str = ""
    """Why dslpar chooses the value, where the value is no other key's."""


_OWN: Mapping[str, Origin] = {
    "steps_per_print": Origin(("train.steps",), "one more than the steps: dslpar reports them, DeepSpeed does not"),
    "optimizer.params.torch_adam": Origin(
        ("optimizer.type",), "torch's own Adam: DeepSpeed's fused one is compiled at the first start"
    ),
    "optimizer.params.adam_w_mode": Origin(("optimizer.type",), "what DeepSpeed calls Adam is AdamW otherwise"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Origin(
        ("zero.stage",), "DeepSpeed's default, True, sends half as much again"
    ),
    "data_types.grad_accum_dtype": Origin(
        ("precision.dtype", "zero.stage"), "micro-batches add up in fp32, not in the 8 or 11 bits of the model's type"
    ),
    "zero_allow_untested_optimizer": Origin(
        ("optimizer.type", "zero.stage"), "this optimizer acts elementwise, so ZeRO's shards of it are right"
    ),
    "zero_force_ds_cpu_optimizer": Origin(
        ("optimizer.type", "zero.offload_optimizer.device"), "dslpar makes this optimizer; DeepSpeed would refuse it"
    ),
    "pipeline.pipe_partitioned": Origin(
        ("parallel.pipeline.size",), "True would take activations for copies of each other on the whole tensor group"
    ),
    "pipeline.grad_partitioned": Origin(
        ("parallel.pipeline.size",), "True would take gradients for copies of each other on the whole tensor group"
    ),
}
"""Keys that dslpar decides, and why."""
_OFF = "None: clipping is off, which DeepSpeed wants to be told (its default is 1.0)"


def deepspeed_values(case: Case, values: Mapping[str, Value]) -> dict[str, Value]:
    """All of DeepSpeed's dict, by key; `values` are those of the config.

    Raises:
        UnknownValueError: lint finds an error, so there is no dict.
    """
    leaves = flat(ds_config(case.job_of_some_world))
    return {f"{PREFIX}{path}": _value(case, values, path, value) for path, value in leaves}


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted path."""
    for name, value in table.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def _value(case: Case, values: Mapping[str, Value], path: str, value: Any) -> Value:
    key = f"{PREFIX}{path}"
    if key in values:
        return values[key]  # raw
    origin = origin_of(path, values)
    first = values[origin.sources[0]]
    if first.how == "unknown":
        return Value(key, None, "unknown", first.why, sources=origin.sources)
    why = origin.why or (_OFF if path == "gradient_clipping" and first.value is None else first.key)
    return Value(key, value, "inferred", why, sources=origin.sources, help=_theirs(path))


def origin_of(path: str, values: Mapping[str, Value]) -> Origin:
    """Where a key of the dict comes from. Raises KeyError for one that dslpar never sets."""
    ours, above = deepspeed_keys(), path
    while above not in ours and "." in above:
        above = above.rpartition(".")[0]
    key = ours[above] + path.removeprefix(above) if above in ours else ""
    if key in values:
        return Origin((key,))
    origin = _OWN[path]
    return Origin(tuple(source for source in origin.sources if source in values), origin.why)


# What dslpar does not set -----------------------------------------------------------------------------------------


def their_default(path: str) -> Value | None:
    """DeepSpeed's own value of a key that dslpar does not set; None for a key that DeepSpeed does not have."""
    from dslpar.schema.deepspeed_policy import KEYS

    section, _, name = path.rpartition(".")
    known = KEYS.get(section, {}).get(name)
    if known is None:
        return None
    message = "a section that dslpar does not set" if known[0] == "section" else "DeepSpeed's own default"
    return Value(f"{PREFIX}{path}", known[1], "default", f"{message}", help=_theirs(path))


def their_keys() -> list[str]:
    """Every key of DeepSpeed's, dotted."""
    from dslpar.schema.deepspeed_policy import KEYS

    return [f"{section}.{name}" if section else name for section, names in KEYS.items() for name in names]


def _theirs(path: str) -> str:
    """DeepSpeed's type and default of a key, in words."""
    from dslpar.schema.deepspeed_policy import KEYS

    section, _, name = path.rpartition(".")
    known = KEYS.get(section, {}).get(name)
    if known is None or known[0] == "section":
        return ""
    return f"DeepSpeed's default: {known[1]!r}" + (f", of type {known[0]}" if known[0] else "")


def dict_or_unknown(case: Case, values: Mapping[str, Value]) -> dict[str, Value]:
    """As `deepspeed_values`; empty where there is no dict."""
    try:
        return deepspeed_values(case, values)
    except UnknownValueError:
        return {}
