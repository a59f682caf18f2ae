"""Compare a model run by a policy with plain transformers: logits, loss and every gradient, in float64.

An equal loss does not prove much: if a reduction of gradients is missing, the loss of the first step is still exact. So
every gradient is compared, with samples of different lengths, and with weights that are neither zeros nor ones.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import gather, mark_owners, placement
from dslpar.models.layered import assemble
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import load, parameters_with_sources
from dslpar.schema.policy import DECODER_INPUTS, Policy

BATCH, SEQUENCE, IMAGE = 4, 12, 40
IGNORED = -100
_ZERO = 1e-13


class Batch(NamedTuple):
    """Inputs of a forward, and labels."""

    inputs: Mapping[str, Tensor]
    """Full inputs, by argument of the model's forward."""
    labels: tuple[Tensor, ...]
    """One tensor per output of the model."""


def make_inputs(
    config: Any, names: Sequence[str] = DECODER_INPUTS, *, padded: bool = True, batch: int = BATCH
) -> dict[str, Tensor]:
    """Make samples of different lengths, padded on the right. `names`: inputs to make.

    With `padded=False`, inputs from the first mask on are left out; an encoder-decoder model gets masks of all ones.
    """
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name in names:
        if name == "pixel_values":
            size = getattr(config, "image_size", IMAGE)
            shape = (batch, config.num_channels, size, size)
            found[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        elif name == "noise":
            patches = (config.image_size // config.patch_size) ** 2
            found[name] = torch.rand(batch, patches, generator=generator, dtype=torch.float64)
        elif "mask" in name:
            if not padded and "decoder_input_ids" not in names:
                break
            lengths = torch.tensor([SEQUENCE, SEQUENCE - 5, SEQUENCE - 1, 4]).roll(len(found))
            lengths = lengths.repeat(-(-batch // len(lengths)))[:batch]
            lengths = lengths if padded else torch.full_like(lengths, SEQUENCE)
            found[name] = torch.arange(SEQUENCE)[None] < lengths[:, None]
        else:
            first, last = (0, config.type_vocab_size) if name == "token_type_ids" else (2, config.vocab_size)
            found[name] = torch.randint(first, last, (batch, SEQUENCE), generator=generator)
    return found


def _make_labels(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Make a label for each sample, or for each token that is not padding."""
    generator = torch.Generator().manual_seed(8)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
    masks = [value for name, value in inputs.items() if "mask" in name]
    return labels.masked_fill(~masks[-1], IGNORED) if masks and labels.dim() == 2 else labels


class Subject(NamedTuple):
    """A transformers class with config and policy: the arguments of `HuggingFaceModel`."""

    cls: Any
    config: Any
    policy: object = None


class Result(NamedTuple):
    """Result of a model on a batch."""

    outputs: tuple[Tensor, ...]
    """Full logits and other outputs."""
    loss: Tensor
    gradients: dict[str, Tensor]
    """Full gradients by transformers' parameter names."""


def plain(cls: Any, config: Any, attention: str = "sdpa") -> tuple[Any, dict[str, Tensor]]:
    """Build the plain transformers model in float64; return it with its weights."""
    torch.manual_seed(3)
    model = build_plain(cls, config, attention)
    with torch.no_grad():
        for p in model.parameters():  # otherwise gains would be ones and biases zeros
            p += 0.1 * torch.randn_like(p)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():  # such as the bias of DeepSeek-V3's router, 0 at first
                buffer += 0.1 * torch.randn_like(buffer)
    return model, {name: value.detach().clone() for name, value in saved.items()}


def build_plain(cls: Any, config: Any, attention: str = "sdpa", constants: torch.dtype = torch.float64) -> Any:
    """Build the plain transformers model in float64, with weights initialized by transformers.

    Constants, such as the factor of Gemma's embedding, are rounded to the dtype `constants`.
    """
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"  # the fused products do not support float64
    before = torch.get_default_dtype()
    torch.set_default_dtype(constants)
    try:
        model = cls._from_config(config, attn_implementation=attention).double().train()
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in name:  # transformers keeps it in float32
                module._buffers[name] = buffer.float()
    return model


def plain_attention(cls: Any, config: Any) -> str:
    """Return the `attn_implementation` of transformers that supports a config: "eager" or "sdpa"."""
    eager = getattr(config, "attn_logit_softcapping", None) or not cls._supports_sdpa
    return "eager" if eager else "sdpa"


def reference(model: Any, inputs: Mapping[str, Tensor], policy: Policy | None = None) -> tuple[Batch, Result]:
    """Compute the result with plain transformers, and make labels. If `policy` names the model's own loss, use it."""
    output = run_plain(model, inputs)
    balance = balance_term(model, inputs, output)
    along = [name for names in policy.returns.values() for name in names] if policy else []
    logits = logits_of(output)
    beside = tuple(output[name] for name in along if name in output)
    if policy and policy.loss:
        given, loss = Batch(inputs, (inputs[policy.loss],)), output.loss
    else:
        given = Batch(inputs, tuple(_make_labels(inputs, each) for each in logits))
        losses = [
            functional.cross_entropy(each.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
            for each, labels in zip(logits, given.labels, strict=True)
        ]
        loss = torch.stack(losses).sum() + balance
    torch.autograd.backward(loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return given, Result(tuple(each.detach() for each in (*logits, *beside)), loss.detach(), gradients)


def run_plain(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Run transformers' own forward in float64; `inputs` by argument name."""
    settings = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    with in_float64():
        return model(**{name: value.long() if "mask" in name else value for name, value in inputs.items()}, **settings)


def logits_of(output: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the logits in an output of transformers, of which losses are computed: not those of routers."""
    return tuple(value for name, value in output.items() if "logits" in name and name != "router_logits")


def balance_term(model: Any, inputs: Mapping[str, Tensor], output: Mapping[str, Any]) -> Tensor:
    """Return the term that transformers' forward adds to the loss for balanced experts; 0 if the config disables it.

    It is computed from the router logits in float64, because transformers computes the shares of experts in float32.
    """
    if output.get("aux_loss") is None:
        return torch.zeros(())
    rows = torch.stack([each.softmax(-1) for each in output["router_logits"]])
    mask = next((value for name, value in inputs.items() if "mask" in name), torch.ones(rows.shape[1]))
    chosen = rows.topk(model.num_experts_per_tok, -1).indices
    choices = functional.one_hot(chosen, model.num_experts).sum(2).to(rows.dtype)
    counted = mask.flatten() != 0
    loss = model.num_experts * (choices[:, counted].mean((0, 1)) * rows[:, counted].mean((0, 1))).sum()
    torch.testing.assert_close(loss, output["aux_loss"], rtol=1e-5, atol=0, check_dtype=False)
    result: Tensor = model.router_aux_loss_coef * loss
    return result


@contextmanager
def in_float64() -> Iterator[None]:
    """Keep float64 in this context, although transformers' norms and softmax cast their inputs to float32."""
    to, softmax = Tensor.to, functional.softmax
    methods: dict[str, Any] = {"float": Tensor.float, "type": Tensor.type, "softmax": Tensor.softmax}

    def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is torch.float64 and (torch.float32 in args or kwargs.get("dtype") is torch.float32):
            return self
        return to(self, *args, **kwargs)

    def floated(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self if self.dtype is torch.float64 else methods["float"](self, *args, **kwargs)
        return result

    def typed(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_narrower = self.dtype is torch.float64 and args[:1] == (torch.float32,)
        return self if is_narrower else methods["type"](self, *args, **kwargs)

    def softmax_of(self: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        dtype = None if self.dtype is torch.float64 else dtype
        result: Tensor = methods["softmax"](self, *args, dtype=dtype, **kwargs)
        return result

    def wide_softmax(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:  # torch's own signature, since nn.Softmax passes _stacklevel
        return softmax(input, dim, _stacklevel, None if input.dtype is torch.float64 else dtype)

    with (
        patch.object(Tensor, "to", kept),
        patch.object(Tensor, "float", floated),
        patch.object(Tensor, "type", typed),
        patch.object(Tensor, "softmax", softmax_of),
        patch.object(functional, "softmax", wide_softmax),
    ):
        yield


def by_policy(
    subject: Subject | HuggingFaceModel, weights: Mapping[str, Tensor], tensor: mesh.TensorMesh, given: Batch
) -> Result:
    """Compute the result by a policy on the ranks of `tensor`, and gather it. Leaves the default dtype at float64."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    model = subject if isinstance(subject, HuggingFaceModel) else HuggingFaceModel(*subject)
    inputs, labels = tuple(given.inputs.values()), given.labels
    with in_float64():
        module = assemble(model.layers(groups), groups, seed=1).train()
        mark_owners(module, groups)
        load(module, weights.__getitem__, groups)
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
        x: Any = inputs if len(inputs) > 1 else inputs[0]
        output: Any = module(x)
        loss = model.loss(groups)(output, labels if len(labels) > 1 else labels[0])  # type: ignore[arg-type]
        torch.autograd.backward(loss)
    gradients: dict[str, Tensor] = {}
    named = first_names(model.model)
    for _, p, sources in parameters_with_sources(module):
        if p.grad is None:  # frozen, or unused, and then plain transformers has no gradient either
            continue
        full = gather(p.grad, p.placement, groups)  # type: ignore[attr-defined]
        lengths = [weights[source.name].shape[1 if source.transposed else 0] for source in sources]
        for source, part in zip(sources, torch.split(full, lengths), strict=True):
            gradients[named[source.name]] = part.t() if source.transposed else part
    first, *others = output if isinstance(output, tuple) else (output,)
    if model.balance is not None:
        others.pop()  # the routers' sums are compared through the loss
    whole = _whole_logits(model, groups, first.detach(), given) if model.skeleton.head else first.detach()
    return Result((whole, *(each.detach() for each in others)), loss.detach(), gradients)


def first_names(model: Any) -> dict[str, str]:
    """Return the first name of each parameter by all of its names. A tied weight has several, in any order."""
    firsts: dict[Tensor, str] = {}
    return {name: firsts.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def differing_copies(subject: Subject, tensor: mesh.TensorMesh, given: Batch) -> list[str]:
    """Return the parameters of which ranks with equal copies get gradients that differ in any bit. Collective.

    It is for configs with dropout. If copies get different dropout masks, they drift apart, which no loss shows.
    """
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    model = HuggingFaceModel(*subject)
    inputs, labels = tuple(given.inputs.values()), given.labels
    with in_float64():
        module = assemble(model.layers(groups), groups, seed=1).train()
        torch.manual_seed(11)
        output: Any = module(inputs if len(inputs) > 1 else inputs[0])
        torch.autograd.backward(model.loss(groups)(output, labels if len(labels) > 1 else labels[0]))  # type: ignore[arg-type]
    found = []
    for name, p in module.named_parameters():
        if p.grad is None:
            continue
        placement_ = p.placement  # type: ignore[attr-defined]
        held: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        for rank, piece in enumerate(collectives.all_gather(p.grad[None], groups.axis("tensor"))):
            coord = groups.mesh.coord(rank)
            at = tuple(tuple(coord[letter] for letter in letters) for letters in placement_.cuts)
            if not torch.equal(held.setdefault(at, piece), piece):
                found.append(name)
                break
    return found


def _whole_logits(model: HuggingFaceModel, groups: Groups, logits: Tensor, given: Batch) -> Tensor:
    padded = placement.table(groups.tensor, model.vocab_size, model.skeleton.hidden_size(0)).padded[0]
    at = placement.inner(groups.tensor, *given.labels[0].shape, padded)
    return gather(logits, at, groups)[..., : model.vocab_size]


def worst(one: Result, other: Result) -> dict[str, float]:
    """Return max|a - b| / max|b| of the logits, the loss and every gradient; infinity for a missing gradient or a NaN.

    A gradient that is zero up to rounding, such as a key bias's (softmax cancels it), is divided by the largest
    gradient instead.
    """
    largest = max(float(each.abs().max()) for each in other.gradients.values())
    pairs = {"loss": (one.loss, other.loss)}
    for number, each in enumerate(zip(one.outputs, other.outputs, strict=True)):
        pairs[f"logits {number}" if number else "logits"] = each
    shared = set(other.gradients) & set(one.gradients)
    # A weight that nothing uses has no gradient, or one of zeros.
    alone = {**other.gradients, **one.gradients}.items()
    missing = [name for name, gradient in alone if name not in shared and bool(gradient.any())]
    pairs |= {name: (one.gradients[name], other.gradients[name]) for name in shared}
    scales = {name: float(b.abs().max()) for name, (_, b) in pairs.items()}
    scales = {name: scale if scale > _ZERO * largest else largest for name, scale in scales.items()}
    differ = {name: float((a - b).abs().max()) / max(scales[name], 1e-30) for name, (a, b) in pairs.items()}
    differ = {name: float("inf") if math.isnan(value) else value for name, value in differ.items()}
    return differ | dict.fromkeys(missing, float("inf"))
