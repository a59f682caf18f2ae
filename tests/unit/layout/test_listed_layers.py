"""Partition of listed layers: their weights, and layers that share an index or have none."""

from __future__ import annotations

import pytest

from dslpar.layout.chunks import Chunks
from dslpar.layout.listed_layers import class_names
from dslpar.layout.resolve import auto_counts
from dslpar.schema.sections import OtherModel


def model(*layers: tuple[str, int | None]) -> OtherModel:
    return OtherModel(target="a.B", args={"layers_cfg": [{"type": name, "layer_idx": index} for name, index in layers]})


def test_functions_weigh_nothing_and_go_before_or_after() -> None:
    names = ("Linear", "ReLU", "Dropout", "Linear", "ReLU", "my.Layer", "Flatten", "Linear")
    listed = model(*((name, None) for name in names))
    assert auto_counts(listed, "cost", Chunks(4), 0) == (3, 2, 2, 1)  # one layer with parameters on each stage
    assert auto_counts(listed, "cost", Chunks(8), 0) == (1,) * 8
    assert class_names(listed)[5] == "Layer"


def test_layers_of_one_index_go_together() -> None:
    listed = model(("Linear", None), ("Linear", 0), ("ReLU", None), ("Linear", 1), ("Linear", 2), ("Linear", -1))
    assert listed.num_layers == 3
    assert auto_counts(listed, "cost", Chunks(2), 0) == (2, 1)  # of 2, 1 and 2 with parameters
    assert auto_counts(listed, "type:^relu$", Chunks(2), 0) == (2, 1)


def test_only_the_built_layers_tell_their_parameters() -> None:
    assert auto_counts(model(("Linear", None), ("Linear", None)), "parameters", Chunks(2), 0) is None


@pytest.mark.parametrize("indices", [(None, None, None), (-1, None, None), (0, 0, 0)])
def test_how_many_there_are(indices: tuple[int | None, ...]) -> None:
    listed = model(*(("Linear", index) for index in indices))
    assert listed.num_layers == (3 if indices[0] is None else 1)
