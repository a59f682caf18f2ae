"""Split backward (B and W) against the unsplit one: every gradient, in every mode.

Both do the same sums in the same order, so gradients are bitwise equal. The exception is a tied table: B's part is
added before W's, whereas the unsplit backward first adds the two (CLOSE).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device_counter import count_kernels
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import Pending
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    MLP,
    Block,
    Embedding,
    Form,
    Head,
    Linear,
    PositionEmbedding,
    Rotary,
    cross_entropy,
    initialize,
    linear,
    mark_owners,
    placement,
)
from dslpar.layers.gather_reduce import Sharding
from dslpar.layers.weight_gradients import WeightGradients, is_splitting, splitting
from dslpar.models.recompute import Step, run_layers
from tests.distributed.layers.sampled_rows import KINDS
from tests.support.compare_dense import (
    BATCH,
    FFN,
    HIDDEN,
    KV_HEADS,
    QUERY_HEADS,
    SEQUENCE,
    VOCAB,
    randomized,
    relative,
)
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import LAYOUTS, kept
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

CLOSE = 1e-12
"""Relative to the largest, in float64."""
NUM_MICRO = 4

FORMS = {
    "gpt2": Form(),
    "llama": Form(norm="rmsnorm", activation="swiglu", num_kv_heads=KV_HEADS, rotary=Rotary(), bias=False),
}


class Model(nn.Module):
    """A small GPT-2 with a tied head, or Llama; from ids to the loss, perhaps with recomputation."""

    def __init__(self, groups: Groups, form: str, recomputed: bool) -> None:
        super().__init__()
        self.groups, self.interval = groups, int(recomputed)
        self.tokens = Embedding(groups, VOCAB, HIDDEN)
        self.positions = PositionEmbedding(groups, SEQUENCE, HIDDEN) if form == "gpt2" else nn.Identity()
        block = partial(Block, groups, HIDDEN, QUERY_HEADS, form=FORMS[form], ffn_hidden_size=FFN)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = FORMS[form].make_norm(groups, HIDDEN, 1e-5)
        self.head = None if form == "gpt2" else Head(groups, HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        steps = [Step(self.tokens), Step(self.positions), *(Step(block, True) for block in self.blocks)]
        x = self.norm(run_layers(steps, ids, self.interval))
        logits = (self.head or self.tokens)(x)
        return cross_entropy(self.groups, logits, ids.roll(-1, 1), VOCAB)


Loss = Callable[[Tensor], Tensor]


def unsplit(loss: Loss, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        loss(batch).backward()


def split(loss: Loss, batches: Sequence[Tensor], lag: int) -> None:
    """Run forwards ahead, and W `lag` micro-batches behind B, as on a rank of a pipeline."""
    ahead: list[Tensor] = []
    waiting: list[WeightGradients] = []
    for index in range(len(batches) + 1):
        if index < len(batches):
            with splitting():
                ahead.append(loss(batches[index]))
        if index > 0:
            aside = WeightGradients()
            with splitting(aside, waiting if lag else [aside]):
                ahead.pop(0).backward()
            waiting.append(aside)
        if len(waiting) > lag:
            waiting.pop(0).accumulate()
    for each in waiting:
        each.accumulate()
        assert len(each) == 0
    assert not is_splitting()


Errors = dict[str, float]


def differences(groups: Groups, module: nn.Module, loss: Loss, batches: Sequence[Tensor], lag: int) -> Errors:
    """Compare every parameter's gradient with and without the split; -1 means bitwise equal."""
    found = {}
    for run in (unsplit, partial(split, lag=lag)):
        module.zero_grad()
        run(loss, batches)
        found[run] = [p.grad.clone() for p in module.parameters()]
    right, ours = found.values()
    names = [name for name, _ in module.named_parameters()]
    assert all(each.abs().max() > 0 for each in right)
    return {name: -1 if torch.equal(a, b) else relative(a, b) for name, a, b in zip(names, ours, right, strict=True)}


def of_models(tensor: mesh.TensorMesh, cases: Sequence[tuple[str, bool, int]]) -> dict[tuple[str, bool, int], Errors]:
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(NUM_MICRO)]
    found = {}
    for form, recomputed, lag in cases:
        model = Model(groups, form, recomputed)
        randomized(model, groups)
        found[form, recomputed, lag] = differences(groups, model, model, batches, lag)
    return found


KEPT = kept(["1d-sequence-2", "2d-4", "3d-8"])
IN_PARTS = {
    f"{name}-overlap": replace(LAYOUTS[name], comm_overlap=True)
    for name in ("1d-2", "1d-sequence-3", "2d-4", "cuboid-1-2-2-sequence-batch")
}
ALL = (
    {"one": mesh.TensorMesh()}
    | KINDS
    | {name: tensor for name, tensor in (KEPT | IN_PARTS).items() if tensor not in LAYOUTS.values()}
)
CASES = [(form, recomputed, lag) for form in FORMS for recomputed in (False, True) for lag in (0, 2)]
FEW = [("gpt2", False, 2), ("llama", True, 1)]
DAILY = {
    "one",
    "1d-2",
    "1d-sequence-2-keep-none",
    "1d-sequence-3-overlap",
    "2d-4-keep-w",
    "2.5d-3-depth-3",
    "cuboid-1-2-2-sequence-batch",
    "ring-2",
}
EACH_TIME = {"one", "1d-2", "1d-sequence-2-keep-none", "2.5d-3-depth-3", "2d-4-keep-w", "ring-2"}


def assert_equal(found: Errors) -> None:
    wrong = {name: error for name, error in found.items() if error > (CLOSE if name == "tokens.weight" else -1)}
    assert not wrong, wrong


@pytest.mark.parametrize("name", sampled(ALL, EACH_TIME))
def test_gradients_of_a_split_backward_are_those_of_one(name: str) -> None:
    cases = FEW if name in DAILY or ALL[name].size > 4 else CASES
    for found in on_ranks(ALL[name].size, of_models, ALL[name], cases):
        for errors in found.values():
            assert_equal(errors)


def of_one_less(tensor: mesh.TensorMesh) -> Errors:
    """Lose a single product: the last one of the first backward, which delays 9."""
    original_put, seen = WeightGradients.put, []

    def put(self: WeightGradients, weight: Tensor, start: Any) -> None:
        seen.append(weight)
        if len(seen) != 9:
            original_put(self, weight, start)

    WeightGradients.put = put  # type: ignore[method-assign]
    (found,) = of_models(tensor, FEW[:1]).values()
    assert len(seen) == 9 * NUM_MICRO
    return found


def test_a_lost_product_is_detected() -> None:
    for found in on_ranks(2, of_one_less, LAYOUTS["1d-2"]):
        assert [name for name, error in found.items() if error > 1e-2] == ["blocks.0.attention.qkv.weight"]


# ---- weights and their needs ----


class Twice(nn.Module):
    """The same MLP twice, an adapter on a trained linear, and a frozen linear."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.mlp = MLP(groups, HIDDEN, FFN)
        self.up, self.down = Linear(groups, HIDDEN, FFN, role="inward"), Linear(groups, FFN, HIDDEN, role="outward")
        self.up.add_adapter(4, scale=0.5)
        randomized(self, groups)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.mlp(self.mlp(x)))).square().mean()


def residuals(groups: Groups, count: int) -> list[Tensor]:
    """Return inputs, which need no gradient."""
    generator = torch.Generator().manual_seed(groups.rank)
    shape = placement.residual(groups.tensor, BATCH, SEQUENCE, HIDDEN).local_shape
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def of_weights_used_twice(tensor: mesh.TensorMesh) -> tuple[list[str], Errors, dict[str, dict[str, int]]]:
    """Return the delayed gradients in order, the differences, and the number of hooks in B and in W."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    module = Twice(groups)
    learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = {p: name for name, p in learned.items()}
    found = {}
    for run in (unsplit, partial(split, lag=1)):
        module.zero_grad()
        run(module, residuals(groups, NUM_MICRO))
        found[run] = {name: p.grad.clone() for name, p in learned.items()}
    right, ours = found.values()
    errors = {name: -1 if torch.equal(ours[name], right[name]) else relative(ours[name], right[name]) for name in right}
    counts: dict[str, dict[str, int]] = {"B": {}, "W": {}}
    during = "B"

    def count(p: Tensor) -> None:
        counts[during][names[p]] = counts[during].get(names[p], 0) + 1

    for p in learned.values():
        p.register_post_accumulate_grad_hook(count)
    with splitting():
        y = module(residuals(groups, 1)[0])
    aside = WeightGradients()
    with splitting(aside):
        y.backward()
    waiting, during = [names[weight] for weight, _ in aside._waiting], "W"
    assert len(aside) == len(waiting)
    aside.accumulate()
    aside.accumulate()  # without products it does nothing
    return waiting, errors, counts


@pytest.mark.parametrize("name", ["one", "1d-2", "2d-4-keep-none"])
def test_weights_used_twice_frozen_and_adapted(name: str) -> None:
    for waiting, errors, counts in on_ranks(ALL[name].size, of_weights_used_twice, ALL[name]):
        assert waiting == ["up.weight", *2 * ["mlp.down.weight", "mlp.up.weight"]]
        assert_equal(errors)
        assert counts["W"] == {"mlp.up.weight": 1, "mlp.down.weight": 1, "up.weight": 1}
        in_b = ("mlp.up.bias", "mlp.down.bias", "up.bias", "up.lora_A", "up.lora_B", "down.bias")
        assert counts["B"] == dict.fromkeys(in_b, 1)


def test_a_table_that_is_looked_up_has_a_part_in_b() -> None:
    model = Model(Groups(Mesh()), "gpt2", recomputed=False)
    randomized(model, model.groups)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
    model(ids).backward()
    whole = model.tokens.weight.grad.clone()
    model.zero_grad()
    aside = WeightGradients()
    with splitting():
        loss = model(ids)
    with splitting(aside):
        loss.backward()
    looked_up = model.tokens.weight.grad.clone()
    assert relative(looked_up, whole) > 1e-2
    assert aside._waiting[0][0] is model.tokens.weight
    aside.accumulate()
    assert relative(model.tokens.weight.grad, whole) < 1e-6  # of float32


# ---- what is split ----


def a_linear() -> tuple[Linear, Tensor]:
    groups = Groups(Mesh())
    layer = Linear(groups, HIDDEN, FFN, role="inward")
    initialize(layer, groups, seed=1)
    return layer, torch.ones(BATCH, SEQUENCE, HIDDEN)


def test_outside_nothing_is_split() -> None:
    layer, x = a_linear()
    plain = layer(x)
    assert "ShardedMatmul" not in type(plain.grad_fn).__name__
    with splitting(), splitting():
        assert "ShardedMatmul" in type(layer(x).grad_fn).__name__
    with pytest.raises(KeyError), splitting():  # noqa: PT012
        assert is_splitting()
        raise KeyError
    assert not is_splitting()
    aside = WeightGradients()
    with splitting(aside):
        plain.sum().backward()
    assert len(aside) == 0
    assert layer.weight.grad is not None
    with splitting():
        y = layer(x)
    with pytest.raises(AssertionError, match=r"has its backward within `splitting\(into\)`"):
        y.sum().backward()


def test_a_backward_in_a_thread_of_its_own_is_split() -> None:
    """As autograd's thread on an accelerator."""
    layer, x = a_linear()
    aside = WeightGradients()
    with splitting():
        y = layer(x)
    with splitting(aside):
        thread = threading.Thread(target=y.sum().backward)
        thread.start()
        thread.join()
    assert len(aside) == 1
    assert layer.weight.grad is None


def test_a_weight_that_is_computed_stays_in_b() -> None:
    """There is no leaf to which its gradient could be added later."""
    layer, x = a_linear()
    leaf = torch.ones(FFN, HIDDEN, requires_grad=True)
    aside = WeightGradients()
    with splitting():
        y = linear.sharded_matmul(x, 2 * leaf, None, layer.sharding)
    with splitting(aside):
        y.sum().backward()
    assert len(aside) == 0
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2 * BATCH * SEQUENCE))


# ---- memory ----


def held(tensor: mesh.TensorMesh) -> float:
    """Return the elements that a block holds from B to W without weights, in s b h / T."""
    torch.set_default_dtype(torch.float64)
    groups, hidden = Groups(Mesh(tensor=tensor)), 48
    block = Block(groups, hidden, 12)
    initialize(block, groups, seed=1)
    x = torch.ones(placement.residual(tensor, BATCH, SEQUENCE, hidden).local_shape, requires_grad=True)
    aside = WeightGradients()
    with splitting():
        y = block(x)
    with splitting(aside):
        y.backward(torch.ones_like(y))
    tensors = [each for _, start in aside._waiting for each in start.args[:2]]  # type: ignore[attr-defined]
    assert not any(each.requires_grad or each.grad_fn for each in tensors), "would hold a graph"
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values()) / 8 / (BATCH * SEQUENCE * hidden / tensor.size)


HELD = {"one": 16, "1d-2": 20, "1d-sequence-2": 20, "2d-4": 20, "2d-4-keep-none": 18}
"""9 for dY of qkv, out, up and down, 7 for their X, and more if a panel is on several ranks. The prototype had the
same.
"""


def test_what_waits_holds_operands_alone() -> None:
    assert on_last_ranks(held, [ALL[name] for name in HELD]) == [*HELD.values()]


# ---- products under the reduction of dX ----


def events(tensor: mesh.TensorMesh) -> tuple[list[str], list[int]]:
    """Return the events of a block's split backward beside a waiting one, and the products left of both."""
    groups = Groups(Mesh(tensor=tensor))
    block = Block(groups, HIDDEN, QUERY_HEADS, ffn_hidden_size=FFN)
    initialize(block, groups, seed=1)
    mark_owners(block, groups)
    older, aside = WeightGradients(), WeightGradients()
    inputs = [x.requires_grad_() for x in residuals(groups, 2)]
    with splitting():
        ys = [block(x) for x in inputs]
    with splitting(older):
        ys[0].sum().backward()
    older.start_first()()  # three are left
    log: list[str] = []
    original_reduce, original_gradient = Sharding.start_reduce, linear._weight_gradient

    def start_reduce(self: Sharding, panel: Tensor) -> Pending:
        pending = original_reduce(self, panel)
        if self.axis.size == 1 or not any(self is layer.sharding.x for layer in (block.attention.qkv, block.mlp.up)):
            return pending
        log.append("start")
        return Pending(panel, finish=lambda _: log.append("wait") or pending.wait())

    def weight_gradient(*args: Any) -> Tensor:
        log.append("product")
        return original_gradient(*args)

    Sharding.start_reduce, linear._weight_gradient = start_reduce, weight_gradient  # type: ignore[method-assign]
    with splitting(aside, [WeightGradients(), older]):
        ys[1].sum().backward()
    counts = [len(older), len(aside)]
    older.accumulate()
    return log, counts


def test_an_older_product_runs_under_each_reduction_of_dx() -> None:
    """1d: under those of the two inward linears. The two outward ones reduce nothing, and compute nothing early."""
    after = ["product"]  # in `accumulate`
    for log, counts in on_ranks(2, events, LAYOUTS["1d-2"]):
        assert log == 2 * ["start", "product", "wait"] + after
        assert counts == [1, 4]
    for log, counts in on_ranks(1, events, mesh.TensorMesh()):
        assert log == 3 * after
        assert counts == [3, 4]


def exposed(tensor: mesh.TensorMesh) -> dict[str, int]:
    """Return exposed collectives of a block's backward: unsplit, and of B and W with and without `older` products."""
    groups = Groups(Mesh(tensor=tensor))
    block = Block(groups, 64, 8, form=replace(FORMS["llama"], num_kv_heads=4))
    initialize(block, groups, seed=1)
    mark_owners(block, groups)
    x = torch.ones(placement.residual(tensor, 4, 32, 64).local_shape, requires_grad=True)

    def backward(into: WeightGradients, *older: WeightGradients) -> int:
        with splitting():
            y = block(x)
        with count_kernels() as counts:
            with splitting(into, older):
                y.backward(torch.ones_like(y))
            for each in {into, *older}:
                each.accumulate()
        return counts.exposed

    y = block(x)
    with count_kernels() as counts:
        y.backward(torch.ones_like(y))
    waiting, own = WeightGradients(), WeightGradients()
    with splitting():
        y = block(x)
    with splitting(waiting):
        y.backward(torch.ones_like(y))
    found = {"one": counts.exposed, "nothing": backward(WeightGradients()), "itself": backward(own, own)}
    with count_kernels() as counts:  # collectives that W of `waiting` alone exposes do not belong to this backward
        waiting_alone = WeightGradients()
        waiting_alone._waiting.extend(waiting._waiting)
        waiting_alone.accumulate()
    return found | {"an older one": backward(WeightGradients(), waiting) - counts.exposed}


NAMES = ("1d-2", "1d-sequence-4", "1d-sequence-2-keep-none", "2d-4", "2d-4-keep-none", "3d-8")


def test_a_split_backward_hides_no_less() -> None:
    found = dict(zip(NAMES, on_last_ranks(exposed, [(LAYOUTS | ALL)[name] for name in NAMES]), strict=True))
    for name, each in found.items():
        assert max(each["an older one"], each["itself"]) <= each["one"], (name, each)
    for name in ("1d-2", "1d-sequence-4", "2d-4"):  # it can fail: both reductions of dX are exposed
        assert found[name]["nothing"] == found[name]["one"] + 2, (name, found[name])
