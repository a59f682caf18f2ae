"""The time of a step: its parts, its limits, and a pipeline's closed form against the simulation."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs.model_costs import function_of
from dslpar.forecast.constants import DEFAULT
from dslpar.forecast.device import Device, device_named
from dslpar.forecast.links import Group, Nodes, group_of, transfer
from dslpar.forecast.part_terms import HOST_BYTES_PER_S
from dslpar.forecast.part_times import exposed_by_ring
from dslpar.forecast.step_time import StepTime, step_time
from dslpar.forecast.workload import Buckets, Framework, Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.layout.simulation import Durations, simulate
from dslpar.models.gpt.costs import layers
from dslpar.models.gpt.section import GPT

H100 = device_named("h100-80g")
NODES = Nodes.usual(H100)
LLAMA = GPT(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    vocab_size=32000,
    max_seq_len=4096,
    ffn_hidden_size=11008,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
NO_HOPS = replace(DEFAULT, hop_s=1e-12, nic_efficiency=1e6)


def one_d(size: int, **options: Any) -> TensorMesh:
    return TensorMesh(y=size, mode="1d", **options)


def workload(
    pipe: int = 1,
    data: int = 1,
    tensor: TensorMesh | None = None,
    *,
    chunks: int = 1,
    micro_batches: int = 8,
    split: bool = False,
    **fields: Any,
) -> Workload:
    stages = Chunks(pipe, chunks)
    values: dict[str, Any] = {"micro_size": 1, "seq_len": 4096, "zero": 1, "model": LLAMA} | fields
    values.setdefault("counts", (32 // stages.stages,) * stages.stages)
    return Workload(
        mesh=Mesh(pipe=pipe, data=data, tensor=tensor or TensorMesh()),
        schedule=Schedule(stages, micro_batches, split),
        **values,
    )


def timed(made: Workload, device: Device = H100, nodes: Nodes = NODES) -> StepTime:
    return step_time(made, device, nodes)


SOME = (
    workload(),
    workload(data=16, zero=3, recompute="full"),
    workload(data=4, tensor=one_d(8, residual="sequence"), zero=2, micro_size=2),
    workload(
        pipe=4, data=2, tensor=one_d(2), chunks=2, framework=Framework(blocking_messages=True, fused_optimizer=False)
    ),
    workload(
        pipe=2, tensor=TensorMesh(q=2, y=2, mode="2d", residual="hidden"), split=True, recompute="full", micro_size=2
    ),
    workload(
        tensor=TensorMesh(q=2, y=2, z=2, mode="3d", residual="batch"),
        micro_size=8,
        framework=Framework(fused_attention=False),
    ),
    workload(tensor=TensorMesh(d=4, mode="sequence", split="sequence"), recompute="selective"),
)


@pytest.mark.parametrize("made", SOME)
def test_the_parts_of_a_step_add_up_to_it(made: Workload) -> None:
    found = timed(made)
    of_micro_batch = found.compute_s + found.weights_s
    of_step = found.tensor_s + found.launch_s + found.bubble_s + found.hops_s + found.reduction_s
    after = found.gather_s + found.optimizer_s + found.other_s
    assert made.micro_batches * of_micro_batch + of_step + after == pytest.approx(found.step_s, rel=1e-12)
    assert min(value for value in vars(found).values() if isinstance(value, float)) >= 0


@pytest.mark.parametrize("made", SOME)
@pytest.mark.parametrize("field", ["tflops", "hbm_gb_per_s", "link_gb_per_s"])
def test_a_faster_device_is_never_slower(made: Workload, field: str) -> None:
    faster = replace(H100, **{field: 2 * getattr(H100, field)})
    assert timed(made, faster).step_s <= timed(made).step_s


def test_a_faster_device_and_a_faster_network_are_faster() -> None:
    made = workload(data=4, tensor=one_d(16, residual="sequence"), micro_size=8)
    assert timed(made, replace(H100, tflops=2 * H100.tflops)).step_s < 0.9 * timed(made).step_s
    assert timed(made).step_s < 0.8 * timed(made, nodes=Nodes(8, 100)).step_s


def test_time_grows_with_the_micro_batch_and_the_sequence() -> None:
    steps = [timed(workload(micro_size=size)).step_s for size in (1, 2, 4, 8)]
    assert steps == sorted(steps)
    assert steps[-1] / steps[-2] == pytest.approx(2, rel=0.1)
    assert timed(workload(seq_len=8192)).step_s > 2 * timed(workload()).step_s


def test_recomputation_repeats_the_forward_with_its_collectives() -> None:
    tensor = one_d(8)
    plain, full = (timed(workload(tensor=tensor, recompute=how)) for how in ("none", "full"))
    assert full.tensor_s == pytest.approx(1.5 * plain.tensor_s, rel=0.02)
    assert 1.25 < full.compute_s / plain.compute_s < 1.4
    selective = timed(workload(tensor=tensor, recompute="selective"))
    assert plain.compute_s < selective.compute_s < full.compute_s


def test_overlap_hides_a_part_of_the_collectives() -> None:
    plain, hidden = (timed(workload(tensor=one_d(8, comm_overlap=on), micro_size=4)) for on in (False, True))
    assert 0.25 * plain.tensor_s < hidden.tensor_s < 0.8 * plain.tensor_s


def test_parts_of_tokens_cost_what_is_computed_again() -> None:
    """Here the MLP's forward is 2/3 of a layer's products, and the head's a third of its own."""
    again = workload(recompute="full")
    parts = timed(replace(again, mlp_chunks=8))
    more = parts.compute_s / timed(again).compute_s
    assert 1.12 < more < 1.2, "five passes of the MLP for four"
    assert timed(replace(workload(), mlp_chunks=8)) == timed(workload()), "of what is not computed again"
    vocab = replace(LLAMA, vocab_size=128_000)
    whole, by_parts = (timed(workload(model=vocab, loss_chunks=chunks)).compute_s for chunks in (1, 16))
    head_s = 2 * 4096 * 4096 * 128_000 / 989e12
    assert head_s < by_parts - whole < 2 * head_s


def test_inputs_that_wait_in_the_hosts_memory_take_their_way() -> None:
    made = workload(recompute="full")
    moved = timed(replace(made, offloads_inputs=True)).step_s - timed(made).step_s
    assert moved == pytest.approx(8 * 32 * 2 * 2 * 4096 * 4096 / 12e9, rel=0.01)


# Context parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("message_s", [0.1, 0.9, 1.0, 1.7])
def test_a_ring_hides_its_messages_under_the_blocks_that_they_are_not_for(size: int, message_s: float) -> None:
    """Simulated message by message: a block starts when the previous one is done and its keys have arrived."""
    block_s = 1.0
    done = arrived = 0.0
    for _ in range(size):
        start = max(done, arrived)
        done, arrived = start + block_s, start + message_s  # it is passed on during the block's computation
    forward, _ = exposed_by_ring([message_s, 0.0], [block_s, block_s], size)
    assert forward == pytest.approx(done - size * block_s)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("key_s", "gradient_s"), [(0.1, 0.2), (0.4, 0.9), (0.9, 0.9), (1.2, 2.4)])
def test_gradients_follow_keys_around_a_ring_and_come_home_under_nothing(
    size: int, key_s: float, gradient_s: float
) -> None:
    """Simulated: during a block, the next keys and the previous block's gradients are in transit."""
    block_s, now = 1.0, 0.0
    for step in range(size):
        on_the_way = (key_s if step + 1 < size else 0.0) + (gradient_s if step else 0.0)
        now += max(block_s, on_the_way)
    now += gradient_s
    _, backward = exposed_by_ring([key_s, gradient_s], [block_s, block_s], size)
    assert backward == pytest.approx(now - size * block_s)


def test_of_an_exchange_each_device_sends_what_leaves_its_node() -> None:
    """With 8 devices on 2 nodes, 4 of 7 parts leave over a quarter of a node's cards; a message leaves in full."""
    across = Group(size=8, inner=4, share=1.0)
    nodes = Nodes(per_node=4, nic_gb_per_s=200)
    made = {kind: transfer(kind, across, H100, nodes, 7e9).nic_s for kind in ("all_to_all", "send", "all_gather")}
    assert made == pytest.approx({"all_to_all": 4 / 50, "send": 7 / 50, "all_gather": 7 / 200})


def context(size: int, impl: str, **values: Any) -> TensorMesh:
    return TensorMesh(d=size, mode="sequence", split="sequence", impl=impl, **values)


def test_a_ring_pays_for_short_sequences_and_an_exchange_for_long_ones() -> None:
    def ratio(seq_len: int) -> float:
        made = (timed(workload(tensor=context(8, impl), seq_len=seq_len, micro_size=1)) for impl in ("ring", "ulysses"))
        ring, ulysses = made
        return ring.tensor_s / ulysses.tensor_s

    assert ratio(4096) > 1.05
    assert ratio(131072) < 1.0


def test_sizes_off_the_tiles_cost_more() -> None:
    """BigScience measured 27 % between these two hidden sizes, with the same layout."""
    even, odd = (
        GPT(num_layers=32, hidden_size=hidden, num_heads=heads, vocab_size=51200, max_seq_len=2048)
        for hidden, heads in ((13824, 72), (14400, 80))
    )
    steps = [timed(workload(model=each, seq_len=2048, tensor=one_d(8))).step_s for each in (even, odd)]
    operations = (14400 / 13824) ** 2
    assert 1.15 * operations < steps[1] / steps[0] < 1.6 * operations


def test_launches_are_a_floor() -> None:
    small = GPT(num_layers=32, hidden_size=256, num_heads=4, vocab_size=512, max_seq_len=256)
    found = timed(workload(model=small, seq_len=256))
    floor = 32 * DEFAULT.layer_launch_s * (1 + DEFAULT.backward_launch) * 8
    assert found.step_s > floor
    assert found.launch_s > 0.8 * floor


def test_each_collective_of_a_layer_is_launched_too() -> None:
    """These are 1d's four all-reduces over two ranks, whose hosts are assumed not to wait for each other."""
    small = GPT(num_layers=32, hidden_size=256, num_heads=4, vocab_size=512, max_seq_len=256)
    made = workload(model=small, seq_len=256, tensor=one_d(2))
    alone = replace(DEFAULT, tensor_launch=1e-12)
    slow, slower = (replace(alone, collective_launch_s=seconds) for seconds in (50e-6, 1050e-6))
    found = [step_time(made, H100, NODES, each) for each in (slow, slower)]
    expected = 32 * 4 * 1e-3 * 8
    assert found[1].step_s - found[0].step_s == pytest.approx(expected, rel=0.05)
    assert found[1].launch_s - found[0].launch_s == pytest.approx(expected, rel=0.05)


SMALL = GPT(num_layers=32, hidden_size=256, num_heads=4, vocab_size=512, max_seq_len=256)
"""A model whose step time is limited by the host."""


def host_s(made: Workload, **constants: float) -> float:
    """Return the launch time of a layer of SMALL, on ranks that do not wait for each other."""
    found = step_time(made, H100, NODES, replace(DEFAULT, tensor_launch=1e-12, **constants))
    return found.launch_s / (made.micro_batches * SMALL.num_layers)


@pytest.mark.parametrize(
    ("values", "forwards", "backwards"),
    [
        ({}, 1, 1),
        ({"recompute": "full"}, 2, 1),
        ({"framework": Framework(launch_ratio=2.0)}, 2, 2),
        ({"recompute": "full", "framework": Framework(launch_ratio=2.0)}, 4, 2),
    ],
)
def test_a_layer_is_launched_forward_and_backward_and_again(
    values: dict[str, Any], forwards: int, backwards: int
) -> None:
    made = workload(model=SMALL, seq_len=256, **values)
    one, more = (host_s(made, layer_launch_s=seconds, backward_launch=3.0) for seconds in (10e-3, 20e-3))
    assert more - one == pytest.approx((forwards + 3.0 * backwards) * 10e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("tensor", "calls"),
    [
        (one_d(2), 2 + 2),
        (TensorMesh(q=2, y=2, mode="2d", residual="hidden"), 10 + 12),
        (TensorMesh(d=4, mode="sequence", split="sequence"), 3 + (3 + 3 + 1)),
    ],
)
def test_collectives_and_a_ring_s_messages_are_launched_in_both_ways(tensor: TensorMesh, calls: int) -> None:
    made = workload(model=SMALL, seq_len=256, tensor=tensor)
    one, more = (host_s(made, layer_launch_s=10e-3, collective_launch_s=seconds) for seconds in (1e-3, 2e-3))
    assert more - one == pytest.approx(calls * 1e-3, rel=0.01)
    again = replace(made, recompute="full")
    one, more = (host_s(again, layer_launch_s=10e-3, collective_launch_s=seconds) for seconds in (1e-3, 2e-3))
    assert more - one > calls * 1e-3, "what a forward sends is sent again"


def test_a_host_runs_ahead_of_a_busy_device() -> None:
    """Its lead from a backward may be lost in a forward, or in recomputation: their sums count."""
    made = workload(model=GPT(num_layers=32, hidden_size=2048, num_heads=16, vocab_size=512, max_seq_len=4096))
    free = replace(DEFAULT, layer_launch_s=1e-9)
    layers = 32 * made.micro_batches
    for recompute, forwards in (("none", 1), ("full", 2)):
        each = replace(made, recompute=recompute)
        device_s = step_time(each, H100, NODES, free).step_s
        # the host needs equal times for forward and backward, and the device twice as long for the backward
        host = replace(DEFAULT, layer_launch_s=0.9 * device_s / layers / (forwards + 1), backward_launch=1.0)
        assert device_s < step_time(each, H100, NODES, host).step_s < 1.06 * device_s
    waits, runs = (
        step_time(
            replace(workload(pipe=2, model=made.model), framework=Framework(blocking_messages=on)), H100, NODES, host
        )
        for on in (True, False)
    )
    assert waits.launch_s > 2 * runs.launch_s


def test_a_step_has_no_jump_where_host_and_device_take_the_same() -> None:
    made = workload(model=LLAMA, data=32, zero=1, micro_batches=2, framework=Framework(overlaps_gather=True))
    split = workload(pipe=4, split=True, recompute="full")
    for each in (made, split):
        steps = [
            step_time(each, H100, NODES, replace(DEFAULT, layer_launch_s=seconds * 1e-5)).step_s
            for seconds in range(50, 800)
        ]
        ratios = [after / before for before, after in pairwise(steps)]
        launched = [(at + 1) / at for at in range(50, 799)]
        assert all(1 - 1e-9 <= found <= most + 2e-3 for found, most in zip(ratios, launched, strict=True))


# Pipelines --------------------------------------------------------------------------------------------------------


def simulated(made: Workload, layer_s: float) -> float:
    """Simulate a workload whose layers take a third of their time for each of F, B and W."""
    stages = [count * layer_s / 3 for count in made.counts]
    return simulate(made.schedule.orders(), made.chunks, Durations(stages, stages, stages)).makespan


WHOLE = function_of(layers(LLAMA, 4096))(TensorMesh(), 4096)
HEADLESS = replace(WHOLE, last=WHOLE.first)


@pytest.mark.parametrize(("chunks", "split"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_equal_stages_have_the_closed_form_s_bubble(chunks: int, split: bool, recompute: str) -> None:
    made = workload(pipe=4, chunks=chunks, split=split, recompute=recompute, known_costs=HEADLESS)
    found = step_time(made, H100, NODES, replace(NO_HOPS, backward_launch=1.0))
    alone = step_time(replace(made, recompute="none"), H100, NODES, replace(NO_HOPS, backward_launch=1.0))
    busy = made.micro_batches * found.compute_s + found.tensor_s + found.launch_s
    idle = found.bubble_s / (busy + found.bubble_s)
    if recompute == "none":
        # A GPT's backward takes a little over two forwards: attention's takes two and a half.
        forward = 1 / 3.06
        expected = made.schedule.bubble(forward, (1 - forward) / 2, (1 - forward) / 2)
        assert idle == pytest.approx(expected, rel=0.02)
    if not split:
        assert idle == pytest.approx(made.schedule.bubble(), rel=1e-9)
        assert found.step_s > alone.step_s or recompute == "none"


def busy_and_idle_s(found: StepTime, micro_batches: int) -> float:
    return micro_batches * found.compute_s + found.tensor_s + found.launch_s + found.bubble_s


@pytest.mark.parametrize("counts", [(9, 9, 8, 6), (5, 9, 9, 9), (6, 6, 6, 14)])
def test_the_fullest_stage_rules_as_the_simulation_says(counts: tuple[int, ...]) -> None:
    equal = workload(pipe=4, micro_batches=16, known_costs=HEADLESS)
    layer_s = busy_and_idle_s(step_time(equal, H100, NODES, NO_HOPS), 16) / (19 * 8)
    made = replace(equal, counts=counts)
    found = busy_and_idle_s(step_time(made, H100, NODES, NO_HOPS), 16)
    assert found == pytest.approx(simulated(made, layer_s), rel=0.03)


def test_messages_of_a_host_that_waits_cost_more() -> None:
    tensor = one_d(2)
    free, blocking = (
        timed(workload(pipe=4, tensor=tensor, framework=Framework(blocking_messages=on))) for on in (False, True)
    )
    assert blocking.step_s > free.step_s
    assert blocking.launch_s > free.launch_s


# Replicas ---------------------------------------------------------------------------------------------------------


def test_zero_3_sends_weights_in_each_micro_batch_and_zero_1_once() -> None:
    first, third = (timed(workload(data=16, zero=zero)) for zero in (1, 3))
    assert first.weights_s == 0 < third.weights_s
    assert first.gather_s > third.gather_s == 0
    assert sum(sent.num_bytes for sent in third.sent) > 3 * sum(sent.num_bytes for sent in first.sent)


def test_hidden_reductions_and_gathers_cost_less() -> None:
    hidden, open_ = (
        timed(workload(data=16, framework=Framework(overlaps_reduction=on, overlaps_gather=on))) for on in (True, False)
    )
    assert hidden.reduction_s < open_.reduction_s
    assert hidden.gather_s < open_.gather_s


def test_weights_that_are_gathered_in_buffers_cost_one_pass() -> None:
    buffers, one_by_one = (
        timed(workload(data=64, framework=Framework(gathers_buffers=each))).gather_s for each in (True, False)
    )
    assert one_by_one == pytest.approx(DEFAULT.gather_passes / DEFAULT.flat_gather_passes * buffers)
    assert DEFAULT.flat_gather_passes == 1


def test_of_prefetched_layers_the_first_waits_for_its_weights() -> None:
    """One of 32 layers remains if compute is far longer than the traffic; without prefetch all of them remain."""
    ahead, waiting = (
        timed(workload(data=8, zero=3, micro_size=4, framework=Framework(prefetches_weights=each))).weights_s
        for each in (True, False)
    )
    assert ahead == pytest.approx(waiting / 32, rel=0.01)


def test_a_rack_is_one_node_for_collectives() -> None:
    """Eight tensor ranks of GB200 are in two nodes of four, and in one rack."""
    device, made = device_named("gb200-186g"), workload(data=16, tensor=one_d(8))
    nodes = Nodes.usual(device)
    assert nodes.linked(device) == Nodes(72, 18 * nodes.nic_gb_per_s)
    assert nodes.linked(device).linked(device) == nodes.linked(device)
    assert NODES.linked(H100) == NODES
    (tensor,) = [each for each in timed(made, device, nodes).sent if each.axis == "y"]
    assert not tensor.across
    apart = timed(made, replace(device, linked=0), nodes)
    assert timed(made, device, nodes).tensor_s < 0.5 * apart.tensor_s


def test_offloaded_weights_are_read_in_each_forward_and_backward() -> None:
    offloads = Framework(buckets=Buckets(offloads_weights=True))
    made = [workload(data=8, zero=3, micro_batches=count, framework=offloads) for count in (1, 3)]
    more = timed(made[1]).terms.offloaded_s - timed(made[0]).terms.offloaded_s
    assert more == pytest.approx(2 * 2 * 2 * made[0].weights(0) / 8 / HOST_BYTES_PER_S)


def test_a_single_replica_sends_nothing() -> None:
    assert timed(workload(zero=3)).sent == ()
    assert timed(workload(zero=3)).weights_s == timed(workload()).gather_s == 0


def test_sent_bytes_are_those_of_the_forecast_of_traffic() -> None:
    made = workload(pipe=2, data=2, tensor=one_d(4, residual="sequence"))
    sent = {each.axis: each for each in timed(made).sent}
    layers = made.costs.layer.traffic.total * 16 * 8 * 2
    assert sent["y"].num_bytes == pytest.approx(float(layers), rel=0.03)
    assert sent["pipe"].num_bytes == 2 * 8 * 2 * 4096 * 4096 / 4
    assert not sent["y"].across
    assert sent["pipe"].across


# Links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (Mesh(data=2, tensor=one_d(8)), ("y",), Group(8, 8, 1.0)),
        (Mesh(data=2, tensor=one_d(8)), ("data",), Group(2, 1, 1 / 8)),
        (Mesh(data=8, tensor=one_d(2)), ("data",), Group(8, 4, 0.5)),
        (Mesh(data=1, tensor=one_d(16)), ("y",), Group(16, 8, 1.0)),
        (Mesh(pipe=2, data=2, tensor=one_d(2)), ("pipe",), Group(2, 2, 0.25)),
        (Mesh(tensor=TensorMesh(d=2, q=4, y=4, mode="2.5d")), ("d", "q"), Group(8, 2, 0.25)),
    ],
)
def test_ranks_of_a_group_that_share_a_node(mesh: Mesh, axes: tuple[str, ...], expected: Group) -> None:
    found = group_of(mesh, NODES, *axes)
    assert found == expected
    peers = mesh.peers(0, *axes)
    assert found.inner == sum(rank < NODES.per_node for rank in peers)


def test_a_group_over_nodes_takes_longer_for_the_same_bytes() -> None:
    inside, over = (
        transfer("all_gather", group, H100, NODES, 1e9).seconds(DEFAULT)
        for group in (Group(8, 8, 1.0), Group(16, 8, 1.0))
    )
    assert inside < over
    halved = transfer("all_gather", Group(16, 8, 0.5), H100, NODES, 1e9).seconds(DEFAULT)
    assert halved > over


def test_latency_counts_each_collective() -> None:
    group = Group(32, 8, 1.0)
    one, ten = (transfer("all_gather", group, H100, NODES, 1e6, calls).seconds(DEFAULT) for calls in (1, 10))
    assert ten - one == pytest.approx(9 * (31 * DEFAULT.nic_latency_s + 3 * DEFAULT.link_latency_s))


# Speed ------------------------------------------------------------------------------------------------------------


def test_a_search_can_afford_it() -> None:
    """It takes 60 us on an idle machine. The smallest of many runs counts, with a margin for a busy one."""
    costs = function_of(layers(LLAMA, 4096))(one_d(2, residual="sequence"), 4096.0)
    made = workload(pipe=2, data=4, tensor=one_d(2, residual="sequence"), known_costs=costs)
    least = 1.0
    for _ in range(200):
        began = time.process_time()
        timed(made)
        least = min(least, time.process_time() - began)
    assert least < 300e-6
