"""PIP: the partition of layers into stages, by hand or by a method, and schedules; DEAD101: a needless partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from dslpar.core.suggest import did_you_mean
from dslpar.layout import listed_layers
from dslpar.layout.divisors import divisors, least_micro_size
from dslpar.layout.family_interface import layout_of
from dslpar.layout.resolve import stages_of
from dslpar.layout.stages import EvenWeights, balanced_listed, counts_of, in_order, is_pattern, num_matches
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule
from dslpar.schema import sections

_PARTITIONS = ("stage_ids", "counts", "method")


@rule("PIP101", "more-stages-than-layers")
def more_stages_than_layers(cx: Context) -> Iterator[Problem]:
    """The pipeline has more stages than the model has transformer layers."""
    layers, stages = cx.model.num_layers, cx.pipeline.stages
    if stages > layers:
        message = f"{stages} stages, but the model has {layers} layers"
        yield cx.problem(cx.pipeline.key, message, f"at most {layers}: each stage needs at least one layer")
    elif (chunks := cx.pipeline.chunks).stages > layers:  # unknown if schedule.type is, which does not change the above
        message = f"{stages} ranks with {chunks.num} stages each, but the model has {layers} layers"
        key = "schedule.num_model_chunks"
        most = f"{cx.source.key(key).rpartition('.')[2]} at most {layers // stages}"
        yield cx.problem((key, "schedule.type"), message, f"{most}: each stage needs at least one layer")


@rule("PIP102", "wrong-number-of-stage-ids")
def wrong_number_of_stage_ids(cx: Context) -> Iterator[Problem]:
    """The number of stage ids is not the number of layers."""
    ids, layers = _ids(cx), cx.model.num_layers
    if len(ids) != layers:
        message = f"{len(ids)} stage ids for {layers} layers"
        yield cx.problem(cx.pipeline.ids_key, message, f"such as {_even_ids(cx)}: one id for each transformer layer")


@rule("PIP103", "stage-ids-decrease")
def stage_ids_decrease(cx: Context) -> Iterator[Problem]:
    """Stage ids decrease."""
    ids, further_chunks = _ids(cx), cx.pipeline.chunks.num - 1
    for layer, (before, stage) in enumerate(pairwise(ids), start=1):
        if stage < before and not (stage == 0 and further_chunks):
            message = f"layer {layer} is on stage {stage}, after a layer on stage {before}"
            hint = f"such as {sorted(ids) if cx.pipeline.chunks.num == 1 else _even_ids(cx)}"
            yield _problem_of_id(cx, layer, message, hint)
            return
        further_chunks -= stage < before


@rule("PIP104", "no-such-stage")
def no_such_stage(cx: Context) -> Iterator[Problem]:
    """A stage id is negative, or not below the pipeline size."""
    last = cx.pipeline.stages - 1
    for layer, stage in enumerate(_ids(cx)):
        if not 0 <= stage <= last:
            message = f"stage id {stage} does not exist: the stages are 0..{last}"
            hint = f"choose an id from 0 to {last}; the pipeline size limits it, not the world size"
            yield _problem_of_id(cx, layer, message, hint)


def _problem_of_id(cx: Context, layer: int, message: str, hint: str) -> Problem:
    key = cx.pipeline.ids_key
    return Problem(cx.source.at_item(key, layer), message, hint, cx.source.key(key))


@rule("PIP105", "empty-stage")
def empty_stage(cx: Context) -> Iterator[Problem]:
    """A stage has no layers."""
    pipeline, chunks, layers = cx.pipeline.multi_stage, cx.pipeline.chunks, cx.model.num_layers
    if chunks.stages > layers:
        return  # PIP101 reports it
    if pipeline.stage_ids is not None:
        counts, key = counts_of(pipeline.stage_ids, chunks), cx.pipeline.ids_key
        if len(pipeline.stage_ids) != layers or not set(pipeline.stage_ids) <= set(range(pipeline.size)):
            return  # PIP102 and PIP104 report it
        if chunks.num > 1 and not in_order(pipeline.stage_ids, chunks):
            return  # PIP103 reports it
    elif pipeline.counts is not None and len(pipeline.counts) == chunks.stages:
        counts, key = pipeline.counts, "parallel.pipeline.counts"
    else:
        return
    empty = [stage for stage, count in enumerate(counts) if not count]
    if empty:
        message = f"stages without layers: {', '.join(map(str, empty))}"
        hint = f"such as {_even_ids(cx) if key == cx.pipeline.ids_key else _even_counts(cx)}"
        yield cx.problem(key, message, hint)


@rule("PIP106", "two-cuts")
def two_cuts(cx: Context) -> Iterator[Problem]:
    """More than one of stage_ids, counts and method is set."""
    pipeline = cx.spec.parallel.pipeline
    given = [name for name in _PARTITIONS if pipeline is not None and getattr(pipeline, name) is not None]
    if len(given) > 1:
        message = f"{' and '.join(given)} each set the partition of the layers"
        yield cx.problem(
            f"parallel.pipeline.{given[-1]}", message, f"keep one of {', '.join(given[:-1])} and {given[-1]}"
        )


@rule("PIP107", "counts-do-not-fit")
def counts_do_not_fit(cx: Context) -> Iterator[Problem]:
    """The counts of layers do not match the stages or the model."""
    pipeline = cx.spec.parallel.pipeline
    if pipeline is None or pipeline.counts is None:
        return
    key, counts, layers = "parallel.pipeline.counts", pipeline.counts, cx.model.num_layers
    if len(counts) != cx.pipeline.chunks.stages:
        hint = f"such as {_even_counts(cx)}: one number for each stage"
        yield cx.problem(key, f"{len(counts)} counts for {cx.pipeline.chunks.stages} stages", hint)
    elif sum(counts) != layers:
        message = f"the counts add up to {sum(counts)}, but the model has {layers} layers"
        yield cx.problem(key, message, f"such as {_even_counts(cx)}")


@rule("PIP108", "layers-differ")
def layers_differ(cx: Context) -> Iterator[Problem]:
    """train.dist.pipeline_num_layers is not the model's number of layers."""
    given, layers = cx.spec.train.dist.pipeline_num_layers, cx.model.num_layers
    if given is not None and given != layers:
        message = f"pipeline_num_layers is {given}, but the model has {layers} layers"
        yield cx.problem("train.dist.pipeline_num_layers", message, f"write {layers}, or leave it out")


@rule("PIP109", "unknown-method")
def unknown_method(cx: Context) -> Iterator[Problem]:
    """parallel.pipeline.method is unknown, or matches no layer."""
    pipeline = cx.spec.parallel.pipeline
    method = pipeline.method if pipeline is not None else None
    if method is None or method in sections.METHODS:
        return
    key, pattern = "parallel.pipeline.method", method.removeprefix("type:")
    if not method.startswith("type:"):
        methods = f"choose one of {', '.join(map(repr, sections.METHODS))} and 'type:REGEX'"
        yield cx.problem(key, f"unknown method {method!r}", did_you_mean(method, sections.METHODS) or methods)
    elif not _is_method(method):
        message = f"{pattern[:40]!r} has characters besides names, '|', '^', '$' and '.'"
        yield cx.problem(key, message, "such as 'type:Block' or 'type:^Embedding|Head$'")
    elif not num_matches(method, names := _class_names(cx)):
        hint = f"choose from the classes {', '.join(dict.fromkeys(names))}"
        yield cx.problem(key, f"{method!r} matches no layer class", hint)


@rule("PIP110", "layers-not-known", "info")
def layers_not_known(cx: Context) -> Iterator[Problem]:
    """The partition is not checked, since the model's layers are known only when the model is built."""
    model, stages = cx.model.unlisted, cx.pipeline.stages
    if model and stages > 1 and not cx.model.by_program:  # for a program's model CFG111 is enough
        message = f"the partition of {model} over {stages} stages is checked only when the model is built"
        hint = "" if cx.model.other.is_of_transformers else "add layers_cfg=[...] to model: then its layers are known"
        yield cx.problem(cx.pipeline.key, message, hint)


@rule("PIP111", "layer-idx-with-gaps")
def layer_idx_with_gaps(cx: Context) -> Iterator[Problem]:
    """The layer_idx of a layers_cfg do not count up from 0 without gaps."""
    yield from cx.misreads("PIP111")


@rule("DEAD101", "cut-without-stages", "warning")
def cut_without_stages(cx: Context) -> Iterator[Problem]:
    """A partition of the layers is set, but the pipeline has one stage."""
    if cx.pipeline.stages > 1:
        return
    for key in (*(f"parallel.pipeline.{name}" for name in _PARTITIONS), "train.dist.custom_pipeline_stage_id"):
        if cx.source.given(key):
            message = f"{cx.source.key(key).rpartition('.')[2]} has no effect: the pipeline has one stage"
            yield cx.problem(key, message, "leave it out; or choose a size of the pipeline")


@rule("PIP113", "stage-without-parameters")
def stage_without_parameters(cx: Context) -> Iterator[Problem]:
    """A stage of a layers_cfg, or every stage of one rank, has no parameters."""
    model, layers = cx.model.other, cx.model.num_layers
    if model.layers is None:
        return  # blocks of transformers models have parameters
    if listed_layers.without_parameters(model, (layers,)):
        message = "no layer of the model has parameters: there is nothing to train"
        yield cx.problem("model.layers_cfg", message, "choose a layer with parameters, such as 'Linear'")
        return
    chunks, counts = cx.pipeline.chunks, partition_of(cx) if cx.pipeline.stages > 1 else None
    empty = _ranks_without_parameters(cx, counts) if counts is not None else []
    if empty:
        message = f"{'ranks' if chunks.num > 1 else 'stages'} without parameters: {', '.join(map(str, empty))}"
        best = balanced_listed(listed_layers.weights(model, "cost") or (), chunks)
        fits = not _ranks_without_parameters(cx, best)
        yield cx.problem(
            partition_keys(cx), message, f"parallel.pipeline.counts={list(best)}" if fits else "choose fewer stages"
        )


def _ranks_without_parameters(cx: Context, counts: Sequence[int]) -> list[int]:
    """Return the pipeline ranks that have no parameters in any of their stages."""
    empty = set(listed_layers.without_parameters(cx.model.other, counts))
    return [rank for rank in range(cx.pipeline.stages) if empty.issuperset(cx.pipeline.chunks.held_by(rank))]


@rule("PIP114", "fewer-matches-than-stages", "warning")
def fewer_matches_than_stages(cx: Context) -> Iterator[Problem]:
    """method='type:REGEX' matches fewer layers than there are stages."""
    pipeline, model = cx.spec.parallel.pipeline, cx.spec.model
    method = (pipeline.method if pipeline is not None else None) or ""
    if not method.startswith("type:") or not _is_method(method):
        return
    names = _class_names(cx)
    if isinstance(model, sections.OtherModel):
        matched = num_matches(method, names)
    else:
        weights = layout_of(model).pipeline_weights(model, method, 0)
        matched = sum(weights.loads((cx.model.num_layers,)) if isinstance(weights, EvenWeights) else weights)
    stages = cx.pipeline.chunks.stages
    if 0 < matched < stages <= cx.model.num_layers:
        message = f"{method!r} matches {matched} layer{'s' * (matched > 1)}, but there are {stages} stages"
        yield cx.problem(
            "parallel.pipeline.method", message, f"choose from the classes {', '.join(dict.fromkeys(names))}"
        )


def _even_counts(cx: Context) -> str:
    """Return even counts of layers per stage as an expression for the config; the first stages get one layer more."""
    layers = cx.model.num_layers
    stages = min(cx.pipeline.chunks.stages, layers)
    least, more = divmod(layers, stages)
    if stages <= 16:
        return str([least + 1] * more + [least] * (stages - more))
    return f"[{least + 1}] * {more} + [{least}] * {stages - more}" if more else f"[{least}] * {stages}"


def _even_ids(cx: Context) -> str:
    """Return the stage id of each layer as an expression for the config."""
    layers, ranks, chunks = cx.model.num_layers, cx.pipeline.stages, cx.pipeline.chunks
    stages = min(chunks.stages, layers)
    if layers <= 16:
        return str([layer * stages // layers % ranks for layer in range(layers)])
    rank = f" % {ranks}" if chunks.num > 1 else ""
    return f"[layer * {stages} // {layers}{rank} for layer in range({layers})]"


def _is_method(method: str) -> bool:
    """Return whether the method is known. Only simple patterns may follow 'type:', as a regex can match for hours."""
    return method in sections.METHODS or (method.startswith("type:") and is_pattern(method.removeprefix("type:")))


def partition_of(cx: Context) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, all above 0; None if it is known only when the model is built.

    Raises:
        UnknownValueError: the partition is not legal, which other rules report.
    """
    pipeline, layers, chunks = cx.pipeline.section, cx.model.num_layers, cx.pipeline.chunks
    stages = chunks.stages
    if stages > layers:
        raise UnknownValueError("partition")
    if pipeline is not None:
        ids, counts, method = pipeline.stage_ids, pipeline.counts, pipeline.method
        wrong = ids is not None and (len(ids) != layers or not in_order(ids, chunks))
        wrong |= counts is not None and sum(counts) != layers  # check first: ids for a count of 10**9 would not fit
        if wrong or (method is not None and not _is_method(method)):
            raise UnknownValueError("partition")
    # cx.spec ends the rule if a size of a dslpar family is invalid. Other models need no size, so take the plain spec.
    spec = cx.reading.spec if isinstance(cx.spec.model, sections.OtherModel) else cx.spec
    found = stages_of(spec, pipeline).counts
    if found is not None and (len(found) != stages or sum(found) != layers or not all(found)):
        raise UnknownValueError("partition")
    return found


def partition_keys(cx: Context) -> tuple[str, ...]:
    """Return the keys that can set the partition; a problem is reported at the first one that is given."""
    return "parallel.pipeline.counts", cx.pipeline.ids_key, "parallel.pipeline.method", cx.pipeline.key


def _class_names(cx: Context) -> Sequence[str]:
    """Return the class names of the model's layers. Raises UnknownValueError if the config does not list them."""
    if cx.model.unlisted:
        raise UnknownValueError("layers")
    model = cx.spec.model
    if isinstance(model, sections.OtherModel) and model.layers is None:
        raise UnknownValueError("layers")  # transformers' layer classes are known only when the model is built
    return (
        listed_layers.class_names(model)
        if isinstance(model, sections.OtherModel)
        else layout_of(model).class_names(model)
    )


def _ids(cx: Context) -> tuple[int, ...]:
    """Return the stage ids of a pipeline with several stages. Raises UnknownValueError if there are none."""
    ids = cx.pipeline.multi_stage.stage_ids
    if ids is None:
        raise UnknownValueError("stage ids")
    return ids


# Schedules ---------------------------------------------------------------------------------------------------------


@rule("PIP112", "interleaved-schedule")
def interleaved_schedule(cx: Context) -> Iterator[Problem]:
    """The config sets several chunks per rank, but the schedule '1f1b' has one chunk per rank."""
    schedule, key = cx.spec.schedule, "schedule.num_model_chunks"
    if schedule is not None and schedule.type == "1f1b" and (schedule.num_model_chunks or 1) > 1:
        name = cx.source.key(key).rpartition(".")[2]
        message = f"{name} is {schedule.num_model_chunks}, but the schedule '1f1b' has one chunk per rank"
        yield cx.problem(key, message, f"schedule.type='interleaved' or 'zero_bubble', or {name}=1")


@rule("PIP116", "compiled-with-zero-bubble")
def compiled_with_zero_bubble(cx: Context) -> Iterator[Problem]:
    """train.compile does not work with the schedule 'zero_bubble', which splits the backward."""
    if cx.spec.train.compiles_layers and cx.pipeline.stages > 1 and schedule_type(cx) == "zero_bubble":
        message = "'zero_bubble' splits the backward, but train.compile makes one graph of a layer's backward"
        yield cx.problem("train.compile", message, f"train.compile_components=['loss'], or {unsplit(cx)}")


def schedule_type(cx: Context) -> str:
    """Return the type of the pipeline's schedule."""
    return cx.spec.schedule.type if cx.spec.schedule is not None else "1f1b"


def unsplit(cx: Context) -> str:
    """Return the hint for a schedule with the same number of chunks and without a split backward."""
    return "schedule.type='interleaved'" if cx.pipeline.chunks.num > 1 else "schedule.type='1f1b'"


@rule("PIP115", "micro-batches-in-part-rounds")
def micro_batches_in_part_rounds(cx: Context) -> Iterator[Problem]:
    """Ranks have several chunks, and the number of micro-batches is not a multiple of the pipeline size."""
    count, stages, chunks = micro_batches_of(cx), cx.pipeline.stages, cx.pipeline.chunks
    if chunks.num > 1 and count % stages:
        batches = f"{count} micro-batch{'es' * (count > 1)}"
        message = f"{batches} for {stages} ranks with {chunks.num} chunks each: not a multiple of {stages}"
        needed = -(-count // stages) * stages
        yield cx.problem(batch_keys(cx), message, other_micro_batches(cx, needed, lambda num: num % stages == 0))


def micro_batches_of(cx: Context) -> int:
    """Return the number of micro-batches per step.

    Raises:
        UnknownValueError: there is no pipeline, or the layout is not legal.
    """
    given = cx.layout.requested_batch
    if cx.pipeline.stages == 1 or (not cx.model.unlisted and cx.pipeline.stages > cx.model.num_layers):
        raise UnknownValueError("pipeline")
    if cx.world.size_if_given is None and (given.accumulation or given.global_size is None):
        return given.accumulation or 1
    global_size, micro, accumulation = cx.layout.batch
    if global_size != micro * accumulation * cx.layout.data_size or micro % least_micro_size(cx.tensor.cuboid):
        raise UnknownValueError("batch")
    return accumulation


def batch_keys(cx: Context) -> tuple[str, ...]:
    """Return the keys that determine the number of micro-batches."""
    micro = ("batch.micro_size",) if cx.layout.requested_batch.global_size is not None else ()
    return "batch.accumulation", "schedule.num_microbatches", *micro, "batch.global_size", cx.pipeline.key


def other_micro_batches(cx: Context, needed: int, fits: Callable[[int], bool], worth: str = "") -> str:
    """Return the hint for `needed` micro-batches, or for another number that `fits` with the same samples per step.

    `worth`: the resulting idle share, which is appended to the hint.
    """
    given = cx.layout.requested_batch
    in_schedule = cx.source.given("schedule.num_microbatches") and not cx.spec.batch.accumulation
    name = "schedule.num_microbatches" if in_schedule else "batch.accumulation"
    if given.global_size is None:
        return f"{name}={needed}" + (f": {worth}" if worth else "")
    if cx.world.size_if_given is None:
        return f"choose {name} of {needed} or more, and a global_size to fit"
    data, least = cx.layout.data_size, least_micro_size(cx.tensor.cuboid)
    samples = given.global_size // data
    fitting = [micro for micro in divisors(samples) if micro % least == 0 and fits(samples // micro)]
    if not fitting:
        micro = given.micro_size or least
        more = "" if given.micro_size and not given.accumulation else f" with {name}={needed}"
        return f"batch.global_size={micro * needed * data}{more}"
    micro_size, accumulation = f"batch.micro_size={fitting[-1]}", f"{name}={samples // fitting[-1]}"
    if given.micro_size is None:
        return accumulation
    return micro_size if given.accumulation is None else f"{micro_size} with {accumulation}"


RULES = (
    more_stages_than_layers,
    wrong_number_of_stage_ids,
    stage_ids_decrease,
    no_such_stage,
    empty_stage,
    two_cuts,
    counts_do_not_fit,
    layers_differ,
    unknown_method,
    layers_not_known,
    layer_idx_with_gaps,
    stage_without_parameters,
    fewer_matches_than_stages,
    cut_without_stages,
    interleaved_schedule,
    compiled_with_zero_bubble,
    micro_batches_in_part_rounds,
)
