"""Attention of sharded transformers models, through transformers' registries of attention and mask functions.

The mask function returns a `Recipe`: the arguments for a mask, but no mask. transformers calls this function with the
residual, which may be split along batch and sequence, so its shape is not that of queries and keys. The attention
function makes the mask later, for the actual queries and keys, once per micro-batch. Heads and samples are split as in
inner activations.

If the sequence is split, attention supports only masks that depend on positions (causal or not, a window, padding,
documents). A bias or a soft cap is refused, and the error names it. (vLLM and TGI register their kernels in the same
registries.)
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
from dslpar.policies.errors import NEEDS_OWN_CODE

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
"""Options of transformers' mask functions that allow to return no mask if torch's attention can apply it itself."""
_PLAIN = (causal_mask_function, bidirectional_mask_function)
_ANYWHERE = {"softcap", "s_aux", "position_bias"}
"""Further arguments of attention that are supported if the sequence is not split."""
_KNOWN = {
    *("scaling", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window"),
    *("output_attentions", "output_router_logits"),
}
"""Arguments of attention that the mask already expresses, or that do not change the result."""
_CALLED = {"s_aux": "sinks (s_aux=)"}
_SPLIT = "attention over a split sequence"
_KNOWN_OF_WHOLE = _KNOWN | _ANYWHERE


def implementation_of(config: Any, given: str | None = None) -> str:
    """Return the requested kernel: `given`, else that of a config, by default SDPA.

    Raises:
        DslparError: it is neither SDPA nor FLASH.
    """
    requested: str | None = given or config._attn_implementation
    if requested not in (None, SDPA, FLASH):
        message = f"attn_implementation {requested!r}: sharded models use torch's attention kernels only"
        hint = f"{SDPA!r} (the default), or {FLASH!r}, which is torch's FlashAttention kernel and no other"
        raise_finding("CFG223", message, hint, key="model.attn_implementation")
    return requested or SDPA


@dataclass
class Recipe:
    """Arguments of transformers' mask function, from which a mask is made when queries and keys are known."""

    function: Callable[..., Any]
    """(batch, head, query, key) -> whether the query attends to the key."""
    options: Mapping[str, Any]
    """Further arguments of transformers' mask function."""
    padding: Tensor | None = None
    """Bool or integers [batch, sequence] of the whole micro-batch; 0 is padding. Int32 values are document numbers from
    1; a token attends only within its document.
    """
    made: dict[tuple[object, ...], Tensor | None] = field(default_factory=dict, repr=False)
    """Cached masks, by the shapes that they were made for."""
    padded: Recipe | None = field(default=None, repr=False)
    """This recipe with the newest micro-batch's padding, so that all blocks share one mask per micro-batch."""

    def with_padding(self, padding: Tensor | None) -> Recipe:
        """Return the recipe for a micro-batch with this padding."""
        if padding is None:
            return self
        if self.padded is None or self.padded.padding is not padding:
            self.padded = Recipe(self.function, self.options, padding)
        return self.padded

    def mask(self, groups: Groups, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the mask for queries [batch/x, heads, sequence, D] and keys.

        None: no mask is needed, because torch's attention computes full or causal attention by the module's attribute.
        """

        def make() -> Tensor | None:
            lengths: dict[str, Any] = {"batch_size": q.shape[0], "q_length": q.shape[2], "kv_length": k.shape[2]}
            options = {**self.options, **self._of_samples(groups)}
            first = first_position()
            options |= dict.fromkeys(_SKIPS, False) if first else {}
            return sdpa_mask(**lengths, q_offset=first, kv_offset=0, device=q.device, **options)

        return self._made_once((q.shape[0], q.shape[2], k.shape[2]), make)

    @cached_property
    def pattern(self) -> Pattern | None:
        """Causality and window of a mask that depends on positions only; None: another mask.

        transformers makes a new window function for each mask, so a window is recognized by the function's values at
        its edges.
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
        """Return the result of `make`, cached by `key`. While torch compiles, the cache is not used.

        A compiled graph that uses a cached mask would differ from the graph that makes the mask. With activation
        checkpointing, the recomputation would then save other tensors than the forward.
        """
        if torch.compiler.is_compiling():
            return make()
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _of_samples(self, groups: Groups) -> dict[str, Any]:
        """Return transformers' mask arguments for this rank's samples.

        In a mask of document numbers, padding is document 0, to which no other token attends.
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
    """Compute attention: q, k and v [batch/x, heads/y, sequence, D] to [batch/x, sequence, heads/y, D]."""
    groups: Groups = module.dslpar_groups  # type: ignore[assignment]
    cuts = placement.inner_cuts(groups.tensor)
    is_cut = groups.axis(*cuts.sequence).size > 1
    is_flash = getattr(module, "dslpar_attention", SDPA) == FLASH
    if is_flash:
        _refuse_beyond_flash(module, is_cut, kwargs)
    if is_cut:
        return _attend_pieces_of_sequences(module, groups, (q, k, v), mask, dropout, kwargs), None
    if unknown := [name for name in kwargs.keys() - _KNOWN_OF_WHOLE if kwargs[name] is not None]:
        message = (
            f"{type(module).__name__} attends with {', '.join(unknown)}, which dslpar's attention does not support"
        )
        raise_finding("TEN235", message, NEEDS_OWN_CODE, key="model.type")
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
        "over a split sequence": is_cut,
        "with a soft cap": kwargs.get("softcap") is not None,
        "with sinks": kwargs.get("s_aux") is not None,
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        message = f"{type(module).__name__} attends {why}, which torch's FlashAttention kernel does not support"
        raise_finding("TEN235", message, f"attn_implementation={SDPA!r}", key="model.attn_implementation")


@contextmanager
def _flash_alone(module: nn.Module, q: Tensor, mask: Tensor | None, dropout: float) -> Iterator[None]:
    """Restrict torch to its FlashAttention kernel in this context. Raises: DslparError: torch cannot use it here."""
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
            hint = f"attn_implementation={SDPA!r}, which uses any kernel that is available"
            raise_finding("TEN235", message, hint, key="model.attn_implementation")


def _scores(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Return masked scores [batch/x, heads/y, sequence, sequence]. `softcap`: Gemma 2's soft cap; None: no cap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and getattr(module, "is_causal", True):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def _weighted(scores: Tensor, v: Tensor, dropout: float, sinks: Tensor | None) -> Tensor:
    """Return the values weighted by the scores' softmax, [batch/x, sequence, heads/y, D].

    `sinks` [heads/y]: GPT-OSS's attention sinks, extra scores per head without a value.
    """
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
    """Return the rows of a padding mask for this rank's samples; sequences stay whole."""
    batch = placement.inner_cuts(groups.tensor).batch
    own = placement.take(padding, 0, groups.tensor, groups.coord, batch)
    return own if own.dtype == DOCUMENTS else own.bool()


def _refuse_unless_plain(module: nn.Module, mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise DslparError if the model's attention cannot be computed over a split sequence (ring, Ulysses)."""
    name = type(module).__name__
    reasons = [_CALLED.get(key, f"{key}=") for key, value in kwargs.items() if key not in _KNOWN and value is not None]
    if mask is not None and not (isinstance(mask, Recipe) and mask.pattern is not None):
        reasons.append("a mask of its own")
    if reasons:
        message = (
            f"{name} attends with {', '.join(reasons)}, and {_SPLIT} supports only causal masks, windows and padding"
        )
        raise_finding("TEN235", message, "use a layout that keeps sequences whole", key="parallel.context")


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _make_recipe)
