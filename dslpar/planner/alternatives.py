"""Changes of a config that the search does not make by itself: without offload, in bf16, with ZeRO 3, with offload.

    without_offload(spec)       # ("zero.offload_optimizer=None",)
    remedies(spec)              # [("precision=bf16",), ("zero.stage=3",), ...]

Each change is a tuple of words for the command line. The planner makes it and then searches the layouts as for any
config (`dslpar.planner.planning`).
"""

from __future__ import annotations

from dslpar.layout.resolve import offloads
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
    """Return the changes that save the most memory, each alone, and then all of them together."""
    found: list[Words] = []
    if spec.precision.dtype == "fp32":
        found.append(("precision=bf16",))
    stage = () if spec.zero.stage == 3 else ("zero.stage=3",)
    if stage:
        found.append(stage)
    if not offloads(spec, "optimizer"):
        needed = () if spec.zero.stage else ("zero.stage=1",)
        found.append((*needed, f"{_OFFLOADED['optimizer']}={_TO_HOST}"))
    if not offloads(spec, "param"):
        found.append((*stage, f"{_OFFLOADED['param']}={_TO_HOST}"))
    together = list(dict.fromkeys(word for words in found for word in words if word != "zero.stage=1"))
    return found if len(found) < 2 or tuple(together) in found else [*found, tuple(together)]
