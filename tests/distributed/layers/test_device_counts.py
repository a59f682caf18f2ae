"""What a block and the loss ask of an accelerator stays below the targets of benchmarks.device_counts."""

from __future__ import annotations

import pytest

from benchmarks.device_counts import FORMS, TENSORS, BlockCounts, block_counts, loss_bytes, missed
from tests.support.fake_world import in_forks
from tests.support.sampling import sampled


def _counts(row: tuple[str, str]) -> BlockCounts:
    return block_counts(*row)


@pytest.mark.parametrize(
    ("form", "tensor"),
    sampled(
        ((form, tensor) for form in FORMS for tensor in TENSORS),
        {("Llama", "1d, sequence, overlap"), ("Llama", "3d"), ("GPT", "2d")},
    ),
)
def test_a_block_is_within_the_targets(form: str, tensor: str) -> None:
    (counts,) = in_forks(_counts, [(form, tensor)], timeout_s=240)
    assert isinstance(counts, BlockCounts), counts
    exposed = counts.forward.exposed + counts.backward.exposed
    assert missed(f"{form}, {tensor}", exposed=exposed, graph_breaks=counts.graph_breaks) == []


def test_the_loss_is_within_the_targets() -> None:
    ((torchs, ours),) = in_forks(lambda _: loss_bytes(), [0], timeout_s=60)
    assert missed("the loss", bytes_a_logit=ours) == []
    assert torchs > 2 * ours


def test_a_miss_is_told() -> None:
    assert missed("GPT, 1d", exposed=6, graph_breaks=13) == ["GPT, 1d: graph breaks 13, asked at most 0"]
    assert missed("Llama, overlap", exposed=3) == ["Llama, overlap: exposed 3, asked at most 2"]
    assert missed("1d, data 2, ZeRO 3", reads=1, synchronize=5) == []
