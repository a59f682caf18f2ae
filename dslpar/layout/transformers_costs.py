"""Count the parameters and multiplications of a transformers model from its config, without building the model.

A count is a sum of terms, such as `ffn + 2 ffn*hidden`. The terms of each model are in the table
dslpar/schema/data/transformers.json, which tools/transformers_tables.py makes by building the models. A name in a term
is one of these:

- a size in `transformers_configs.NAMES`, such as `hidden`, `ffn` or `vocab`;
- `q`, the features of all query heads together, or `kv`, the features of all key heads together;
- `patches`, the patches per image, or `pixels`, the numbers per patch;
- `labels`, the classes of a classifier;
- any other field of the model's config whose value is a number.

The table lists the terms by part of the model: "table" (the token embedding), "front" (all else before the blocks),
each list of blocks, "back" (all after the blocks but the head), and "head" (the output matrix).

    >>> model = OtherModel(target="transformers.GPT2LMHeadModel", args={"config": {}})
    >>> num_parameters(model.transformers), pipeline_weights(model.transformers, "parameters", 0).layer
    (124439808, 7087872)

Multiplications: looking up embeddings counts as free, and attention windows are ignored. Of the experts, only those
that compute a token are counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple, TypeVar

from dslpar.core.mesh import TensorMesh
from dslpar.layout.divisors import ranks
from dslpar.layout.sharding import inner_cuts, residual_cuts
from dslpar.layout.stages import EvenWeights, Weights
from dslpar.schema.sections import OtherModel
from dslpar.schema.transformers_configs import NAMES, TransformersConfig

__all__ = ["OtherModel", "num_multiplied_weights", "num_parameters", "pipeline_weights", "score_products"]

T = TypeVar("T")

_NOT_EVEN = (
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_layer_freq",
    "moe_layer_start_index",
    "num_dense_layers",
)
"""Fields that give experts to some blocks only. If one differs from its default, the size of each block is unknown."""
_LOOKED_UP = ("vocab", "positions", "patches", "labels")
"""Sizes that count rows of embedding tables before the blocks: a row is looked up, not multiplied."""


class UnknownSizeError(Exception):
    """A size of the model is not a known number."""


def num_parameters(config: TransformersConfig | None) -> int | None:
    """Return the elements of all weights, counting tied weights once; None if not known."""
    return _known(config, lambda counted: sum(map(counted.held, counted.parts())) + sum(counted.blocks(counted.held)))


def block_parameters(config: TransformersConfig | None) -> list[int] | None:
    """Return the number of parameters of each block, in the order in which they run; None if not known."""
    return _known(config, lambda counted: counted.blocks(counted.held))


def fields_of_other_weights(config: TransformersConfig, saved: TransformersConfig) -> Iterator[str]:
    """Yield the fields of `config`, as it overrides `saved`, with which the weights of `saved` cannot be used.

    A field changes the number of a part's weights, or the heads that they form, or adds blocks.
    """
    heads, layers = saved.own_name("heads"), {saved.own_name("layers"), *saved.row.get("blocks", {}).values()}
    for name, value in ((name, config.values[name]) for name in config.keys):
        before = saved.values.get(name)
        if name == LABELS:  # which follows from id2label alone, or from its default
            if _has_classifier(saved) and value != _Counted(saved).num_labels():
                yield name
            continue
        if value == before or name not in saved.values:
            continue
        if name in layers:
            if type(value) is int and type(before) is int and value > before:
                yield name
        elif name == heads or _weights_by_part(saved.overridden(name, value)) != _weights_by_part(saved):
            yield name


LABELS = "num_labels"


def _has_classifier(config: TransformersConfig) -> bool:
    return any("labels" in names for text in config.row.get("parts", {}).values() for _, names in _parsed(text))


def _weights_by_part(config: TransformersConfig) -> Mapping[str, int | None]:
    """Return the number of weights of each part; of an unknown class, the sizes that it must depend on."""
    blocks = config.row.get("blocks", {})
    names = [part for name in blocks for part in (name, f"{name}.0", f"{name}.dense")]
    counted = _known(config, lambda counted: {part: counted.held(part) for part in (*counted.parts(), *names)})
    return {name: config.size(name) for name in NAMES if name not in _NOT_OF_WEIGHTS} if counted is None else counted


_NOT_OF_WEIGHTS = ("layers", "decoder_layers", "positions", "active_experts", "image")
"""Sizes that need not change a weight's shape."""


def num_multiplied_weights(config: TransformersConfig | None) -> int | None:
    """Return the number of weights that each token is multiplied with; None if not known.

    These are the weights of patch embeddings, of the blocks, of the layers after the blocks, and of the head.
    """
    return _known(config, lambda counted: counted.first() + counted.last() + sum(counted.blocks(counted.multiplied)))


def score_products(config: TransformersConfig | None, seq_len: int) -> int | None:
    """Return the multiplications per token of attention with a whole sequence, in all blocks and without a mask."""
    return _known(config, lambda counted: sum(counted.blocks(lambda part: counted.scores(part, seq_len))))


def pipeline_weights(config: TransformersConfig | None, method: str, seq_len: int) -> Weights | None:
    """Return the weight of each block, and the additional weights of the first and last stage; None if not known.

    With method 'cost', a weight is the number of multiplications per token in the forward pass, for sequences of length
    `seq_len`. With 'parameters', it is the number of parameters; a tied embedding counts on the first and on the last
    stage, since both hold it. With 'type:REGEX', the result is None, since that method needs the built layers.
    """
    if method not in ("cost", "parameters"):
        return None

    def weights(counted: _Counted) -> Weights:
        if method == "cost":
            causal = 2 if counted.is_causal else 1
            blocks = counted.blocks(lambda part: counted.multiplied(part) + counted.scores(part, seq_len) // causal)
            first, last = counted.first(), counted.last()
        else:
            blocks = counted.blocks(counted.held)
            first = counted.held("table") + counted.held("front")
            last = counted.held("back") + max(counted.held("head"), counted.head())
        if len(set(blocks)) == 1:
            return EvenWeights(first, blocks[0], last)
        blocks[0] += first
        blocks[-1] += last
        return blocks

    return _known(config, weights)


class MixtureWeights(NamedTuple):
    """Parameters of one block with a mixture of experts: of the whole model, or those that one rank holds."""

    experts: int
    """All experts that tokens are sent to."""
    shared: int
    """The shared expert, which all tokens visit."""
    others: int
    """Attention, norms and routers."""

    @property
    def total(self) -> int:
        """All parameters of the block."""
        return self.experts + self.shared + self.others


def mixture_weights(config: TransformersConfig | None, tensor: TensorMesh) -> MixtureWeights | None:
    """Return the parameters of a block that one rank holds if tokens are exchanged; None if they are not known.

    `dslpar.policies.experts` has the placements: whole experts are divided over e and the tensor axes, in equally many
    places per rank; a shared expert's features are sharded over the tensor axes; routers are whole on each rank. Of the
    others, matrices are sharded over q, y and z, and vectors as the features that they belong to.
    """
    return _known(config, lambda counted: counted.mixture(tensor))


def dense_weights(config: TransformersConfig | None, tensor: TensorMesh) -> int | None:
    """Return the parameters of a first block, with an MLP instead of experts, that one rank holds; None if not known.

    They are sharded as the others of `mixture_weights`.
    """
    return _known(config, lambda counted: counted.dense(tensor))


SHARED_GATES = {"Qwen2MoeForCausalLM"}
"""Classes with a gate of the shared expert: a vector of `hidden` features that is whole on each rank, like a router."""


def _known(config: TransformersConfig | None, count: Callable[[_Counted], T]) -> T | None:
    """Return `count` of the model; None if the table lacks the model, its blocks differ, or a size is unknown."""
    defaults = {} if config is None else config.known.get("defaults", {})
    if config is None or config.num_layers is None or "parts" not in config.row:
        return None
    if any(config.values.get(name) != defaults.get(name) for name in _NOT_EVEN if config.values.get(name)):
        return None
    try:
        return count(_Counted(config))
    except UnknownSizeError:
        return None


class _Counted:
    """Counts of one model by part: "table", "front", "back", "head", or the name of a list of blocks.

    The part "LIST.0" has the additional terms of the first block of LIST, and "LIST.dense" those of each block with an
    MLP instead of experts (`TransformersConfig.num_dense`).
    """

    def __init__(self, config: TransformersConfig) -> None:
        self.config = config
        self.is_causal = config.is_causal

    def parts(self) -> Iterator[str]:
        """Yield the parts that are not blocks."""
        yield from ("table", "front", "back", "head")

    def blocks(self, count: Callable[[str], int]) -> list[int]:
        """Return the count of each block, in the order in which they run."""
        found = []
        for name, counted_by in self.config.row["blocks"].items():
            each = [count(name)] * self.config.values[counted_by]
            each[0] += count(f"{name}.0")
            for number in range(min(self.config.num_dense, len(each))):
                each[number] += count(f"{name}.dense")
            found += each
        return found

    def held(self, part: str) -> int:
        """Return the number of a part's parameters. `held("head")` is 0 if the head's matrix is tied to the table."""
        return sum(times * self._product(names) for times, names in self._terms(part))

    def mixture(self, tensor: TensorMesh) -> MixtureWeights:
        """Return `mixture_weights` of the model's blocks, which must all be alike."""
        ((name, _),) = self.config.row["blocks"].items()
        num_experts = self._size("experts")
        places = -(-num_experts // (tensor.e * tensor.size))
        experts = shared = others = Fraction(0)
        for times, names in self._terms(name):
            elements = times * self._product(names)
            if "experts" in names and (len(names) > 2 or {*names} & _INNER_OF_MLP):
                experts += Fraction(elements * places, num_experts)
            elif "experts" in names and times > 1:  # a router, and a bias of the experts
                experts += Fraction((elements - elements // times) * places, num_experts)
                others += elements // times
            elif len({*names} - {"shared_experts"}) == 2 and {*names} & _INNER_OF_MLP:
                shared += Fraction(elements, tensor.size)
            else:
                others += Fraction(elements, _num_pieces(names, tensor))
        if self.config.model in SHARED_GATES:
            hidden = self._size("hidden")
            others += hidden - Fraction(hidden, _num_pieces(("hidden",), tensor))
        return MixtureWeights(*map(int, (experts, shared, others)))

    def dense(self, tensor: TensorMesh) -> int:
        """Return `dense_weights`."""
        ((name, _),) = self.config.row["blocks"].items()
        times: Counter[tuple[str, ...]] = Counter()
        for part in (name, f"{name}.dense"):  # the second takes the experts away
            for number, names in self._terms(part):
                times[names] += number
        found = (Fraction(number * self._product(names), _num_pieces(names, tensor)) for names, number in times.items())
        return int(sum(found))

    def multiplied(self, part: str) -> int:
        """Return the number of weights in a part's matrices (not in vectors), counting only active experts."""
        found = 0
        for times, names in self._terms(part):
            if "experts" in names and len(names) > 2:  # otherwise it is the router, which every token uses
                names = tuple("active_experts" if name == "experts" else name for name in names)
            elif "experts" in names:  # GPT-OSS also has a bias per expert: of inner features, and of `hidden`
                times = min(times, 1) if "hidden" in names else 0
            found += times * self._product(names) if len(names) > 1 else 0
        return found

    def scores(self, part: str, seq_len: int) -> int:
        """Return the multiplications per token of attention: query with keys, and attention weights with values."""
        if part.endswith((".0", ".dense")):
            return 0
        if self.config.size("kv_latent") is not None:  # keys and values have different sizes
            of_head = sum(map(self._size, ("plain_dim", "rotary_dim", "value_dim")))
            return seq_len * self._size("heads") * of_head
        return 2 * seq_len * self._size("q")

    def first(self) -> int:
        """Return the number of multiplied weights before the blocks: patch embeddings, but not embedding tables."""
        terms = [(times, names) for times, names in self._terms("front") if not {*names} & {*_LOOKED_UP}]
        return sum(times * self._product(names) for times, names in terms if len(names) > 1)

    def last(self) -> int:
        """Return the number of multiplied weights after the blocks, including the head."""
        return self.multiplied("back") + self.head()

    def head(self) -> int:
        """Return the elements of the head's matrix, also if it is tied; `held("head")` leaves a tied matrix out."""
        return sum(times * self._product(names) for times, names in _parsed(self.config.row.get("head", "")))

    def _terms(self, part: str) -> list[tuple[int, tuple[str, ...]]]:
        """Return the terms of a part, and the terms that switches add if they differ from the class's defaults."""
        row, values, defaults = self.config.row, self.config.values, self.config.known["defaults"]
        texts = [row["parts"].get(part, "")]
        turned = [
            more for name, more in row.get("switches", {}).items() if _is_on(values[name]) != _is_on(defaults[name])
        ]
        return [term for text in (*texts, *(more.get(part, "") for more in turned)) for term in _parsed(text)]

    def _product(self, names: tuple[str, ...]) -> int:
        return math.prod(map(self._size, names))

    def _size(self, name: str) -> int:
        if name in _DERIVED:
            value = _DERIVED[name](self)
        else:
            value = self.config.size(name) if name in NAMES else self.config.number(name)
        if value is None:
            raise UnknownSizeError(name)
        return value

    # ---- sizes that follow from others ----

    def _kv_heads(self) -> int:
        return self.config.size("kv_heads") or self._size("heads")

    def _head_dim(self) -> int:
        return self.config.size("head_dim") or self._size("hidden") // self._size("heads")

    def _ffn(self) -> int:
        return self.config.size("ffn") or 4 * self._size("hidden")

    def num_labels(self) -> int | None:
        """Return the number of a classifier's classes."""
        labels = self.config.values.get("id2label")
        return len(labels) if labels else self.config.values.get("num_labels", 2)


_INNER_OF_MLP = {"ffn", "expert_ffn", "shared_ffn"}
_LATENTS = ("q_latent", "kv_latent")


def _num_pieces(names: tuple[str, ...], tensor: TensorMesh) -> int:
    """Return over how many ranks a weight of a block is sharded, by the names of its sizes; experts are not meant."""
    if "experts" in names or names in (("head_dim",), *((each,) for each in _LATENTS)):
        return 1  # routers, and norms per head or of latents
    if len(names) > 1 and not ("heads" in names and {*names} & {*_LATENTS}):
        return tensor.q * tensor.y * tensor.z
    cuts = residual_cuts(tensor) if names == ("hidden",) else inner_cuts(tensor)
    return ranks(tensor, cuts.features)


_DERIVED: Mapping[str, Callable[[_Counted], int | None]] = {
    "kv_heads": _Counted._kv_heads,
    "head_dim": _Counted._head_dim,
    "ffn": _Counted._ffn,
    "labels": _Counted.num_labels,
    "q": lambda of: of._size("heads") * of._size("head_dim"),
    "kv": lambda of: of._size("kv_heads") * of._size("head_dim"),
    "patches": lambda of: (of._size("image") // of._size("patch")) ** 2,
    "pixels": lambda of: of._size("patch") ** 2 * of._size("channels"),
}
"""Sizes that are computed from other sizes if the config does not set them."""


def _is_on(switch: object) -> bool:
    return switch.startswith("gated") if isinstance(switch, str) else bool(switch)


def _parsed(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Parse a sum of terms: yield the factor and the names of each.

    >>> list(_parsed("2 ffn*hidden + hidden + 3 1"))
    [(2, ('ffn', 'hidden')), (1, ('hidden',)), (3, ())]
    """
    for term in filter(None, text.split(" + ")):
        times, _, product = term.rpartition(" ")
        yield int(times or 1), tuple(name for name in product.split("*") if name != "1")
