"""Load of a mixture's experts in a run: `experts.json` in the run folder, with each expert's share of the tokens.

    write(folder, step=200, loads=[LayerLoad("blocks.0", 2, (0.26, 0.24, 0.3, 0.2))])
    step, loads = read(folder)

The file has the last measured loads alone, since a line per step would be long: DeepSeek-V3 has 58 * 256 experts. The
curves of two figures are in metrics.jsonl: `expert_max_over_mean`, the largest of all layers, and `expert_entropy`, the
smallest of all layers. A router is even if both are 1. Where experts have a capacity, `expert_dropped` is the largest
share of dropped choices.

    >>> even, collapsed = LayerLoad("a", 2, (0.25,) * 4), LayerLoad("b", 2, (0.5, 0.5, 0.0, 0.0))
    >>> (even.max_over_mean, even.entropy, even.effective), (collapsed.max_over_mean, collapsed.entropy)
    ((1.0, 1.0, 4.0), (2.0, 0.5))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.reporting.run_dir import EXPERTS, write_atomically


class LayerLoad(NamedTuple):
    """Load of the experts of one mixture."""

    layer: str
    """Global name of the layer, with the mixture's own name if the layer has several."""
    top_k: int
    """Number of experts that each token chooses."""
    shares: tuple[float, ...]
    """Each expert's share of all choices; the sum is 1."""
    dropped: float | None = None
    """Share of the choices that the experts' capacity dropped; None: they have no capacity."""

    @property
    def max_over_mean(self) -> float:
        """The most loaded expert's load, relative to the mean: from 1 to the number of experts."""
        return max(self.shares) * len(self.shares)

    @property
    def effective(self) -> float:
        """Number of evenly loaded experts with the same entropy: from 1 to the number of experts."""
        return math.exp(-sum(share * math.log(share) for share in self.shares if share > 0))

    @property
    def entropy(self) -> float:
        """Entropy of the shares, relative to that of an even load: from 0 to 1."""
        return math.log(self.effective) / math.log(len(self.shares)) if len(self.shares) > 1 else 1.0


def figures(loads: Sequence[LayerLoad]) -> dict[str, float]:
    """Return the fields of a line of metrics.jsonl: the most uneven layer's; empty without loads."""
    if not loads:
        return {}
    of_all = {
        "expert_max_over_mean": max(each.max_over_mean for each in loads),
        "expert_entropy": min(each.entropy for each in loads),
    }
    dropped = [each.dropped for each in loads if each.dropped is not None]
    return of_all | ({"expert_dropped": max(dropped)} if dropped else {})


def write(folder: Path, step: int, loads: Iterable[LayerLoad]) -> None:
    """Write experts.json; its file is complete at any time."""
    layers = {each.layer: _stored(each) for each in loads}
    write_atomically(folder / EXPERTS, json.dumps({"step": step, "layers": layers}) + "\n")


def read(folder: Path) -> tuple[int, list[LayerLoad]] | None:
    """Return the step of the last measurement, and the loads; None if there is none.

    Raises:
        ValueError: the file is corrupted; the message says how.
    """
    path = folder / EXPERTS
    if not os.path.isfile(path):  # False for an impossible path, where pathlib raises
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not _is_measurement(content):
        raise ValueError("it has no step, or no shares of experts by layer")
    layers = content["layers"].items()
    return content["step"], [
        LayerLoad(name, each["top_k"], tuple(each["shares"]), each.get("dropped")) for name, each in layers
    ]


def _stored(load: LayerLoad) -> dict[str, object]:
    dropped = {} if load.dropped is None else {"dropped": round(load.dropped, 6)}
    return {"top_k": load.top_k, "shares": [round(share, 6) for share in load.shares]} | dropped


def _is_measurement(content: object) -> bool:
    if not isinstance(content, Mapping) or type(content.get("step")) is not int:
        return False
    layers = content.get("layers")
    return isinstance(layers, Mapping) and all(map(_is_load, layers.values()))


def _is_load(layer: object) -> bool:
    if not isinstance(layer, Mapping) or type(layer.get("top_k")) is not int:
        return False
    shares = layer.get("shares")
    if not isinstance(shares, list) or not shares:
        return False
    return all(isinstance(share, int | float) and 0 <= share <= 1 for share in (*shares, layer.get("dropped", 0)))
