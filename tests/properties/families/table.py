"""Layouts that each family runs in, as data: modes, stages, replicas, ZeRO, ties, recomputing, padding in pairs.

    ROWS           # name -> Row: what trains
    REFUSED        # name -> Row: what lint refuses, by the code that `refusal` gives

Each family has every legal pair of values of any two factors, in layouts of up to 8 ranks (pairwise testing: Cohen et
al., The AETG System, 1997). A cell that does not train is refused by a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

from tests.support import hugging_face as hf

STEPS, SAMPLES, CLIP, VOCABULARY = 3, 16, 0.3, 259
"""The gradient norm is above 0.3, so clipping acts in every step. Every mode must pad 259 rows of tokens."""
OPTIMIZER = {"type": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

MODES: Mapping[str, Mapping[str, Any] | None] = {
    "no tensor ranks": None,
    "1d 2": {"size": 2, "mode": "1d"},
    "1d 2 sequence": {"size": 2, "mode": "1d", "sequence": True},
    "2d 4": {"size": 4, "mode": "2d"},
    "2.5d 8": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d 8": {"size": 8, "mode": "3d"},
    "cuboid (1, 2, 2)": {
        "size": 4,
        "mode": "cuboid",
        "shape": (1, 2, 2),
        "residual": "sequence",
        "inner": "batch",
    },
    "ring 2": {"size": 2, "mode": "sequence"},
    "ulysses 2": {"size": 2, "mode": "sequence", "impl": "ulysses"},
}
OF_SEQUENCES = ("ring 2", "ulysses 2")

TIES = {"t5": (True,), "bert, with the next sentence": (True,)}
"""Whether the head is tied to the table, for families with only one choice: T5's config has no such key any more, and
an untied BERT has an unused bias.
"""
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "gpt_neox", "gpt2", "opt"),
    *("bloom", "mixtral", "qwen3_moe", "bert, with the next sentence", "t5"),
)
"""Names in `tests.support.hugging_face`."""
UNKNOWN = {
    "gpt_neox": ("num_key_value_heads",),
    "opt": ("num_key_value_heads", "intermediate_size", "initializer_range"),
    "mixtral": ("moe_intermediate_size",),
}
"""Sizes in `hugging_face` that a family's config class lacks; a config as text must leave them out."""
NOT_PLAIN = ("gemma2", "bloom", "t5")
"""Families whose attention has a soft cap or a bias."""


class Row(NamedTuple):
    """A cell of the table."""

    family: str
    mode: str
    pipe: int
    data: int
    zero: int
    tied: bool
    recompute: bool
    padded: bool

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        tensor = MODES[self.mode]
        return self.pipe * self.data * (tensor["size"] if tensor else 1)

    @property
    def problem(self) -> Problem:
        """Return what the reference depends on."""
        return Problem(self.family, self.tied, self.padded)

    def config(self) -> dict[str, Any]:
        """Return the row as a config's sections."""
        cls = hf.FAMILIES[self.family].classes()[0].__name__
        parallel: dict[str, Any] = {"pipeline": self.pipe} if self.pipe > 1 else {}
        if tensor := MODES[self.mode]:
            parallel["tensor"] = dict(tensor)
        zero: dict[str, Any] = {"stage": self.zero}
        if self.zero == 3:
            zero["stage3_param_persistence_threshold"] = 0  # else small parameters are never partitioned
        return {
            "model": {"type": f"transformers.{cls}", "config": self.problem.sizes()},
            **({"parallel": parallel} if parallel else {}),
            "optimizer": OPTIMIZER,
            "zero": zero,
            "precision": "fp32",
            "batch": {"global_size": SAMPLES, "accumulation": 2},
            "train": {"steps": STEPS, "clip_grad_norm": CLIP},
            **({"activation_checkpoint": 1} if self.recompute else {}),
        }

    @property
    def name(self) -> str:
        """Return the row in words."""
        said = [self.mode, f"pipe {self.pipe}", f"data {self.data}", f"ZeRO {self.zero}"]
        said += ["tied" if self.tied else "untied"]
        return f"{self.family}: " + ", ".join([*said, *["recompute"] * self.recompute, *["padding"] * self.padded])


class Problem(NamedTuple):
    """The computation of a run, independent of the layout."""

    family: str
    tied: bool
    padded: bool

    def sizes(self) -> dict[str, Any]:
        """Return the model's config: the one of the comparison in float64, with two blocks in each list."""
        unknown = UNKNOWN.get(self.family, ())
        sizes = {name: size for name, size in hf.FAMILIES[self.family].sizes.items() if name not in unknown}
        few = {
            name: 2 for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers") if name in sizes
        }
        ties = {} if self.family in TIES else {"tie_word_embeddings": self.tied}
        return sizes | few | ties | {"vocab_size": VOCABULARY}


def refusal(row: Row) -> str:
    """Return the code of the finding that refuses a cell; "" if it trains."""
    if row.mode in OF_SEQUENCES and row.family in NOT_PLAIN:
        return "TEN134"
    return "ZER101" if row.pipe > 1 and row.zero > 1 else ""


def cells(family: str, ties: Sequence[bool]) -> Iterator[Row]:
    """Yield every cell of a family on up to 8 ranks. With ZeRO, replicas take all remaining ranks."""
    for values in product(MODES, (1, 2), (1, 2), (0, 1, 2, 3), ties, (False, True), (False, True)):
        row = Row(family, *values)
        room = row.world <= 8
        if room and (row.zero == 0 or row.data == 2 or 2 * row.world > 8):
            yield row


@cache
def covering(ties: Sequence[bool], is_plain: bool) -> Sequence[Row]:
    """Return cells that cover all legal pairs of values, each time the cell with the most new pairs for its cost."""
    family = FAMILIES[0] if is_plain else NOT_PLAIN[0]
    found = {row: set(combinations(enumerate(row[1:]), 2)) for row in cells(family, ties) if not refusal(row)}
    left, chosen = set().union(*found.values()), list[Row]()
    while left:
        turn = len(chosen)
        best = max(found, key=lambda row: (len(found[row] & left) / (4 + row.world), _agree(row, turn)))
        left -= found.pop(best)
        chosen.append(best)
    return chosen


def _agree(row: Row, turn: int) -> int:
    """Return how many of a row's switches match the bits of `turn`, so that switches vary among equal rows."""
    return sum(value == bool(turn >> bit & 1) for bit, value in enumerate(row[5:]))


def _rows(family: str) -> Iterator[Row]:
    ties = TIES.get(family, (True, False))
    for row in covering(ties, family not in NOT_PLAIN):
        yield row._replace(family=family)


def _refused(family: str) -> Iterator[Row]:
    ties = TIES.get(family, (True, False))
    return (row for row in cells(family, ties[:1]) if refusal(row) and not row.recompute and not row.padded)


ROWS = {row.name: row for family in FAMILIES for row in _rows(family)}
REFUSED = {row.name: row for family in FAMILIES for row in _refused(family)}
