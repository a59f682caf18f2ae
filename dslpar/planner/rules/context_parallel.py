"""PERF115: context parallelism with an `impl` that is slower than another one, by the forecast for a known device.

No published run has context parallelism, so the message says that nothing checks the ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dslpar.layout.modes import context_forms, cuboid_of
from dslpar.layout.resolve import heads_of, with_zero
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.planner.rules.fit import known_machine
from dslpar.schema.parallel_forms import tensor_of

WORTH = 1.05
"""Smallest ratio of step times that is reported. All implementations compute the same and differ only in traffic."""


@rule("PERF115", "slower-context-impl", "warning")
def slower_context_impl(cx: Context) -> Iterator[Problem]:
    """Another `impl` of context parallelism makes the step shorter."""
    machine = known_machine(cx) if cx.tensor.cuboid.context > 1 else None
    if machine is None:
        return
    from dslpar.forecast.comparison import by_context_form
    from dslpar.forecast.plan import forecast
    from dslpar.forecast.workload import workload_of

    spec, heads = cx.job.spec, heads_of(cx.job.spec.model)
    forms = context_forms(tensor_of(spec), spec.parallel.context, heads, machine.nodes.per_node)
    elements_sent = by_context_form(cx.job, machine.nodes.per_node)  # has only the legal forms
    requested, steps = next(iter(forms)), {}  # `context_forms` puts the requested form first
    for form in elements_sent:
        cuboid = with_zero(cuboid_of(*forms[form], heads), spec.model, spec.zero.stage, cx.pipeline.stages)
        workload = workload_of(replace(cx.job, mesh=replace(cx.job.mesh, tensor=cuboid)))
        assert workload is not None, "the costs are known"
        forecast_of_form = forecast(workload, machine)
        if not forecast_of_form.thrashes or form == requested:
            steps[form] = forecast_of_form.time.step_s
    best = min(steps, key=lambda form: steps[form], default=requested)
    if requested not in steps or steps[requested] < WORTH * steps[best]:
        return
    message = (
        f"context parallelism by {requested} sends {elements_sent[requested]:,} elements per rank and layer,"
        f" by {best} {elements_sent[best]:,}: a step takes {steps[requested] / steps[best]:.2f} times as long"
        f" ({machine.device.name}, {machine.nodes.per_node} per node), by the forecast of `dslpar plan`"
    )
    if elements_sent[requested] < elements_sent[best]:
        message += ", since 'ring' sends during attention, and 'ulysses' waits for its exchange"
    context = spec.parallel.context
    section = "parallel.tensor" if context is None or context.size == 1 else "parallel.context"
    hint = _as_written(best)
    if context is not None and context.ulysses_size is not None and "ulysses_size" not in hint:
        hint += ", without ulysses_size"
    yield cx.problem((f"{section}.impl", section), message, hint)


def _as_written(form: str) -> str:
    """Return the config's options for a form of context parallelism: for 'hybrid of 4', impl and ulysses_size."""
    impl, _, exchanging = form.partition(" of ")
    return f"impl={impl!r}" + (f", ulysses_size={exchanging}" if exchanging else "")


RULES = (slower_context_impl,)
