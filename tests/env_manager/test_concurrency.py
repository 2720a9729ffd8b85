"""How many episodes are played at once, in virtual time: the engines are a queue, at which episodes take turns."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_manager.concurrency import Concurrency

TURNS = 5


class Farm:
    """Episodes at engines that have `places` places. Every ten seconds they take weights for `pause` seconds."""

    def __init__(self, concurrency: Concurrency, places: int, *, step_seconds: float = 0.0, pause: float = 0.0) -> None:
        self.concurrency, self.places = concurrency, places
        self.step_seconds, self.pause = step_seconds, pause
        self.now = 0.0
        self.limits = [(0.0, concurrency.limit)]
        """(seconds, limit) whenever it changed."""
        self.made = 0
        self.generating = 0
        self.chance = random.Random(7)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[tuple[int, float]] = deque()

    def run(self, seconds: float) -> "Farm":
        """Play on."""
        end = self.now + seconds
        self._begin()
        self._serve()
        while self._events and self._events[0][0] < end:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self.now = end
        return self

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happens))

    def _begin(self) -> None:
        for _ in range(self.concurrency.free):
            self.concurrency.begin(self.now)
            self._step(TURNS)

    def _step(self, turns: int) -> None:
        self._after(self.step_seconds * self.chance.uniform(0.5, 1.5), partial(self._ask, turns))

    def _ask(self, turns: int) -> None:
        self._waiting.append((turns, self.now))
        self._serve()

    def _serve(self) -> None:
        if self._waiting and self.now % 10 < self.pause:
            self._after(self.pause - self.now % 10 + 1e-6, self._serve)
            return
        while self._waiting and self.generating < self.places:
            turns, since = self._waiting.popleft()
            self.generating += 1
            took = self.chance.uniform(0.5, 1.5)
            self._after(took, partial(self._generated, turns, self.now - since, took))

    def _generated(self, turns: int, queued: float, took: float) -> None:
        self.generating -= 1
        self.made += 1
        if self.concurrency.generated(queued, took, self.now):
            self.limits.append((self.now, self.concurrency.limit))
        if turns > 1:
            self._step(turns - 1)
        else:
            self.concurrency.end(self.now)
        self._begin()
        self._serve()


def adaptive(slots: int = 512, least: int = 8, share: float = 0.5) -> Concurrency:
    return Concurrency(slots, least, share, 0.0)


@pytest.mark.parametrize("step_seconds", [0.0, 1.0, 4.0])
def test_it_settles_where_engines_are_just_full_and_costs_them_nothing(step_seconds: float):
    seconds = 400.0
    always = Farm(adaptive(least=512), 32, step_seconds=step_seconds).run(seconds)
    farm = Farm(adaptive(), 32, step_seconds=step_seconds).run(seconds)

    late = [limit for at, limit in farm.limits if at > 200]
    right = 32 + 16 + 32 * step_seconds  # that generate, that queue, that are in the environment
    assert always.concurrency.limit == 512
    assert late
    assert all(0.8 * right <= limit <= 1.25 * right for limit in late)
    assert farm.made > 0.99 * always.made


def test_pauses_of_the_engines_do_not_make_them_idle_afterwards():
    always = Farm(adaptive(least=512), 32, step_seconds=1.0, pause=2.0).run(500)
    farm = Farm(adaptive(), 32, step_seconds=1.0, pause=2.0).run(500)

    assert farm.concurrency.limit < 150
    assert farm.made > 0.97 * always.made


def test_it_follows_engines_that_come_and_go():
    farm = Farm(adaptive(), 16)
    limits: list[int] = []
    for places in (16, 64, 8):
        farm.places = places
        limits.append(farm.run(500).concurrency.limit)

    assert [round(limit / 1.5) for limit in limits] == pytest.approx([16, 64, 8], rel=0.2)


def test_while_there_is_less_work_than_slots_the_limit_stays():
    concurrency = adaptive(slots=100)
    concurrency.begin(0.0)

    for second in range(1, 1000):
        concurrency.generated(0.0, 1.0, float(second))

    assert concurrency.limit == 100


def test_by_hand():
    concurrency = Concurrency(4, 1, 0.5, 0.0)
    for _ in range(4):
        concurrency.begin(0.0)

    changed = [concurrency.generated(2.0, 2.0, 12.0) for _ in range(8)]

    # Asked in the first 8 s: one each second, that waits 2 s and takes 2 s. So 2 queue while 2 are made; 1 is enough.
    assert changed == [False] * 7 + [True]
    assert (concurrency.limit, concurrency.free) == (3, 0)


@given(
    slots=st.integers(1, 64),
    least=st.integers(0, 64),
    share=st.floats(0.1, 2),
    told=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.booleans()), max_size=300),
)
def test_it_stays_within_its_bounds(slots: int, least: int, share: float, told: list[tuple[float, float, bool]]):
    least = min(least, slots)
    concurrency = Concurrency(slots, least, share, 0.0)

    for second, (queued, generating, begins) in enumerate(told):
        if begins and concurrency.free:
            concurrency.begin(float(second))
        elif concurrency.running:
            concurrency.end(float(second))
        concurrency.generated(queued, generating, float(second))
        assert (least or slots) <= concurrency.limit <= slots
