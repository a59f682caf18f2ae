"""Prefetched weights and delayed gradients: bitwise equal, whatever happens in between.

Each case trains two models with the same weights for a few rounds, and one of them prefetches. Weights change between
rounds through `.data`, as in DeepSpeed's steps, which torch does not count. So a panel that outlived its round would be
seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.device_counter import count_kernels
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Linear, initialize, late_reduction, placement
from dslpar.layers.loss import cross_entropy, cross_entropy_by_chunks
from dslpar.layers.operand_shardings import prefetch_weights
from tests.distributed.layers.test_backward_order import _Products
from tests.distributed.layers.test_weight_gradients import Model, split
from tests.support.compare_dense import BATCH, HIDDEN, SEQUENCE, VOCAB, randomized
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import LAYOUTS, kept
from tests.support.live_storages import LiveStorages
from tests.support.prefetched_panels import count_ahead
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

ROUNDS = 3
"""In the first round no order is known yet."""

Scenario = Callable[[nn.Module, Sequence[Tensor]], None]


# ---- scenarios of a round ----


def one_by_one(module: nn.Module, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        module(batch).backward()


def in_flight(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Run as on a pipeline's first stage, whose backwards come while other micro-batches are in flight."""
    ahead = [module(batches[0]), module(batches[1])]
    ahead.pop(0).backward()
    ahead.append(module(batches[2]))
    for loss in ahead:
        loss.backward()


def retained(module: nn.Module, batches: Sequence[Tensor]) -> None:
    loss = module(batches[0])
    loss.backward(retain_graph=True)
    loss.backward()


def of_inputs_alone(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """In a retained graph, first take only the vectors' gradients: a matrix's gradient is made, and nobody takes it."""
    loss = module(batches[0])
    torch.autograd.grad(loss, [p for p in module.parameters() if p.dim() == 1], retain_graph=True)
    loss.backward()


def evaluated_between(module: nn.Module, batches: Sequence[Tensor]) -> None:
    with torch.no_grad():
        module(batches[0])
    one_by_one(module, batches)


def changed_by_hook(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Change a weight after its prefetch."""

    def change(linear: Any, inputs: Any) -> None:
        with torch.no_grad():
            linear.weight.mul_(1.5)

    with hooked(module.blocks[1].mlp.up.register_forward_pre_hook(change)):
        one_by_one(module, batches)


def replaced_by_hook(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Replace a weight by another tensor after its prefetch."""

    def change(linear: Any, inputs: Any) -> None:
        linear.weight.data = linear.weight.data * 1.5

    with hooked(module.blocks[1].mlp.up.register_forward_pre_hook(change)):
        one_by_one(module, batches)


def failing_forward(module: nn.Module, batches: Sequence[Tensor]) -> None:
    with hooked(module.blocks[1].mlp.up.register_forward_pre_hook(fail)), pytest.raises(KeyError):
        module(batches[0])
    one_by_one(module, batches)


def failing_backward(module: nn.Module, batches: Sequence[Tensor]) -> None:
    with hooked(module.blocks[0].mlp.register_full_backward_hook(fail)):
        loss = module(batches[0])
        with pytest.raises(KeyError):
            loss.backward()
    module.zero_grad()
    one_by_one(module, batches)


def fail(*_: Any) -> None:
    raise KeyError


def another_way(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Send micro-batches through other layers than the ones before them."""
    blocks = module.blocks
    for index, batch in enumerate(batches):
        module.blocks = blocks[: index % 2 + 1]
        module(batch).backward()
    module.blocks = blocks


@contextmanager
def hooked(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


class ByParts(Model):
    """Computes the MLP and the loss with its head in parts of the tokens."""

    def __init__(self, groups: Groups, form: str, recomputed: bool) -> None:
        super().__init__(groups, form, recomputed)
        for block in self.blocks:
            block.mlp_chunks = 2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return cross_entropy_by_chunks(
            self.groups, self.head or self.tokens, self.norm(x), ids.roll(-1, 1), VOCAB, num_chunks=2
        )


class Reentrant(Model):
    """Recomputes by torch's reentrant checkpoint, whose backward runs another one inside."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.tokens(ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return cross_entropy(self.groups, self.head(self.norm(x)), ids.roll(-1, 1), VOCAB)


class Adapted(Model):
    """Has adapters on frozen linears, a frozen linear, and trained others."""

    def __init__(self, groups: Groups, form: str, recomputed: bool) -> None:
        super().__init__(groups, form, recomputed)
        for linear in (self.blocks[0].attention.qkv, self.blocks[1].mlp.down):
            linear.weight.requires_grad_(False)
            linear.add_adapter(4, scale=0.5)
        self.blocks[1].attention.out.weight.requires_grad_(False)


Make = Callable[[Groups], nn.Module]

CASES: dict[str, tuple[Make, Scenario]] = {
    "GPT-2": (partial(Model, form="gpt2", recomputed=False), one_by_one),
    "Llama": (partial(Model, form="llama", recomputed=False), one_by_one),
    "recomputed": (partial(Model, form="gpt2", recomputed=True), one_by_one),
    "recomputed, in flight": (partial(Model, form="llama", recomputed=True), in_flight),
    "recomputed by a backward within": (partial(Reentrant, form="llama", recomputed=False), one_by_one),
    "by parts": (partial(ByParts, form="gpt2", recomputed=False), one_by_one),
    "by parts, untied": (partial(ByParts, form="llama", recomputed=False), one_by_one),
    "split": (partial(Model, form="llama", recomputed=False), partial(split, lag=1)),
    "split, recomputed": (partial(Model, form="llama", recomputed=True), partial(split, lag=0)),
    "adapters, frozen": (partial(Adapted, form="gpt2", recomputed=False), one_by_one),
    "adapters, frozen, recomputed": (partial(Adapted, form="llama", recomputed=True), one_by_one),
    "in flight": (partial(Model, form="gpt2", recomputed=False), in_flight),
    "retained": (partial(Model, form="gpt2", recomputed=False), retained),
    "of inputs alone": (partial(Model, form="gpt2", recomputed=False), of_inputs_alone),
    "evaluated between": (partial(Model, form="gpt2", recomputed=False), evaluated_between),
    "changed by a hook": (partial(Model, form="gpt2", recomputed=False), changed_by_hook),
    "replaced by a hook": (partial(Model, form="llama", recomputed=False), replaced_by_hook),
    "failing forward": (partial(Model, form="llama", recomputed=False), failing_forward),
    "failing backward": (partial(Model, form="llama", recomputed=False), failing_backward),
    "another way": (partial(Model, form="llama", recomputed=False), another_way),
}


def rounds(module: nn.Module, scenario: Scenario, batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of each round; weights change after each."""
    found = []
    for _ in range(ROUNDS):
        module.zero_grad()
        scenario(module, batches)
        for p in module.parameters():
            if p.grad is not None:
                found.append(p.grad.clone())
                p.data.sub_(p.grad, alpha=0.01)
    return [*found, *(p.detach() for p in module.parameters())]


def of_cases(tensor: mesh.TensorMesh, cases: Sequence[str]) -> dict[str, tuple[bool, int, int]]:
    """Return by case whether all is bitwise equal, the number of rounds with gradients, and of prefetched panels."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=replace(tensor, comm_overlap=True)))
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(3)]
    used = count_ahead()
    found = {}
    for name in cases:
        make, scenario = CASES[name]
        results = []
        for enabled in (False, True):
            module = randomized(make(groups), groups)
            prefetch_weights(module, enabled)
            before = len(used)
            results.append(rounds(module, scenario, batches))
            assert enabled or len(used) == before
            if enabled and name == "GPT-2":
                _check_switches(module, used, batches)
        right, ours = results
        assert all(each.abs().max() > 0 for each in right), name
        equal = len(right) == len(ours) and all(map(torch.equal, right, ours))
        found[name] = equal, len(right), len(used) - before
    return found


def _check_switches(module: nn.Module, used: list[bool], batches: Sequence[Tensor]) -> None:
    """Check that a copy prefetches by itself, and that nothing does once switched off."""
    twin = copy.deepcopy(module)
    before = len(used)
    one_by_one(twin, batches)
    assert len(used) > before
    assert twin.weight_prefetch is not module.weight_prefetch
    prefetch_weights(module, enabled=False)
    before = len(used)
    one_by_one(module, batches)
    assert len(used) == before
    assert module.weight_prefetch is None
    assert not module._forward_pre_hooks


FEW = ("GPT-2", "recomputed", "by parts, untied", "split", "adapters, frozen", "in flight")
OF_FOUR = {
    "2.5d-4-depth-2": mesh.TensorMesh(d=2, q=2, mode="2.5d", residual="hidden"),
    "cuboid-2-1-2": mesh.TensorMesh(q=2, z=2, mode="cuboid", residual="hidden", inner="batch", keep="none"),
}
"""Features of 2.5d and 3d beyond 2d, on fewer ranks."""
LARGE = {"3d-8": LAYOUTS["3d-8"]}
OF_TWO = {"cuboid-2-1-1": mesh.TensorMesh(q=2, mode="cuboid")}
"""Weights sharded over q alone, whose cases take a third of the time."""
SQUARE = kept(["2d-4"])
ALL = SQUARE | OF_FOUR | LARGE | OF_TWO


def runs() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield layouts with cases, so few that ranks on two cores take at most some minutes."""
    for name in (*LARGE, *OF_TWO):
        cases = FEW if name in LARGE else tuple(CASES)
        yield from [(name, cases[::2]), (name, cases[1::2])]
    yield from [(name, FEW) for name in OF_FOUR]
    # Each case runs with each of a linear's two panels kept, and with it gathered again.
    yield from [(name, FEW[number // 2 :: 2]) for number, name in enumerate(SQUARE)]


RUNS = list(runs())
DAILY = [run for run in RUNS if run[0] in OF_TWO][-1:]
"""The half of the cases that takes two ranks less time. 2d is always trained by
tests/distributed/engine/test_weight_prefetch.py.
"""


@pytest.mark.parametrize(("name", "cases"), sampled(RUNS, DAILY))
def test_bits_are_the_same(name: str, cases: tuple[str, ...]) -> None:
    for found in on_ranks(ALL[name].size, of_cases, ALL[name], cases):
        assert [*found] == [*cases]
        assert not [case for case, (equal, _, _) in found.items() if not equal]
        assert not [case for case, (_, _, ahead) in found.items() if not ahead]


# ---- overlap ----

FLAT = mesh.TensorMesh(q=2, mode="cuboid", comm_overlap=True)
"""Weights sharded over q, without other traffic."""
WIDTH = 40
PANEL = (WIDTH, WIDTH)


class Chain(nn.Module):
    """Linears one after the other."""

    def __init__(self, groups: Groups, count: int) -> None:
        super().__init__()
        layers = [Linear(groups, WIDTH, WIDTH, role="inward", bias=False) for _ in range(count)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def chain(tensor: mesh.TensorMesh, count: int) -> tuple[Chain, Tensor]:
    groups = Groups(Mesh(tensor=tensor))
    module = Chain(groups, count)
    initialize(module, groups, seed=1)
    prefetch_weights(module)
    return module, torch.ones(placement.residual(tensor, BATCH, SEQUENCE, WIDTH).local_shape, requires_grad=True)


@contextmanager
def logged(log: list[str], names: dict[int, str]) -> Iterator[None]:
    """Log starts and waits: of a weight by its name, of a gradient by the order of products."""
    gather, reduce = collectives.start_all_gather, collectives.start_reduce_scatter
    count = iter(range(10**6))

    def pending(name: str, begun: Pending) -> Pending:
        log.append(f"start {name}")
        return Pending(begun.received, finish=lambda _: log.append(f"wait {name}") or begun.wait())

    def start_gather(x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
        return pending(f"W{names[x.data_ptr()]}", gather(x, axis, *args, **kwargs))

    def start_reduce(x: Tensor, axis: Axis, *args: Any) -> Pending:
        return pending(f"dW{next(count)}", reduce(x, axis, *args))

    collectives.start_all_gather, collectives.start_reduce_scatter = start_gather, start_reduce
    try:
        yield
    finally:
        collectives.start_all_gather, collectives.start_reduce_scatter = gather, reduce


def events(tensor: mesh.TensorMesh) -> tuple[list[str], list[str]]:
    """Return the events of a forward and a backward of three linears with known order."""
    module, x = chain(tensor, 3)
    module(x).sum().backward()
    names = {linear.weight.data_ptr(): str(index) for index, linear in enumerate(module.layers)}
    forward: list[str] = []
    backward: list[str] = []
    with logged(forward, names), _Products(forward, PANEL):
        y = module(x)
    gradient = torch.ones_like(y)
    for linear in module.layers:
        linear.weight.register_post_accumulate_grad_hook(lambda p: backward.append(f"add dW of {names[p.data_ptr()]}"))
    with logged(backward, names), _Products(backward, PANEL):
        y.backward(gradient)
    return forward, backward


def test_collectives_run_under_the_products_of_others() -> None:
    ((forward, backward),) = on_last_ranks(events, [FLAT])
    first = ["start W1", "dgrad", "wait W1", "start W2", "dgrad", "wait W2", "dgrad"]  # the log calls any product so
    assert forward == first
    assert backward == [
        *["dgrad", "start W1", "wgrad", "start dW0"],
        *["wait W1", "dgrad", "wait dW0", "start W0", "wgrad", "start dW1", "add dW of 2"],
        *["wait W0", "dgrad", "wait dW1", "wgrad", "start dW2", "wait dW2", "add dW of 0", "add dW of 1"],
    ]


def late_gradients(tensor: mesh.TensorMesh) -> list[bool]:
    """Return for each late gradient whether autograd also gave its stand-in a gradient."""
    seen: list[bool] = []
    original = late_reduction._StandIn.backward

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        seen.append(grads[0] is not None)
        return original(ctx, *grads)

    late_reduction._StandIn.backward = staticmethod(backward)  # type: ignore[method-assign]
    module, x = chain(tensor, 3)
    for _ in range(2):
        module(x).sum().backward()
    return seen


def test_a_stand_in_gets_a_gradient() -> None:
    """torch before 2.6 takes its device from it: otherwise it would run on the caller's thread, beside a GPU's."""
    assert on_last_ranks(late_gradients, [FLAT]) == [[True, True]]


def without_dx(tensor: mesh.TensorMesh) -> tuple[list[str], bool]:
    """Return the events of a backward of three linears whose input needs no gradient, and whether a reduction is still
    referenced.
    """
    module, x = chain(tensor, 3)
    x = x.detach()
    module(x).sum().backward()
    log: list[str] = []
    y = module(x)
    names = {linear.weight.data_ptr(): str(index) for index, linear in enumerate(module.layers)}
    with logged(log, names), _Products(log, PANEL):
        y.backward(torch.ones_like(y))
    return log, bool(module.weight_prefetch._backwards)


def test_a_linear_without_dx_goes_on_with_the_sum_of_the_one_before() -> None:
    """The first linear's product, for dW alone, hides the second's sum over d."""
    ((log, left),) = on_last_ranks(without_dx, [FLAT])
    assert log[-4:] == ["wait dW1", "wgrad", "start dW2", "wait dW2"]
    assert not left


def exposed(tensor: mesh.TensorMesh) -> list[int]:
    """Return exposed collectives of one block and of two, each without and with prefetch."""
    groups, found = Groups(Mesh(tensor=tensor)), []
    for count in (1, 2):
        blocks = nn.Sequential(*(Block(groups, 64, 8) for _ in range(count)))
        initialize(blocks, groups, seed=1)
        x = torch.ones(placement.residual(tensor, 4, 32, 64).local_shape, requires_grad=True)
        for enabled in (False, True):
            prefetch_weights(blocks, enabled)
            for _ in range(2):
                with count_kernels() as counts:
                    blocks(x).sum().backward()
            found.append(counts.exposed)
    return found


def test_what_is_sent_for_weights_runs_under_products() -> None:
    """The second block is like one in the middle of a model; the ends belong to the first.

    Of its exposed collectives, four are norms' statistics. The others are sums of vectors' gradients, which an engine
    does once per step.
    """
    sizes = [replace(LAYOUTS[name], comm_overlap=True) for name in ("2d-4", "3d-8")]
    assert on_last_ranks(exposed, sizes) == [[17, 8, 2 * 17, 8 + 5], [18, 9, 2 * 18, 9 + 6]]


# ---- memory ----


class _Panels(LiveStorages):
    """Records the largest number of live panels of weights at a product."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        size = 4 * WIDTH * WIDTH
        self.bytes()  # forgets those that are freed
        self.most = max(self.most, sum(nbytes == size for _, nbytes in self._alive.values()))
        return result


def panels(tensor: mesh.TensorMesh) -> dict[str, int]:
    found = {}
    for enabled in (False, True):
        module, x = chain(tensor, 4)
        prefetch_weights(module, enabled)
        for _ in range(2):
            with _Panels() as forward:
                y = module(x)
            gradient = torch.ones_like(y)
            with _Panels() as backward:
                y.backward(gradient)
            del y
        found |= {f"forward, {enabled}": forward.most, f"backward, {enabled}": backward.most}
        with _Panels() as after:
            torch.ones(1)
        module.zero_grad()
        found[f"after, {enabled}"] = after.most
    return found


def test_two_panels_are_the_most() -> None:
    """In a backward, W makes room for dW, or for the next W."""
    (found,) = on_last_ranks(panels, [FLAT])
    assert found == {
        "forward, False": 1,
        "backward, False": 1,
        "after, False": 0,
        "forward, True": 2,
        "backward, True": 2,
        "after, True": 0,
    }


# ---- only on request ----


def prefetching(tensor: mesh.TensorMesh) -> bool:
    block = Block(Groups(Mesh(tensor=tensor)), HIDDEN, 4)
    prefetch_weights(block)
    return block.weight_prefetch is not None


def test_only_weights_in_pieces_are_prefetched_and_only_with_overlap() -> None:
    sizes = [FLAT, replace(FLAT, comm_overlap=False), replace(LAYOUTS["1d-2"], comm_overlap=True)]
    assert on_last_ranks(prefetching, sizes) == [True, False, False]
