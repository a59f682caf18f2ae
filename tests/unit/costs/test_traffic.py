"""Traffic formulas against a paper's count, the design's formula and a break-even by trial; `show`'s input.

tests/distributed/layers/test_traffic.py compares them with the layers' real traffic.
"""

from __future__ import annotations

import doctest
from dataclasses import replace
from fractions import Fraction

import pytest

from dslpar.core.mesh import TensorMesh
from dslpar.costs import any_model as costs
from dslpar.costs import layers, memory, traffic, work
from dslpar.costs.collective_traffic import Traffic
from dslpar.costs.layers import Layer, Linear
from dslpar.forecast import comparison
from dslpar.forecast.comparison import break_even
from dslpar.linter import check
from dslpar.models.gpt import section
from tests.support.layouts import LAYOUTS

H, F, M = 24, 48, 144
GPT = section.GPT(num_layers=3, hidden_size=H, num_heads=12, ffn_hidden_size=F, vocab_size=17, max_seq_len=12)
SQUARE = LAYOUTS["2d-4"]


def f(n: int) -> Fraction:
    return Fraction(n - 1, n)


@pytest.mark.parametrize("module", [layers, traffic, memory, work])
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_every_kind_of_layer_has_all_closed_forms() -> None:
    kinds = {*Layer.__subclasses__()} - {layers.PerSample}
    assert len(kinds) > 10
    for module in (memory, traffic, work):
        assert set(module.FORMS) == kinds, module.__name__


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_block_in_1d_sends_megatron_s_four_all_reduces(size: int) -> None:
    sent = costs.layer_traffic(GPT, TensorMesh(y=size, mode="1d"), M)
    assert sent.both == {("all_reduce", "y"): 8 * f(size) * M * H}
    assert sent.forward == sent.backward


@pytest.mark.parametrize("name", LAYOUTS)
def test_linears_are_the_closed_form(name: str) -> None:
    """The form is twice (X + W + Y) with all panels kept, and the depth; `keep` gathers the others again."""
    tensor = LAYOUTS[name]
    x, y, z, q, d = tensor.x, tensor.y, tensor.z, tensor.q, tensor.d
    residual, inner = f(y) * Fraction(M * H, x * z), f(z) * Fraction(M * F, x * y)
    weight, depth = f(q) * Fraction(H * F, y * z), 2 * f(d) * Fraction(H * F, q * y * z)
    for role, again_x in (("inward", 0 if tensor.residual == "replicated" else residual), ("outward", inner)):
        again = (0 if tensor.keep in ("x", "both") else again_x) + (0 if tensor.keep in ("w", "both") else weight)
        k, n = (H, F) if role == "inward" else (F, H)
        sent = traffic.total([Linear(k, n, role, bias=False)], tensor, M)  # type: ignore[arg-type]
        assert sent.total == 2 * (residual + weight + inner) + depth + again


@pytest.mark.parametrize("q", [2, 4])
def test_kept_panels_send_two_thirds_of_summa(q: int) -> None:
    tensor = TensorMesh(q=q, y=q, mode="2d", residual="hidden", keep="both")
    sent = traffic.total([Linear(H, F, "inward", bias=False)], tensor, M).total
    assert 3 * sent == 2 * 3 * Fraction(q - 1, q * q) * (M * H + H * F)


def test_what_is_not_differentiated_is_not_sent() -> None:
    tensor = LAYOUTS["2.5d-8-depth-2"]
    frozen = traffic.total([Linear(H, F, "inward", bias=False, adapters=())], tensor, M)
    first = traffic.total([Linear(H, F, "inward", bias=False, input_grad=False)], tensor, M)
    assert ("all_reduce", "d") not in frozen.backward
    assert ("reduce_scatter", "y") not in first.backward
    assert first.forward == frozen.forward


def test_a_model_is_the_sum_of_its_layers() -> None:
    one = replace(GPT, num_layers=1)
    for tensor in LAYOUTS.values():
        more = costs.model_traffic(GPT, tensor, M).both - costs.model_traffic(one, tensor, M).both
        assert more == costs.layer_traffic(GPT, tensor, M).both * 2


@pytest.mark.parametrize("name", ["2d-4", "2.5d-8-depth-2", "3d-8", "ring-4", "ulysses-4", "cuboid-2-3-2"])
def test_the_break_even_is_where_the_smaller_of_two_changes(name: str) -> None:
    tensor = LAYOUTS[name]
    reference = TensorMesh(y=tensor.size, mode="1d")

    def sends_less(tokens: int) -> bool:
        return costs.layer_traffic(GPT, tensor, tokens).total < costs.layer_traffic(GPT, reference, tokens).total

    needed = break_even(GPT, tensor, M).needed
    if needed is None:
        assert not any(map(sends_less, (1, 10**3, 10**9)))
    else:
        assert sends_less(needed)
        assert not sends_less(needed - 1)


def test_a_break_even_that_is_never() -> None:
    """One column of ranks with a sharded residual sends what 1d does, and statistics of norms in addition."""
    tensor = TensorMesh(y=4, mode="cuboid", residual="hidden", keep="both")
    found = break_even(GPT, tensor, M)
    assert found.needed is None
    assert found.sent > found.sent_in_1d == 8 * f(4) * M * H


def test_traffic_is_a_value() -> None:
    a, b = Traffic({("all_reduce", "y"): 2, ("send", "d"): 0}), Traffic({("all_gather", "d q"): Fraction(1, 3)})
    assert a == {("all_reduce", "y"): 2}
    assert a + b == b + a == {("all_reduce", "y"): 2, ("all_gather", "d q"): Fraction(1, 3)}
    assert (a + b - a) == b
    assert (a + b).total == Fraction(7, 3)
    assert (a + b).by_axis() == {"d q": Fraction(1, 3), "y": 2}
    assert hash(a) == hash(Traffic({("all_reduce", "y"): 2}))


def test_the_summary_of_a_job() -> None:
    text = (
        "model = dict(type='GPT', num_layers=3, hidden_size=24, num_heads=12, ffn_hidden_size=48, vocab_size=256,"
        " max_seq_len=12)\nbatch = dict(micro_size=12)\nparallel = dict(tensor=dict(size=4, mode={}))\n"
    )
    found = comparison.summary(check.resolve(check.load_text(text.format("'2d'"), "cfg.py"), 4))
    assert found is not None
    assert found.tokens == M
    assert sum(found.layer.values()) == costs.layer_traffic(GPT, SQUARE, M).total
    assert found.break_even_tokens == break_even(GPT, SQUARE, M).needed
    in_1d = comparison.summary(check.resolve(check.load_text(text.format("'1d'"), "cfg.py"), 4))
    assert in_1d is not None
    assert (in_1d.layer, in_1d.break_even_tokens) == ({"y": 6 * M * 24}, None)
    alone = text.format("'1d'").partition("parallel")[0]
    assert comparison.summary(check.resolve(check.load_text(alone, "cfg.py"), 4)) is None
