"""Random inputs and labels for any model, with different lengths and a pattern to learn.

    samples = draw_samples(job, model, module, num_samples=40)
    inputs, labels = samples.batch(range(4), range(4))

As in text, some tokens are far more frequent than others, so that gradients are more than noise. If a model reads
tokens, the loss ignores some labels (IGNORE_INDEX), and their number differs between samples. This reveals a mean over
micro-batches in place of a mean over counted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import Mesh
from dslpar.data.order import Samples, sample_indices
from dslpar.data.source import find_source, make_samples
from dslpar.distributed.groups import Groups
from dslpar.layers import IGNORE_INDEX
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.models import LayeredModel
from dslpar.schema.sections import ImageModel, OtherModel, TokenModel

_SEED = 7
_SHARE_IGNORED = 0.2
_LENGTH = 12
"""Tokens per sample if neither the data nor the model has a length."""


class DrawnSamples:
    """Samples in memory; implements `data.order.Samples`."""

    def __init__(self, inputs: Sequence[Tensor], labels: Sequence[Tensor], all_counted: bool) -> None:
        """Take inputs and labels as tensors [num_samples, ...], inputs in the order of the forward's arguments."""
        self.inputs, self.labels, self.all_counted = tuple(inputs), tuple(labels), all_counted
        self.num_samples = len(inputs[0])

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return (inputs, labels), each a tensor if there is only one, else a tuple."""
        chosen = list(samples)
        return _one([x[chosen] for x in self.inputs]), _one([x[chosen] for x in self.labels])


def draw_samples(job: Job, model: LayeredModel, module: nn.Module, num_samples: int) -> Samples:
    """Draw samples for the job's model, or read the config's data if only the model's class knows its inputs.

    `module` is the model, built on one process.

    Raises:
        DslparError: the model's inputs are unknown.
    """
    section, names = job.spec.model, inputs_of(job)
    generator = torch.Generator().manual_seed(_SEED)
    if isinstance(section, TokenModel):
        ids = _tokens(generator, num_samples, job.seq_len + 1, section.vocab_size)
        return DrawnSamples((ids[:, :-1],), (_ignoring(ids[:, 1:], generator),), all_counted=False)
    if isinstance(section, ImageModel):
        classes = torch.randint(0, getattr(section, "num_classes", 2), (num_samples,), generator=generator)
        sides = (section.num_channels, section.image_size, section.image_size)
        images = [_images(generator, classes, sides) for _ in names]
        return DrawnSamples(tuple(images), (classes,), all_counted=True)
    if isinstance(section, OtherModel) and section.is_of_transformers:
        return _of_transformers(job, model, module, num_samples, generator)
    if isinstance(section, OtherModel) and section.layers is not None:
        return _of_listed_layers(job, section.layers, num_samples, generator)
    return _read(job, num_samples)


def _read(job: Job, num_samples: int) -> DrawnSamples:
    """Read the first samples of the config's own data, in the order of a run."""
    samples = make_samples(job, find_source(job).train, inputs_of(job))
    numbers = range(min(num_samples, samples.num_samples))
    inputs, labels = samples.batch(sample_indices(samples, numbers, job.spec.train.seed), numbers)
    return DrawnSamples(_tuple(inputs), _tuple(labels), samples.all_counted)


# ---- transformers ----


def _of_transformers(
    job: Job, model: Any, module: nn.Module, num_samples: int, generator: torch.Generator
) -> DrawnSamples:
    """Draw inputs by the policy's input names, and a label for each prediction of the built model."""
    config, policy, length = model.config, model.policy, job.seq_len or _LENGTH
    inputs = {name: _input(name, config, num_samples, length, generator) for name in policy.inputs}
    if policy.loss:
        return DrawnSamples(tuple(inputs.values()), (inputs[policy.loss],), all_counted=True)
    with torch.no_grad():
        output = module(_one([x[:2] for x in inputs.values()]))
    outputs = model.whole_output(Groups.without_processes(Mesh()), output)
    shapes = [value.shape for name, value in outputs.items() if name != "aux_loss"]
    labels = [torch.randint(0, shape[-1], (num_samples, *shape[1:-1]), generator=generator) for shape in shapes]
    masks = [value for name, value in inputs.items() if "mask" in name]
    if is_tokens := labels[0].dim() == 2:
        labels[0] = labels[0].masked_fill(~masks[-1], IGNORE_INDEX) if masks else _ignoring(labels[0], generator)
    return DrawnSamples(tuple(inputs.values()), tuple(labels), all_counted=not is_tokens)


def _input(name: str, config: Any, count: int, length: int, generator: torch.Generator) -> Tensor:
    if name == "pixel_values":
        size = config.image_size if hasattr(config, "image_size") else 32
        return torch.randn(count, config.num_channels, size, size, generator=generator)
    if name == "noise":
        return torch.rand(count, (config.image_size // config.patch_size) ** 2, generator=generator)
    if "mask" in name:
        lengths = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        return torch.arange(length)[None] < lengths
    if name == "token_type_ids":
        second = (torch.arange(length)[None] >= length // 2).long().repeat(count, 1)
        return second.clamp(max=config.type_vocab_size - 1)
    return _tokens(generator, count, length, config.vocab_size)


# ---- layers by a list ----


def _of_listed_layers(
    job: Job, layers: Sequence[Mapping[str, Any]], num_samples: int, generator: torch.Generator
) -> Samples:
    first = layers[0]
    kind = str(first.get("type", "")).rpartition(".")[2]
    length = job.seq_len or _LENGTH
    classes = next((int(each["out_features"]) for each in reversed(layers) if "out_features" in each), 0)
    if kind == "Embedding" and classes:
        ids = _tokens(generator, num_samples, length + 1, int(first["num_embeddings"]))
        return DrawnSamples((ids[:, :-1],), (_ignoring(ids[:, 1:] % classes, generator),), all_counted=False)
    if kind == "Linear" and classes:
        labels = torch.randint(0, classes, (num_samples,), generator=generator)
        x = torch.randn(num_samples, int(first["in_features"]), generator=generator) + labels[:, None]
        return DrawnSamples((x,), (labels,), all_counted=True)
    return _read(job, num_samples)


def samples_of_pairs(pairs: Sequence[Any], path: str) -> DrawnSamples:
    """Return a program's (input, label) pairs as samples. Raises DslparError: `pairs` is empty."""
    if not len(pairs):
        raise_finding("BAT205", "there are no samples", "give at least a global batch of (input, label) pairs", path)
    inputs, labels = zip(*((_tuple(x), _tuple(y)) for x, y in pairs), strict=True)
    stacked = [
        tuple(torch.stack([torch.as_tensor(v) for v in each]) for each in zip(*side, strict=True))
        for side in (inputs, labels)
    ]
    counted = all(label.is_floating_point() or bool((label != IGNORE_INDEX).all()) for label in stacked[1])
    return DrawnSamples(stacked[0], stacked[1], all_counted=counted)


# ---- numbers ----


def _tokens(generator: torch.Generator, count: int, length: int, vocab_size: int) -> Tensor:
    """Return ids [count, length]: random at odd positions, with a few frequent ids, and counting up at even positions.

    The even positions run through the whole vocabulary, so that ids at the edges of each rank's shard of an embedding
    occur, too. Among the random ids, the special tokens' ids 0 and 1 are rare.
    """
    chance = torch.rand(count, length, generator=generator)
    ids = ((1 - chance**4) * (vocab_size - 1) + 0.5).long().clamp(max=vocab_size - 1)
    places = ids[:, ::2].shape[1]
    ids[:, ::2] = (torch.arange(count * places) % vocab_size).view(count, places)
    return ids


def _ignoring(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Replace labels by IGNORE_INDEX at random: none in every fifth sample, up to about two fifths in others."""
    share = torch.rand(len(labels), 1, generator=generator) * 2 * _SHARE_IGNORED
    share[1::5] = 0
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < share, IGNORE_INDEX)


def _images(generator: torch.Generator, classes: Tensor, sides: tuple[int, ...]) -> Tensor:
    return torch.randn(len(classes), *sides, generator=generator) + 0.3 * classes.view(-1, 1, 1, 1)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _one(values: list[Tensor]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
