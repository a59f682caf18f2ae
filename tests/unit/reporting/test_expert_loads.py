"""experts.json: what is written is read, and a corrupted file says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dslpar.reporting import expert_loads
from dslpar.reporting.expert_loads import LayerLoad
from dslpar.reporting.run_dir import EXPERTS

LOADS = [LayerLoad("blocks.0", 2, (0.5, 0.25, 0.25, 0.0)), LayerLoad("blocks.1", 1, (1.0,), 0.25)]


def test_loads_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert expert_loads.read(tmp_path) is None
    expert_loads.write(tmp_path, 7, LOADS[:1])
    expert_loads.write(tmp_path, 8, LOADS)
    assert expert_loads.read(tmp_path) == (8, LOADS)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"step": 1}',
        '{"step": "1", "layers": {}}',
        '{"step": 1, "layers": {"a": [0.5, 0.5]}}',
        '{"step": 1, "layers": {"a": {"top_k": 1, "shares": []}}}',
        '{"step": 1, "layers": {"a": {"top_k": 1, "shares": [2]}}}',
        '{"step": 1, "layers": {"a": {"top_k": 1.5, "shares": [1]}}}',
        '{"step": 1, "layers": {"a": {"top_k": 1, "shares": [1], "dropped": 2}}}',
    ],
)
def test_a_corrupted_file_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / EXPERTS).write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 - the page shows its text, whatever it is
        expert_loads.read(tmp_path)


def test_figures_are_the_most_uneven_layer_s() -> None:
    assert expert_loads.figures([]) == {}
    found = expert_loads.figures([LayerLoad("even", 2, (0.25,) * 4), *LOADS])
    assert found["expert_max_over_mean"] == 2.0
    entropy = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert found["expert_entropy"] == pytest.approx(entropy / math.log(4))
    assert found["expert_dropped"] == 0.25
    assert "expert_dropped" not in expert_loads.figures(LOADS[:1])


def test_a_file_keeps_six_digits(tmp_path: Path) -> None:
    expert_loads.write(tmp_path, 1, [LayerLoad("a", 1, (1 / 3, 2 / 3))])
    assert json.loads((tmp_path / EXPERTS).read_text())["layers"]["a"]["shares"] == [0.333333, 0.666667]
