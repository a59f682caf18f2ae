"""Changes of a config that the search does not make by itself: without offload, in bf16, with offload.

    without_offload(spec)       # ("zero.offload_optimizer=None",)
    remedies(spec)              # [(), ("precision=bf16", "zero.stage=1"), ...]

Each change is a tuple of words for the command line. The planner makes it and then searches the layouts as for any
config (`dslpar.planner.planning`).
"""

from __future__ import annotations

from collections.abc import Iterable

from dslpar.layout.resolve import offloads
from dslpar.schema.parallel_forms import is_of_libai, pipeline_key, pipeline_of
from dslpar.schema.sections import Spec

Words = tuple[str, ...]

_OFFLOADED = {"optimizer": "zero.offload_optimizer", "param": "zero.offload_param"}
_TO_HOST = 'dict(device="cpu")'


def without_offload(spec: Spec) -> Words:
    """Return the words that keep all state on the device; empty if nothing is offloaded."""
    words = [f"{key}=None" for what, key in _OFFLOADED.items() if offloads(spec, what)]
    checkpoint = spec.activation_checkpoint
    return (*words, *(["activation_checkpoint.offload=False"] if checkpoint is not None and checkpoint.offload else []))


def remedies(spec: Spec) -> list[Words]:
    """Return the changes that save the most memory: none but those of the search, bf16, offload, and both.

    The search tries every ZeRO stage that a change allows. Half precision and an offloaded optimizer need ZeRO 1 or
    more, and offloaded weights ZeRO 3 without a pipeline.
    """
    sharded: Words = () if spec.zero.stage else ("zero.stage=1",)
    whole: Words = () if spec.zero.stage == 3 else ("zero.stage=3",)
    pipeline = pipeline_of(spec)
    if pipeline is not None and pipeline.size > 1:
        key = pipeline_key(spec) if is_of_libai(spec) else "parallel.pipeline"
        whole = (*whole, f"{key}=1")
    half: Words = ("precision=bf16", *sharded) if spec.precision.dtype == "fp32" else ()
    optimizer: Words = () if offloads(spec, "optimizer") else (*sharded, f"{_OFFLOADED['optimizer']}={_TO_HOST}")
    both: Words = () if offloads(spec, "param") else (*optimizer, *whole, f"{_OFFLOADED['param']}={_TO_HOST}")
    offered = [(), half, optimizer, both, (*half, *both) if half and both else ()]
    return list(dict.fromkeys(map(last_of_each_key, offered)))


def last_of_each_key(words: Iterable[str]) -> Words:
    """Return overrides without those that a later one of the same key replaces."""
    return tuple({word.partition("=")[0]: word for word in words}.values())
