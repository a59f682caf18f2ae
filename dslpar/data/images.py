"""Image samples: read, resize and scale images, and draw the other inputs of the model's forward.

Mirroring, and the noise by which ViTMAE masks patches, are drawn from the run's seed and the sample's number in the
run. So they do not depend on the layout, and are the same after a resume.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.data.image_files import Images, open_arrays
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import ImageData
from dslpar.schema.sections import OtherModel


class ImageSamples:
    """Samples of the images `indices` of `images`; only `training` images may be mirrored.

    `inputs` are the arguments of the model's forward: pixel_values, and for some models noise.
    """

    all_counted = True
    """Every label counts in the loss."""

    def __init__(self, job: Job, images: Images, indices: Sequence[int], training: bool, inputs: Sequence[str]) -> None:
        data, model = job.spec.data, job.spec.model
        assert isinstance(data, ImageData)
        self.job, self.data, self.images, self.indices, self.training = job, data, images, indices, training
        self.num_samples = len(indices)
        config = model.transformers if isinstance(model, OtherModel) else None
        size = config.size("image") if config is not None else getattr(model, "image_size", None)
        self.size = data.size or size
        self.channels = config.size("channels") if config is not None else getattr(model, "num_channels", None)
        patch = config.size("patch") if config is not None else None
        self.num_patches = (self.size // patch) ** 2 if "noise" in inputs and self.size and patch else 0
        self.pixels = None if images.names else open_arrays(job, data, images.path)[0]
        if images.names and importlib.util.find_spec("PIL") is None:
            message = "files of images need the package Pillow, which is not installed"
            raise_finding("BAT212", message, "pip install dslpar[hf], or use NumPy arrays", job.path, "data.path")

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Tensor]:
        """Return images, float32 [len(samples), channels, height, width], and classes, int64 [len(samples)].

        `samples` index the images of this part. `numbers` are the samples' positions in the run, which seed mirroring
        and noise. For a model that takes noise, return (images, noise [len(samples), patches]), and the images as its
        targets.
        """
        made = [self._image(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        if len(shapes := {image.shape for image in made}) > 1:
            message = f"images of {' and '.join(str(tuple(shape)) for shape in sorted(shapes))} in one batch"
            raise_finding(
                "BAT205", message, "set data.size: all images are then resized to it", self.job.path, "data.size"
            )
        images = torch.stack(made)
        if not self.num_patches:
            return images, torch.tensor([self.images.labels[self.indices[sample]] for sample in samples])
        return (images, torch.stack([self._noise(number) for number in numbers])), images

    def _image(self, sample: int, number: int) -> Tensor:
        image = self._scaled(self.indices[sample])
        channels = image.shape[0]
        if self.size and image.shape[1:] != (self.size, self.size):
            resized = functional.interpolate(image[None], (self.size, self.size), mode="bilinear", antialias=True)
            image = resized[0].clamp(0, 1)
        if self.training and self.data.flip and stable_hash("flip", self.job.spec.train.seed, number) % 2:
            image = image.flip(-1)
        mean, std = (
            torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (self.data.mean, self.data.std)
        )
        wrong = [len(value) for value in (mean, std) if len(value) not in (1, channels)]
        if wrong:
            message = f"images have {channels} channels, but data.mean or data.std has {wrong[0]} numbers"
            raise_finding("BAT205", message, "a number, or one for each channel", self.job.path, "data.mean")
        return (image - mean) / std

    def _scaled(self, index: int) -> Tensor:
        """Return an image, float32 [channels, height, width] in [0, 1]."""
        pixels = self._file(index) if self.pixels is None else np.asarray(self.pixels[index])
        if pixels.ndim == 2:
            pixels = pixels[None]
        elif self._channels_are_last(pixels.shape):
            pixels = pixels.transpose(2, 0, 1)
        if self.channels is not None and pixels.shape[0] != self.channels:
            message = f"images have {pixels.shape[0]} channels, but the model takes {self.channels}"
            raise_finding("BAT205", message, f"model.config.num_channels={pixels.shape[0]}", self.job.path, "model")
        most = np.iinfo(pixels.dtype).max if np.issubdtype(pixels.dtype, np.integer) else 1
        return torch.from_numpy(pixels.astype(np.float32) / np.float32(most))

    def _channels_are_last(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array is [height, width, channels] and not [channels, height, width].

        Where both its ends may be channels, as in [3, 32, 4], the one with the model's number of channels has them.
        """
        if self.channels in (shape[0], shape[-1]):
            return bool(shape[-1] == self.channels)
        return shape[-1] in _CHANNELS

    def _file(self, index: int) -> Any:
        from PIL import Image

        path = os.path.join(self.images.path, self.images.names[index])
        try:
            with Image.open(path) as image:
                return np.asarray(image.convert("L" if self.channels == 1 else "RGB"))
        except OSError as error:
            message, hint = f"cannot read {path!r}: {error}", "repair or remove that file"
            raise_finding("BAT201", message, hint, self.job.path, "data.path")

    def _noise(self, number: int) -> Tensor:
        """Return a distinct number in [0, 1) for each patch."""
        generator = torch.Generator("cpu").manual_seed(stable_hash("noise", self.job.spec.train.seed, number))
        return torch.randperm(self.num_patches, generator=generator) / self.num_patches


_CHANNELS = (1, 3, 4)
