"""The layout search: its results fit, are ranked, keep the global batch, and honour pinned values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median
from typing import Any

import pytest

from dslpar.costs import model_costs
from dslpar.forecast import plan
from dslpar.forecast.candidate import NO_TENSOR, Candidate, Workloads, settings
from dslpar.forecast.device import device_named
from dslpar.forecast.model_states import states
from dslpar.forecast.part_terms import part_terms
from dslpar.forecast.part_times import part_times
from dslpar.forecast.plan import AT_FULL_SPEED, Fitting, Machine, forecast, verdict_of
from dslpar.forecast.search import leaders, nearest, search
from dslpar.forecast.search_space import candidates, pins_of, tensors
from dslpar.forecast.step_time import least_s, step_time
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.schema.sections import ContextParallel, TensorParallel

LLAMA = """
model = dict(type='GPT', num_layers=40, hidden_size=5120, num_heads=40, ffn_hidden_size=13824, vocab_size=32000,
             max_seq_len=4096, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False)
precision = 'bf16'
zero = dict(stage=1)
batch = dict(global_size=512, micro_size=4)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d', sequence=True))
"""
ODD = LLAMA.replace("global_size=512, micro_size=4", "global_size=384, micro_size=3")
RESMLP = """
model = dict(type='ResMLP', num_layers=24, hidden_size=384)
precision = 'fp16'
zero = 1
batch = dict(global_size=1024, micro_size=128)
"""
H100 = Machine.usual(device_named("h100-80g"))


def job_of(text: str, world: int, *words: str) -> Job:
    return check.check(check.load_text(text, "config.py", words), world).job


@pytest.fixture(scope="module")
def workloads() -> Workloads:
    return Workloads(job_of(LLAMA, 64))


def test_what_fits_is_ranked(workloads: Workloads) -> None:
    found = search(workloads, H100)
    assert len(found.fitting) > 100
    assert all(option.forecast.share <= AT_FULL_SPEED for option in found.fitting)
    assert all(one.step_s <= other.step_s for one, other in pairwise(found.fitting))
    assert len({option.candidate for option in found.fitting}) == len(found.fitting)
    assert {option.forecast.workload.global_size for option in found.fitting} == {512}
    assert {option.forecast.workload.mesh.world_size for option in found.fitting} == {64}


@pytest.mark.parametrize("name", ["h100-80g", "a100-40g"])
def test_it_finds_what_looking_at_every_layout_finds(workloads: Workloads, name: str) -> None:
    machine = Machine.usual(device_named(name))
    groups: dict[tuple[object, ...], dict[int, list[Candidate]]] = {}
    for each in candidates(workloads):
        series = groups.setdefault((each.tensor, each.context, each.pipe, each.chunks, each.split, each.zero), {})
        series.setdefault(each.micro_size, []).append(each)
    expected: list[tuple[float, Candidate]] = []
    for growing in groups.values():
        for _, alternatives in sorted(growing.items()):
            made = [(each, Fitting(machine).forecast(workloads.workload(each))) for each in alternatives]
            fitting = [(found.time.step_s, each) for each, found in made if found is not None]
            if not fitting:
                break  # larger micro-batches need more
            expected.append(fitting[0])
    found = search(workloads, machine)
    assert {option.candidate for option in found.fitting} == {candidate for _, candidate in expected}
    assert [option.step_s for option in found.fitting] == pytest.approx(sorted(s for s, _ in expected), rel=1e-12)
    assert found.num_legal == len(list(candidates(workloads)))
    first = [option.candidate for option in islice(search(workloads, machine).fastest(), 8)]
    assert first == [option.candidate for option in found.fitting[:8]], "however few are asked for"


def test_a_step_never_takes_less_than_its_bound(workloads: Workloads) -> None:
    shares = []
    for candidate in candidates(workloads):
        workload = workloads.workload(candidate)
        terms = part_terms(workload, H100.device, H100.nodes)
        parts = part_times(terms, H100.constants, splits_backward=candidate.split)
        least = least_s(parts, workload.layers_on_ranks, workload.schedule)
        shares.append(least / step_time(workload, H100.device, H100.nodes, H100.constants).step_s)
    assert max(shares) <= 1
    assert median(shares) > 0.7, "a bound that is far off ranks nothing"


@pytest.mark.parametrize(
    ("text", "world", "near"),
    # Host launches dominate small micro-batches of a small model, and are few in large ones.
    [(LLAMA, 64, 0.8), (ODD, 8, 0.8), ("LONG", 16, 0.8), (RESMLP, 8, 0.05)],
)
def test_a_bound_from_the_largest_micro_batch_is_never_more_than_the_own_one(
    text: str, world: int, near: float
) -> None:
    workloads = Workloads(job_of({"LONG": LONG}.get(text, text), world), H100.nodes.per_node)
    shares = []
    for each in search(workloads, H100)._series:
        sizes = range(len(each.growing))
        assert each.bound_s <= min(map(each.bound_from_largest_s, sizes)) * (1 + 1e-12)
        shares += [each.bound_from_largest_s(size) / each.least_s(size) for size in sizes]
    assert max(shares) <= 1 + 1e-12, "rounding alone"
    assert median(shares) > near, "a bound that is far off spares nothing"


def test_little_is_looked_at_to_show_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts do not depend on the machine; `python -m benchmarks plan_speed` has the seconds."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for module, name in ((plan, "stage_memory"), (plan, "step_time"), (model_costs, "ModelCosts")):
        count(module, name)
    found = search(Workloads(job_of(LLAMA, 64)), H100)
    assert len(list(islice(found.fastest(), 8))) == 8
    assert found.num_legal > 1500
    assert counts["ModelCosts"] <= 35, (
        "one for each cuboid, and for each micro-batch of those that may be among the first"
    )
    assert counts["step_time"] <= 150
    assert counts["stage_memory"] <= 600


def test_all_modes_are_tried(workloads: Workloads) -> None:
    tried = list(candidates(workloads))
    assert {each.tensor.mode for each in tried} == {None, "1d", "2d", "3d"}
    assert {each.zero for each in tried} == {1, 2, 3}
    assert {(each.chunks > 1, each.split) for each in tried} == {(a, b) for a in (False, True) for b in (False, True)}
    assert all(each.zero == 1 for each in tried if each.pipe > 1)
    assert workloads.own in tried


def test_depth_is_tried_where_the_config_has_it() -> None:
    job = job_of(LLAMA.replace("size=2, mode='1d', sequence=True", "size=8, mode='2.5d', depth=2"), 64)
    assert "2.5d" in {each.tensor.mode for each in candidates(Workloads(job))}


LONG = """
model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
             vocab_size=128256, max_seq_len=65536, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False)
precision = 'bf16'
zero = dict(stage=1)
batch = dict(global_size=64)
activation_checkpoint = 1
"""


def contexts(found: Iterable[Candidate]) -> set[tuple[int, str]]:
    return {(each.context.size, str(each.context.impl)) for each in found if each.context is not None}


def test_context_parallelism_is_tried_for_long_sequences() -> None:
    tried = list(candidates(Workloads(job_of(LONG, 64), per_node=4)))
    sizes = {size for size, _ in contexts(tried)}
    assert sizes == {2, 4, 8, 16}, "those that leave a rank 4,096 tokens"
    assert {impl for _, impl in contexts(tried)} == {"ring", "ulysses", "hybrid"}
    assert any(each.context is None for each in tried)
    assert not contexts(candidates(Workloads(job_of(LONG.replace("65536", "4096"), 64))))


def test_the_config_s_own_context_is_tried_with_others() -> None:
    text = LONG.replace("65536", "4096") + "parallel = dict(context=dict(size=4, impl='ulysses'))\n"
    workloads = Workloads(job_of(text, 64))
    tried = list(candidates(workloads))
    assert workloads.own in tried
    assert contexts(tried) == {(4, "ulysses"), (4, "ring"), (4, "hybrid")}
    assert any(each.context is None for each in tried)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_is_tried_over_a_context_alone(stage: int) -> None:
    text = LONG.replace("stage=1", f"stage={stage}") + "parallel = dict(context=8)\n"
    workloads = Workloads(job_of(text, 8))
    tried = list(candidates(workloads))
    assert workloads.own in tried
    assert {each.zero for each in tried if each.context == workloads.own.context and each.pipe == 1} == {1, 2, 3}
    one, two, three = (states(workloads.workload(workloads.own._replace(zero=zero)), 0) for zero in (1, 2, 3))
    assert one.optimizer == two.optimizer == three.optimizer == 8 * workloads.base.weights(0) / 8
    assert one.gradients == 8 * two.gradients
    assert two.weights > 6 * three.weights


def test_forms_that_another_beats_are_left_out_but_the_config_s_own() -> None:
    text = (
        LONG + "parallel = dict(context=dict(size=16, impl='ulysses'), tensor=dict(size=2, mode='1d', sequence=True))\n"
    )
    job = job_of(text.replace("num_kv_heads=8", "num_kv_heads=32"), 64)
    workloads = Workloads(job, H100.nodes.per_node)
    own = workloads.own.context
    with_context = [each for each in candidates(workloads) if each.context is not None]
    # Forms are compared by their first layouts, and the order of two close ones may change with other layouts.
    shapes = {(each.tensor, each.context): each for each in reversed(with_context)}
    kept = {(option.candidate.tensor, option.candidate.context) for option in search(workloads, H100).fitting}
    left_out = [each for key, each in shapes.items() if key not in kept]
    assert own in {context for _, context in kept}
    assert len(left_out) > 10
    for each in left_out:
        assert each.context is not None
        same = [shapes[key] for key in kept if key[0] == each.tensor and key[1] and key[1].size == each.context.size]
        better = [layer_seconds(workloads, other) for other in same]
        assert not same or min(better) <= layer_seconds(workloads, each), "slower ones are for where it does not fit"


def layer_seconds(workloads: Workloads, candidate: Candidate) -> float:
    parts = part_terms(workloads.workload(candidate), H100.device, H100.nodes)
    return part_times(parts, H100.constants).layer.seconds


def test_a_slower_form_is_kept_that_fits_where_the_faster_one_does_not() -> None:
    """For MLPs in parts, attention is the peak, and there a ring holds more than an exchange."""
    text = """
model = dict(type='GPT', num_layers=2, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
             vocab_size=32000, max_seq_len=2097152, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False)
precision = 'bf16'
zero = dict(stage=1)
parallel = dict(context=dict(size=8, impl='ring'))
activation_checkpoint = dict(interval=1, mlp_chunks=16)
train = dict(loss_chunks=256)
"""
    workloads = Workloads(job_of(text, 8), 8)
    other = workloads.own._replace(context=ContextParallel(size=8, impl="ulysses"))
    ring, ulysses = (forecast(workloads.workload(each), H100) for each in (workloads.own, other))
    assert ring.time.step_s < ulysses.time.step_s
    assert ring.binding.total > 1.02 * ulysses.binding.total
    memory = (ring.binding.total + ulysses.binding.total) / 2 / AT_FULL_SPEED
    small = replace(H100, device=replace(H100.device, memory_gib=memory / 0.995 / 2**30))
    assert (8, "ulysses") in contexts(option.candidate for option in search(workloads, small).fitting)


def test_a_pinned_impl_stays_though_another_is_faster() -> None:
    job = job_of(LONG + "parallel = dict(context=dict(size=8, impl='ulysses'))\n", 64)
    pins = pins_of(["parallel.context"], lambda candidate: settings(job, candidate))
    found = search(Workloads(job, 8), H100, pins)
    assert found.fitting
    assert contexts(option.candidate for option in found.fitting) == {(8, "ulysses")}


def test_the_front_has_what_is_faster_than_all_that_needs_less(workloads: Workloads) -> None:
    found = search(workloads, H100)
    front = found.pareto
    assert front[0] is found.fitting[0]
    for option in found.fitting:
        dominated = any(other.bytes < option.bytes and other.step_s <= option.step_s for other in found.fitting)
        if option not in front:
            assert dominated or any(other.bytes == option.bytes for other in front)
        else:
            assert not dominated


def test_repairs_begin_with_the_fewest_changes(workloads: Workloads) -> None:
    assert forecast(workloads.base, H100).thrashes
    changes = [option.candidate.changes(workloads.own) for option in search(workloads, H100).repairs()]
    assert changes == sorted(changes)
    assert changes[0] == 1
    first = next(nearest(workloads, H100))
    assert set(settings(workloads.job, first.candidate)) == {"batch.micro_size"}


def test_pinned_values_stay(workloads: Workloads) -> None:
    job = workloads.job
    pins = pins_of(["parallel.pipeline", "batch.micro_size"], lambda candidate: settings(job, candidate))
    found = search(workloads, H100, pins)
    assert found.fitting
    assert {(each.candidate.pipe, each.candidate.micro_size) for each in found.fitting} == {(2, 4)}
    tensor = pins_of(["parallel.tensor.mode"], lambda candidate: settings(job, candidate))
    assert {each.candidate.tensor.mode for each in search(workloads, H100, tensor).fitting} == {"1d"}


def test_gradient_handlers_keep_zero_0() -> None:
    text = LLAMA.replace("precision = 'bf16'\nzero = dict(stage=1)", "gradient_handler = [dict(type='my.Handler')]")
    found = list(candidates(Workloads(job_of(text, 64))))
    assert {each.zero for each in found} == {0}


def test_what_torch_compiles_is_not_split() -> None:
    job = job_of(LLAMA, 64, "train.compile=True")
    assert not any(each.split for each in candidates(Workloads(job)))
    job = job_of(LLAMA, 64, "train.compile=True", "train.compile_components=['loss']")
    assert any(each.split for each in candidates(Workloads(job)))


def test_nothing_is_put_off_beside_adapters() -> None:
    text = """
model = dict(type='transformers.LlamaForCausalLM', config=dict(num_hidden_layers=8){})
data = dict(seq_len=2048)
batch = dict(global_size=64)
"""
    for lora, is_split in ("", True), (", lora=dict(r=8)", False):
        assert any(each.split for each in candidates(Workloads(job_of(text.format(lora), 8)))) == is_split


def test_the_configs_own_options_stay() -> None:
    own = TensorParallel(size=4, mode="2d", comm_overlap=True)
    assert next(tensors(4, own)) == own
    assert [each.mode for each in tensors(4, own)] == ["2d", "1d", "1d"]
    assert list(tensors(1, own)) == [NO_TENSOR]


def test_leaders_differ_by_less_than_the_error(workloads: Workloads) -> None:
    fitting = search(workloads, H100).fitting
    near = leaders(fitting, 0.05)
    assert 1 <= len(near) < len(fitting)
    assert near[-1].step_s <= 1.05 * fitting[0].step_s < fitting[len(near)].step_s


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.5, "fits"), (0.84, "fits"), (0.86, "tight"), (1.0, "tight"), (1.01, "does not fit"), (3.0, "does not fit")],
)
def test_verdicts(share: float, verdict: str) -> None:
    assert verdict_of(share) == verdict


def test_a_larger_device_holds_more_and_a_faster_one_is_faster(workloads: Workloads) -> None:
    made = {
        name: search(workloads, Machine.usual(device_named(name))) for name in ("a100-40g", "a100-80g", "h200-141g")
    }
    counts = [len(found.fitting) for found in made.values()]
    assert counts == sorted(counts)
    assert made["h200-141g"].fitting[0].step_s < made["a100-80g"].fitting[0].step_s
