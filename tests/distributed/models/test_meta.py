"""A whole model, its loss, backward and step on torch's meta device, in every mode: nothing runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.deepspeed_patches import owned_square_norm
from dslpar.distributed.groups import Groups
from dslpar.layers import mark_owners
from dslpar.models import GPT, build_module
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import LAYOUTS
from tests.support.sampling import sampled

NAMES = (
    "1d-2",
    "1d-sequence-2",
    "2d-4",
    "2.5d-8-depth-2",
    "3d-8",
    "cuboid-1-2-2-sequence-batch",
    "ring-2",
    "ulysses-2",
)
FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 4,
    },
}


class _OnCpu(TorchDispatchMode):
    """Records operations on CPU tensors of at least one dim, since a scalar may belong to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.count += 1
        if any(each.device.type == "cpu" and each.dim() for each in tensors):
            self.found.add(str(func))
        return result


def _on_cpu(form: dict[str, Any], tensor: mesh.TensorMesh) -> tuple[list[str], int, str]:
    # torch's fake group takes tensors of any device, but needs their backend for batched messages.
    collectives.dist.batch_isend_irecv = lambda operations: []  # type: ignore[attr-defined]
    groups = Groups(Mesh(tensor=tensor))
    model = GPT(num_layers=2, hidden_size=48, num_heads=12, vocab_size=70, max_seq_len=24, **form)
    ids = torch.zeros((8, 24), dtype=torch.int64, device="meta")
    with torch.device("meta"):
        module = build_module(model, groups, seed=1)
    mark_owners(module, groups)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)  # fused, as on a GPU, is only for real devices
    model.loss(groups)(module(ids), ids)  # tables are made on the CPU at their first use
    with _OnCpu() as mode:
        loss = model.loss(groups)(module(ids), ids)
        loss.backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        square = owned_square_norm(module, groups.axis("d", "q", "y", "z"))
        torch._foreach_mul_(grads, (1 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
    assert len(grads) == len(list(module.parameters()))
    assert square.is_meta
    assert all(grad.is_meta for grad in grads)
    return sorted(mode.found), mode.count, loss.device.type


@pytest.mark.parametrize("form", sampled(FORMS, {"llama"}))
def test_nothing_is_left_on_the_cpu(form: str) -> None:
    tensors = [mesh.TensorMesh(), *(LAYOUTS[name] for name in NAMES)]
    found = on_last_ranks(lambda tensor: _on_cpu(FORMS[form], tensor), tensors)
    for name, (on_cpu, count, device) in zip(("one process", *NAMES), found, strict=True):
        assert (on_cpu, device) == ([], "meta"), name
        assert count > 100
