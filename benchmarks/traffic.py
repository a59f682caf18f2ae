"""Traffic of a rank, forward and backward: counts on real ranks, beside dslpar's formula and the papers' counts.

    python -m benchmarks.traffic

The table has elements of one micro-batch by ring counts (tests.support.traffic_counter). `formula` is from
dslpar.costs.traffic. Exit status 1 means that the two differ somewhere, or that a target is missed. `papers` counts
the linear layers alone, by the scheme of the mode's paper:

1d        Megatron-LM (1909.08053): its f and g, an all-reduce of each input that is shared and of each output that is
          summed; four a block, which are 8 b s h (t-1)/t by ring counts. Derived.
2d        SUMMA (2104.05343): Y = X W broadcasts panels of X and W, dX those of W and reduces those of dX, dW those of X
          and reduces those of dW: 3 (q-1)/q^2 (X + W), re-derived with a broadcast that sends its panel once a rank.
2.5d      Tesseract (2105.14500): the same with X cut by the depth too, 3 (q-1)/q^2 (X/d + W). Its authors'
          documentation (ColossalAI, 2.5D tensor parallelism) gives 3 (q-1) (d+1) / (d q) for matrices of one size:
          these proportions, larger by q. The all-reduce of dW over the depth is not in it, and added. Re-derived.
3d        2105.14450: all-gather two operands, reduce-scatter the third, forward and once more backward: 6 (q-1)/q^3 of
          matrices of one size, as its authors' documentation gives it (ColossalAI, 3D tensor parallelism).

Sequence splits have their own counts for attention (ring: 2105.13120, DeepSpeed-Ulysses: 2309.14509), and their linears
move no activations. DeepSpeed's AutoTP runs under the same counter: forward and backward of a stack of Llama layers on
two ranks. With one data replica and without the optimizer's step, only tensor parallelism sends.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import HEADER, Ratio
from benchmarks.sides import on_ranks
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.costs import any_model as costs
from dslpar.costs import layers as sizes
from dslpar.costs import traffic
from dslpar.costs.collective_traffic import LayerTraffic, Number, Traffic
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Block, Form, Linear, initialize, placement
from dslpar.layout.modes import cuboid_of
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.traffic_counter import counting

TARGET = 0.58
"""dslpar's 1d against AutoTP: 4 all-reduces against 7 are 0.571."""
BATCH, SEQUENCE, HIDDEN, HEADS, FFN = 8, 16, 64, 8, 256
TOKENS = BATCH * SEQUENCE
KEEPS: tuple[mesh.Keep, ...] = ("x", "w", "both", "none")
MODEL = section.GPT(num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=1, max_seq_len=1)

MODES: dict[int, tuple[dict[str, Any], ...]] = {
    4: (
        dict(mode="1d"),
        dict(mode="1d", sequence=True),
        dict(mode="2d"),
        dict(mode="sequence"),
        dict(mode="sequence", impl="ulysses"),
        dict(mode="cuboid", shape=(1, 2, 2)),
    ),
    8: (
        dict(mode="1d"),
        dict(mode="1d", sequence=True),
        dict(mode="2.5d", depth=2),
        dict(mode="3d"),
        dict(mode="sequence"),
        dict(mode="sequence", impl="ulysses"),
        dict(mode="cuboid", shape=(2, 2, 2)),
    ),
}


class Layer(NamedTuple):
    """A measured layer, and its formula."""

    build: Callable[[Groups], nn.Module]
    formula: Callable[[mesh.TensorMesh], LayerTraffic]
    linears: tuple[tuple[int, int], ...]
    """(in, out) features of the products, alternately inward and outward."""


LAYERS = {
    "linear": Layer(
        lambda groups: Linear(groups, HIDDEN, FFN, role="inward", bias=False),
        lambda tensor: traffic.total([sizes.Linear(HIDDEN, FFN, "inward", bias=False)], tensor, TOKENS),
        ((HIDDEN, FFN),),
    ),
    "mlp": Layer(
        lambda groups: MLP(groups, HIDDEN, FFN),
        lambda tensor: traffic.total(sizes.mlp(HIDDEN, FFN), tensor, TOKENS),
        ((HIDDEN, FFN), (FFN, HIDDEN)),
    ),
    "block": Layer(
        lambda groups: Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN),
        lambda tensor: costs.layer_traffic(MODEL, tensor, TOKENS),
        ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN)),
    ),
}


def main() -> int:
    """Print the table. The exit status is 1 if a count differs from its formula, or a target is missed."""
    logging.disable(logging.WARNING)
    wrong = 0
    print("| ranks | mode | keep | layer | measured | formula | papers | measured / papers |\n" + "|---" * 8 + "|")
    for world, modes in MODES.items():
        for row in rows_of(world, [kept for mode in modes for kept in _keeps(cuboid_of(_asked(world, mode)))]):
            print(row, flush=True)
            wrong += not row.right
    print(f"\n{wrong} counts differ from their formula\n\n{HEADER}")
    for ratio in ratios():
        print(ratio, flush=True)
        wrong += not ratio.passed
    return 1 if wrong else 0


# Ours -------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table."""

    tensor: mesh.TensorMesh
    layer: str
    measured: list[Traffic]
    """Traffic by rank."""

    @property
    def right(self) -> bool:
        """Return whether every rank sent what the formula gives, by collective and axis."""
        said = LAYERS[self.layer].formula(self.tensor).both
        return all(each == said for each in self.measured)

    def __str__(self) -> str:
        tensor = self.tensor
        most = max(each.total for each in self.measured)
        papers = papers_count(tensor, LAYERS[self.layer].linears)
        form = {"1d": tensor.residual, "sequence": tensor.impl}.get(tensor.mode or "", "*".join(map(str, tensor.shape)))
        told = (f"{float(papers):,.0f}", f"{float(most / papers):.2f}") if papers else ("-", "-")
        said = LAYERS[self.layer].formula(tensor).total
        cells = tensor.size, f"{tensor.mode} {form}", tensor.keep, self.layer, f"{float(most):,.0f}"
        return f"| {' | '.join(map(str, (*cells, f'{float(said):,.0f}', *told)))} |{'' if self.right else ' WRONG'}"


def rows_of(world: int, tensors: list[mesh.TensorMesh]) -> Iterator[Row]:
    """Yield every layer in every cuboid of a world."""
    ranks = on_ranks(world, partial(sent_by_all, tensors))
    for index, tensor in enumerate(tensors):
        for name in LAYERS:
            yield Row(tensor, name, [rank[index][name] for rank in ranks])


def sent_by_all(tensors: list[mesh.TensorMesh]) -> list[dict[str, Traffic]]:
    """Return this rank's traffic by cuboid and layer."""
    found = []
    for _, alike in groupby(tensors, lambda tensor: replace(tensor, keep="x")):
        groups = None
        for tensor in alike:  # they differ in `keep` alone, so one set of process groups serves all of them
            groups = _groups_of(tensor, groups)
            found.append({name: sent_by(groups, layer.build) for name, layer in LAYERS.items()})
    return found


def _groups_of(tensor: mesh.TensorMesh, made: Groups | None) -> Groups:
    groups = copy.copy(made) if made else Groups(Mesh(tensor=tensor))
    groups.mesh = Mesh(tensor=tensor)
    return groups


def sent_by(groups: Groups, build: Callable[[Groups], nn.Module]) -> Traffic:
    """Count forward and backward of a layer."""
    tensor, layer = groups.tensor, build(groups)
    initialize(layer, groups, seed=1)
    x = torch.zeros(placement.residual(tensor, BATCH, SEQUENCE, HIDDEN).local_shape, requires_grad=True)
    with counting(groups) as sent:
        layer(x).sum().backward()
    return sent.elements


def _asked(world: int, mode: dict[str, Any]) -> sections.TensorParallel:
    return sections.TensorParallel(size=world, **mode)


def _keeps(tensor: mesh.TensorMesh) -> list[mesh.TensorMesh]:
    """Return the layouts with every `keep` that changes the traffic, or the mode's own alone."""
    kept = [replace(tensor, keep=keep) for keep in KEEPS]
    sent = {LAYERS["block"].formula(each).both for each in kept}
    return kept if len(sent) > 1 else [tensor]


# The papers' counts -----------------------------------------------------------------------------------------------


def papers_count(tensor: mesh.TensorMesh, linears: tuple[tuple[int, int], ...]) -> Fraction | None:
    """Return the linear layers' traffic by the scheme of the mode's paper, or None if it has none."""
    count = _SCHEMES.get(tensor.mode or "")
    if count is None:
        return None
    return sum((count(tensor, *features, number % 2 == 0) for number, features in enumerate(linears)), Fraction())


def _megatron(tensor: mesh.TensorMesh, k: int, n: int, inward: bool) -> Fraction:
    """Return one all-reduce: in the backward of the input, or in the forward of the output."""
    return 2 * _f(tensor.y) * TOKENS * (k if inward else n)


def _summa(tensor: mesh.TensorMesh, k: int, n: int, inward: bool) -> Fraction:
    q, d = tensor.q, tensor.d
    panels = Fraction(TOKENS * k, d) + k * n
    return 3 * Fraction(q - 1, q * q) * panels + 2 * _f(d) * Fraction(k * n, q * q)


def _cube(tensor: mesh.TensorMesh, k: int, n: int, inward: bool) -> Fraction:
    q = tensor.q
    return 2 * _f(q) * Fraction(TOKENS * k + k * n + TOKENS * n, q * q)


def _f(n: int) -> Fraction:
    return Fraction(n - 1, n)


_SCHEMES = {"1d": _megatron, "2d": _summa, "2.5d": _summa, "3d": _cube}


# DeepSpeed's AutoTP -----------------------------------------------------------------------------------------------

LLAMA = replace(MODEL, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False)
LAYERS_OF_STACK = 4


def ratios() -> Iterator[Ratio]:
    """Yield dslpar's count over AutoTP's for the same stack on two ranks: counts have no spread."""
    ours, theirs = on_ranks(2, sent_by_our_stack), on_ranks(2, sent_by_autotp)
    said = costs.layer_traffic(LLAMA, mesh.TensorMesh(y=2, mode="1d"), TOKENS).total * LAYERS_OF_STACK
    assert ours == [said] * 2, f"ours sent {ours}, and the formula says {said}"
    assert theirs[0] == theirs[1] > 0, f"AutoTP's ranks sent {theirs}"
    found = float(ours[0] / theirs[0])
    yield Ratio("dslpar 1d / DeepSpeed AutoTP, elements sent, 2 ranks", found, found, found, TARGET)


def sent_by_our_stack() -> Number:
    """Return elements of forward and backward."""
    form = Form(norm="rmsnorm", activation="swiglu", bias=False)

    def stack(groups: Groups) -> nn.Module:
        return nn.Sequential(
            *(Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN, form=form) for _ in range(LAYERS_OF_STACK))
        )

    return sent_by(Groups(Mesh(tensor=mesh.TensorMesh(y=2, mode="1d"))), stack).total


def sent_by_autotp() -> Number:
    """Return elements of forward and backward of the second micro-batch: in the first, AutoTP compares inputs."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    stack = nn.Sequential(*(LlamaBlock() for _ in range(LAYERS_OF_STACK)))
    columns = [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"]
    rows = [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"]
    specs = [{"patterns": columns, "partition_type": "column"}, {"patterns": rows, "partition_type": "row"}]
    engine, *_ = deepspeed.initialize(
        model=stack,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            },
        },
    )
    groups = Groups(Mesh(tensor=mesh.TensorMesh(y=2, mode="1d")))
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    engine.backward(engine(x).sum())
    with counting(groups) as sent:
        engine.backward(engine(x).sum())
    assert set(sent.calls) == {("all_reduce", "y")}, sent.calls
    return sent.elements.total


class LlamaBlock(nn.Module):
    """A Llama block with seven linears, which AutoTP knows by name."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        sizes = dict.fromkeys(("q", "k", "v", "o"), (HIDDEN, HIDDEN))
        sizes |= {"gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}
        for name, (k, n) in sizes.items():
            self.add_module(f"{name}_proj", nn.Linear(k, n, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, hidden] to the same, with the heads of this rank."""
        normed = self.norm1(x)
        q, k, v = (self._heads(project(normed)) for project in (self.q_proj, self.k_proj, self.v_proj))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        found: Tensor = x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return found

    def _heads(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(-1, (-1, HIDDEN // HEADS))
        return apart.transpose(1, 2)


if __name__ == "__main__":
    sys.exit(main())
