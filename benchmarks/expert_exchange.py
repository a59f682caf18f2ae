"""Tokens that are sent to their experts against tokens that are gathered: a step of one mixture on four ranks.

16 experts of 1024 features, top-2, hidden size 512, 16 samples of 64 tokens in all, fp32, over gloo: forward and
backward of transformers' MixtralSparseMoeBlock by its policy. One side has four replicas and `parallel.expert=4`, the
other side a tensor group of four ranks in mode 1d, which is the other way to divide the experts by four. Ranks share
the cores of this machine, so CPU time of all ranks measures the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from benchmarks.sides import side
from benchmarks.transformers_step import with_wall
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.schema.policy import Policy

RANKS, EXPERTS, TOP_K, HIDDEN, FFN, SAMPLES, LENGTH = 4, 16, 2, 512, 1024, 16, 64
POLICY = Policy(blocks=(), regions={}, outward=(), experts=("mlp.experts",), routers=("mlp.gate",))
SENT = Mesh(data=RANKS, tensor=TensorMesh(e=RANKS, exchanges_tokens=True))
GATHERED = Mesh(tensor=TensorMesh(y=RANKS, mode="1d"))


def ratios() -> Iterator[Ratio]:
    """Measure wall and CPU time of both sides in turns."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with side(partial(step_on, SENT), RANKS) as sent, side(partial(step_on, GATHERED), RANKS) as gathered:
        found: list[Costs] = list(in_turns(with_wall(sent), with_wall(gathered)))
    yield ratio("mixture, 4 ranks: sent / gathered, wall", [wall for _, wall in found], 0.6)
    yield ratio("mixture, 4 ranks: sent / gathered, CPU", [cpu for cpu, _ in found], 0.6)


def step_on(mesh: Mesh) -> Callable[[], object]:
    """Return a step of the mixture on this rank of a mesh."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from dslpar.policies.apply import Setting, apply
    from dslpar.policies.weights import load

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS}
    config = MixtralConfig(num_experts_per_tok=TOP_K, **sizes)
    config._experts_implementation = "eager"
    mixture = MixtralSparseMoeBlock(config)
    for p in mixture.parameters():
        nn.init.normal_(p, std=0.02)
    weights = {f"mlp.{name}": p.detach().clone() for name, p in mixture.named_parameters()}
    groups = Groups(mesh)
    part = apply(mixture, "mlp", Setting(groups, POLICY, HIDDEN, config))
    load(part, weights.__getitem__, groups)
    every = torch.randn(SAMPLES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    own = every.chunk(mesh.data)[groups.coord["data"]].clone().requires_grad_()

    def step() -> None:
        part.zero_grad()
        part(own).sum().backward()

    return step
