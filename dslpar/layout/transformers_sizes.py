"""Sizes of a transformers model, from what its config is given, and what they must divide by. No transformers here.

transformers' config classes call the same size by several names, which their `attribute_map` knows and a linter cannot
ask. A size that is left out has the class's default, which is not known here: what hangs on it is not checked.

    >>> model = OtherModel(target="transformers.GPT2LMHeadModel", args={"config": {"n_head": 6, "n_embd": 48}})
    >>> sizes = sizes_of(model)
    >>> [(each.key, each.value, each.why) for each in conditions(sizes, Tensor(y=4, mode="1d")) if not each.holds]
    [('n_head', 6, 'y = 4')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslpar.core.mesh import Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition
from dslpar.schema.sections import OtherModel

NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
"""What transformers' config classes call each size."""


class Size(NamedTuple):
    """A size that the config gives."""

    key: str
    """As it is written there."""
    value: int


def sizes_of(model: OtherModel) -> dict[str, Size]:
    """Return the sizes that `model.config` gives; empty for a model that is not transformers'."""
    given = model.args.get("config")
    if not model.is_of_transformers or not isinstance(given, Mapping):
        return {}
    written = {size: next((name for name in names if name in given), "") for size, names in NAMES.items()}
    sizes = {size: Size(name, given[name]) for size, name in written.items() if name}
    return {name: size for name, size in sizes.items() if type(size.value) is int and size.value > 0}


def conditions(sizes: Mapping[str, Size], cuboid: Tensor) -> Iterator[Condition]:
    """What each size that is given, and the features that it counts, must divide by; keys are those of the config."""
    for name in ("heads", "kv_heads"):
        if size := sizes.get(name):
            yield divisors.cut(size.key, size.value, cuboid, divisors.head_axes(cuboid), "TEN131")
    for size, features in _inner_features(sizes):
        for axes in divisors.inner_axes(cuboid):
            yield divisors.cut(size.key, features, cuboid, axes, "TEN131")
    if size := sizes.get("hidden"):
        for axes in divisors.residual_only_axes(cuboid):
            yield divisors.cut(size.key, size.value, cuboid, axes, "TEN131")


def _inner_features(sizes: Mapping[str, Size]) -> Iterator[tuple[Size, int]]:
    """Yield each size that counts inner features, with how many."""
    if ffn := sizes.get("ffn"):
        yield ffn, ffn.value
    heads, hidden, head_dim = (sizes.get(name) for name in ("heads", "hidden", "head_dim"))
    if heads and (head_dim or hidden):
        width = head_dim.value if head_dim else hidden.value // heads.value  # type: ignore[union-attr]
        for size in filter(None, (heads, sizes.get("kv_heads"))):
            yield size, size.value * width
