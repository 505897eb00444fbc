"""The groups that a generation takes, in any order of events."""

from collections.abc import Callable
from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.group_queue import GroupKey, GroupQueue

SIZE, NUM_ROWS, NUM_GENERATIONS = 3, 4, 40


def queue(max_staleness: int = 2, num_wanted: int | None = 6, **state) -> GroupQueue:
    """A queue of generations of three groups, whose prompts repeat after four."""
    state.setdefault("row_of", row_of)
    return GroupQueue(SIZE, max_staleness, num_wanted=num_wanted, **state)


def row_of(key: GroupKey) -> int:
    """Row of a prompt; each round has prompts of its own."""
    return key.round * NUM_ROWS * SIZE + (key.generation * SIZE + key.position) % NUM_ROWS


def numbers(groups: GroupQueue, keys: list[GroupKey]) -> list[int]:
    return [*map(groups.number_of, keys)]


def complete(groups: GroupQueue, *which: int) -> None:
    for number in which:
        groups.complete(groups.key_of(number))


def open_new(groups: GroupQueue, now: int, limit: int = 99) -> list[int]:
    return numbers(groups, groups.open_new(now, limit))


def pop(groups: GroupQueue) -> list[int] | None:
    if groups.next_generation(0) is None:
        return None
    keys, _ = groups.pop_generation(0)
    return numbers(groups, keys)


def test_the_first_groups_that_are_complete_make_up_the_generation():
    groups = queue(num_wanted=4)
    assert open_new(groups, now=0) == [0, 1, 2, 3]
    for number in (3, 1):
        complete(groups, number)
        assert pop(groups) is None
    complete(groups, 2)
    assert pop(groups) == [1, 2, 3]
    assert open_new(groups, now=1) == [4, 5, 6]  # 0 is still open


def test_the_oldest_groups_go_first():
    groups = queue(num_wanted=4)
    open_new(groups, now=0)
    complete(groups, 1, 2, 3)
    pop(groups)
    complete(groups, *open_new(groups, now=1), 0)
    assert pop(groups) == [0, 5, 6]  # 4 has 0's prompt


def test_a_group_that_would_be_too_old_is_opened_again():
    groups = queue(max_staleness=1)
    open_new(groups, now=0)
    assert groups.drop_stale(now=1) == []
    assert numbers(groups, groups.drop_stale(now=2)) == [0, 1, 2, 3, 4, 5]
    assert open_new(groups, now=2) == [0, 1, 2, 3, 4, 5]


def test_the_last_generations_open_no_more_groups_than_they_need():
    assert open_new(queue(num_wanted=4), now=0, limit=SIZE) == [0, 1, 2]


def test_open_groups_of_a_checkpoint_are_as_old_as_they_were_and_not_opened_again():
    groups = queue(max_staleness=1, next_number=5)
    groups.reopened = [*map(groups.key_of, (0, 2, 3))]
    groups.restore({groups.key_of(2): 0, groups.key_of(3): 1})
    assert {groups.number_of(k): then for k, then in groups.opened_at.items()} == {2: 0, 3: 1}
    assert numbers(groups, groups.drop_stale(now=2)) == [2]
    assert open_new(groups, now=2) == [0, 2, 5, 6, 7]


# In order, with rounds that replace groups


def searched(
    is_useful: Callable[[GroupKey], bool], *, most_rounds: int = 3, widening: float = 1.0
) -> tuple[GroupQueue, list[list[GroupKey]]]:
    """A generation whose groups are rejected unless they are useful, and its rounds."""
    groups = queue(num_wanted=None, most_rounds=most_rounds, widening=widening)
    rounds = [groups.open_generation(7, now=7)]
    while True:
        for key in reversed(rounds[-1]):
            assert groups.next_generation(7) is None and not groups.num_missing(7)
            (groups.complete if is_useful(key) else groups.reject)(key)
        if not (count := groups.num_missing(7)):
            return groups, rounds
        rounds.append(groups.open_round(7, count, now=7))


def test_without_rejected_groups_there_is_one_round():
    groups, rounds = searched(lambda key: True)
    assert groups.pop_generation(7) == (rounds[0], []) and len(rounds) == 1


def test_rejected_groups_are_replaced_by_as_many_in_the_next_round():
    groups, rounds = searched(lambda key: (key.round + key.position) % 3 == 0, most_rounds=9)
    useful = [key for each in rounds for key in each if (key.round + key.position) % 3 == 0]
    for before, after in pairwise(rounds):
        num_useful = len([key for key in useful if key.round <= before[0].round])
        assert len(after) == SIZE - num_useful
    assert groups.pop_generation(7) == (useful, sorted({*chain(*rounds)} - {*useful}))


def test_after_the_last_round_rejected_groups_fill_the_generation_behind_useful_ones():
    groups, rounds = searched(lambda key: key == GroupKey(7, 2, 1), most_rounds=2)
    keys, replaced = groups.pop_generation(7)
    assert len(rounds) == 3 and keys == [GroupKey(7, 2, 1), *rounds[0][:2]]
    assert len(replaced) == 3 * SIZE - SIZE


def test_a_prompt_that_was_tried_again_is_taken_once():
    groups = queue(num_wanted=None, most_rounds=1, row_of=lambda key: key.position)
    first = groups.open_generation(7, now=7)
    for key in first:
        groups.reject(key)
    again = groups.open_round(7, 3, now=7)
    groups.complete(again[1])
    for key in (again[0], again[2]):
        groups.reject(key)
    keys, replaced = groups.pop_generation(7)
    assert keys == [again[1], first[0], first[2]]
    assert replaced == [first[1], again[0], again[2]]


def test_a_wider_round_opens_more_groups_than_are_missing_and_the_first_are_taken():
    groups, rounds = searched(lambda key: key.round > 0, widening=1.5)
    assert [len(each) for each in rounds] == [3, 5]
    assert groups.pop_generation(7) == (rounds[1][:3], [*rounds[0], *rounds[1][3:]])


def test_a_round_without_other_prompts_is_the_last():
    groups = queue(num_wanted=None, most_rounds=9)
    for key in groups.open_generation(0, now=0):
        groups.reject(key)
    assert groups.num_missing(0) == SIZE
    assert groups.open_round(0, 0, now=0) == []
    assert groups.next_generation(0) == [GroupKey(0, 0, n) for n in range(SIZE)]


class Run:
    """A run with groups answered in any order: it is saved, killed and resumed, and loses engines.

    An event is a number; its remainders choose what happens, and to which group.
    """

    def __init__(self, max_staleness: int, num_wanted: int | None) -> None:
        self.max_staleness, self.num_wanted = max_staleness, num_wanted
        self.queue = self.new_queue()
        self.now, self.opened_at, self.taken, self.rejected = 0, {}, [], []
        self.ask()
        self.save()

    def new_queue(self, **state) -> GroupQueue:
        return queue(self.max_staleness, self.num_wanted, most_rounds=2, **state)

    def happen(self, event: int) -> None:
        kind, which = event % 16, event // 16
        found = sorted(self.queue.opened_at.keys() - self.queue._complete)
        if kind < 11 and found:
            self.end(found[which % len(found)], is_equal=kind < 2)
        elif kind < 13:
            self.train()
        elif kind == 13 and self.num_wanted is None:
            self.begin_anew()
        elif kind == 14:
            self.save()
        else:
            self.resume()

    def ask(self) -> None:
        if self.num_wanted is None:
            begun = {key.generation for key in (*self.queue.opened_at, *self.all_rejected())}
            for generation in range(self.now, self.now + 1 + self.max_staleness):
                if generation not in begun and len(self.taken) <= generation < NUM_GENERATIONS:
                    self.note(self.queue.open_generation(generation, self.now))
        else:
            limit = (NUM_GENERATIONS - len(self.taken)) * SIZE
            self.note(self.queue.open_new(self.now, limit))

    def all_rejected(self) -> list[GroupKey]:
        return [*chain(*self.queue._rejected.values())]

    def note(self, keys: list[GroupKey]) -> None:
        self.opened_at |= dict.fromkeys(keys, self.now)

    def end(self, key: GroupKey, is_equal: bool) -> None:
        if is_equal and self.queue.reject(key):
            self.rejected.append(key)
        elif not is_equal:
            self.queue.complete(key)
        if self.num_wanted is not None:
            self.ask()
        elif count := self.queue.num_missing(key.generation):
            self.note(self.queue.open_round(key.generation, count, self.now))

    def train(self) -> None:
        number = len(self.taken)
        if number == NUM_GENERATIONS or self.queue.next_generation(number) is None:
            return
        keys, replaced = self.queue.pop_generation(number)
        assert len(keys) == len({*keys}) == SIZE and not {*keys} & {*replaced}
        if self.num_wanted is None:
            assert {key.generation for key in (*keys, *replaced)} == {number}
        else:
            assert len({self.queue.row_of(key) for key in keys}) == SIZE
        ages = [number - self.opened_at[key] for key in keys]
        assert 0 <= min(ages) <= max(ages) <= self.max_staleness
        self.taken.append(keys)
        self.ask()
        self.now = len(self.taken)  # these weights are pushed
        if self.num_wanted is not None:
            self.queue.drop_stale(self.now)
        self.ask()

    def begin_anew(self) -> None:
        """Lose the engines: the next generation must come from the current weights."""
        if len(self.taken) < NUM_GENERATIONS:
            number = len(self.taken)
            dropped = self.queue.drop_generation(number)
            assert {key.generation for key in dropped} <= {number}
            self.note(self.queue.open_generation(number, self.now))

    def save(self) -> None:
        self.saved = [*self.taken], [*self.rejected], self.queue.next_number, self.queue.untaken

    def resume(self) -> None:
        self.taken, self.rejected = ([*each] for each in self.saved[:2])
        _, _, next_number, untaken = self.saved
        self.queue, self.now = self.new_queue(), len(self.taken)
        if self.num_wanted is not None:
            self.queue.next_number, self.queue.reopened = next_number, [*untaken]
        self.ask()

    def check(self) -> None:
        """Assert that each group is taken once, rejected or pending, and a generation can be
        filled."""
        taken = [*chain(*self.taken)]
        assert len({*taken}) == len(taken)
        assert not {*taken} & {*self.queue.untaken}
        if self.num_wanted is None:
            for number in range(len(self.taken), min(self.now + 1, NUM_GENERATIONS)):
                at_hand = (*self.queue.opened_at, *self.all_rejected())
                assert len([key for key in at_hand if key.generation == number]) >= SIZE
            return
        known = [*taken, *self.rejected, *self.queue.untaken]
        assert sorted(map(self.queue.number_of, known)) == [*range(self.queue.next_number)]
        if len(self.taken) < NUM_GENERATIONS:
            assert len({self.queue.row_of(key) for key in self.queue.opened_at}) >= SIZE


@settings(max_examples=1000, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    share=st.none() | st.floats(0, 1),
    events=st.lists(st.integers(0, 1 << 12), max_size=50),
)
def test_in_any_order_of_events_no_group_is_too_old_and_each_is_trained_on_once(
    max_staleness, share, events
):
    num_wanted = None if share is None else SIZE + round(share * SIZE * max_staleness)
    run = Run(max_staleness, num_wanted)
    for event in events:
        run.happen(event)
        run.check()
