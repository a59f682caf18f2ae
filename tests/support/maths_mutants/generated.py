"""Generated mutants: each call of a collective is left out, doubled, or returns its pieces in another order.

A rule rewrites the text of the call, so these are ordinary mutants. Mutants in the tables are not generated again.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import NamedTuple

from tests.support.maths_mutants.mutant import Function, Kind, Mutant, source_of, tree_of
from tests.support.versions import HAS_TRANSFORMERS

MODULES = (
    *(
        f"layers.{name}"
        for name in ("norm", "embedding", "loss", "context_attention", "batch_norm", "pooling", "token_linear")
    ),
    *(f"layers.{name}" for name in ("activation_sharding", "gather_reduce", "overlap", "late_reduction")),
    *(f"engine.{name}" for name in ("engine", "pipeline_executor", "micro_batches", "vector_reduction")),
    *("policies.latent", "policies.experts", "models.moco.model", "distributed.deepspeed_patches.norms"),
    *("distributed.gradient_buffer", "distributed.gradient_reduction", "distributed.parameter_gather"),
)


class _Rule(NamedTuple):
    name: str
    kind: Kind
    calls: Collection[str]
    text: str
    """The new text, from the call's text {call}, its first argument {x}, its axis {axis} and its dim {dim}."""
    stands_for: str


_SUMS = ("all_reduce", "reduce_from_group", "copy_to_group")
_GATHERS = ("all_gather", "all_gather_autograd", "gather_from_group")
_SCATTERS = ("reduce_scatter_autograd", "scatter_to_group")
RULES = (
    _Rule("left out", "reduction", _SUMS, "{x}", "a sum is left out"),
    _Rule(
        "left out", "reduction", ("start_all_reduce_", "start_reduce_"), "collectives.Pending({x})", "a sum is left out"
    ),
    _Rule("twice", "reduction", _SUMS, "collectives.{name}({call}, {axis})", "a sum is done twice"),
    _Rule(
        "twice",
        "reduction",
        ("start_all_reduce_",),
        "collectives.start_all_reduce_({call}.wait(), {axis})",
        "a sum is done twice",
    ),
    _Rule(
        "rolled", "order", _GATHERS, "mistakes.rolled({call}, {axis}.size, {dim})", "gathered pieces are one place off"
    ),
    _Rule(
        "rolled",
        "order",
        ("start_all_gather",),
        "mistakes.rolled_pieces({call}, {axis}.size, {dim})",
        "gathered pieces are one place off",
    ),
    _Rule("own alone", "reduction", _GATHERS, "mistakes.own_alone({x}, {axis}, {dim})", "other ranks' pieces are zero"),
    _Rule(
        "of the neighbour",
        "slice",
        _SCATTERS,
        "collectives.{name}(mistakes.rolled({x}, {axis}.size, {dim}), {axis}, {dim})",
        "each rank has its neighbour's piece",
    ),
)

EQUAL = {
    "layers.norm: _statistics: all_gather 2 rolled": "the statistics of all pieces are sums over them, in any order",
    "policies.experts: SharedExpertLinear.forward: all_gather_autograd rolled": (
        "the linears of a shared expert then have their inner features in the same other order"
    ),
}
"""Equivalent mutants, with the reason; they are not generated."""


def generated() -> list[Mutant]:
    """Return the mutants of all rules."""
    modules = [module for module in MODULES if HAS_TRANSFORMERS or not module.startswith("policies.")]
    found = [mutant for module in modules for mutant in _of_module(f"dslpar.{module}")]
    names = {mutant.name for mutant in found}
    left_out = {name for name in EQUAL if name.partition(":")[0] in modules} - names
    assert not left_out, f"no such mutants: {left_out}"
    return [mutant for mutant in found if mutant.name not in EQUAL]


def _of_module(module: str) -> Iterator[Mutant]:
    import_module(module)
    for name, node in _functions(tree_of(module)):
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and _collective(each)]
        segment = ast.get_source_segment(source_of(module), node) or ""
        for number, call in enumerate(sorted(calls, key=lambda each: (each.lineno, each.col_offset))):
            yield from _of_call(module, name, call, number if len(calls) > 1 else None, segment)


def _functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in tree.body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{node.name}.")


def _collective(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "collectives"


def _of_call(module: str, function: str, call: ast.Call, number: int | None, segment: str) -> Iterator[Mutant]:
    assert isinstance(call.func, ast.Attribute)
    source, own = source_of(module), call.func.attr
    text = ast.get_source_segment(source, call) or ""
    options = {each.arg for each in call.keywords}
    if len(call.args) < 2 or segment.count(text) != 1 or options & {"op", "group"}:
        return
    x, axis, *rest = (ast.get_source_segment(source, each) or "" for each in call.args)
    if rest and own in ("all_reduce", "start_all_reduce_"):
        return  # doubling a maximum changes nothing
    where = "" if number is None else f" {number + 1}"
    for rule in RULES:
        if own in rule.calls:
            new = rule.text.format(call=text, x=f"({x})", axis=f"({axis})", dim=rest[0] if rest else "0", name=own)
            name = f"{module.removeprefix('dslpar.')}: {function}: {own}{where} {rule.name}"
            stands_for = f"{rule.stands_for}: {own} over {axis}"
            yield Mutant(name, rule.kind, module, function, text, new, stands_for, f"({axis}).size > 1")
