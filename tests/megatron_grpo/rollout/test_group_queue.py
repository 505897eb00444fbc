"""Over-sampling: which groups a generation takes, in any order of events."""

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.group_queue import GroupQueue

SIZE, NUM_ROWS, NUM_GENERATIONS = 3, 4, 40


def queue(max_staleness: int = 2, num_wanted: int = 6, **state) -> GroupQueue:
    """Generations of three groups, whose prompts repeat after four."""
    return GroupQueue(SIZE, num_wanted, max_staleness, lambda number: number % NUM_ROWS, **state)


def test_the_first_groups_that_are_complete_make_up_the_generation():
    groups = queue(num_wanted=4)
    assert groups.open_new(now=0, limit=99) == [0, 1, 2, 3]
    for number in (3, 1):
        groups.complete(number)
        assert groups.pop_generation() is None
    groups.complete(2)
    assert groups.pop_generation() == [1, 2, 3]
    assert groups.open_new(now=1, limit=99) == [4, 5, 6]  # beside 0


def test_the_oldest_groups_go_first():
    groups = queue(num_wanted=4)
    groups.open_new(now=0, limit=99)
    for number in (1, 2, 3):
        groups.complete(number)
    groups.pop_generation()
    for number in [*groups.open_new(now=1, limit=99), 0]:
        groups.complete(number)
    assert groups.pop_generation() == [0, 5, 6]  # 4 has the prompt of 0


def test_no_prompt_is_twice_in_a_generation():
    groups = queue()
    assert groups.open_new(now=0, limit=99) == [0, 1, 2, 3, 4, 5]
    for number in (0, 1, 4, 5):
        groups.complete(number)
    assert groups.pop_generation() is None
    groups.complete(2)
    assert groups.pop_generation() == [0, 1, 2]


def test_a_group_that_would_be_too_old_is_asked_for_again():
    groups = queue(max_staleness=1)
    groups.open_new(now=0, limit=99)
    assert groups.drop_stale(now=1) == []
    assert groups.drop_stale(now=2) == [0, 1, 2, 3, 4, 5]
    assert groups.open_new(now=2, limit=99) == [0, 1, 2, 3, 4, 5]


def test_the_last_generations_ask_for_no_more_than_they_need():
    groups = queue(num_wanted=4)
    assert groups.open_new(now=0, limit=SIZE) == [0, 1, 2]


def test_open_groups_of_a_checkpoint_are_as_old_as_they_were_and_not_asked_for_again():
    groups = queue(max_staleness=1, next_number=5, requeued=[0, 2, 3])
    groups.restore({2: 0, 3: 1})
    assert groups.requested_at == {2: 0, 3: 1}
    assert groups.drop_stale(now=2) == [2]
    assert groups.open_new(now=2, limit=99) == [0, 2, 5, 6, 7]


class Schedule:
    """A run whose groups are answered in any order; it is saved, killed and resumed now and then.

    Every event is a number, whose remainders choose what happens, and to which group.
    """

    def __init__(self, max_staleness: int, num_wanted: int) -> None:
        self.options = max_staleness, num_wanted
        self.queue = queue(*self.options)
        self.now, self.requested_at, self.taken, self.rejected = 0, {}, [], []
        self.ask()
        self.save()

    def happen(self, event: int) -> None:
        kind, which = event % 16, event // 16
        found = sorted(self.queue._open)
        if kind < 12 and found:
            self.complete(found[which % len(found)], is_equal=kind == 0)
        elif kind < 14:
            self.train()
        elif kind == 14:
            self.save()
        else:
            self.resume()

    def ask(self) -> None:
        limit = (NUM_GENERATIONS - len(self.taken)) * SIZE
        for number in self.queue.open_new(self.now, limit):
            self.requested_at[number] = self.now

    def complete(self, number: int, is_equal: bool) -> None:
        if is_equal:
            self.queue.reject(number)
            self.rejected.append(number)
            self.ask()
        else:
            self.queue.complete(number)

    def train(self) -> None:
        if len(self.taken) == NUM_GENERATIONS or (numbers := self.queue.pop_generation()) is None:
            return
        assert len({number % NUM_ROWS for number in numbers}) == len(numbers) == SIZE
        ages = [len(self.taken) - self.requested_at[number] for number in numbers]
        assert 0 <= min(ages) <= max(ages) <= self.options[0]
        self.taken.append(numbers)
        self.ask()
        self.now = len(self.taken)  # these weights are pushed
        self.queue.drop_stale(self.now)
        self.ask()

    def save(self) -> None:
        self.saved = [*self.taken], [*self.rejected], self.queue.next_number, self.queue.untaken

    def resume(self) -> None:
        self.taken, self.rejected = ([*each] for each in self.saved[:2])
        _, _, next_number, untaken = self.saved
        self.queue = queue(*self.options, next_number=next_number, requeued=[*untaken])
        self.now = len(self.taken)
        self.ask()

    def check(self) -> None:
        """Every prompt is taken once, or rejected, or will be; a generation can be filled."""
        known = [*chain(*self.taken), *self.rejected, *self.queue.untaken]
        assert sorted(known) == [*range(self.queue.next_number)]
        if len(self.taken) < NUM_GENERATIONS:
            at_hand = [*self.queue._open, *self.queue._complete]
            assert len({number % NUM_ROWS for number in at_hand}) >= SIZE


@settings(max_examples=1000, deadline=None)
@given(
    max_staleness=st.integers(1, 4),
    share=st.floats(0, 1),
    events=st.lists(st.integers(0, 1 << 12), max_size=50),
)
def test_in_any_order_of_events_no_group_is_too_old_and_each_is_trained_on_once(
    max_staleness, share, events
):
    schedule = Schedule(max_staleness, SIZE + round(share * SIZE * max_staleness))
    for event in events:
        schedule.happen(event)
        schedule.check()
