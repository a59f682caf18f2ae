"""Images: folders and arrays, classes, resizing, scaling, mirroring, ViTMAE's noise, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.data.image_files import find_images
from dslpar.data.images import ImageSamples
from dslpar.data.source import find_source, make_samples
from dslpar.layout.resolve import Job, resolve
from dslpar.schema import sections
from dslpar.schema.datasets import ImageData
from tests.support.versions import HAS_TRANSFORMERS

VIT = {"image_size": 8, "patch_size": 2, "num_channels": 3, "num_labels": 3}
PIXELS = np.arange(30 * 8 * 8 * 3, dtype=np.int64).reshape(30, 8, 8, 3) % 251


def job(path: Path, kind: str = "ViTForImageClassification", config: Any = VIT, **data: Any) -> Job:
    model = sections.OtherModel(target=f"transformers.{kind}", args={"config": dict(config)})
    spec = sections.Spec(model=model, data=ImageData(path=str(path), **data), batch=sections.Batch(global_size=4))
    return resolve(spec, 1, str(path.parent / "cfg.py"))


def arrays(tmp_path: Path, images: Any = None, labels: Any = None) -> Path:
    images = PIXELS.astype(np.uint8) if images is None else images
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(len(images)) % 3 if labels is None else labels)
    return tmp_path / "images.npz"


def made(job: Job, inputs: tuple[str, ...] = ("pixel_values",)) -> ImageSamples:
    found = make_samples(job, find_source(job).train, inputs)
    assert isinstance(found, ImageSamples)
    return found


def test_arrays_are_scaled_and_split(tmp_path: Path) -> None:
    samples = made(job(arrays(tmp_path), eval_fraction=0.1, mean=[0.1, 0.2, 0.3], std=0.5))
    assert samples.num_samples == 27
    images, classes = samples.batch([0, 5], [0, 1])
    assert images.dtype == torch.float32
    assert classes.tolist() == [samples.indices[0] % 3, samples.indices[5] % 3]
    expected = (PIXELS[samples.indices[5]].transpose(2, 0, 1) / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / 0.5
    assert torch.allclose(images[1], torch.tensor(expected, dtype=torch.float32), atol=1e-6)
    found = find_images(job(tmp_path / "images.npz", eval_fraction=0.1))
    assert sorted([*found.train, *found.held_out]) == list(range(30))


@pytest.mark.parametrize("shape", [(30, 8, 8), (30, 8, 8, 1), (30, 1, 8, 8)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_shapes_and_types_of_arrays(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    most = 1 if dtype is np.float32 else np.iinfo(dtype).max
    pixels = (np.arange(30 * 64).reshape(shape) % 5 / 4 * most).astype(dtype)
    samples = made(job(arrays(tmp_path, pixels), config={**VIT, "num_channels": 1}, mean=0.0, std=1.0))
    (image,), _ = samples.batch([0], [0])
    assert image.shape == (1, 8, 8)
    expected = torch.tensor(pixels[samples.indices[0]].reshape(1, 8, 8) / most, dtype=torch.float32)
    assert torch.allclose(image, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(30, 3, 8, 4), (30, 8, 4, 3), (30, 3, 8, 1), (30, 4, 8, 3)])
def test_an_image_of_few_columns_is_read_by_the_model_s_channels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The number of columns, or of rows, may be one that channels have: 1, 3 or 4."""
    pixels = (np.arange(np.prod(shape)).reshape(shape) % 251).astype(np.uint8)
    samples = made(job(arrays(tmp_path, pixels), mean=0.0, std=1.0))
    samples.size = 0
    expected = pixels[samples.indices[0]]
    expected = expected.transpose(2, 0, 1) if shape[-1] == 3 else expected
    assert torch.allclose(samples.batch([0], [0])[0][0], torch.tensor(expected / 255, dtype=torch.float32), atol=1e-6)


def test_mapped_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", PIXELS.astype(np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(30) % 2)
    samples = made(job(tmp_path / "images.npy", labels="labels.npy"))
    assert isinstance(samples.pixels, np.memmap)
    assert samples.batch([2], [0])[1].tolist() == [samples.indices[2] % 2]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="Pillow is installed with dslpar[hf]")
def test_a_folder_a_class(tmp_path: Path) -> None:
    from PIL import Image

    for name, value in (("b-dogs", 200), ("a-cats", 50)):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (20 + number, 16), (value, 10, 10)).save(tmp_path / "train" / name / f"{number}.png")
    (tmp_path / "train" / "notes.txt").write_text("no image")
    samples = made(job(tmp_path / "train", eval_fraction=0.0, mean=0.0, std=1.0))
    assert samples.num_samples == 8
    images, classes = samples.batch(range(8), range(8))
    assert images.shape == (8, 3, 8, 8)
    assert classes.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert images[:, 0].mean((1, 2)).tolist() == pytest.approx([50 / 255] * 4 + [200 / 255] * 4, abs=1e-3)
    before = find_images(job(tmp_path / "train")).identity
    Image.new("RGB", (9, 9)).save(tmp_path / "train" / "a-cats" / "5.png")
    assert find_images(job(tmp_path / "train")).identity != before


def test_noise_is_of_the_number_in_the_run(tmp_path: Path) -> None:
    config = job(arrays(tmp_path), kind="ViTMAEForPreTraining", mean=0.0, std=1.0)
    samples = made(config, ("pixel_values", "noise"))
    (images, noise), labels = samples.batch([0, 0], [3, 4])
    assert torch.equal(images, labels)
    assert noise.shape == (2, 16)
    assert sorted(noise[0].tolist()) == [number / 16 for number in range(16)]
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(made(config, ("pixel_values", "noise")).batch([0], [4])[0][1], noise[1:])


def test_mirrors_are_of_training_alone(tmp_path: Path) -> None:
    config = job(arrays(tmp_path), flip=True, eval_fraction=0.5)
    samples = made(config)
    plain, _ = made(job(tmp_path / "images.npz", eval_fraction=0.5)).batch([1], [0])
    seen = [samples.batch([1], [number])[0] for number in range(40)]
    mirrored = [not torch.equal(image, plain) for image in seen]
    assert all(torch.equal(image.flip(-1), plain) for image, is_other in zip(seen, mirrored, strict=True) if is_other)
    assert 8 <= sum(mirrored) <= 32
    held_out = make_samples(config, find_source(config).held_out, ("pixel_values",))
    assert all(torch.equal(held_out.batch([1], [0])[0], held_out.batch([1], [number])[0]) for number in range(20))


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"images": np.zeros((5, 3), np.uint8)}, "BAT201", r"shape \(5, 3\)"),
        ({"labels": np.zeros(7, int)}, "BAT201", r"has 30 images, but labels of the shape \(7,\)"),
        ({"labels": np.zeros(30)}, "BAT201", "labels .* are float64, not whole numbers"),
        ({"labels": np.full(30, 3)}, "BAT213", "classes up to 3, but the model has only 3 classes"),
        ({"images": np.zeros((3, 8, 8, 3), np.uint8)}, "BAT210", "takes 4 samples, but there are 2 images"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], code: str, message: str) -> None:
    path = arrays(tmp_path, **change)
    with pytest.raises(DslparError, match=f"(?s){code}.*{message}"):
        find_images(job(path))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "images.npz").write_text("no array")
    with pytest.raises(DslparError, match="neither a folder nor a NumPy array"):
        find_images(job(tmp_path / "images.npz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DslparError, match="holds no images"):
        find_images(job(tmp_path / "empty"))
    with pytest.raises(DslparError, match="cannot read"):
        find_images(job(tmp_path / "nothing.npz"))


def test_channels_of_another_number(tmp_path: Path) -> None:
    with pytest.raises(DslparError, match="images have 3 channels, but the model takes 1"):
        made(job(arrays(tmp_path), config={**VIT, "num_channels": 1})).batch([0], [0])
