"""Schedules: orders against other implementations, closed forms against the simulation, matched messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action, Link, Schedule, consumer, direction, messages, producer
from dslpar.layout.simulation import Durations, even_durations, held, receives, simulate
from tests.support.sampling import sampled

SCHEDULES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.booleans()).map(
    lambda drawn: Schedule(Chunks(drawn[0], drawn[1]), drawn[2] * (drawn[0] if drawn[1] > 1 else 1), drawn[3])
)
"""Schedules of 1 to 8 ranks, also with fewer micro-batches than ranks."""


def written(order: list[Action]) -> str:
    """Return an order as text like `F0.1`: kind, stage, micro-batch."""
    return " ".join(f"{kind}{stage}.{micro}" for kind, stage, micro in order)


# Orders -----------------------------------------------------------------------------------------------------------


@given(SCHEDULES)
def test_each_rank_has_every_action_of_its_stages_once(schedule: Schedule) -> None:
    kinds = "FBW" if schedule.split else "FB"
    for rank, order in enumerate(schedule.orders()):
        stages, micros = schedule.chunks.held_by(rank), range(schedule.num_micro_batches)
        assert Counter(order) == Counter(Action(k, stage, i) for k in kinds for stage in stages for i in micros)
        # Gradients are summed in the same order everywhere, and weights' in the order of inputs'.
        for kind in kinds:
            for stage in stages:
                assert [micro for k, s, micro in order if (k, s) == (kind, stage)] == list(micros)
        if schedule.split:
            assert [each[1:] for each in order if each.kind == "B"] == [each[1:] for each in order if each.kind == "W"]


@pytest.mark.parametrize(("pipe", "count"), [(1, 3), (2, 1), (2, 4), (4, 2), (4, 4), (4, 9), (8, 16)])
def test_1f1b_is_deepspeed_s_order(pipe: int, count: int) -> None:
    for rank in range(pipe):
        theirs = TrainSchedule(micro_batches=count, stages=pipe, stage_id=rank)
        found = []
        for step, commands in enumerate(theirs.steps()):
            micro, _ = theirs._step_to_micro_batch(step)
            kinds = {ForwardPass: "F", BackwardPass: "B"}
            found += [(kinds[type(each)], rank, micro) for each in commands if type(each) in kinds]
        assert Schedule(Chunks(pipe), count).order(rank) == found


def test_the_interleaved_order_is_megatron_s() -> None:
    """Two ranks with two chunks each and four micro-batches, by hand, from section 2.2 of arXiv 2104.04473."""
    first, last = Schedule(Chunks(2, 2), 4).orders()
    assert written(first) == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")
    assert written(last) == ("F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3")


def test_the_order_of_zero_bubble_is_zb_h1_s() -> None:
    """With three ranks and four micro-batches, a rank defers as many W as there are ranks before it."""
    orders = Schedule(Chunks(3), 4, split=True).orders()
    assert [written(order) for order in orders] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 B1.3 W1.2 W1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 W2.2 W2.3",
    ]


TORCH_S = [
    (theirs, pipe, num)
    for theirs, least in ((torchs.ScheduleInterleaved1F1B, 2), (torchs.ScheduleInterleavedZeroBubble, 1))
    for pipe, num in ((2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (4, 4), (8, 2))
    if num >= least  # with one chunk, torch's interleaved schedule starts with more forwards than 1F1B
]


@pytest.mark.parametrize(("theirs", "pipe", "num"), TORCH_S)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_and_zero_bubble_orders_are_torch_s(theirs: type, pipe: int, num: int, rounds: int) -> None:
    """The orders of torch.distributed.pipelining are compared without padding; its stages need process groups, its
    orders do not.
    """
    split = theirs is torchs.ScheduleInterleavedZeroBubble
    kinds = {torchs.FORWARD: "F", torchs.FULL_BACKWARD: "B", torchs.BACKWARD_INPUT: "B", torchs.BACKWARD_WEIGHT: "W"}
    made = theirs.__new__(theirs)
    made.n_local_stages, made.pp_group_size = num, pipe
    made._n_microbatches, made.microbatches_per_round = rounds * pipe, pipe
    for rank in range(pipe):
        made.rank = rank
        padded = made._calculate_single_rank_operations(rank)
        found = [(kinds[each.computation_type], each.stage_index, each.microbatch_index) for each in padded if each]
        assert Schedule(Chunks(pipe, num), rounds * pipe, split).order(rank) == found


def test_several_chunks_need_whole_rounds() -> None:
    schedule = Schedule(Chunks(4, 2), 6)
    for refused in (schedule.orders, schedule.bubble, lambda: schedule.held(0)):
        with pytest.raises(
            ValueError, match="6 micro-batches are not a multiple of 4 ranks, each of which has 2 chunks"
        ):
            refused()


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20))
def test_an_evaluation_may_have_any_number_of_micro_batches(pipe: int, num: int, count: int) -> None:
    chunks = Chunks(pipe, num)
    orders = Schedule(chunks, count).forward_orders()
    timeline = simulate(orders, chunks, even_durations(chunks.stages))
    assert sorted(timeline.spans) == [("F", stage, micro) for stage in range(chunks.stages) for micro in range(count)]
    if count % pipe == 0:  # no rank waits except while the pipeline fills
        assert timeline.makespan == count * num + pipe - 1


# Closed forms -----------------------------------------------------------------------------------------------------

SIZES = [(pipe, num) for pipe in range(2, 17) for num in range(1, 5)]
MOST_MICRO_BATCHES = 64
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 0.0), (1.0, 0.5, 1.5), (0.5, 1.0, 1.0)]
"""F, B and W: only matmuls; with attention, which has no W; a backward that is all B; more W than B; a short F."""


@pytest.mark.parametrize(("pipe", "num"), sampled(SIZES, {(2, 1), (3, 1), (4, 2)}))
def test_closed_forms_are_the_simulation_s(pipe: int, num: int) -> None:
    """Bubble and activations agree for every number of micro-batches from P to 64."""
    chunks = Chunks(pipe, num)
    for count in range(pipe, MOST_MICRO_BATCHES + 1, pipe if num > 1 else 1):
        for split in (False, True):
            schedule = Schedule(chunks, count, split)
            orders = schedule.orders()
            assert [schedule.held(rank) for rank in range(pipe)] == [held(order, chunks) for order in orders]
            for times in TIMES if split else TIMES[:1]:  # for an unsplit backward, times do not matter
                simulated = simulate(orders, chunks, even_durations(chunks.stages, *times)).bubble
                # 64 * 4 * 3 additions of numbers below 1000 round by less than 1e-12
                assert schedule.bubble(*times) == pytest.approx(simulated, abs=1e-9), (count, split, times)


@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.tuples(*[st.floats(0.1, 3.0)] * 3),
)
def test_the_bubble_s_closed_form_holds_for_any_times(
    pipe: int, num: int, rounds: int, split: bool, times: tuple[float, float, float]
) -> None:
    schedule = Schedule(Chunks(pipe, num), rounds * pipe, split)
    timeline = simulate(schedule.orders(), schedule.chunks, even_durations(pipe * num, *times))
    assert schedule.bubble(*times) == pytest.approx(timeline.bubble, abs=1e-9)


@given(st.integers(1, 16), st.integers(1, 20), st.booleans())
def test_fewer_micro_batches_than_ranks(pipe: int, count: int, split: bool) -> None:
    schedule = Schedule(Chunks(pipe), count, split)
    assert [schedule.held(rank) for rank in range(pipe)] == [held(each, Chunks(pipe)) for each in schedule.orders()]
    if split and count < pipe:
        with pytest.raises(ValueError, match=f"{count} micro-batches over {pipe} ranks: simulate it"):
            schedule.bubble()
    else:
        simulated = simulate(schedule.orders(), schedule.chunks, even_durations(pipe)).bubble
        assert schedule.bubble() == pytest.approx(simulated, abs=1e-9)


def test_figures_of_four_ranks_and_eight_micro_batches() -> None:
    chunks, of_two = Chunks(4), Chunks(4, 2)
    schedules = [Schedule(chunks, 8), Schedule(of_two, 8), Schedule(chunks, 8, True), Schedule(of_two, 8, True)]
    assert [schedule.bubble() for schedule in schedules] == pytest.approx([3 / 11, 3 / 19, 1 / 9, 1 / 17])
    totals = [[schedule.held(rank).total for rank in range(4)] for schedule in schedules]
    assert totals == [[4, 3, 2, 1], [5.5, 4.5, 3.5, 2.5], [4, 4, 4, 4], [4, 4, 4, 4]]
    assert [schedules[3].held(rank).deferred for rank in range(4)] == [0.5, 1, 1.5, 2]


# Messages ---------------------------------------------------------------------------------------------------------


@given(SCHEDULES, st.booleans())
def test_every_message_is_sent_once_and_taken_in_once(schedule: Schedule, evaluates: bool) -> None:
    chunks = schedule.chunks
    orders = schedule.forward_orders() if evaluates else schedule.orders()
    links = messages(orders, chunks)
    for (sender, receiver), listed in links.items():
        sources = [producer(action, chunks) for action in listed]
        known = set(sources)
        assert sources == [action for action in orders[sender] if action in known]
        assert {chunks.rank_of(action.stage) for action in listed} == {receiver} != {sender}
    needs = [each for order in orders for each in order if producer(each, chunks) is not None]
    assert Counter(chain.from_iterable(links.values())) == Counter(needs if chunks.pipe > 1 else [])
    assert all(consumer(source, chunks) == each for each in needs if (source := producer(each, chunks)) is not None)


@given(SCHEDULES.filter(lambda schedule: schedule.chunks.pipe > 2))
def test_over_three_ranks_and_more_messages_are_used_as_they_come(schedule: Schedule) -> None:
    """So a rank waits for the oldest message that it has begun to receive, and stores none for later."""
    orders = schedule.orders()
    for (_, receiver), listed in messages(orders, schedule.chunks).items():
        known = set(listed)
        assert listed == [action for action in orders[receiver] if action in known]


def test_over_two_ranks_a_link_has_activations_and_gradients_in_it() -> None:
    schedule = Schedule(Chunks(2, 2), 2)
    links = messages(schedule.orders(), schedule.chunks)
    assert written(links[0, 1]) == "F1.0 F1.1 F3.0 F3.1 B1.0 B1.1"
    assert written(links[1, 0]) == "F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"


@given(SCHEDULES)
def test_two_ranks_never_send_both_ways_in_one_group(schedule: Schedule) -> None:
    links = messages(schedule.orders(), schedule.chunks)
    groups = Counter((direction(link), frozenset(link)) for link in links)
    assert set(groups.values()) <= {1}


# Receives ahead ---------------------------------------------------------------------------------------------------


def ends(orders: list[list[Action]], chunks: Chunks, ahead: list[list[list[Action]]]) -> bool:
    """Return whether all ranks finish if each action waits for everything that its rank has begun to send and receive.

    Loading a CUDA kernel has this effect. As in NCCL, a send ends when its receive has begun, and a receive when its
    send has.
    """
    links = messages(orders, chunks)
    numbers = {each: number for listed in links.values() for number, each in enumerate(listed)}
    sent, begun = Counter[Link](), Counter[Link]()
    known: list[set[tuple[str, int]]] = [set() for _ in orders]

    def ended(rank: int) -> bool:
        """Return whether everything that the rank receives has been sent, and everything it sent received."""
        return all(
            begun[link] <= sent[link] if link[1] == rank else sent[link] <= begun[link]
            for link in links
            if rank in link
        )

    def run(rank: int) -> Iterator[None]:
        for action, receives_now in zip(orders[rank], ahead[rank], strict=True):
            for each in receives_now:
                source = producer(each, chunks)
                assert source is not None
                link = chunks.rank_of(source.stage), rank
                begun[link] += 1
                if each[:2] not in known[rank]:  # the first over a boundary: the host reads its header
                    known[rank].add(each[:2])
                    while sent[link] < begun[link]:
                        yield
            source = producer(action, chunks)
            if source is not None:
                assert begun[chunks.rank_of(source.stage), rank] > numbers[action], "it was not begun before its use"
            while not ended(rank):
                yield
            target = consumer(action, chunks)
            if target is not None:
                sent[rank, chunks.rank_of(target.stage)] += 1

    ranks, before = [run(rank) for rank in range(chunks.pipe)], None
    while ranks and before != (len(ranks), sent, begun):
        before = len(ranks), sent.copy(), begun.copy()
        ranks = [rank for rank in ranks if next(rank, ranks) is None]
    return not ranks


OF_SEVERAL = SCHEDULES.filter(lambda schedule: schedule.chunks.pipe > 1)


@given(OF_SEVERAL, st.booleans())
def test_no_rank_waits_for_ever_whatever_it_loads(schedule: Schedule, evaluates: bool) -> None:
    chunks = schedule.chunks
    orders = schedule.forward_orders() if evaluates else schedule.orders()
    assert ends(orders, chunks, [receives(orders, chunks, rank) for rank in range(chunks.pipe)])


def _next_after_each(orders: list[list[Action]], chunks: Chunks, rank: int) -> list[list[Action]]:
    """Begin with each link's first message, and start the next receive as soon as one message is taken."""
    coming = {link: list(listed) for link, listed in messages(orders, chunks).items() if link[1] == rank}
    before = [[] for _ in orders[rank]]
    for listed in coming.values():
        for message, following in pairwise(listed):
            before[orders[rank].index(message)].append(following)
        before[0].insert(0, listed[0])
    return before


def test_one_message_ahead_of_all_is_one_too_many() -> None:
    """Seen on an H200: both ranks loaded a kernel in the second backward, and each waited for what the other would only
    send after it.
    """
    schedule = Schedule(Chunks(2), 4)
    orders = schedule.orders()
    assert not ends(orders, schedule.chunks, [_next_after_each(orders, schedule.chunks, rank) for rank in range(2)])


@given(OF_SEVERAL, st.booleans())
def test_each_message_is_received_once_and_in_a_link_s_order(schedule: Schedule, evaluates: bool) -> None:
    chunks = schedule.chunks
    orders = schedule.forward_orders() if evaluates else schedule.orders()
    for rank in range(chunks.pipe):
        found = list(chain.from_iterable(receives(orders, chunks, rank)))
        for (_, receiver), listed in messages(orders, chunks).items():
            if receiver == rank:
                known = set(listed)
                assert [each for each in found if each in known] == listed


# Uneven stages ----------------------------------------------------------------------------------------------------


@given(
    SCHEDULES,
    st.lists(st.tuples(*[st.floats(0.1, 2.0)] * 3), min_size=32, max_size=32),
    st.floats(0.0, 1.0),
)
def test_every_order_runs_whatever_stages_and_messages_take(
    schedule: Schedule, times: list[tuple[float, float, float]], message: float
) -> None:
    """No action runs before its inputs exist, and no rank does two things at once."""
    chunks = schedule.chunks
    durations = Durations(*zip(*times[: chunks.stages], strict=True))
    timeline = simulate(schedule.orders(), chunks, durations, message)
    for rank, order in enumerate(timeline.orders):
        spans = [timeline.spans[action] for action in order]
        assert all(before.end <= after.start for before, after in pairwise(spans))
        for action, span in zip(order, spans, strict=True):
            needed = producer(action, chunks)
            if needed is not None:
                far = chunks.rank_of(needed.stage) != rank
                assert span.start >= timeline.spans[needed].end + (message if far else 0.0)
    assert timeline.makespan >= max(timeline.busy)
