"""Bounds of `prove`: shifts of gradients, rounding, and how far an element may move."""

from __future__ import annotations

import torch

from dslpar.parity.one_process import FACTOR, FLOOR, _nudged, _shifts, _weight_bound

GRADIENT = torch.tensor([[1.0, -2.0, 0.0], [3.0, 1e-9, -1.0]], dtype=torch.float64)


def test_shifts_have_all_patterns_of_signs_over_three_steps() -> None:
    patterns = set()
    for shift in _shifts({"w": 0.5}):
        steps = [shift(step, "w", GRADIENT) for step in range(5)]
        for added in steps:
            assert torch.equal(added.abs(), 0.5 * (GRADIENT != 0))
        patterns.add(tuple(bool(torch.equal(added, steps[0])) for added in steps[:3]))
        assert torch.equal(shift(1, "w", GRADIENT), steps[1]), "the same in each run"
    assert patterns == {(True, one, other) for one in (True, False) for other in (True, False)}


def test_signs_of_elements_are_equal_in_the_first_shift_and_drawn_in_the_others() -> None:
    first, *others = (shift(0, "w", torch.ones(1000)) for shift in _shifts({"w": 1.0, "v": 1.0}))
    assert torch.equal(first, torch.ones(1000))
    for added in others:
        assert 0.4 < (added > 0).double().mean() < 0.6  # six standard deviations
    assert not torch.equal(*others[:2])
    assert not torch.equal(others[0], next(iter([*_shifts({"v": 1.0})][1:]))(0, "v", torch.ones(1000)))


def test_an_element_may_move_as_its_neighbours_were_moved() -> None:
    true = torch.zeros(5, dtype=torch.float64)
    shifted = [torch.tensor([0.0, 1e-6, 4.0, -2.0, 8.0]), torch.tensor([0.0, 0.0, -3.0, 2.0, 1.0])]
    bound = _weight_bound(true, [true.float()], [each.double() for each in shifted])
    assert bound.tolist() == [0.0, 4.0, 8.0, 4.0, 16.0], "none, the median of those that moved, and twice its own"


def test_rounding_is_that_of_the_run_that_rounds_most() -> None:
    true = torch.ones(2, dtype=torch.float64)
    rounded = [true + torch.tensor([1e-3, 0.0]), true - torch.tensor([2e-3, 5e-4])]
    bound = _weight_bound(true, rounded, [true, true])
    torch.testing.assert_close(bound, FACTOR * torch.tensor([2e-3, 5e-4], dtype=torch.float64) + FLOOR)


def test_a_draw_moves_each_weight_by_one_rounding() -> None:
    weight = torch.linspace(0.5, 2.0, 1000)
    one, other = (_nudged("w", weight, draw).float() for draw in (1, 2))
    for each in (one, other):
        assert 0 < ((each - weight) / weight).abs().max() <= 2.0**-22
    assert not torch.equal(one, other)
    assert torch.equal(one, _nudged("w", weight, 1).float())
