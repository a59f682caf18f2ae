"""Covering arrays over `tests.support.layout_factors`: their rows, and how they are generated.

    python -m tests.properties.layouts.arrays                 # repairs the arrays, after a change of factors or lint
    python -m tests.properties.layouts.arrays --anew daily    # makes one anew; `prove` takes more than ten minutes

    rows("daily")           # strength 2, of few families, in up to 8 ranks: `make test` runs each level of it
    rows("prove")           # all families with all else in pairs; what divides a model in triples, up to 16 ranks
    rows("mixtures")        # mixtures of experts in pairs, up to 8 ranks, tokens gathered and sent
    rows("compiled")        # each level once with layers that torch compiles, 20 s of a core for each of up to 4 ranks

Most faults need one level of one factor, or two together; few need three (Kuhn, Wallace and Gallo, "Software fault
interactions", 2004). The arrays are made by covertable, and stored as data, so that the rows do not change with its
version. Combinations that lint refuses are constraints. A test checks each constraint against lint, and the coverage of
the arrays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from tests.support.layout_factors import (
    BALANCED,
    CONTEXTS,
    DECODERS,
    FACTORS,
    FAMILIES,
    MIXTURES,
    MODES,
    Row,
    findings_of,
)
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "properties" / "layouts"


class Constraint(NamedTuple):
    """Levels that may occur together."""

    names: tuple[str, ...]
    holds: Callable[[Row], bool]
    """A predicate on rows with these factors."""
    why: str


def world_size(row: Row) -> int:
    """Return the number of ranks of a row's mode, context, pipe and data."""
    mode, context = MODES[row["mode"]], CONTEXTS[row["context"]]
    return int(row["pipe"] * row["data"] * (mode["size"] if mode else 1) * (context["size"] if context else 1))


IN_ANY_MODE = frozenset(
    {"GPT", "Llama's form", "BERT", "RoBERTa", "GPT-2", "OPT", "Llama", "Qwen2", "Qwen3", "Gemma", "Gemma 3"}
    | {"Phi-3", "OLMo 2", "GPT-NeoX", "Mistral", *MIXTURES}
)
_OF_OURS = ("GPT", "Llama's form", "one key head")
NOT_CUT = ("layers_cfg", "ResNet")
_SEQUENCES_CUT = ("1d 2 sequence", "ring 2", "ulysses 2", "cuboid 2 3 1")

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("mode", "residual", "inner"),
        lambda r: (r["residual"], r["inner"]) == (None, None) or r["mode"].startswith(("3d", "cuboid")),
        "other modes keep activations in one way",
    ),
    Constraint(("mode", "keep"), lambda r: r["keep"] is None or r["mode"] != "none", "there is nothing to keep"),
    Constraint(
        ("mode", "overlap"),
        lambda r: not r["overlap"] or r["mode"] not in ("none", "ring 2", "ulysses 2"),
        "there is nothing to overlap",
    ),
    Constraint(
        ("mode", "context"),
        lambda r: r["context"] == "none" or not r["mode"].startswith(("2.5d", "ring", "ulysses")),
        "the mode has the axis of a context",
    ),
    Constraint(("pipe", "schedule"), lambda r: r["schedule"] == "1f1b" or r["pipe"] > 1, "no pipeline to schedule"),
    Constraint(("pipe", "zero"), lambda r: r["zero"] < 2 or r["pipe"] == 1, "DeepSpeed's pipelines take ZeRO 0 and 1"),
    Constraint(
        ("data", "expert"), lambda r: r["data"] % max(r["expert"], 1) == 0, "replicas hold equal numbers of experts"
    ),
    Constraint(("family", "expert"), lambda r: not r["expert"] or r["family"] in MIXTURES, "there are no experts"),
    Constraint(("family", "balance"), lambda r: not r["balance"] or r["family"] in BALANCED, "there is no such loss"),
    Constraint(
        ("family", "context"),
        lambda r: r["context"] == "none" or r["family"] != "GPT-OSS",
        "no attention over ranks has its sinks",
    ),
    Constraint(
        ("family", "mode"),
        lambda r: not r["mode"].startswith(("ring", "ulysses")) or r["family"] != "GPT-OSS",
        "no attention over ranks has its sinks",
    ),
    Constraint(
        ("expert", "zero"), lambda r: r["expert"] < 2 or r["zero"] < 3, "ZeRO 3 shards weights over all replicas"
    ),
    Constraint(("expert", "offload"), lambda r: r["expert"] < 2 or not r["offload"], "not with experts of replicas"),
    Constraint(("zero", "offload"), lambda r: not r["offload"] or r["zero"] > 0, "ZeRO offloads"),
    Constraint(
        ("zero", "param_gather"), lambda r: not r["param_gather"] or r["zero"] in (1, 2), "of ZeRO 1 and 2 alone"
    ),
    Constraint(
        ("zero", "schedule", "compile"),
        lambda r: not r["compile"] or (r["zero"] < 3 and not r["schedule"].startswith("zero")),
        "compiled layers are whole graphs",
    ),
    Constraint(
        ("family", "recompute"),
        lambda r: not r["recompute"] or r["family"] != "ResNet",
        "running statistics would be updated twice a step: CFG228, of the built model",
    ),
    Constraint(("family", "adapters"), lambda r: not r["adapters"] or r["family"] in DECODERS, "of decoders alone"),
    Constraint(
        ("family", "tied"), lambda r: r["tied"] or r["family"] in (*DECODERS, *_OF_OURS), "the family has one form"
    ),
    Constraint(
        ("family", "context"), lambda r: r["context"] == "none" or r["family"] in IN_ANY_MODE, "sequences stay whole"
    ),
    Constraint(
        ("family", "pipe", "accumulation"),
        lambda r: r["family"] != "MoCo" or (r["pipe"], r["accumulation"]) == (1, 1),
        "it compares all samples of a step",
    ),
    Constraint(
        ("family", "mode"),
        lambda r: (
            r["family"] in IN_ANY_MODE
            or r["mode"] == "none"
            or (r["family"] not in NOT_CUT and not (r["mode"] in _SEQUENCES_CUT or r["mode"] == "1d 3"))
        ),
        "nothing is cut, or an odd number of tokens is not",
    ),
    Constraint(
        ("family", "mode", "residual"),
        lambda r: r["family"] in IN_ANY_MODE or r["residual"] != "sequence",
        "an odd number of tokens is not cut",
    ),
    Constraint(
        ("family", "mode", "residual", "inner"),
        lambda r: r["family"] != "MoCo" or not (r["mode"].startswith("cuboid") or r["residual"] or r["inner"]),
        "its heads are cut by more than a small batch has",
    ),
    Constraint(
        ("family", "mode"),
        lambda r: r["family"] != "one key head" or r["mode"] in ("none", "ring 2", "2.5d 2"),
        "one head is not cut",
    ),
)


class Array(NamedTuple):
    """The specification of an array."""

    factors: Mapping[str, tuple[Any, ...]]
    most_ranks: int
    triples: tuple[str, ...] = ()
    """Factors with every combination of three levels."""
    strength: int = 2
    """Number of levels that are combined for all other factors."""


_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(each for each in FAMILIES if each not in MIXTURES or each in ("Mixtral", "Qwen3-MoE")),
    "expert": (0,),
    "balance": (False,),
}
"""Levels of layouts without `parallel.expert`."""
_FEW_FAMILIES = ("GPT", "Llama's form", "ResMLP", "MoCo", "layers_cfg", "BERT", "T5", "Llama")
_FEW_MODES = ("none", "1d 2", "1d 2 sequence", "2d 4", "2.5d 2", "3d 8", "cuboid 1 2 2", "ring 2", "ulysses 2")
ARRAYS: Mapping[str, Array] = {
    "daily": Array(
        {
            **FACTORS,
            **_OTHERS,
            "family": _FEW_FAMILIES,
            "mode": _FEW_MODES,
            "context": ("none", "ring 2", "ulysses 2"),
            "pipe": (1, 2),
            "data": (1, 2),
            "accumulation": (1, 2),
            "optimizer": ("AdamW", "SGD"),
            "compile": (False,),  # 20 s of CPU per row: covered in `prove`, and once in tests/distributed/layers
            "offload": (False,),  # a second per rank to load DeepSpeed's kernel: covered in tests/distributed/engine
        },
        8,
    ),
    "prove": Array(
        {**FACTORS, **_OTHERS, "compile": (False,)},
        16,
        ("mode", "pipe", "schedule", "data", "zero", "context", "recompute", "overlap"),
    ),
    "mixtures": Array(
        {
            **FACTORS,
            "family": MIXTURES,
            "mode": ("none", "1d 2", "1d 2 sequence", "2d 4", "3d 8", "cuboid 1 2 2", "2.5d 2"),
            "keep": (None,),
            "residual": (None,),
            "inner": (None,),
            "overlap": (False,),
            "context": ("none", "ring 2", "ulysses 2"),
            "pipe": (1, 2),
            "data": (1, 2, 4),
            "param_gather": (False,),
            "offload": (False,),
            "recompute": (0, 1),
            "compile": (False,),
            "loss_chunks": (1,),
            "tied": (True,),
            "accumulation": (1, 2),
            "optimizer": ("AdamW",),
            "order": (None,),
        },
        8,
    ),
    # Recompute wherever it is legal: a graph that runs again must save the same tensors.
    "compiled": Array({**FACTORS, **_OTHERS, "compile": (True,), "recompute": (1, 2, 0)}, 4, strength=1),
}


def rows(name: str) -> list[dict[str, Any]]:
    """Return the stored rows of an array."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    return [dict(zip(kept["factors"], map(_as_level, row), strict=True)) for row in kept["rows"]]


def _as_level(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # an order of axes


def legal(row: Row, array: Array) -> bool:
    """Return whether a row, or a part with the factors of some constraints, violates none of them."""
    size_is_known = {"mode", "context", "pipe", "data"} <= row.keys()
    return all(each.holds(row) for each in CONSTRAINTS if set(each.names) <= row.keys()) and not (
        size_is_known and world_size(row) > array.most_ranks
    )


def missing(name: str) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield the legal combinations that an array promises and lacks. Legality is checked by pairs of levels."""
    yield from missing_of(rows(name), ARRAYS[name])


def missing_of(held: Sequence[Row], array: Array) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield the missing combinations of these rows."""
    strengths = [(tuple(array.factors), array.strength), (array.triples, 3)]
    for names, strength in strengths:
        for chosen in combinations(names, strength):
            have = {tuple(row[each] for each in chosen) for row in held}
            for levels in product(*(array.factors[each] for each in chosen)):
                part = dict(zip(chosen, levels, strict=True))
                if levels not in have and legal(part, array) and _completed(part, array) is not None:
                    yield tuple(part.items())


def _completed(part: Row, array: Array) -> dict[str, Any] | None:
    """Return a legal row with these levels, and all others as plain as possible, or with one or two exceptions."""
    free = [name for name in array.factors if name not in part]
    plain = {name: array.factors[name][0] for name in free} | dict(part)
    tries = [(name, level) for name in free for level in array.factors[name]]
    two = ((one, other) for one, other in combinations(tries, 2) if one[0] != other[0])
    others = chain([{}], (dict([one]) for one in tries), map(dict, two))
    return next((row for each in others if legal(row := {**plain, **each}, array)), None)


class _Covered:
    """Counts of rows per combination of levels that an array promises."""

    def __init__(self, array: Array, held: Sequence[Row]) -> None:
        pairs = combinations(array.factors, array.strength)
        self._chosen = [*pairs, *(combinations(array.triples, 3) if array.triples else ())]
        self._count = Counter(part for row in held for part in self._parts(row))

    def _parts(self, row: Row, names: Collection[str] | None = None) -> Iterator[tuple[object, ...]]:
        """Yield the combinations of a row, or only those with a factor in `names`."""
        for chosen in self._chosen:
            if names is None or not set(chosen).isdisjoint(names):
                yield chosen, *(row[each] for each in chosen)

    def try_change(self, old: Row, new: Row | None) -> bool:
        """Replace a row by `new`, or remove it, unless a combination would be lost."""
        names = None if new is None else [name for name in old if old[name] != new[name]]
        lost = Counter(self._parts(old, names))
        if new is not None:
            lost.subtract(self._parts(new, names))
        if any(number > 0 and self._count[part] <= number for part, number in lost.items()):
            return False
        self._count.subtract(lost)
        return True


_SIZES = ("data", "pipe", "context", "mode")


def _with_fewer_ranks(held: Sequence[Row], array: Array) -> list[dict[str, Any]]:
    """Return the rows without redundant ones, and on fewer ranks where no combination is lost.

    A row's cost is its number of ranks. covertable ignores costs when it chooses among levels with equal coverage.
    """
    covered = _Covered(array, held)
    left: list[dict[str, Any]] = []
    for row in sorted(held, key=world_size, reverse=True):
        if covered.try_change(row, None):
            continue
        made = dict(row)
        for name in _SIZES:
            for level in array.factors[name]:
                new = made | {name: level}
                if new["pipe"] == 1:
                    new["schedule"] = array.factors["schedule"][0]
                if world_size(new) < world_size(made) and legal(new, array) and covered.try_change(made, new):
                    made = new
        left.append(made)
    return left


_DRAWS = 4
"""Ways to draw an array, of which the one with the fewest ranks is kept: their numbers of rows differ by a factor of 4.
"""


def make(name: str) -> list[dict[str, Any]]:
    """Make an array."""
    import covertable

    array = ARRAYS[name]
    constraints = [{"operator": "fn", "requires": list(each.names), "evaluate": each.holds} for each in CONSTRAINTS]
    sized = {
        "operator": "fn",
        "requires": ["mode", "context", "pipe", "data"],
        "evaluate": lambda row: world_size(row) <= array.most_ranks,
    }
    more = {"sub_models": [{"fields": list(array.triples), "strength": 3}]} if array.triples else {}
    alone = {name: each[0] for name, each in array.factors.items() if len(each) == 1}
    levels = {name: list(each) for name, each in array.factors.items() if name not in alone}
    drawn = [
        covertable.make(
            levels,
            strength=array.strength,
            constraints=[*constraints, sized],
            sorter=covertable.sorters.random,
            seed=seed,
            **more,
        )
        for seed in range(_DRAWS)
    ]
    made = [_with_fewer_ranks([{**alone, **row} for row in each], array) for each in drawn]
    return min(made, key=lambda each: sum(map(world_size, each)))


def repair(name: str) -> list[dict[str, Any]]:
    """Return the stored rows that are still legal, and new rows for each missing combination."""
    array = ARRAYS[name]
    held = [legal_row for row in rows(name) if (legal_row := _repaired(row, array)) is not None]
    while part := next(missing_of(held, array), None):
        row = _completed(dict(part), array)
        assert row is not None, "a combination that no row can have is not missing"
        held.append(row)
    return _with_fewer_ranks(held, array)


def _repaired(row: Row, array: Array) -> dict[str, Any] | None:
    """Return the row, perhaps with one factor at its plainest level, or None if that does not make it legal."""
    if row.keys() != array.factors.keys() or any(row[name] not in array.factors[name] for name in row):
        return None
    plainer = ({**row, name: array.factors[name][0]} for name in reversed(array.factors))
    return next((each for each in (dict(row), *plainer) if legal(each, array)), None)


def main(argv: Sequence[str]) -> int:
    """Repair or make arrays, and write them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.properties.layouts.arrays", description=__doc__, formatter_class=raw
    )
    choices = [[], *ARRAYS]  # argparse also checks the empty default against the choices
    parser.add_argument("names", nargs="*", choices=choices, metavar="NAME", help=f"of {', '.join(ARRAYS)}; all")
    parser.add_argument("--anew", action="store_true", help="make them without a look at those that are kept")
    args = parser.parse_args(argv)
    for name in args.names or ARRAYS:
        made = make(name) if args.anew else repair(name)
        refused = [(row, found) for row in made if (found := findings_of(row))]
        for row, found in refused:
            print(f"lint refuses {row}: {found}", file=sys.stderr)
        if refused:
            return 1
        order = list(FACTORS)
        lines = ",\n".join("    " + json.dumps([row[each] for each in order]) for row in made)
        text = f'{{\n  "factors": {json.dumps(order)},\n  "rows": [\n{lines}\n  ]\n}}\n'
        (FOLDER / f"{name}.json").write_text(text)
        print(f"{name}: {len(made)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
