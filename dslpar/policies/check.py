"""Check that a policy does not change results: compare a tiny model in every tensor mode with transformers, on CPUs.

    for row in check(miniature_of(LlamaForCausalLM)): ...

Each tensor mode runs on its own forked ranks, with gloo. The outcome is "exact", "refused" (with a reason), or "wrong".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dslpar.core import mesh
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed.forked_ranks import RankError, run_on_ranks
from dslpar.layout.modes import cuboid_of
from dslpar.policies import hf_parity
from dslpar.policies.errors import OF_ITSELF, as_findings
from dslpar.policies.hf_parity import Subject
from dslpar.policies.miniature import default_config, dropping, shrunk
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.model_inputs import check_inputs
from dslpar.schema.sections import TensorParallel
from dslpar.schema.transformers_policies import POLICIES

CLOSE = 1e-12
"""Tolerance: a thousand roundings in float64, since sums of some hundred terms are added in another order."""
MODES: Mapping[str, TensorParallel | None] = {
    "one process": None,
    "1d 2": TensorParallel(size=2, mode="1d"),
    "1d 2 sequence": TensorParallel(size=2, mode="1d", sequence=True),
    "1d 4": TensorParallel(size=4, mode="1d"),
    "2d 4": TensorParallel(size=4, mode="2d"),
    "2.5d 8 (depth 2)": TensorParallel(size=8, mode="2.5d", depth=2),
    "3d 8": TensorParallel(size=8, mode="3d"),
    "cuboid (1, 2, 2)": TensorParallel(size=4, mode="cuboid", shape=(1, 2, 2)),
    "ring 2": TensorParallel(size=2, mode="sequence"),
    "ulysses 2": TensorParallel(size=2, mode="sequence", impl="ulysses"),
}


class Row(NamedTuple):
    """Result of one tensor mode."""

    mode: str
    outcome: str
    """exact, refused, or wrong."""
    worst: float = 0.0
    """Largest error of a tensor, relative to its largest element."""
    tensor: str = ""
    """Tensor with the largest error, or the reason if the mode is refused or has failed."""
    dropout: str = ""
    """Reason why dropout is refused in this mode; empty: it is not refused."""
    help: str = ""
    """What to write if the mode is refused."""


def check(subject: Subject, modes: Mapping[str, TensorParallel | None] = MODES) -> Iterator[Row]:
    """Yield the result of each mode with padded samples. Also check that equal copies stay equal with dropout on.

    Raises:
        DslparError: the model has no policy, or cannot be run by it.
    """
    policy = HuggingFaceModel(*subject).policy
    torch.set_num_threads(1)  # ranks fork
    attention = hf_parity.plain_attention(subject.cls, subject.config)
    with as_findings(f"{subject.cls.__name__}: plain transformers", OF_ITSELF):
        model, weights = hf_parity.plain(subject.cls, subject.config, attention)
        given, reference = hf_parity.reference(model, hf_parity.make_inputs(subject.config, policy.inputs), policy)
    for name, parallel in modes.items():
        yield _row(name, cuboid_of(parallel), (subject, weights, given, reference))


def miniature_of(
    cls: Any, config: Any = None, changes: Mapping[str, Any] | None = None, policy: object = None
) -> Subject:
    """Return a class with its config in miniature. `config` None: the class's defaults.

    Raises:
        DslparError: a policy cannot split such a class, or its config refuses these values.
    """
    if policy is None and cls.__name__ not in POLICIES:
        check_inputs(cls)
    if config is None:
        config = default_config(cls, changes or {})
    return Subject(cls, shrunk(config, changes), policy)


def _row(name: str, tensor: mesh.TensorMesh, job: tuple[Any, ...]) -> Row:
    try:
        found = run_on_ranks(tensor.size, _on_rank, tensor, job)
    except RankError as error:
        return Row(name, "wrong", float("inf"), error.reason)
    refused = next((each for each in found if isinstance(each, Finding)), None)
    if refused is not None:
        return Row(name, "refused", tensor=refused.message, help=refused.help)
    farthest, value = max(((key, off) for each, _ in found for key, off in each.items()), key=lambda pair: pair[1])
    dropout = found[0][1]
    if isinstance(dropout, list) and dropout:
        return Row(name, "wrong", float("inf"), f"{dropout[0]}: with dropout, its copies get different gradients")
    said = dropout if isinstance(dropout, str) else ""
    return Row(name, "exact" if value <= CLOSE else "wrong", value, farthest, said)


def _on_rank(tensor: mesh.TensorMesh, job: tuple[Any, ...]) -> tuple[dict[str, float], list[str] | str] | Finding:
    """Run one mode on this rank; return (errors by tensor, result of `_dropout`), or the finding that refuses it."""
    subject, weights, given, reference = job
    try:
        off = hf_parity.worst(hf_parity.by_policy(subject, weights, tensor, given), reference)
        return off, _dropout(subject, tensor, given)
    except DslparError as error:
        return error.findings[0]


def _dropout(subject: Subject, tensor: mesh.TensorMesh, given: hf_parity.Batch) -> list[str] | str:
    """Return the parameters whose copies get different gradients with dropout on, or why dropout is refused."""
    try:
        return hf_parity.differing_copies(subject._replace(config=dropping(subject.config)), tensor, given)
    except DslparError as error:
        return error.findings[0].message
