"""Find images, check them, and split them into training and held-out images, without torch and without decoding.

    cats/1.png cats/2.png dogs/1.jpg        one folder per class; classes are numbered in the order of their names
    digits.npz                              arrays `images` and `labels`
    images.npy and labels.npy               one array per file, mapped into memory

Images are uint8 or uint16, or floats in [0, 1]; [N, H, W], [N, H, W, channels] or [N, channels, H, W].
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import walk
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import ImageData, absolute_path
from dslpar.schema.sections import OtherModel

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
NO_CLASS = -1
_HINT = "a folder with a folder of images for each class, an .npz file of images and labels, or .npy files"


class Images(NamedTuple):
    """Images of a run, and their split."""

    path: str
    """Path of the folder or file."""
    labels: Sequence[int]
    """Class of each image, [N]; NO_CLASS: the image has none."""
    names: Sequence[str]
    """Paths of the images below the folder, [N]; empty: the images are an array."""
    train: Sequence[int]
    """Indices of the training images."""
    held_out: Sequence[int]
    """Indices of the held-out images."""
    identity: str
    """Digest of the images and their split."""


def find_images(job: Job) -> Images:
    """Find, split and check the images of a job.

    Raises:
        DslparError: there are no images, too few for a step, or more classes than the model has.
    """
    data = job.spec.data
    assert isinstance(data, ImageData)
    path = absolute_path(job.path, data.path)
    try:
        names, labels, seen = _in_folder(path) if os.path.isdir(path) else _in_arrays(job, data, path)
    except OSError as error:
        _refuse(job, f"cannot read {error.filename or path!r}: {error.strerror or error}")
    if not len(labels):
        _refuse(job, f"{path!r} holds no images")
    train, held_out = _split(len(labels), data.eval_fraction)
    identity = hashlib.sha256(repr((seen, len(train), data.eval_fraction)).encode()).hexdigest()
    found = Images(path, labels, names, train, held_out, identity)
    _check_classes(job, found)
    _check_numbers(job, found)
    return found


def _in_folder(path: str) -> tuple[list[str], list[int], object]:
    """Return names, classes, and the identity of the images: names and file sizes."""
    files = [file for file in walk(path) if file.name.lower().endswith(SUFFIXES)]
    classes = sorted({os.path.dirname(file.name) for file in files})
    numbers = {name: number if name else NO_CLASS for number, name in enumerate(classes)}
    if "" in numbers and len(classes) > 1:  # skip images beside the class folders, which have no class
        files = [file for file in files if os.path.dirname(file.name)]
        numbers = {name: number for number, name in enumerate(classes[1:])}
    seen = [(file.name.replace(os.sep, "/"), os.path.getsize(file.path)) for file in files]
    return [file.name for file in files], [numbers[os.path.dirname(file.name)] for file in files], seen


def _in_arrays(job: Job, data: ImageData, path: str) -> tuple[list[str], Sequence[int], object]:
    images, labels = open_arrays(job, data, path)
    if images.ndim not in (3, 4):
        _refuse(job, f"images of {path!r} have the shape {images.shape}, not [N, H, W] with or without channels")
    if labels is not None and labels.shape != images.shape[:1]:
        _refuse(job, f"{path!r} has {len(images)} images, but labels of the shape {labels.shape}")
    if labels is not None and not np.issubdtype(labels.dtype, np.integer):
        _refuse(job, f"labels of {path!r} are {labels.dtype}, not whole numbers")
    numbers = np.full(len(images), NO_CLASS) if labels is None else np.asarray(labels)
    digest = hashlib.sha256(numbers.astype(np.int64).tobytes()).hexdigest()
    return [], numbers.tolist(), (os.path.basename(path), images.shape, str(images.dtype), digest)


def open_arrays(job: Job, data: ImageData, path: str) -> tuple[Any, Any]:
    """Return the images, memory-mapped if the file allows it, and the labels, or None without labels."""
    try:
        opened = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(opened, np.ndarray):
            with opened as arrays:
                if "images" not in arrays:
                    _refuse(job, f"{path!r} has the arrays {', '.join(arrays)}, but no 'images'")
                return arrays["images"], arrays.get("labels")
        labels = None
        if data.labels is not None:
            labels = np.load(absolute_path(job.path, data.labels), mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        _refuse(job, f"{path!r} is neither a folder nor a NumPy array: {error}")
    return opened, labels


def _split(number: int, fraction: float) -> tuple[list[int], list[int]]:
    """Hold out a share of the images by a fixed permutation: at least one if the share is not 0, and never all."""
    count = min(max(round(number * fraction), 1), number - 1) if fraction else 0
    if not count:
        return list(range(number)), []
    # Permuted, since neighbouring images often have the same class.
    order = np.random.default_rng(0).permutation(number)
    return np.sort(order[count:]).tolist(), np.sort(order[:count]).tolist()


def _check_classes(job: Job, found: Images) -> None:
    model = job.spec.model
    config = model.transformers if isinstance(model, OtherModel) else None
    if config is None or not config.model.endswith("ForImageClassification"):
        return
    known = config.values.get("num_labels") or len(config.values.get("id2label") or ()) or _DEFAULT_CLASSES
    highest, lowest = max(found.labels), min(found.labels)
    if lowest < 0:
        _refuse(job, f"images of {found.path!r} have no classes, which {config.model} needs as labels")
    if highest >= known:
        message = f"{found.path!r} has classes up to {highest}, but the model has only {known} classes"
        has_weights = isinstance(model, OtherModel) and "pretrained" in model.args
        hint = f"choose images of {known} classes" if has_weights else f"model.config.num_labels={highest + 1}"
        raise_finding("BAT213", message, hint, job.path, "model.config.num_labels")


_DEFAULT_CLASSES = 2
"""transformers' default of num_labels."""


def _check_numbers(job: Job, found: Images) -> None:
    size = job.batch.global_size
    if size > len(found.train):
        message = f"a step takes {size} samples, but there are {len(found.train)} images to train on"
        raise_finding("BAT210", message, "a smaller batch, or more images", job.path, "batch")
    if job.spec.train.eval_interval is not None and not found.held_out:
        hint = "raise data.eval_fraction, or leave train.eval_interval out"
        raise_finding("BAT203", "no images are held out", hint, job.path, "data")


def _refuse(job: Job, message: str) -> NoReturn:
    raise_finding("BAT201", message, _HINT, job.path, "data.path")
