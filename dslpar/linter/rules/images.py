"""TEN140, TEN141: check the sizes of dslpar's own image models against the mesh, and image_size against patch_size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.layout.divisors import Condition, divisors
from dslpar.layout.family_interface import layout_of
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.schema.sections import ImageModel


@rule("TEN140", "size-of-image-model-does-not-divide")
def size_of_image_model_does_not_divide(cx: Context) -> Iterator[Problem]:
    """A size of an image model does not divide over the ranks that shard it."""
    model = cx.model.of(ImageModel)
    if model.image_size % model.patch_size:
        return  # the number of patches is unknown; TEN141 reports it
    conditions = layout_of(model).conditions(model, cx.tensor.cuboid, model.longest_sample)
    for key in dict.fromkeys(each.key for each in conditions if not each.holds):
        of_key = [each for each in conditions if each.key == key]
        broken = next(each for each in of_key if not each.holds)
        name = cx.source.key(f"model.{key}").rpartition(".")[2]
        message = f"{name}: {broken.value} is not divisible by {broken.why}"
        yield cx.problem(f"model.{key}", message, _hint(model, key, of_key))


def _hint(model: ImageModel, key: str, conditions: Sequence[Condition]) -> str:
    if key in ("image_size", "patch_size"):
        return "choose other sizes of images or patches, or another tensor mode"
    from dslpar.layout.divisors import common
    from dslpar.layout.nearest import multiples  # only a mistake needs it

    return f"nearest legal: {' or '.join(map(str, multiples(conditions[0].value, common(conditions))))}"


@rule("TEN141", "image-is-not-patches")
def image_is_not_patches(cx: Context) -> Iterator[Problem]:
    """image_size is not a multiple of patch_size."""
    size, patch = cx.model.of(ImageModel).image_size, cx.model.of(ImageModel).patch_size
    if size % patch:
        near = sorted(divisors(size), key=lambda each: abs(each - patch))[:2]
        message = f"patch_size {patch} does not divide image_size {size}"
        yield cx.problem("model.patch_size", message, f"nearest legal: {' or '.join(map(str, sorted(near)))}")


RULES = (size_of_image_model_does_not_divide, image_is_not_patches)
