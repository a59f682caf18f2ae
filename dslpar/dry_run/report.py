"""Report of a dry run (`dslpar plan --dry-run`): text for a terminal, and a record for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from dslpar.core.visible import json_text, visible
from dslpar.dry_run.dry_run import DryRun
from dslpar.dry_run.stage import ParameterRecord

_MOST_PARAMETERS = 12
_MOST_RANKS = 4
NOT_RUN = "DeepSpeed's reduction of gradients over replicas, and its optimizer's step"


def as_record(result: DryRun) -> dict[str, object]:
    """Return the values of `dslpar plan --dry-run --format json`; programs rely on their names."""
    return {
        "rank": result.rank,
        "world_size": result.job.mesh.world_size,
        "coord": dict(result.coord),
        "stages": list(result.stages),
        "layers": list(result.layers),
        "actions": result.num_actions,
        "parameters": [_parameter_record(name, each) for name, each in result.parameters.items()],
        "collectives": [
            {"axis": axes, "kind": kind, "calls": calls, "bytes": round(num_bytes)}
            for (kind, axes), (calls, num_bytes) in result.operations.items()
        ],
        "messages": [
            {"kind": kind, "peer": peer, "form": form, "count": count}
            for (kind, peer, form), count in _messages(result).items()
        ],
        "saved_bytes": result.saved_bytes,
        "peak_saved_bytes": result.peak_saved_bytes,
        "classes": [
            {"stages": list(each.stages), "ranks": each.num_ranks, "ran": list(each.ran)} for each in result.classes
        ],
        "not_run": NOT_RUN,
        "problems": [each._asdict() for each in result.problems],
    }


def _parameter_record(name: str, record: ParameterRecord) -> dict[str, object]:
    return {
        "name": name,
        "shape": list(record.shape),
        "local_shape": list(record.local_shape),
        "dtype": record.dtype,
        "owner": record.is_owner,
    }


def as_json(result: DryRun) -> str:
    """Return the record as JSON."""
    return json_text(as_record(result))


def as_text(result: DryRun) -> str:
    """Return the report as text."""
    lines = [
        *_heading(result),
        *_parameter_lines(result),
        *_operation_lines(result),
        *_message_lines(result),
        *_memory_lines(result),
        *_class_lines(result),
        *_problem_lines(result),
    ]
    return "".join(visible(line) + "\n" for line in lines)


FORMATS = {"text": as_text, "json": as_json}


def _heading(result: DryRun) -> Iterator[str]:
    sizes = result.job.mesh.sizes
    at = ", ".join(f"{axis} {index} of {sizes[axis]}" for axis, index in result.coord.items() if sizes[axis] > 1)
    yield f"{result.job.path}: dry run of rank {result.rank} of {result.job.mesh.world_size}" + (
        f" ({at})" if at else ""
    )
    first, last = result.layers[0], result.layers[-1]
    stages = "stage " if len(result.stages) == 1 else "stages "
    held = f"{stages}{', '.join(map(str, result.stages))} of {result.job.chunks.stages}"
    yield f"  {held}: {len(result.layers)} layers, {first} to {last}"
    yield f"  {result.num_actions:,} actions on {result.job.batch.accumulation} micro-batches"


def _parameter_lines(result: DryRun) -> Iterator[str]:
    if not result.parameters:
        return
    yield ""
    yield f"{len(result.parameters)} parameters"
    shown = list(result.parameters.items())[:_MOST_PARAMETERS]
    width = max(len(name) for name, _ in shown)
    for name, record in shown:
        yield f"  {name:{width}}  {record.dtype}{list(record.local_shape)} of {list(record.shape)}"
    if len(result.parameters) > len(shown):
        yield f"  and {len(result.parameters) - len(shown)} more (--format json has all)"


def _operation_lines(result: DryRun) -> Iterator[str]:
    if result.operations:
        yield ""
        yield f"operations per step within groups, without {NOT_RUN}"
    for (kind, axes), (calls, num_bytes) in result.operations.items():
        yield f"  over {axes:12} {kind:15} {calls:8,} calls  {_bytes(num_bytes):>10} sent"


def _messages(result: DryRun) -> Counter[tuple[str, int, str]]:
    return Counter((each.kind, each.peer, each.form) for each in result.messages)


def _message_lines(result: DryRun) -> Iterator[str]:
    if result.messages:
        yield ""
        yield "messages per step between stages, including headers"
    for (kind, peer, form), count in _messages(result).items():
        way = "to  " if kind == "send" else "from"
        yield f"  {way} pipe {peer:<4} {count:8,} x {form}"


def _memory_lines(result: DryRun) -> Iterator[str]:
    if result.saved_bytes:
        yield ""
        most = "" if result.peak_saved_bytes is None else f", {_bytes(result.peak_saved_bytes)} at most"
        yield f"kept for the backward: {_bytes(result.saved_bytes)} per micro-batch{most}"


def _class_lines(result: DryRun) -> Iterator[str]:
    yield ""
    yield f"{result.job.mesh.world_size:,} ranks by class, and the ranks of each that ran"
    for each in result.classes:
        ranks = ", ".join(map(str, each.ran))
        yield f"  {_stages(each.stages):16} {each.num_ranks:8,} ranks: rank{'s' * (len(each.ran) > 1)} {ranks}"


def _stages(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    together = list(stages) == list(range(stages[0], stages[-1] + 1))
    return f"stages {stages[0]}-{stages[-1]}" if together else f"stages {', '.join(map(str, stages))}"


def _problem_lines(result: DryRun) -> Iterator[str]:
    yield ""
    if not result.problems:
        yield f"no problems: shards tile all parameters ({result.num_tiled} checked, those of equal layers once),"
        yield "stages chain, and ranks agree on their collectives and on the order of messages"
        return
    yield f"{len(result.problems)} problem{'s' * (len(result.problems) > 1)}"
    for problem in result.problems:
        yield f"  {problem.check}: {problem.where}: {problem.what}"
        yield f"    {problem.why}"


def _bytes(number: int | Fraction) -> str:
    """Return a number of bytes as text, such as "1.5 GB", in units of 1000."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
