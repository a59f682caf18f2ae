"""Imports, once, what every rank that forks from this process would import for itself, a second of each rank's life."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec


@cache
def import_torch() -> None:
    """What a first backward imports: sympy comes with it, 0.4 s a rank."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    if find_spec("torch.profiler._cupti_monitor"):  # not of every torch
        import_module("torch.profiler._cupti_monitor")


@cache
def import_deepspeed() -> None:
    """What a first engine imports and looks up: with ZeRO 1 and 2 torch's compiler, with ZeRO 3 more."""
    import_torch()
    for name in (
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.utils.pin_memory",
        "torch._subclasses.schema_check_mode",
        "dslpar.checkpoint.full_state_dict",
        "dslpar.engine.build",
        "dslpar.models.gpt.model",
        "dslpar.training.fit",
    ):
        import_module(name)
    from dslpar.distributed.deepspeed_patches import skip_shm_op

    skip_shm_op()


@cache
def import_transformers(name: str) -> None:
    """What ranks import of a class of transformers': its own code, and what a policy needs."""
    getattr(import_module("transformers"), name)
    import_module("dslpar.policies.model")
