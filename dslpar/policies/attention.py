"""Attention of transformers models on pieces, through transformers' registries of attention and mask functions.

The mask function makes no mask but a recipe for one. At that point transformers knows only the residual, which may be
cut along batch and sequence, so its shape is not that of attention's inputs. The attention function makes the mask from
the actual queries and keys, once per micro-batch. Heads and samples are cut like inner activations.

Attention over a split sequence takes only recipes defined by positions (causal or not, a window, padding, documents). A
bias or a soft cap is refused by name. (vLLM and TGI plug their kernels in through the same registries.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    packed_sequence_mask_function,
    sdpa_mask,
)

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.attention import attend, causal_mask
from dslpar.layers.context_attention import AttentionDropout, RingOptions, hybrid, ulysses
from dslpar.layers.dropout import shard_rng, shard_seed
from dslpar.layers.kv_cache import cache_in_use, first_position
from dslpar.layers.upcast import upcast
from dslpar.layout.attention_blocks import Pattern

IMPLEMENTATION = "dslpar"
"""Name of dslpar's functions in transformers' registries."""
SDPA, FLASH = "sdpa", "flash_attention_2"
"""Values of `attn_implementation`: torch's scaled_dot_product_attention with the kernel that torch chooses, or with its
FlashAttention kernel only.
"""

DOCUMENTS = torch.int32
"""Dtype of a mask with each token's document number. (Padding from programs is int64, as tokenizers return it.)"""
_OF_MASKS = ("local_size", "use_vmap")
_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
"""Options that allow leaving a mask out if torch's attention applies it by itself."""
_PLAIN = (causal_mask_function, bidirectional_mask_function)
_ANYWHERE = {"softcap", "s_aux", "position_bias"}
"""Further arguments that are supported over whole sequences."""
_KNOWN = {
    *("scaling", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window"),
    *("output_attentions", "output_router_logits"),
}
"""Arguments of attention that its mask covers as well, or that change nothing."""
_SPLIT = "attention over a split sequence"
_KNOWN_OF_WHOLE = _KNOWN | _ANYWHERE


def implementation_of(config: Any) -> str:
    """Return a config's attention, SDPA by default. Raises: DslparError: it is neither SDPA nor FLASH."""
    requested: str | None = config._attn_implementation
    if requested not in (None, SDPA, FLASH):
        message = f"attn_implementation {requested!r}: pieces of a model attend by torch's kernels"
        hint = f"{SDPA!r} (the default), or {FLASH!r}, which is torch's FlashAttention kernel and no other"
        raise_finding("CFG223", message, hint, key="model.config.attn_implementation")
    return requested or SDPA


@dataclass
class Recipe:
    """Arguments from which transformers would have made a mask."""

    function: Callable[..., Any]
    """(batch, head, query, key) -> whether the query attends to the key."""
    options: Mapping[str, Any]
    padding: Tensor | None = None
    """Bool or integers [batch, sequence] of the whole micro-batch; 0 is padding. Int32 values are document numbers from
    1; a token attends only within its document.
    """
    made: dict[tuple[object, ...], Tensor | None] = field(default_factory=dict, repr=False)
    padded: Recipe | None = field(default=None, repr=False)
    """This recipe with the newest micro-batch's padding, so that its blocks share a mask."""

    def with_padding(self, padding: Tensor | None) -> Recipe:
        """Return the recipe for a micro-batch with this padding."""
        if padding is None:
            return self
        if self.padded is None or self.padded.padding is not padding:
            self.padded = Recipe(self.function, self.options, padding)
        return self.padded

    def mask(self, groups: Groups, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the mask for queries [batch/x, heads, sequence, D] and keys; None: full or causal, by the module."""

        def make() -> Tensor | None:
            lengths: dict[str, Any] = {"batch_size": q.shape[0], "q_length": q.shape[2], "kv_length": k.shape[2]}
            options = {**self.options, **self._of_samples(groups)}
            first = first_position()
            options |= dict.fromkeys(_SKIPS, False) if first else {}
            return sdpa_mask(**lengths, q_offset=first, kv_offset=0, device=q.device, **options)

        return self._made_once((q.shape[0], q.shape[2], k.shape[2]), make)

    @cached_property
    def pattern(self) -> Pattern | None:
        """Pattern if the mask depends on positions alone: causal or not, with or without a window; else None.

        transformers makes a new window function for each mask, so it is recognized by its values at the edges.
        """
        if self.function in _PLAIN:
            return Pattern(causal=self.function is causal_mask_function)
        size = self.options.get("local_size")
        if not isinstance(size, int):
            return None
        edges = torch.tensor([0, 1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size + 2])
        queries, keys = edges[:, None], edges[None, :]
        given = self.function(0, 0, queries, keys)
        distance = queries - keys
        causal, both_ways = (distance >= 0) & (distance < size), distance.abs() <= size
        for expected, pattern in (
            (causal, Pattern(causal=True, window=size)),
            (both_ways, Pattern(causal=False, window=size + 1)),
        ):
            if torch.equal(torch.as_tensor(given).expand_as(expected), expected):
                return pattern
        return None

    def added(self, groups: Groups, x: Tensor) -> Tensor | None:
        """Return the additive mask for scores of inner activations [batch/x, sequence, features]; None: no mask."""

        def make() -> Tensor | None:
            lengths: dict[str, Any] = {"batch_size": x.shape[0], "q_length": x.shape[1], "kv_length": x.shape[1]}
            options = {**self.options, **self._of_samples(groups)}
            return eager_mask(**lengths, dtype=x.dtype, device=x.device, **options)

        return self._made_once((*x.shape[:2], x.dtype), make)

    def _made_once(self, key: tuple[object, ...], make: Callable[[], Tensor | None]) -> Tensor | None:
        """Return the result of `make`, cached by `key`; in a layer that torch compiles, call it each time.

        A graph that finds a cached mask differs from the graph that made it, and recomputation would save other
        tensors.
        """
        if torch.compiler.is_compiling():
            return make()
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _of_samples(self, groups: Groups) -> dict[str, Any]:
        """Return transformers' mask arguments for this rank's samples.

        With documents, padding is document number 0, to which no other token attends.
        """
        if self.padding is None:
            return {"mask_function": self.function, "attention_mask": None}
        own = _samples(groups, self.padding)
        if own.dtype != DOCUMENTS:
            return {"mask_function": self.function, "attention_mask": own}
        function = and_masks(self.function, packed_sequence_mask_function(own))
        return {"mask_function": function, "attention_mask": None, **dict.fromkeys(_SKIPS, False)}


def _make_recipe(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **options: Any) -> Recipe:
    kept = {name: options[name] for name in _OF_MASKS if name in options}
    kept |= {skip: options[skip] for skip in _SKIPS if skip in options}
    return Recipe(mask_function, kept, attention_mask)


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float = 0.0, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend: queries, keys and values [batch/x, heads/y, sequence, D] to [batch/x, sequence, heads/y, D]."""
    groups: Groups = module.dslpar_groups  # type: ignore[assignment]
    cuts = placement.inner_cuts(groups.tensor)
    is_cut = groups.axis(*cuts.sequence).size > 1
    is_flash = getattr(module, "dslpar_attention", SDPA) == FLASH
    if is_flash:
        _refuse_beyond_flash(module, is_cut, kwargs)
    if is_cut:
        return _attend_pieces_of_sequences(module, groups, (q, k, v), mask, dropout, kwargs), None
    if unknown := [name for name in kwargs.keys() - _KNOWN_OF_WHOLE if kwargs[name] is not None]:
        message = f"{type(module).__name__} attends with {', '.join(unknown)}, which dslpar's attention does not know"
        raise_finding("TEN235", message, "report the model: it needs a rule of its own", key="model.type")
    if cache := cache_in_use():
        k, v = cache.extended(module, k, v)
    if isinstance(mask, Recipe):
        mask = mask.mask(groups, q, k)
    if mask is None and cache and cache.begin:
        mask = causal_mask(q, k)
    run = _attend_by_flash if is_flash else _attend_whole_sequences
    if not dropout:
        return run(module, (q, k, v), mask, dropout, kwargs), None
    with shard_rng(groups, cuts, q.device):
        return run(module, (q, k, v), mask, dropout, kwargs), None


def _attend_whole_sequences(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> Tensor:
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if softcap is None and sinks is None:
        y: Tensor = sdpa_attention_forward(module, *qkv, mask, dropout=dropout, **kwargs)[0]
        return y
    q, k, v = qkv
    return _weighted(_scores(module, q, k, mask, kwargs["scaling"], softcap), v, dropout, sinks)


def _attend_by_flash(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> Tensor:
    with _flash_alone(module, qkv[0], mask, dropout):
        return _attend_whole_sequences(module, qkv, mask, dropout, kwargs)


def _refuse_beyond_flash(module: nn.Module, is_cut: bool, kwargs: Mapping[str, Any]) -> None:
    """Raise DslparError if the FlashAttention kernel cannot compute the model's attention."""
    reasons = {
        "in pieces of sequences": is_cut,
        "with a soft cap": kwargs.get("softcap") is not None,
        "with sinks": kwargs.get("s_aux") is not None,
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        message = f"{type(module).__name__} attends {why}, which torch's FlashAttention kernel does not"
        raise_finding("TEN235", message, f"attn_implementation={SDPA!r}", key="model.config.attn_implementation")


@contextmanager
def _flash_alone(module: nn.Module, q: Tensor, mask: Tensor | None, dropout: float) -> Iterator[None]:
    """Restrict torch to its FlashAttention kernel in this context. Raises: DslparError: no such kernel fits."""
    with warnings.catch_warnings(), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        warnings.simplefilter("ignore")  # torch warns about each kernel that it did not take
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            with_what = [*["a mask"] * (mask is not None), *["dropout"] * (dropout > 0)]
            what = f" with {' and '.join(with_what)}" if with_what else ""
            message = f"{type(module).__name__}: torch has no FlashAttention kernel for {q.dtype} on {q.device}{what}"
            hint = f"attn_implementation={SDPA!r}, which takes the kernel that there is"
            raise_finding("TEN235", message, hint, key="model.config.attn_implementation")


def _scores(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Return masked scores [batch/x, heads/y, sequence, sequence], with Gemma 2's soft cap if `softcap` is given."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and getattr(module, "is_causal", True):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def _weighted(scores: Tensor, v: Tensor, dropout: float, sinks: Tensor | None) -> Tensor:
    """Return [batch/x, sequence, heads/y, D]; `sinks` [heads/y]: GPT-OSS's extra scores, which absorb weight."""
    length = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(upcast(scores), -1).to(v.dtype)[..., :length]
    v = v.repeat_interleave(scores.shape[1] // v.shape[1], dim=1)
    return (torch.dropout(weights, dropout, train=True) @ v).transpose(1, 2)


def _attend_pieces_of_sequences(
    module: nn.Module, groups: Groups, qkv: tuple[Tensor, Tensor, Tensor], mask: Any, dropout: float, kwargs: Any
) -> Tensor:
    q, k, v = qkv
    _refuse_unless_plain(module, mask, kwargs)
    scaling = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    if mask is not None:
        causal = mask.pattern.causal
    padding = None if mask is None or mask.padding is None else _samples(groups, mask.padding)
    cuts = placement.inner_cuts(groups.tensor)
    window = mask.pattern.window if mask is not None else None
    if groups.tensor.ring == 1:
        if scaling is not None and scaling != q.shape[-1] ** -0.5:
            q = q * (scaling * q.shape[-1] ** 0.5)  # torch's attention scales by 1 / sqrt(D)

        def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with shard_rng(groups, cuts, q.device) if dropout else nullcontext():
                return attend(q, k, v, causal=causal, mask=padding, dropout=dropout, window=window)

        y = ulysses(q, k, v, groups.axis("ulysses"), whole)
    else:
        seed = shard_seed(groups, cuts) if dropout else 0
        ring, zigzag = groups.axis("ring"), groups.tensor.zigzag
        options = RingOptions(ring, causal, padding, AttentionDropout(dropout, seed), window, scaling, zigzag)
        y = hybrid(q, k, v, groups.axis("ulysses"), options)
    return y.transpose(1, 2)


def _samples(groups: Groups, padding: Tensor) -> Tensor:
    """Return the rows of this rank's samples, with whole sequences."""
    batch = placement.inner_cuts(groups.tensor).batch
    own = placement.take(padding, 0, groups.tensor, groups.coord, batch)
    return own if own.dtype == DOCUMENTS else own.bool()


def _refuse_unless_plain(module: nn.Module, mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise DslparError if ring and ulysses cannot compute the model's attention."""
    name = type(module).__name__
    reasons = [f"{key}=" for key, value in kwargs.items() if key not in _KNOWN and value is not None]
    if mask is not None and not (isinstance(mask, Recipe) and mask.pattern is not None):
        reasons.append("a mask of its own")
    if reasons:
        message = (
            f"{name} attends with {', '.join(reasons)}, and {_SPLIT} knows causal masks, windows and padding alone"
        )
        raise_finding("TEN235", message, "a layout that attends to whole sequences", key="parallel.context")


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _make_recipe)
