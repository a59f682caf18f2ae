"""Sizes of a transformers model from its config, and their divisibility. Does not import transformers.

transformers' config classes have several names for the same size, which `dslpar.schema.transformers_configs` knows. A
missing size has the class's default, if the class is known.

    >>> args = {"config": {"n_head": 6, "n_embd": 48}}
    >>> config = OtherModel(target="transformers.GPT2LMHeadModel", args=args).transformers
    >>> [(each.key, each.value, each.why) for each in conditions(config, TensorMesh(y=4, mode="1d")) if not each.holds]
    [('n_head', 6, 'y = 4')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.core.mesh import TENSOR_AXES, TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition
from dslpar.schema.sections import OtherModel

if TYPE_CHECKING:
    from dslpar.schema.transformers_configs import TransformersConfig

__all__ = ["DECODER", "OtherModel", "Size", "beyond_masks", "conditions", "inner_features", "sizes_of"]

_ROLES = (
    *("hidden", "heads", "kv_heads", "head_dim", "ffn", "shared_ffn", "experts", "expert_ffn", "shared_experts"),
    *("q_latent", "kv_latent", "rotary_dim", "plain_dim", "value_dim"),
)
_LARGEST = 2**31  # no size, and no product of two sizes, is as large
DECODER = ("decoder_num_attention_heads", "decoder_hidden_size", "decoder_intermediate_size")
"""Config fields of a decoder whose sizes differ from the encoder's, as in ViTMAE."""


class Size(NamedTuple):
    """Size of a model."""

    key: str
    """The key as the author writes it."""
    value: int


def sizes_of(config: TransformersConfig | None) -> dict[str, Size]:
    """Return the known sizes by their names in `transformers_configs.NAMES`; empty without a config."""
    if config is None:
        return {}
    return {role: Size(config.key(role), size) for role in _ROLES if (size := config.size(role)) is not None}


def conditions(config: TransformersConfig | None, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the divisibility conditions of each size and of the features that follow from it.

    The key of a condition is the config's name of the size.
    """
    sizes = sizes_of(config)
    if config is not None and "experts" in sizes and not _has_dense_blocks(config):
        sizes.pop("ffn", None)  # it is the size of experts, which are not sharded
    for name in ("heads", "kv_heads"):
        if size := sizes.get(name):
            yield divisors.head_cut(size.key, size.value, cuboid, "TEN131")
    for size, features in inner_features(sizes):
        for axes in divisors.inner_axes(cuboid):
            yield divisors.cut(size.key, features, cuboid, axes, "TEN131")
    for size, features in _shared_features(sizes):
        yield divisors.cut(size.key, features, cuboid, _axes_with_ranks(cuboid), "TEN131")
    if size := sizes.get("hidden"):
        for axes in divisors.residual_only_axes(cuboid):
            yield divisors.cut(size.key, size.value, cuboid, axes, "TEN131")
    if config is not None:
        yield from _of_stages(config, cuboid)
        yield from _of_decoder(config, cuboid)


def _heads_of_stages(config: TransformersConfig) -> Sequence[int]:
    """Return the heads of each stage of the model (not of a pipeline) if a known class lists them, as Swin; else ()."""
    heads, depths = config.values.get(config.own_name("heads")), config.values.get("depths")
    if not config.known or not isinstance(heads, (list, tuple)):
        return ()
    if isinstance(depths, (list, tuple)):
        heads = heads[: len(depths)]  # further entries have no stage
    return heads if all(type(each) is int and each > 0 for each in heads) else ()


def _of_stages(config: TransformersConfig, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of a model that lists heads by stage, as Swin does.

    If a stage's heads are a multiple of an earlier stage's, the earlier condition suffices.
    """
    heads, width = _heads_of_stages(config), config.number("embed_dim")
    for stage, count in enumerate(heads):
        if not any(count % earlier == 0 for earlier in heads[:stage]):
            yield divisors.head_cut(config.key("heads"), count, cuboid, "TEN131")
    if heads and width is not None:  # each stage has twice the features of the one before
        for axes in dict.fromkeys((*divisors.inner_axes(cuboid), *divisors.residual_only_axes(cuboid))):
            yield divisors.cut(config.author_key("embed_dim"), width, cuboid, axes, "TEN131")
        ratio = config.values.get("mlp_ratio")
        if isinstance(ratio, int | float) and 0 < ratio < _LARGEST:
            widths = [width << stage for stage in range(min(len(heads), 31)) if width << stage < _LARGEST]
            for features in (int(each * ratio) for each in widths):  # which may be odd
                for axes in divisors.inner_axes(cuboid):
                    yield divisors.cut(config.author_key("mlp_ratio"), features, cuboid, axes, "TEN131")


def _of_decoder(config: TransformersConfig, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of a decoder with its own sizes, as in ViTMAE."""
    heads, hidden, ffn = (config.number(name) for name in DECODER)
    heads_key, hidden_key, ffn_key = map(config.author_key, DECODER)
    if heads is None or hidden is None:
        return
    yield divisors.head_cut(heads_key, heads, cuboid, "TEN131")
    for axes in divisors.inner_axes(cuboid):
        yield divisors.cut(heads_key, hidden // heads * heads, cuboid, axes, "TEN131")
        if ffn is not None:
            yield divisors.cut(ffn_key, ffn, cuboid, axes, "TEN131")
    for axes in divisors.residual_only_axes(cuboid):
        yield divisors.cut(hidden_key, hidden, cuboid, axes, "TEN131")


def _has_dense_blocks(config: TransformersConfig) -> bool:
    """Return whether some blocks have an MLP instead of experts."""
    is_sparse = not config.values.get("mlp_only_layers") and (config.number("decoder_sparse_step") or 1) == 1
    return not is_sparse or config.num_dense > 0


def _axes_with_ranks(cuboid: TensorMesh) -> tuple[str, ...]:
    """Return the axes of the tensor group that have several ranks."""
    return tuple(axis for axis in TENSOR_AXES if getattr(cuboid, axis) > 1)


def _shared_features(sizes: Mapping[str, Size]) -> Iterator[tuple[Size, int]]:
    """Yield the size that determines the features of a shared expert, with their number.

    They are sharded over the whole tensor group.
    """
    if size := sizes.get("shared_ffn"):
        yield size, size.value
    elif (size := sizes.get("expert_ffn")) and (number := sizes.get("shared_experts")):
        yield size, number.value * size.value


def inner_features(sizes: Mapping[str, Size]) -> Iterator[tuple[Size, int]]:
    """Yield each size that determines a number of inner features, with that number."""
    if size := sizes.get("ffn"):
        yield size, size.value
    if sizes.get("kv_latent"):
        yield from _latent_features(sizes)
        return
    heads, hidden, head_dim = (sizes.get(name) for name in ("heads", "hidden", "head_dim"))
    if heads and (head_dim or hidden):
        width = head_dim.value if head_dim else hidden.value // heads.value  # type: ignore[union-attr]
        for size in filter(None, (heads, sizes.get("kv_heads"))):
            yield size, size.value * width


def _latent_features(sizes: Mapping[str, Size]) -> Iterator[tuple[Size, int]]:
    """Yield the same for latent attention: both latents, and the heads' values (or queries, if they have no latent)."""
    heads, query, latent, rotary, plain, value = (
        sizes.get(name) for name in ("heads", "q_latent", "kv_latent", "rotary_dim", "plain_dim", "value_dim")
    )
    if query:
        yield query, query.value
    elif heads and plain and rotary:
        yield heads, heads.value * (plain.value + rotary.value)
    if latent and rotary:
        yield latent, latent.value + rotary.value
    if heads and value:
        yield heads, heads.value * value.value


def beyond_masks(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that change attention by more than masks, each with a description of the change."""
    layers = values.get("layer_types")
    if isinstance(layers, (list, tuple)) and "chunked_attention" in layers:
        yield "layer_types", "layers attend within chunks"
    if values.get("attn_logit_softcapping"):
        yield "attn_logit_softcapping", "scores are capped"
    if "relative_attention_num_buckets" in values:
        yield "relative_attention_num_buckets", "scores have a bias by position"
    if values.get("alibi"):
        yield "alibi", "scores have a bias by position"
