"""Check that a policy does not change results: compare a tiny model in every tensor mode with transformers, on CPUs.

    for row in check(Subject(LlamaForCausalLM, shrunk(LlamaConfig()))): ...

Each tensor mode runs on its own forked ranks, with gloo. The outcome is "exact", "refused" (with a reason), or "wrong".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.distributed.forked_ranks import RankError, run_on_ranks
from dslpar.layout.modes import cuboid_of
from dslpar.policies import hf_parity
from dslpar.policies.hf_parity import Subject
from dslpar.policies.model import HuggingFaceModel
from dslpar.schema.sections import TensorParallel

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
_SMALL: Mapping[str, float] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "word_embed_proj_dim": 32,
    "vocab_size": 70,
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
"""Values to which a config is shrunk. A vocabulary of 70 rows must be padded in every mode."""
_AT_MOST = ("first_k_dense_replace", "n_group", "topk_group")
"""Numbers that are kept if they are smaller."""
_NEEDED = ("num_experts_per_tok",)
"""Numbers that a class may leave open (DeepSeek-V2), but without which it does not run."""


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


def shrunk(config: Any, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a tiny config of the same class: sizes are shrunk, dropout is off, `changes` apply, the rest is equal."""
    small = copy.deepcopy(config)
    for name, value in _SMALL.items():
        own = getattr(config, "attribute_map", {}).get(name, name)
        full = getattr(config, own, None)
        if full is not None or (name in _NEEDED and hasattr(config, own)):
            setattr(small, own, min(full or value, value) if name in _AT_MOST else value)
    if hasattr(config, "kv_lora_rank"):  # latent attention: each head has a key, of which rotary rotates head_dim
        small.num_key_value_heads, small.head_dim = small.num_attention_heads, small.qk_rope_head_dim
    for name, value in (changes or {}).items():
        setattr(small, name, value)
    for name, value in vars(small).items():
        if "drop" in name and isinstance(value, float):
            setattr(small, name, 0.0)
    layer_types = getattr(small, "layer_types", None)
    if isinstance(layer_types, list):
        small.layer_types = layer_types[: small.num_hidden_layers]
    return small


def dropping(config: Any) -> Any:
    """Return the config with every dropout rate set, except layerdrop."""
    made = copy.deepcopy(config)
    for name, value in vars(config).items():
        if "drop" in name and "layerdrop" not in name and isinstance(value, float):
            setattr(made, name, 0.2)
    return made


def check(subject: Subject, modes: Mapping[str, TensorParallel | None] = MODES) -> Iterator[Row]:
    """Yield the result of each mode with padded samples. Also check that equal copies stay equal with dropout on.

    Raises:
        DslparError: the model has no policy, or cannot be run by it.
    """
    policy = HuggingFaceModel(*subject).policy
    torch.set_num_threads(1)  # ranks fork
    attention = hf_parity.plain_attention(subject.cls, subject.config)
    model, weights = hf_parity.plain(subject.cls, subject.config, attention)
    given, reference = hf_parity.reference(model, hf_parity.make_inputs(subject.config, policy.inputs), policy)
    for name, parallel in modes.items():
        yield _row(name, cuboid_of(parallel), (subject, weights, given, reference))


def _row(name: str, tensor: mesh.TensorMesh, job: tuple[Any, ...]) -> Row:
    try:
        found = run_on_ranks(tensor.size, _on_rank, tensor, job)
    except RankError as error:
        return Row(name, "wrong", float("inf"), error.reason)
    refused = next((each for each in found if isinstance(each, str)), None)
    if refused is not None:
        return Row(name, "refused", tensor=refused)
    farthest, value = max(((key, off) for each, _ in found for key, off in each.items()), key=lambda pair: pair[1])
    dropout = found[0][1]
    if isinstance(dropout, list) and dropout:
        return Row(name, "wrong", float("inf"), f"{dropout[0]}: with dropout, its copies get different gradients")
    said = dropout if isinstance(dropout, str) else ""
    return Row(name, "exact" if value <= CLOSE else "wrong", value, farthest, said)


def _on_rank(tensor: mesh.TensorMesh, job: tuple[Any, ...]) -> tuple[dict[str, float], list[str] | str] | str:
    """Run one mode on this rank; return (errors by tensor, result of `_dropout`), or the reason of a refusal."""
    subject, weights, given, reference = job
    try:
        off = hf_parity.worst(hf_parity.by_policy(subject, weights, tensor, given), reference)
        return off, _dropout(subject, tensor, given)
    except DslparError as error:
        return error.findings[0].message


def _dropout(subject: Subject, tensor: mesh.TensorMesh, given: hf_parity.Batch) -> list[str] | str:
    """Return the parameters whose copies get different gradients with dropout on, or why dropout is refused."""
    try:
        return hf_parity.differing_copies(subject._replace(config=dropping(subject.config)), tensor, given)
    except DslparError as error:
        return error.findings[0].message
