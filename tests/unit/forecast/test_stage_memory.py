"""A rank's memory waterfall: its parts, the binding moment and rank, and the effect of config keys.

tests/distributed/engine measures states, buffers and activations on ranks (test_state_memory.py,
test_activation_memory.py).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.forecast.activations import activations, fullest
from dslpar.forecast.model_states import states
from dslpar.forecast.stage_memory import (
    COMMUNICATOR,
    CONTEXT,
    StageMemory,
    binding,
    num_communicators,
    stage_memory,
)
from dslpar.forecast.workload import Buckets, Framework, Workload, workload_of
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.linter import check
from dslpar.models.gpt.section import GPT

LLAMA_13B = GPT(
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    ffn_hidden_size=13824,
    vocab_size=32000,
    max_seq_len=4096,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)


def workload(pipe: int = 1, data: int = 8, tensor: int = 1, micro_batches: int = 8, **other: Any) -> Workload:
    cuboid = TensorMesh(y=tensor, mode="1d", residual="sequence") if tensor > 1 else TensorMesh()
    sizes = {"counts": (40 // pipe,) * pipe, "schedule": Schedule(Chunks(pipe), micro_batches), "zero": 1}
    mesh = Mesh(pipe=pipe, data=data, tensor=cuboid)
    return Workload(**{"model": LLAMA_13B, "mesh": mesh, "micro_size": 1, "seq_len": 4096} | sizes | other)


# ---- the waterfall ----


def test_parts_add_up() -> None:
    made = stage_memory(workload(pipe=2, tensor=2), 0)
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation", "outside")
    assert sum(getattr(made, part) for part in parts) == pytest.approx(made.total)
    assert made.masters < made.optimizer
    assert made.working < made.activations
    assert all(value >= 0 for value in made[2:])


def test_the_first_stage_binds_and_the_last_has_the_logits() -> None:
    first, last = (stage_memory(workload(pipe=2), rank) for rank in (0, 1))
    assert binding(workload(pipe=2)) == first
    assert first.activations > 1.5 * last.activations
    assert first.logits == 0 < last.logits


def test_a_head_of_many_words_makes_the_last_stage_bind() -> None:
    wordy = replace(workload(pipe=2), model=replace(LLAMA_13B, vocab_size=1_000_000))
    assert binding(wordy).pipe_rank == 1


def test_moments() -> None:
    """Long sequences peak in a backward, short ones where DeepSpeed reduces, half precision in the step."""
    assert stage_memory(workload(), 0).moment == "backward"
    short = replace(workload(), seq_len=16)
    assert stage_memory(replace(short, framework=Framework(buckets=Buckets(overlapped=False))), 0).moment == "reduction"
    assert stage_memory(replace(short, zero=0), 0).moment == "step"


def test_the_loss_of_one_micro_batch_finds_neither_gradients_nor_buckets() -> None:
    wordy = replace(workload(data=64), zero=2, micro_size=8, model=replace(LLAMA_13B, vocab_size=100_000))
    several, one = (stage_memory(replace(wordy, schedule=Schedule(Chunks(1), count)), 0) for count in (2, 1))
    assert several.moment == one.moment == "backward"
    assert several.logits == one.logits > 0
    assert (one.gradients, one.buffers) == (0, 0)
    assert several.gradients == 4 * wordy.weights(0) / 64
    assert several.buffers > 0


def test_buckets_of_zero_2_rise_in_a_backward_and_their_middle_is_left_out() -> None:
    """A model that is four times as deep has the same waterfall, apart from the positions of layers."""
    few, many = (
        states(replace(workload(), zero=2, model=replace(LLAMA_13B, num_layers=count), counts=(count,)), 0)
        for count in (40, 160)
    )
    for held in (few, many):
        dones, sizes = zip(*held.rises, strict=True)
        assert list(dones) == sorted({*dones})
        assert list(sizes) == sorted({*sizes})
        assert held.left < sizes[-1] == held.buffers
        assert 0 <= dones[0] <= dones[-1] <= 1
    assert many.left == pytest.approx(few.left, rel=0.02)
    assert many.buffers == pytest.approx(few.buffers, rel=0.02)


def test_zero_1_has_room_for_all_gradients_as_soon_as_there_is_one() -> None:
    """Accumulated gradients need it. With a single micro-batch, gradients come bucket by bucket as activations are
    freed.
    """
    first = stage_memory(workload(pipe=4, micro_batches=4), 0)  # all of its forwards come first
    assert first.moment == "backward"
    assert first.gradients == 2 * first.weights
    assert first.activations > 0.9 * stage_memory(workload(pipe=4), 0).activations
    one, several = (stage_memory(workload(micro_batches=count), 0) for count in (1, 2))
    assert several.gradients == 2 * several.weights
    assert (one.moment, one.activations) == ("reduction", 0)
    assert one.total < several.total


def test_what_is_outside_torch() -> None:
    alone = stage_memory(workload(data=1), 0)
    assert alone.outside == CONTEXT
    replicas = stage_memory(workload(data=8), 0)
    assert replicas.outside == CONTEXT + COMMUNICATOR


@pytest.mark.parametrize(
    ("mesh", "number"),
    [
        (Mesh(), 0),
        (Mesh(data=8), 1),
        (Mesh(pipe=2, data=16, tensor=TensorMesh(y=2, mode="1d")), 4),
        (Mesh(pipe=4), 2),
        (Mesh(tensor=TensorMesh(q=2, y=2, z=2, mode="3d")), 4),
    ],
)
def test_communicators(mesh: Mesh, number: int) -> None:
    assert num_communicators(mesh) == number


# ---- activations ----


@pytest.mark.parametrize(("pipe", "num", "split"), list(product((1, 2, 3, 4, 8), (1, 2, 3), (False, True))))
def test_what_is_in_flight_is_the_schedule_s_count(pipe: int, num: int, split: bool) -> None:
    for count in (pipe, 2 * pipe, 5 * pipe):
        schedule = Schedule(Chunks(pipe, num), count, split)
        for rank in range(pipe):
            most = fullest(schedule, rank, [1.0] * num, [1.0] * num)
            assert most / num == schedule.held(rank).total


def test_uneven_chunks_are_counted_by_stage() -> None:
    """The first of two chunks has more micro-batches in flight, so its layers count more."""
    schedule = Schedule(Chunks(4, 2), 8)
    early, late = (
        activations(workload(pipe=4, schedule=schedule, counts=counts), 0).saved
        for counts in ((8, 5, 5, 5, 2, 5, 5, 5), (2, 5, 5, 5, 8, 5, 5, 5))
    )
    assert early > 1.3 * late


def test_recomputation_keeps_inputs_and_one_group() -> None:
    stored, by_one, by_four = (
        activations(replace(workload(), recompute="full" if interval else "none", interval=interval or 1), 0)
        for interval in (0, 1, 4)
    )
    assert by_four.saved < by_one.saved < 0.2 * stored.saved
    assert by_four.working > 2.5 * by_one.working


def test_a_second_panel_of_weights_is_there_where_the_next_one_is_prefetched() -> None:
    cuboid = TensorMesh(q=2, y=2, mode="2d", residual="hidden")
    plain = workload(mesh=Mesh(data=2, tensor=cuboid), micro_size=2)
    ahead = replace(plain, mesh=Mesh(data=2, tensor=replace(cuboid, comm_overlap=True)))
    panel = 2 * 5120 * 2 * 13824 / cuboid.y  # gate and up, in bf16
    assert activations(ahead, 0).working - activations(plain, 0).working == pytest.approx(panel)
    compiled = replace(ahead, framework=replace(ahead.framework, compiles_layers=True))
    for not_ahead in (replace(ahead, zero=3), compiled):
        assert activations(not_ahead, 0).working == activations(plain, 0).working


def test_of_few_tokens_the_head_s_panels_are_more_than_the_loss_s_softmax() -> None:
    cuboid = TensorMesh(q=2, y=2, mode="2d", residual="hidden")
    whole = workload(mesh=Mesh(data=8), micro_size=2)
    few = workload(mesh=Mesh(data=2, tensor=cuboid), micro_size=2, seq_len=512)
    elements, panel = float(few.costs.logits), 5120 * 32000 / cuboid.y
    assert activations(few, 0).logits == pytest.approx(2 * 2 * elements + 2 * 2 * panel)
    assert 2 * 2 * panel > 4 * elements
    assert activations(whole, 0).logits == pytest.approx((2 * 2 + 4) * float(whole.costs.logits)), "no panel there"


def test_scores_are_kept_where_attention_is_not_fused() -> None:
    fused = workload()
    plain = replace(fused, framework=replace(fused.framework, fused_attention=False))
    selective = replace(plain, recompute="selective")
    of_scores = 40 * 40 * 4096**2 * 2  # layers, heads, softmax in bf16
    more = activations(plain, 0).saved - activations(fused, 0).saved
    assert more == pytest.approx(of_scores, rel=0.01)
    assert activations(selective, 0).saved == pytest.approx(activations(fused, 0).saved, rel=0.01)


def test_a_fused_norm_keeps_its_input_alone() -> None:
    fused, plain = (
        activations(replace(workload(), framework=Framework(fused_norms=each)), 0).saved for each in (True, False)
    )
    assert plain - fused == (2 * 40 + 1) * 4096 * 5120 * 2


def test_korthikanti_s_layer() -> None:
    """A layer with dropout and without fused attention has 34 s b h + 5 a s^2 b bytes (arXiv 2205.05198)."""
    model = GPT(num_layers=1, hidden_size=6144, num_heads=64, vocab_size=1, max_seq_len=1, dropout=0.1)
    made = Workload(
        model=model,
        mesh=Mesh(),
        counts=(1,),
        schedule=Schedule(Chunks(1), 1),
        micro_size=4,
        seq_len=2048,
        framework=Framework(fused_attention=False),
    )
    tokens, scores = 4 * 2048, 4 * 64 * 2048**2
    head = 2 * 2 * tokens * 6144  # the inputs of the last norm and of the head
    assert activations(made, 0).saved - head == pytest.approx(34 * tokens * 6144 + 5 * scores, rel=0.002)


# ---- states ----


@pytest.mark.parametrize("data", [1, 8])
def test_zero_shards_one_more_thing_at_each_stage(data: int) -> None:
    held = [states(replace(workload(data=data), zero=stage), 0) for stage in range(4)]
    elements = workload().weights(0)
    assert [each.optimizer for each in held] == pytest.approx([8 * elements, *[8 * elements / data] * 3])
    assert [each.gradients + each.allocated for each in held] == pytest.approx(
        [2 * elements, 4 * elements, 4 * elements / data, 4 * elements / data]
    )
    assert [each.weights for each in held[:3]] == [2 * elements] * 3
    assert held[3].weights == pytest.approx(2 * elements / data, rel=0.01)


def test_offloaded_states_are_not_on_the_device() -> None:
    made = replace(workload(), framework=Framework(offloads_optimizer=True, buckets=Buckets(overlapped=False)))
    for stage in (1, 2, 3):
        held = states(replace(made, zero=stage), 0)
        assert held.masters == held.optimizer == 0
        assert held.resting < states(replace(workload(), zero=stage), 0).resting


def test_other_frameworks_have_no_buckets() -> None:
    plain = replace(workload(), framework=Framework(buckets=None))
    held, elements = states(plain, 0), plain.weights(0)
    assert (held.allocated, held.gradients, held.constant) == (4 * elements, 0, 0)
    assert held.masters == 4 * elements / 8


# ---- a config's keys ----

CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=1024, num_heads=8, vocab_size=1000, max_seq_len=128)
batch = dict(global_size=16, accumulation=2)
"""


def of_config(text: str) -> Workload:
    made = workload_of(check.check(check.load_text(CONFIG + text, "config.py", ()), 8).job)
    assert made is not None
    return made


def test_buckets_are_those_of_the_config() -> None:
    default = of_config("precision = 'bf16'\nzero = dict(stage=1)\n").framework.buckets
    assert default == Buckets()
    assert (default.reduce_elements(1), default.reduce_elements(3)) == (40_000_000, 500_000_000)
    own = of_config("precision = 'bf16'\nzero = dict(stage=1, reduce_bucket_size=1000)\n").framework.buckets
    assert own == Buckets(reduce=1000.0)
    theirs = of_config("precision = 'bf16'\nzero = dict(stage=2, overlap_comm=False)\n").framework.buckets
    assert theirs == Buckets(overlapped=False)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        ("dict(type='AdamW')", 2),
        ("dict(type='AdamW', amsgrad=True)", 3),
        ("dict(type='SGD', lr=0.1)", 0),
        ("dict(type='SGD', lr=0.1, momentum=0.9)", 1),
    ],
)
def test_moments_are_those_of_the_config(optimizer: str, moments: int) -> None:
    assert of_config(f"optimizer = {optimizer}\n").framework.moments == moments


def test_a_larger_bucket_takes_more() -> None:
    """This holds if gradients are reduced: buckets have their full size, however little the last one contains."""
    small, large = (
        stage_memory(replace(workload(), zero=2, seq_len=16, framework=Framework(buckets=Buckets(reduce=size))), 0)
        for size in (4e7, 4e9)
    )
    assert large.buffers > small.buffers + 4e9


def test_importing_it_stays_light() -> None:
    names = "'torch', 'numpy', 'deepspeed'"
    code = f"import sys; import dslpar.forecast.stage_memory; sys.exit(any(name in sys.modules for name in ({names})))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_is_a_value() -> None:
    made = stage_memory(workload(), 0)
    assert isinstance(made, StageMemory)
    assert made == stage_memory(workload(), 0)


def test_parts_of_tokens_and_the_host_s_memory_are_counted() -> None:
    """Softmax and gradient count for a quarter of the logits, and of 20 layers' inputs only the one in transit."""
    whole = workload(pipe=2, recompute="full")
    by_chunks, on_host = replace(whole, loss_chunks=4), replace(whole, offloads_inputs=True)
    plain, parts, host = (activations(each, 1) for each in (whole, by_chunks, on_host))
    logits, boundary = 4096 * 32_000, 4096 * 5120 * 2
    assert plain.logits == (4 + 2) * logits
    assert parts.logits == (4 + 2 * 2) * logits / 4
    assert parts.first == plain.first
    assert plain.first - host.first == 19 * boundary
