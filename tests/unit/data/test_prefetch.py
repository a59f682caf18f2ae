"""Prefetched micro-batches: equal, in equal order, and errors raised in their own step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.data.prefetch import Prefetcher


def made(consumed: int) -> Iterator[tuple[int, int]]:
    yield from ((consumed, index) for index in range(3))


@given(st.lists(st.integers(0, 5), max_size=12))
def test_each_step_has_the_micro_batches_of_its_position(steps: list[int]) -> None:
    """Positions may come in any order: the next one, the same again, or another."""
    prefetcher = Prefetcher(made, 4)
    for step in [*range(3), *steps]:
        assert list(prefetcher.step(step * 4)) == list(made(step * 4))
    prefetcher.close()


def test_the_next_step_is_made_while_this_one_computes() -> None:
    began, go_on = threading.Event(), threading.Event()

    def make(consumed: int) -> Iterator[tuple[int, int]]:
        if consumed:
            began.set()
            assert go_on.wait(30)
        yield from made(consumed)

    prefetcher = Prefetcher(make, 4)
    assert list(prefetcher.step(0)) == list(made(0)), "it does not wait for the next one"
    assert began.wait(30)
    go_on.set()
    assert list(prefetcher.step(4)) == list(made(4))
    prefetcher.close()


def test_a_step_is_a_list() -> None:
    """An iterator may reuse one buffer, so the engine would wait for each copy to the device."""
    prefetcher = Prefetcher(made, 4)
    assert all(isinstance(prefetcher.step(4 * step), list) for step in range(3))
    prefetcher.close()


def test_what_making_raises_comes_in_its_own_step() -> None:
    def make(consumed: int) -> Iterator[tuple[int, int]]:
        if consumed == 8:
            raise OSError("no such disk")
        return made(consumed)

    prefetcher = Prefetcher(make, 4)
    assert list(prefetcher.step(0)) == list(made(0))
    assert list(prefetcher.step(4)) == list(made(4))
    with pytest.raises(OSError, match="no such disk"):
        prefetcher.step(8)
    assert list(prefetcher.step(12)) == list(made(12))
    prefetcher.close()


def test_what_is_made_ahead_is_pinned_in_the_thread() -> None:
    threads: list[str] = []

    def pin(batches: list[tuple[int, int]]) -> list[tuple[int, int]]:
        threads.append(threading.current_thread().name)
        return [(first, -second) for first, second in batches]

    prefetcher = Prefetcher(made, 4, pin=pin)
    assert list(prefetcher.step(0)) == list(made(0))
    assert list(prefetcher.step(4)) == pin(list(made(4)))
    prefetcher.close()
    assert threads[0] == "prefetch"


def test_nothing_is_made_beyond_the_end() -> None:
    asked: list[int] = []

    def make(consumed: int) -> Iterator[tuple[int, int]]:
        asked.append(consumed)
        return made(consumed)

    prefetcher = Prefetcher(make, 4, end=8)
    for consumed in (0, 4):
        list(prefetcher.step(consumed))
    prefetcher.close()
    assert asked == [0, 4]
