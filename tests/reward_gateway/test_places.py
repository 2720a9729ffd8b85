import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reward_gateway.places import Places
from rollfarm.errors import RewardFailed


def test_as_many_run_as_there_are_places_and_the_others_come_in_order():
    places = Places[str](places=2, most_waiting=10)

    entered = [places.enter(who) for who in "abcd"]
    following = [places.leave() for _ in range(4)]

    assert entered == [True, True, False, False]
    assert following == ["c", "d", None, None]
    assert (places.running, places.waiting) == (0, 0)


def test_who_gives_up_is_passed_over():
    places = Places[str](places=1, most_waiting=10)
    for who in "abc":
        places.enter(who)

    gave_up = places.give_up("b")

    assert gave_up
    assert places.leave() == "c"


def test_who_was_given_a_place_cannot_give_up_waiting():
    places = Places[str](places=1, most_waiting=10)
    places.enter("a")
    places.enter("b")
    places.leave()

    assert not places.give_up("b")
    assert places.running == 1


def test_more_than_may_wait_are_refused():
    places = Places[str](places=1, most_waiting=1)
    places.enter("a")
    places.enter("b")

    with pytest.raises(RewardFailed, match="1 episodes of this domain are being scored and 1 wait"):
        places.enter("c")

    assert (places.running, places.waiting) == (1, 1)


class Machine(RuleBasedStateMachine):
    """Against a plain model: who runs, and who waits in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places[int](places=3, most_waiting=4)
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.next = 0

    @rule()
    def enter(self) -> None:
        self.next += 1
        if len(self.running) < 3:
            assert self.places.enter(self.next)
            self.running.append(self.next)
        elif len(self.waiting) < 4:
            assert not self.places.enter(self.next)
            self.waiting.append(self.next)
        else:
            with pytest.raises(RewardFailed):
                self.places.enter(self.next)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.running.remove(data.draw(st.sampled_from(self.running)))
        following = self.places.leave()
        assert following == (self.waiting[0] if self.waiting else None)
        if following is not None:
            self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self.waiting))
        assert self.places.give_up(who)
        self.waiting.remove(who)

    @invariant()
    def counts_agree(self) -> None:
        assert (self.places.running, self.places.waiting) == (len(self.running), len(self.waiting))

    @invariant()
    def nobody_waits_while_a_place_is_free(self) -> None:
        assert self.places.running == 3 or self.places.waiting == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
