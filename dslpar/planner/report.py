"""Report of `dslpar plan`: the memory of the fullest rank by part, the step's time, repairs, and the fastest layouts.

The report is text or JSON. The *binding* rank is the pipeline rank that needs the most memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from dslpar.core.visible import json_text, visible
from dslpar.forecast.candidate import Candidate, candidate_of
from dslpar.forecast.constants import ENOUGH_RUNS, Error, widest
from dslpar.forecast.device import GIB
from dslpar.forecast.host_memory import offloads_of
from dslpar.forecast.model_states import owner_of
from dslpar.forecast.plan import AT_FULL_SPEED, Forecast
from dslpar.forecast.search import Option, leaders
from dslpar.forecast.stage_memory import StageMemory, uneven_load
from dslpar.forecast.workload import Workload
from dslpar.layout.family_interface import pipeline_weights
from dslpar.layout.stages import EvenWeights
from dslpar.layout.transformers_costs import num_parameters
from dslpar.planner.planning import Plan, Suggestion
from dslpar.schema.sections import Model, OtherModel, TensorParallel

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation", "outside")
_BAR = 24
_VERDICTS = {"fits": "fits", "tight": "TIGHT", "does not fit": "DOES NOT FIT"}


def as_record(plan: Plan) -> dict[str, object]:
    """Return the values of `dslpar plan --format json`; programs rely on their names."""
    own = plan.own
    return {
        "verdict": own.verdict,
        "binding": {"rank": _global_rank(own), "stage": own.binding_rank, "bytes": round(own.binding.total)},
        "memory": [_memory_record(stage, memory) for stage, memory in enumerate(own.memory)],
        "step_s": own.time.step_s,
        "tokens_per_s_gpu": own.tokens_per_s_gpu,
        "mfu_causal": own.mfu_causal,
        "bubble": own.bubble,
        "repairs": [_suggestion_record(each) for each in plan.repairs],
        "layouts": [_suggestion_record(each) for each in plan.layouts],
        "remedies": [_suggestion_record(each) for each in plan.remedies],
        "device": own.machine.device.name,
        "device_bytes": round(own.machine.device.memory_bytes),
        "error": {
            "half": own.error.half,
            "nine_of_ten": own.error.nine_of_ten,
            "uncovered": list(own.uncovered),
            "effects": list(own.effects),
            "own_runs": own.machine.num_runs,
        },
        "num_legal": plan.num_legal,
        "host_bytes": round(own.host_bytes),
        "uneven_experts": _uneven_record(own),
    }


def as_json(plan: Plan) -> str:
    """Return the record as JSON."""
    return json_text(as_record(plan))


def _memory_record(stage: int, memory: StageMemory) -> dict[str, object]:
    parts = {name: round(getattr(memory, name)) for name in PARTS}
    return {"stage": stage, **parts, "total": round(memory.total)}


def _uneven_record(own: Forecast) -> dict[str, object] | None:
    found = own.at_uneven_load
    if found is None:
        return None
    return {
        "load": uneven_load(own.workload),
        "stage": found.pipe_rank,
        "bytes": round(found.total),
        "verdict": own.uneven_verdict,
    }


def _suggestion_record(suggestion: Suggestion) -> dict[str, object]:
    option = suggestion.option
    return {
        "overrides": list(suggestion.overrides),
        "bytes": round(option.bytes),
        "step_s": option.step_s,
        "uncovered": list(option.forecast.uncovered),
    }


def _global_rank(made: Forecast) -> int:
    return made.workload.mesh.rank({"pipe": made.binding_rank})


def as_text(plan: Plan) -> str:
    """Return the report as text."""
    lines = [
        *_heading(plan),
        *_own_lines(plan),
        *_time_lines(plan.own),
        *_repair_lines(plan),
        *_layout_lines(plan),
    ]
    return "".join(visible(line) + "\n" for line in lines)


FORMATS = {"text": as_text, "json": as_json}


# The config as given -----------------------------------------------------------------------------------------------


def _heading(plan: Plan) -> Iterator[str]:
    own, job, machine = plan.own, plan.job, plan.machine
    workload, device, nodes = own.workload, machine.device, machine.nodes
    batch = f"batch {job.batch.global_size:,}"
    if job.seq_len:
        batch += f" of {job.seq_len:,} tokens ({_count(own.tokens)})"
    name = _name(workload) + " (traced)" * workload.costs.is_traced
    yield f"{job.path}: {name}, {_count(_parameters(workload))} parameters, {batch}"
    world = workload.mesh.world_size
    num_nodes = -(-world // nodes.per_node)
    within = f"{num_nodes} node{'s' * (num_nodes > 1)} of {min(world, nodes.per_node)}"
    network = f", {nodes.nic_gb_per_s:g} GB/s per node between nodes" if num_nodes > 1 else ""
    yield f"{world} x {device.name}: {within}, {device.link_gb_per_s:g} GB/s within a node{network}"


def _unit(own: Forecast) -> str:
    """Return the unit of the throughput: tokens, or samples for a traced model whose samples are not sequences."""
    return "tokens" if own.workload.seq_len > 1 else "samples"


def _name(workload: Workload) -> str:
    target = getattr(workload.model, "target", "")
    return target.rpartition(".")[2] or type(workload.model).__name__


def _parameters(workload: Workload) -> float:
    """Return the model's number of parameters: the sum over the ranks of one replica, with shared weights once."""
    mesh, costs = workload.mesh, workload.costs
    if mesh.tensor.exchanges_tokens and (known := _known_parameters(workload.model)) is not None:
        return float(known)
    layers = costs.layer.memory.weights * (1 if costs.units else sum(workload.counts))
    held = layers + costs.first.memory.weights + costs.last.memory.weights
    return float(held - costs.tied) * mesh.tensor.size / mesh.tensor.d


def _known_parameters(model: Model | OtherModel) -> int | None:
    """Return the number of parameters of a model with experts, of which ranks hold different numbers."""
    if not isinstance(model, Model):
        return num_parameters(model.transformers)
    weights = pipeline_weights(model, "parameters", model.longest_sample)
    assert weights is not None, "a model of dslpar's"
    total = sum(weights.loads((model.num_layers,)) if isinstance(weights, EvenWeights) else weights)
    is_tied, table = getattr(model, "tie_embeddings", False), getattr(model, "vocab_size", 0)
    return total - (table * getattr(model, "hidden_size", 0) if is_tied else 0)


def _own_lines(plan: Plan) -> Iterator[str]:
    own = plan.own
    needs, has = own.binding.total / GIB, own.machine.device.memory_bytes / GIB
    where = f"stage {own.binding_rank} needs" if len(own.memory) > 1 else "a rank needs"
    yield ""
    yield f"yours    {describe(own.workload, _candidate(plan))}"
    thrashes = f"; above {100 * AT_FULL_SPEED:.0f} % it thrashes" if own.verdict == "tight" and own.thrashes else ""
    yield f"         {_VERDICTS[own.verdict]}: {where} {needs:.1f} of {has:.1f} GiB{thrashes}"
    yield from _waterfall(own)
    yield from _host_lines(own)
    yield from _uneven_lines(own)


def _host_lines(own: Forecast) -> Iterator[str]:
    """Yield the memory of the host that offloaded state takes."""
    if size := own.host_bytes:
        ranks = min(own.workload.mesh.world_size, own.machine.nodes.per_node)
        yield f"  host memory    {size / GIB:7.1f}  offloaded, {size * ranks / GIB:.1f} GiB per node of {ranks} ranks"


def _uneven_lines(own: Forecast) -> Iterator[str]:
    """Yield the memory of a rank whose experts get more than the even load, if tokens are sent to experts."""
    found = own.at_uneven_load
    if found is not None:
        verdict = "" if own.uneven_verdict == "fits" else f" ({_VERDICTS[own.uneven_verdict or own.verdict]})"
        load = f"{uneven_load(own.workload):g} times the even load"
        yield f"  {found.total / GIB:.1f} GiB if a rank's experts get {load}{verdict}"


def _candidate(plan: Plan) -> Candidate:
    return candidate_of(plan.job)


def _waterfall(own: Forecast) -> Iterator[str]:
    memory = own.binding
    for name in PARTS:
        size = getattr(memory, name)
        if size >= 0.05 * GIB or name in ("weights", "activations"):
            bar = "#" * round(_BAR * size / memory.total)
            yield f"  {_NAMES.get(name, name):14} {size / GIB:7.1f}  {bar:{_BAR}} {_note(name, own)}".rstrip()


_NAMES = {"fragmentation": "fragmentation", "outside": "outside torch"}


def _note(name: str, own: Forecast) -> str:
    workload = own.workload
    if name == "activations":
        held = workload.schedule.held(own.binding_rank).total
        layers = sum(workload.counts[stage] for stage in workload.chunks.held_by(own.binding_rank))
        again = ", recomputed" if workload.recompute == "full" else ""
        return f"{held:g} micro-batch{'es' * (held != 1)} in flight x {layers} layers{again}"
    if name == "optimizer" and workload.zero and (copies := workload.mesh.size(*workload.mesh.zero_axes)) > 1:
        of = "replicas" if copies == workload.mesh.data else "ranks with the same weights"
        experts = f", experts over {workload.mesh.size('expert_data')}" if workload.mesh.tensor.e > 1 else ""
        return f"over {copies} {of}{experts} (ZeRO {workload.zero})"
    if name == "weights" and (frozen := owner_of(workload, own.binding_rank).frozen):
        return f"{100 * frozen / workload.weights(own.binding_rank):.1f} % frozen"
    if name == "outside":
        return "driver and communicators"
    return ""


def _axes(names: str) -> str:
    """Return "axis y", or "axes d and q" for several names that are separated by spaces."""
    return f"axes {' and '.join(names.split())}" if " " in names else f"axis {names}"


def describe(workload: Workload, candidate: Candidate) -> str:
    """Return a layout as one line: "pipeline 2, data 4, ZeRO 1, micro 2 x 8"."""
    mesh = workload.mesh
    parts = [f"pipeline {mesh.pipe}"] if mesh.pipe > 1 else []
    if mesh.pipe > 1 and candidate.schedule_type != "1f1b":
        chunks = f" of {candidate.chunks} chunks" if candidate.chunks > 1 else ""
        parts[0] += f" ({candidate.schedule_type}{chunks})"
    parts += [f"data {mesh.data}"] if mesh.data > 1 else []
    parts += [f"context {mesh.tensor.context} ({mesh.tensor.impl})"] if mesh.tensor.context > 1 else []
    parts += [f"tensor {_tensor(candidate.tensor)}"] if mesh.tensor.size > mesh.tensor.context else []
    if mesh.tensor.exchanges_tokens:
        parts_of = f" in {mesh.tensor.expert_chunks} chunks" if mesh.tensor.expert_chunks > 1 else ""
        parts += [f"expert {mesh.size('expert')}{parts_of}"]
    parts += [f"ZeRO {workload.zero}", f"micro {workload.micro_size} x {workload.micro_batches}"]
    parts += [f"recomputed in groups of {candidate.interval}"] if candidate.interval else []
    parts += [f"offload of {' and '.join(offloaded)}"] if (offloaded := offloads_of(workload)) else []
    return ", ".join(parts)


def _tensor(tensor: TensorParallel) -> str:
    options = [f"{tensor.mode}"]
    options += ["sequence"] if tensor.sequence else []
    options += [f"depth {tensor.depth}"] if tensor.depth else []
    return f"{tensor.size} ({', '.join(options)})"


def _time_lines(own: Forecast) -> Iterator[str]:
    time = own.time
    yield ""
    error = f"+- {_rounded(own.error.half)} in half of the cases, {_rounded(own.error.nine_of_ten)} in nine of ten"
    yield f"step     {seconds(time.step_s)} ({error}), {own.tokens_per_s_gpu:,.0f} {_unit(own)} per second and device"
    yield f"         {_error_basis(own)}"
    yield f"         MFU {_percent(own.mfu_causal)} (causal FLOPs, excluding recomputation)"
    shown = [f"{name} {seconds(s)}" for name, s in _parts_s(own).items() if s >= _SHOWN_SHARE * time.step_s]
    yield f"         time: {', '.join(shown)}"
    if own.workload.mesh.pipe > 1:
        yield f"         bubble {_percent(own.bubble)} (a rank is idle for this share of the forwards and backwards)"
    for sent in time.sent:
        over = "between nodes" if sent.across else "within a node"
        yield f"  sends  {sent.num_bytes / GIB:8.2f} GiB per step on {_axes(sent.axis)}, {over}"


def _error_basis(own: Forecast) -> str:
    """Return what the error of the step is based on."""
    machine = own.machine
    if own.effects:
        of_any, of_mixtures = "the largest of any effect left out", "that of published steps of mixtures"
        errors = [of_any] * bool(own.uncovered) + [of_mixtures] * (len(own.uncovered) < len(own.effects))
        larger = ", whichever is larger" if len(errors) > 1 else ""
        return f"no fitted run has {' or '.join(own.effects)}: the error is {' or '.join(errors)}{larger}"
    if machine.is_calibrated:
        return f"the error is that after calibration with {machine.num_runs} of your runs, on others"
    return f"the error is that for a software stack never measured: {ENOUGH_RUNS} of your runs reduce it (--calibrate)"


# Better layouts ----------------------------------------------------------------------------------------------------


def _repair_lines(plan: Plan) -> Iterator[str]:
    if plan.own.verdict == "fits":
        return
    yield ""
    if not plan.repairs:
        among = f" with {', '.join(plan.fixed)} fixed" if plan.fixed else ""
        other = "free a fixed key, or " if plan.fixed else ""
        yield f"no layout of this model and batch fits{among}: {other}choose more ranks or a larger device"
        yield from _remedy_lines(plan)
        return
    rows = [(shlex.join(each.overrides), each.option) for each in plan.repairs]
    yield from _table("repairs, the smallest change first", [(text, option, "") for text, option in rows])


def _remedy_lines(plan: Plan) -> Iterator[str]:
    """Yield what changes of precision, ZeRO and offload leave: the fastest layout that fits, else the smallest."""
    if plan.remedies:
        rows = [
            (
                shlex.join(each.overrides),
                each.option,
                "" if not each.option.forecast.thrashes else f"  {_VERDICTS[each.option.forecast.verdict]}",
            )
            for each in plan.remedies
        ]
        yield from _table("other precision, ZeRO or offload, and what it leaves", rows)


def _table(title: str, rows: Sequence[tuple[str, Option, str]]) -> Iterator[str]:
    """Yield a title and numbered rows; `rows` has each row's text, its option, and a mark for the end of the line."""
    width = max(len(title) - 5, *(len(text) for text, _, _ in rows))
    yield f"{title:{width + 5}} {'GiB':>6} {'step':>9} {'MFU':>7} {'bubble':>7}"
    for number, (text, option, mark) in enumerate(rows, start=1):
        yield f"  {number:<2} {text:{width}} {_row(option)}{mark}"


def _row(option: Option) -> str:
    made = option.forecast
    bubble = _percent(made.bubble) if made.workload.mesh.pipe > 1 else "-"
    return f"{option.bytes / GIB:6.1f} {seconds(option.step_s):>9} {_percent(made.mfu_causal):>7} {bubble:>7}"


def _layout_lines(plan: Plan) -> Iterator[str]:
    if not plan.layouts:
        return
    yield ""
    front = _front([each.option for each in plan.layouts])
    rows = [
        (
            describe(each.option.forecast.workload, each.option.candidate) + ("" if each.overrides else " (yours)"),
            each.option,
            _mark(each.option in front, _more_effects(plan.own, each.option)),
        )
        for each in plan.layouts
    ]
    yield from _table(f"the fastest that fit, of {plan.num_legal:,} layouts", rows)
    yield "  *  uses less memory than every faster layout"
    marked = [each.option for each in plan.layouts if _more_effects(plan.own, each.option)]
    if marked:
        names = sorted({name for option in marked for name in _more_effects(plan.own, option)})
        half = max(option.forecast.error.half for option in marked)
        yield f"  ?  +- {_rounded(half)} in half of the cases, as no fitted run has {' or '.join(names)}"
    yield from _comparison(plan)


def _mark(is_in_front: bool, more_effects: Sequence[str]) -> str:
    return f"  {'*' if is_in_front else ' '} {'?' if more_effects else ' '}".rstrip()


def _more_effects(own: Forecast, option: Option) -> list[str]:
    """Return the option's effects that no fitted run has, except those of the config's own layout."""
    return [name for name in option.forecast.effects if name not in own.effects]


def _front(options: Iterable[Option]) -> list[Option]:
    front: list[Option] = []
    for option in options:
        if not front or option.bytes < front[-1].bytes:
            front.append(option)
    return front


def _comparison(plan: Plan) -> Iterator[str]:
    options = [each.option for each in plan.layouts]
    alike = leaders(options, plan.machine.comparison_error.half)
    if len(alike) > 1:
        yield f"1 to {len(alike)} differ by less than the forecast's error: measure them"
    best, own = options[0], plan.own
    if own.time.step_s > _MUCH * best.step_s:
        times, error = own.time.step_s / best.step_s, _ratio_error(own, best.forecast).half
        unsure = f" (+- {_rounded(error)} in half of the cases)" if times <= 1 + error else ""
        yield f"yours takes {times:.2f} times as long as the first{unsure}{_reason(own, best.forecast)}"


def _ratio_error(one: Forecast, other: Forecast) -> Error:
    """Return the error of the ratio of two layouts' times, which is larger if one of them has an effect of its own."""
    differ = {**one.effects, **other.effects}.items() - (one.effects.items() & other.effects.items())
    return widest(one.machine.comparison_error, *(error for _, error in differ))


def _reason(own: Forecast, best: Forecast) -> str:
    """Name the part of the step in which the config's own layout loses the most time against the best layout."""
    cheaper = _parts_s(best)
    more = {name: part - cheaper[name] for name, part in _parts_s(own).items()}
    most = max(more, key=lambda name: more[name])
    return f"; the largest difference is {most}" if more[most] > 0 else ""


def _parts_s(made: Forecast) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    time, micro_batches = made.time, made.workload.micro_batches
    return {
        "computing": time.compute_s * micro_batches,
        "tensor collectives": time.tensor_s,
        "launch overhead": time.launch_s,
        "ZeRO traffic per micro-batch": time.weights_s * micro_batches,
        "waiting for other stages": time.bubble_s,
        "messages between stages": time.hops_s,
        "reducing gradients": time.reduction_s,
        "gathering changed weights": time.gather_s,
        "the optimizer": time.optimizer_s - time.terms.offloaded_s,
        "moving offloaded state": time.terms.offloaded_s,
    }


_SHOWN_SHARE = 0.005
_MUCH = 1.02
"""Factor over the best layout's time above which the reason is printed."""


# Numbers -----------------------------------------------------------------------------------------------------------


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def seconds(of: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{of:.2f} s" if of >= 1 else f"{of * 1e3:.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rounded(error: float) -> str:
    return f"{100 * error:.0f} %"
