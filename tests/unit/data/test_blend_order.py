"""The order of a blend: counts of each prefix against the weights, and its inverse, by brute force."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dslpar.data.blend_order import BlendOrder, exact_weight, weights_by_size

WEIGHTS = st.lists(
    st.one_of(st.floats(1e-6, 1e6), st.integers(1, 5).map(float), st.sampled_from([1e-6, 0.1, 0.3, 1.0])),
    min_size=1,
    max_size=12,
)


def fractions_of(weights: list[float]) -> list[Fraction]:
    return [exact_weight(weight) for weight in weights]


@given(WEIGHTS, st.integers(0, 300))
@example([0.5, *[0.005] * 100], 300)
@example([1e-6, 1.0], 300)
@example([1.0] * 7, 300)
def test_each_prefix_has_its_share_of_each_part(weights: list[float], length: int) -> None:
    exact = fractions_of(weights)
    order, counts = BlendOrder(exact), [0] * len(weights)
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    total = sum(whole)
    bound = total * (1 if len(weights) <= 2 else 4)  # in halves of a sample
    for number in range(length):
        part, index = order.locate(number)
        assert index == counts[part]  # each part's samples come in order, none twice and none left out
        counts[part] += 1
        for count, weight in zip(counts, whole, strict=True):
            assert abs(2 * count * total - 2 * (number + 1) * weight) <= bound
    assert order.counts(length) == dict(enumerate(counts))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 200))
def test_two_parts_are_in_webster_s_order(first: float, second: float, length: int) -> None:
    exact = fractions_of([first, second])
    light, heavy = sorted(range(2), key=lambda part: (exact[part], part))
    # By definition, the (j+1)-th sample of a part is at (2j+1) / weight; ties go to the larger weight.
    places = [
        (Fraction(2 * j + 1) / exact[part], part != heavy, part) for part in (light, heavy) for j in range(length)
    ]
    assert [BlendOrder(exact).locate(number)[0] for number in range(length)] == [
        part for *_, part in sorted(places)[:length]
    ]


def test_far_into_a_run() -> None:
    exact = fractions_of([0.7, 0.2, 0.0999999, 1e-7])
    order, far = BlendOrder(exact), 10**15
    before, after = order.counts(far), order.counts(far + 1000)
    found = [order.locate(number) for number in range(far, far + 1000)]
    for part in range(4):
        assert [index for which, index in found if which == part] == list(range(before[part], after[part]))
        assert abs(before[part] - far * exact[part]) <= 2
    assert BlendOrder([Fraction(3)]).locate(far) == (0, far)


def test_weights_are_taken_as_they_are_written() -> None:
    tenth = BlendOrder(fractions_of([0.7, 0.2, 0.1]))
    assert tenth.counts(10**12) == {0: 7 * 10**11, 1: 2 * 10**11, 2: 10**11}
    assert [tenth.locate(number) for number in range(5)] == [
        BlendOrder(fractions_of([7.0, 2.0, 1.0])).locate(number) for number in range(5)
    ]


@pytest.mark.parametrize(("temperature", "shares"), [(1.0, [0.8, 0.2]), (2.0, [2 / 3, 1 / 3]), (1e9, [0.5, 0.5])])
def test_temperatures_flatten_sizes(temperature: float, shares: list[float]) -> None:
    weights = weights_by_size([400, 100], temperature)
    assert [float(weight / sum(weights)) for weight in weights] == pytest.approx(shares)
