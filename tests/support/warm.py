"""Import once what every forked rank would import itself, a second per rank."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec


@cache
def import_torch() -> None:
    """Import what a first backward needs: sympy comes with it, 0.4 s per rank."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    if find_spec("torch.profiler._cupti_monitor"):  # only some versions of torch have it
        import_module("torch.profiler._cupti_monitor")


@cache
def import_plain_deepspeed() -> None:
    """Import and look up what a first engine needs: torch's compiler with ZeRO 1 and 2, and more with ZeRO 3."""
    import_torch()
    for name in (
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.utils.pin_memory",
        "torch._subclasses.schema_check_mode",
    ):
        import_module(name)


@cache
def import_deepspeed() -> None:
    """Import what a first engine of dslpar needs."""
    import_plain_deepspeed()
    for name in (
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
    """Import what ranks need of a transformers class: its code, and what a policy needs."""
    getattr(import_module("transformers"), name)
    import_module("dslpar.policies.model")
