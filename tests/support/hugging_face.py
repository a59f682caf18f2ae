"""transformers models of a size that ranks of a test can hold, and what they compute by themselves, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import gather, mark_owners, placement
from dslpar.models.layered import assemble
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import load, parameters_with_sources

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 70,  # which every mode must pad
    "max_position_embeddings": 32,
    "initializer_range": 0.2,  # so that activations are of order 1, and a lost term shows
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BATCH, SEQUENCE = 4, 12
IGNORED = -100


class Family(NamedTuple):
    """A class of transformers', and its config."""

    name: str
    """Of its classes, without "ForCausalLM" and "Config"."""
    sizes: Mapping[str, Any]
    head: str = "ForCausalLM"
    attention: str = "sdpa"
    model: str = ""
    """The class, where it is not the name with the head."""

    def classes(self) -> tuple[Any, Any]:
        """The model's and the config's."""
        cls = getattr(transformers, self.model or self.name + self.head)
        return cls, cls.config_class

    def config(self, **more: Any) -> Any:
        """Its config, in miniature."""
        return self.classes()[1](**{**self.sizes, **more})


_GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 70,
    "n_positions": 32,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", SIZES),
    "llama, tied": Family("Llama", SIZES | {"tie_word_embeddings": True}),
    "qwen2": Family("Qwen2", SIZES | {"use_sliding_window": False}),
    "qwen3": Family("Qwen3", SIZES | {"head_dim": 4}),
    "mistral": Family("Mistral", SIZES | {"sliding_window": 5}),
    "gemma": Family("Gemma", SIZES | {"head_dim": 4}),
    "gemma2": Family(
        "Gemma2",
        SIZES | {"head_dim": 4, "query_pre_attn_scalar": 5, "sliding_window": 5},
        attention="eager",
    ),
    "gemma3": Family(
        "Gemma3Text",
        SIZES | {"head_dim": 4, "query_pre_attn_scalar": 5, "sliding_window": 5},
        model="Gemma3ForCausalLM",
    ),
    "phi3": Family("Phi3", SIZES),
    "olmo2": Family("Olmo2", SIZES),
    "gpt_neox": Family("GPTNeoX", SIZES),
    "gpt2": Family("GPT2", {**_GPT2, "n_inner": 48}, "LMHeadModel"),
    "cohere": Family("Cohere", SIZES | {"logit_scale": 0.3}),
}


class Batch(NamedTuple):
    """Ids, which of them are tokens, and labels."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def batch(vocab_size: int = 70) -> Batch:
    """Samples of different lengths, padded on the right; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, vocab_size, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.tensor([SEQUENCE, SEQUENCE - 5, SEQUENCE - 1, 4])
    mask = torch.arange(SEQUENCE)[None] < lengths[:, None]
    labels = torch.randint(0, vocab_size, (BATCH, SEQUENCE), generator=generator).masked_fill(~mask, IGNORED)
    return Batch(ids, mask, labels)


class Result(NamedTuple):
    """What a model makes of a batch."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    """By transformers' own names."""


def plain(family: Family) -> tuple[Any, dict[str, Tensor]]:
    """The model as transformers has it, in float64, and its weights."""
    cls, _ = family.classes()
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which its constants are made, too
    try:
        model = cls._from_config(family.config(), attn_implementation=family.attention).double().train()
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in name:  # which transformers keeps in float32
                module._buffers[name] = buffer.float()
    with torch.no_grad():
        for p in model.parameters():  # else norms are ones and biases zeros
            p += 0.1 * torch.randn_like(p)
    return model, {name: value.detach().clone() for name, value in model.state_dict().items()}


def reference(model: Any, given: Batch, *, padded: bool) -> Result:
    """The same by plain transformers; float32 inside its norms is widened."""
    with _wide():
        kwargs = {"attention_mask": given.mask.long()} if padded else {}
        logits = model(input_ids=given.ids, use_cache=False, **kwargs).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Result(logits.detach(), loss.detach(), gradients)


@contextmanager
def _wide() -> Iterator[None]:
    """float64 stays float64 where transformers' code computes in float32 to be safe: norms, softmax."""
    to, plain_float, softmax = Tensor.to, Tensor.float, functional.softmax

    def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is torch.float64 and (torch.float32 in args or kwargs.get("dtype") is torch.float32):
            return self
        return to(self, *args, **kwargs)

    def floated(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype is torch.float64 else plain_float(self, *args, **kwargs)

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype is torch.float64 else dtype)

    Tensor.to, Tensor.float, functional.softmax = kept, floated, wide_softmax
    try:
        yield
    finally:
        Tensor.to, Tensor.float, functional.softmax = to, plain_float, softmax


def by_policy(
    family: Family, weights: Mapping[str, Tensor], tensor: mesh.Tensor, given: Batch, *, padded: bool
) -> Result:
    """The same by dslpar, on this rank of `tensor`; everything gathered."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    cls, _ = family.classes()
    model = HuggingFaceModel(cls, family.config())
    with _wide():
        module = assemble(model.layers(groups), groups, seed=1).train()
        mark_owners(module, groups)
        load(module, weights.__getitem__, groups)
        x: Any = (given.ids, given.mask) if padded else given.ids
        logits = module(x)
        loss = model.loss(groups)(logits, given.labels)
        loss.backward()
    gradients: dict[str, Tensor] = {}
    for _, p, sources in parameters_with_sources(module):
        assert p.grad is not None, sources
        full = gather(p.grad, p.placement, groups)  # type: ignore[attr-defined]
        lengths = [weights[source.name].shape[1 if source.transposed else 0] for source in sources]
        for source, part in zip(sources, torch.split(full, lengths), strict=True):
            gradients[source.name] = part.t() if source.transposed else part
    at = placement.inner(tensor, *given.ids.shape, _padded(model, groups))
    whole = gather(logits.detach(), at, groups)[..., : model.vocab_size]
    return Result(whole, loss.detach(), gradients)


def _padded(model: HuggingFaceModel, groups: Groups) -> int:
    return placement.table(groups.tensor, model.vocab_size, model.skeleton.hidden_size).padded[0]


def worst(one: Result, other: Result) -> dict[str, float]:
    """max|a - b| / max|b| of the logits, the loss and every gradient; one that is not there is infinite."""
    pairs = {"logits": (one.logits, other.logits), "loss": (one.loss, other.loss)}
    missing = set(other.gradients) ^ set(one.gradients)
    pairs |= {name: (one.gradients[name], other.gradients[name]) for name in set(other.gradients) - missing}
    differ = {name: float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for name, (a, b) in pairs.items()}
    return differ | dict.fromkeys(missing, float("inf"))
