"""Jobs for the parts of a blend: each part is checked and read by a job of its own. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from dslpar.core.errors import DslparError
from dslpar.data.blend_order import exact_weight, weights_by_size
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import BlendData, Data, part_key
from dslpar.schema.fields import facts_of


def part_jobs(job: Job) -> list[Job]:
    """Return one job per part. The part is all of the job's data, and the part's share of a step is the job's batch."""
    data = _blend(job)
    total = sum(part.weight or 0 for part in data.parts)
    jobs = []
    for part in data.parts:
        # A part without a weight is blended by its size, and so never too small for its share.
        share = part.weight / total if part.weight is not None else 0
        batch = job.batch._replace(global_size=max(1, int(share * job.batch.global_size)))
        dataset: Data = part.dataset
        if dataset.seq_len is None and "seq_len" in {field.name for field in dataclasses.fields(dataset)}:
            dataset = dataclasses.replace(dataset, seq_len=data.seq_len)  # type: ignore[arg-type]
        interval = job.spec.train.eval_interval if holds_out(dataset) else None
        train = dataclasses.replace(job.spec.train, eval_interval=interval)
        spec = dataclasses.replace(job.spec, data=dataset, train=train)
        jobs.append(dataclasses.replace(job, spec=spec, batch=batch))
    return jobs


def holds_out(data: Data) -> bool:
    """Return whether some of the data is held out."""
    return any(getattr(data, name, None) for name in ("eval_fraction", "eval_path", "eval_split", "eval"))


def weights_of(job: Job, sizes: Mapping[int, int]) -> list[Fraction]:
    """Return the weights of the parts in `sizes`, {number of the part: number of its samples}."""
    data = _blend(job)
    given = [data.parts[number].weight for number in sizes]
    if None not in given:
        return [exact_weight(weight) for weight in given if weight is not None]
    return weights_by_size(list(sizes.values()), data.temperature or 1)


def blend_identity(job: Job, identities: Sequence[str]) -> str:
    """Return a digest of a blend: its parts, their weights, and the keys that determine their samples."""
    data = _blend(job)
    drawn = [
        [getattr(part.dataset, field.name) for field in dataclasses.fields(part.dataset) if _matters(field)]
        for part in data.parts
    ]
    seen = repr((data.temperature, [part.weight for part in data.parts], drawn, *identities))
    return hashlib.sha256(seen.encode()).hexdigest()


def at_part(error: DslparError, number: int) -> DslparError:
    """Convert findings about a part's job to findings about that part of the blend."""
    key = part_key(number)
    keys = [key + each.key.removeprefix("data") if each.key.startswith("data.") else key for each in error.findings]
    return DslparError([each._replace(key=key) for each, key in zip(error.findings, keys, strict=True)])


def _blend(job: Job) -> BlendData:
    data = job.spec.data
    assert isinstance(data, BlendData)
    return data


def _matters(field: dataclasses.Field[object]) -> bool:
    """Return whether a resume may not change a key. Keys of parts are not compared one by one, only by the digest."""
    return facts_of(field).resume != "free"
