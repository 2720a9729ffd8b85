"""Routing, one decision at a time. Engines are played by the tests; time is a number."""

from typing import Any

import pytest

from llm_proxy.requests import EngineMisbehaved
from llm_proxy.routing import BEHIND, CONNECTING, SERVING, Router, RoutingSettings
from rollfarm import tokens
from rollfarm.errors import EngineFailed, InvalidArgument, UnknownEngine, VersionUnavailable, to_failure
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT


class Client:
    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def answer(self, result: Any) -> None:
        assert result.request_id not in self.results
        self.results[result.request_id] = result


class World:
    """A router with its clock and its client; what was sent to engines, and what was cancelled there."""

    def __init__(self, **settings: Any) -> None:
        self.router = Router(RoutingSettings(**settings))
        self.client = Client()
        self.now = 0.0
        self.sent: list[tuple[str, Any]] = []
        self.cancelled: list[tuple[str, str]] = []

    def engine(self, name: str, *, version: int = 0, slots: int = 1, context: int = 100) -> None:
        status = engine_pb2.EngineServiceGetStatusResponse(
            instance_id=name, policy_version=version, slot_count=slots, context_token_count=context, vocabulary_size=50
        )
        self.router.attach(name, name)
        self.router.connected(name, status, self.now)
        self.step()

    def ask(self, request_id: str, *, client: Client | None = None, tokens_: int = 4, **more: Any) -> None:
        self.router.submit(asked(request_id, tokens_, **more), client or self.client, self.now)

    def step(self) -> list[str]:
        """What was sent now, as request@engine."""
        effects = self.router.step(self.now)
        new = [(engine, generation) for engine, batch in effects.sends.items() for generation in batch]
        self.sent += new
        self.cancelled += [(engine, wire) for engine, wires in effects.cancels.items() for wire in wires]
        for waiter, result in effects.answers:
            waiter.answer(result)
        return [f"{generation.request_id.split('~')[0]}@{engine}" for engine, generation in new]

    def tell(self, engine: str, wire_id: str, ids: list[int], *, version: int = 0, reason: int = 0) -> list[str]:
        self.router.receive(engine, chunk(wire_id, ids, version=version, reason=reason), self.now)
        return self.step()


def asked(request_id: str, max_tokens: int = 4, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("min_version", "exact_version", "priority") if name in more}
    prompt = more.pop("prompt", [1, 2])
    session_id = more.pop("session_id", "")
    return llm_proxy_pb2.ProxiedGeneration(
        generation=engine_pb2.Generation(
            request_id=request_id,
            prompt_token_ids=tokens.pack_ids(prompt),
            sampling=trajectory_pb2.Sampling(max_tokens=max_tokens, **more),
            session_id=session_id,
        ),
        **own,
    )


def chunk(wire_id: str, ids: list[int], *, version: int = 0, reason: int = 0) -> Any:
    spans = [trajectory_pb2.VersionSpan(policy_version=version, token_count=len(ids))] if ids else []
    return engine_pb2.GenerationChunk(
        request_id=wire_id,
        token_ids=tokens.pack_ids(ids),
        logprobs=tokens.pack_logprobs([-token / 4 for token in ids]),
        version_spans=spans,
        finish_reason=reason,  # pyright: ignore[reportArgumentType]
    )


def ids_of(result: Any) -> list[int]:
    return tokens.unpack_ids(result.token_ids).tolist()


def spans_of(result: Any) -> list[tuple[int, int]]:
    return [(span.policy_version, span.token_count) for span in result.version_spans]


def test_requests_wait_in_the_line_until_a_slot_is_free() -> None:
    world = World()
    world.engine("e", slots=2)
    for name in "abc":
        world.ask(name)

    assert world.step() == ["a@e", "b@e"]
    assert (world.router.waiting_count, world.router.running_count) == (1, 2)
    assert world.tell("e", "a", [7, 8, 9, 10], reason=LENGTH) == ["c@e"]

    assert ids_of(world.client.results["a"]) == [7, 8, 9, 10]
    assert world.client.results["a"].engine_id == "e"


def test_the_oldest_version_goes_first_then_what_was_begun_then_arrival() -> None:
    world = World()
    world.ask("begun", priority=3)
    world.engine("dying")
    world.ask("first", priority=3)
    world.ask("second", priority=3)
    world.ask("old", priority=2)
    world.router.lost("dying", "gone", world.now)

    world.engine("e", slots=4)

    assert [generation.request_id.split("~")[0] for _, generation in world.sent[1:]] == [
        "old", "begun", "first", "second",
    ]  # fmt: skip


def test_the_engine_with_fewest_outstanding_tokens_is_chosen() -> None:
    world = World()
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("long", tokens_=90)
    world.ask("short", tokens_=5)
    world.ask("next", tokens_=5)

    assert world.step() == ["long@a", "short@b", "next@b"]


def test_tokens_that_were_generated_are_no_longer_outstanding() -> None:
    world = World()
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("one", tokens_=10)
    world.ask("two", tokens_=8)
    assert world.step() == ["one@a", "two@b"]

    world.tell("a", "one", [5] * 9)
    world.ask("three")

    assert world.step() == ["three@a"]


def test_a_session_stays_with_its_engine_until_that_is_too_busy() -> None:
    world = World(affinity_bound_tokens=20)
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("turn 1", session_id="s", tokens_=8)
    assert world.step() == ["turn 1@a"]

    world.ask("turn 2", session_id="s", tokens_=8)
    assert world.step() == ["turn 2@a"]
    world.ask("turn 3", session_id="s", tokens_=8)
    assert world.step() == ["turn 3@a"]
    world.ask("turn 4", session_id="s", tokens_=8)
    assert world.step() == ["turn 4@b"]
    world.ask("turn 5", session_id="s", tokens_=8)
    assert world.step() == ["turn 5@b"]


def test_only_the_latest_sessions_are_remembered() -> None:
    world = World(session_count=2)
    world.engine("a", slots=100)
    for name in ("x", "y", "z"):
        world.ask(name, session_id=name)
    world.step()

    assert list(world.router._sessions) == ["y", "z"]  # pyright: ignore[reportPrivateUsage]


def test_oversubscription_gives_an_engine_more_than_its_slots() -> None:
    world = World(oversubscription=1.5)
    world.engine("e", slots=2)
    for name in "abcd":
        world.ask(name)

    assert world.step() == ["a@e", "b@e", "c@e"]


def test_an_engine_without_slots_is_given_nothing() -> None:
    world = World()
    world.engine("e", slots=0)
    world.ask("a")

    assert world.step() == []


def test_a_request_waits_until_its_min_version_is_served() -> None:
    world = World()
    world.engine("e", version=1, slots=4)
    world.ask("new", min_version=2)
    world.ask("now", min_version=1)

    assert world.step() == ["now@e"]
    world.router.served(["e"], 2, world.now)

    assert world.step() == ["new@e"]


def test_an_exact_version_that_has_passed_is_refused() -> None:
    world = World()
    world.engine("e", version=3)

    with pytest.raises(VersionUnavailable, match="Version 2 is gone; 3 is served") as refused:
        world.ask("a", exact_version=2)

    assert refused.value.facts == {"exact_version": "2", "policy_version": "3"}
    assert world.router.running_count == world.router.waiting_count == 0


def test_an_exact_version_is_refused_when_it_passes_while_the_request_waits() -> None:
    world = World()
    world.engine("e", version=1)
    world.ask("busy")
    world.ask("waits", exact_version=1)
    world.ask("later", exact_version=2)
    world.step()

    world.router.served(["e"], 2, world.now)
    world.step()

    assert world.client.results["waits"].failure.reason == "VERSION_UNAVAILABLE"
    assert world.tell("e", "busy", [1], version=1, reason=STOP) == ["later@e"]


def test_a_running_request_of_an_exact_version_is_refused_at_the_first_token_of_another() -> None:
    world = World()
    world.engine("e", version=1)
    world.ask("a", exact_version=1)
    world.step()

    world.tell("e", "a", [5], version=1)
    world.router.served(["e"], 2, world.now)
    world.tell("e", "a", [6], version=2)

    assert world.client.results["a"].failure.reason == "VERSION_UNAVAILABLE"
    assert world.cancelled == [("e", "a")]


def test_a_request_continues_from_its_tokens_when_its_engine_dies() -> None:
    world = World()
    world.engine("one")
    world.ask("a", tokens_=5, seed=40, temperature=0.5)
    world.step()
    world.tell("one", "a", [5, 6], version=0)

    world.engine("two")
    world.router.lost("one", "connection reset", world.now)
    assert world.step() == ["a@two"]

    again = world.sent[-1][1]
    assert tokens.unpack_ids(again.prompt_token_ids).tolist() == [1, 2, 5, 6]
    assert (again.sampling.max_tokens, again.sampling.seed, again.sampling.temperature) == (3, 42, 0.5)
    assert again.request_id != "a"
    world.tell("two", again.request_id, [7, 8, 9], reason=LENGTH)
    result = world.client.results["a"]
    assert ids_of(result) == [5, 6, 7, 8, 9]
    assert tokens.unpack_logprobs(result.logprobs).tolist() == [-1.25, -1.5, -1.75, -2.0, -2.25]
    assert spans_of(result) == [(0, 5)]
    assert (result.engine_id, result.resumption_count, world.router.resumption_count) == ("two", 1, 1)


def test_versions_are_kept_across_engines_and_updates() -> None:
    world = World()
    world.engine("e")
    world.ask("a", tokens_=4)
    world.step()
    world.tell("e", "a", [5])

    world.router.close_gate()
    world.router.served(["e"], 1, world.now)
    world.router.open_gate()
    world.tell("e", "a", [6, 7], version=1)
    world.tell("e", "a", [8], version=1, reason=LENGTH)

    assert spans_of(world.client.results["a"]) == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("generated", "limits", "reason"),
    [
        ([5, 6, 7, 8], {}, LENGTH),
        ([5, 6], {"stop_token_ids": [6]}, STOP),
        ([5, 6], {"prompt": [1] * 98, "tokens_": 9}, LENGTH),
    ],
    ids=["max_tokens", "stop token", "context"],
)
def test_a_request_that_is_complete_when_its_engine_dies_is_answered(
    generated: list[int], limits: Any, reason: int
) -> None:
    world = World()
    world.engine("e", context=100)
    world.ask("a", **limits)
    world.step()
    world.tell("e", "a", generated)

    world.router.lost("e", "gone", world.now)
    world.step()

    assert ids_of(world.client.results["a"]) == generated
    assert world.client.results["a"].finish_reason == reason


def test_an_abort_that_nobody_asked_for_is_continued() -> None:
    world = World()
    world.engine("e")
    world.ask("a", tokens_=3)
    world.step()

    assert world.tell("e", "a", [5], reason=ABORT) == ["a@e"]
    world.tell("e", world.sent[-1][1].request_id, [6, 7], reason=LENGTH)

    assert ids_of(world.client.results["a"]) == [5, 6, 7]


def test_a_failure_that_may_pass_is_tried_elsewhere_and_another_is_the_answer() -> None:
    world = World()
    world.engine("e", slots=2)
    world.ask("a")
    world.ask("b")
    world.step()

    broken, wrong = chunk("a", []), chunk("b", [])
    broken.failure.CopyFrom(to_failure(EngineFailed("Out of memory.")))
    wrong.failure.CopyFrom(to_failure(InvalidArgument("No such token.")))
    world.router.receive("e", broken, world.now)
    world.router.receive("e", wrong, world.now)

    assert world.step() == ["a@e"]
    assert world.client.results["b"].failure.reason == "INVALID_ARGUMENT"


def test_a_request_that_no_engine_can_advance_is_refused_with_the_cause() -> None:
    world = World(max_fruitless_attempts=2)
    world.ask("poison")
    for attempt in range(3):
        world.engine("e")
        assert world.router.running_count == 1, attempt
        world.router.lost("e", "segmentation fault", world.now)
    world.step()

    failure = world.client.results["poison"].failure
    assert failure.reason == "ENGINE_FAILED"
    assert "segmentation fault" in failure.message


def test_attempts_that_add_tokens_are_not_counted_against_a_request() -> None:
    world = World(max_fruitless_attempts=0)
    world.ask("a", tokens_=10)
    for token in range(5):
        world.engine("e")
        world.tell("e", world.sent[-1][1].request_id, [token])
        world.router.lost("e", "gone", world.now)
    world.step()

    assert not world.client.results


def test_a_request_that_is_retried_joins_the_first_and_both_are_answered() -> None:
    world, other = World(), Client()
    world.engine("e")
    world.ask("a")
    world.ask("a", client=other)
    assert world.step() == ["a@e"]

    world.tell("e", "a", [5], reason=STOP)

    assert ids_of(world.client.results["a"]) == ids_of(other.results["a"]) == [5]
    assert world.router.finished_count == 1


def test_another_request_of_the_same_id_is_refused() -> None:
    world = World()
    world.ask("a")

    with pytest.raises(InvalidArgument, match="open and different"):
        world.ask("a", tokens_=9)


def test_a_request_lives_until_its_last_waiter_has_gone() -> None:
    world, other = World(), Client()
    world.engine("e")
    world.ask("a")
    world.ask("a", client=other)
    world.step()

    world.router.withdraw("a", other, world.now)
    world.step()
    assert world.cancelled == []
    world.router.withdraw("a", world.client, world.now)
    world.step()

    assert world.cancelled == [("e", "a")]
    assert world.router.running_count == 0


def test_a_cancelled_request_answers_with_its_tokens_and_holds_its_slot_until_the_engine_confirms() -> None:
    world = World()
    world.engine("e")
    world.ask("a")
    world.ask("b")
    world.step()
    world.tell("e", "a", [5])

    world.router.cancel("a", world.now)
    assert world.step() == []
    assert world.router.unconfirmed_cancels("e") == ["a"]
    assert world.tell("e", "a", [6], reason=ABORT) == ["b@e"]

    assert ids_of(world.client.results["a"]) == [5]
    assert world.client.results["a"].finish_reason == ABORT


def test_the_id_of_a_cancelled_request_may_be_used_again_at_once() -> None:
    world = World()
    world.engine("e", slots=2)
    world.ask("a")
    world.step()
    world.router.cancel("a", world.now)
    world.step()
    world.client.results.clear()

    world.ask("a")
    world.step()
    world.tell("e", "a", [9, 9], reason=ABORT)
    world.tell("e", world.sent[-1][1].request_id, [5], reason=STOP)

    assert ids_of(world.client.results["a"]) == [5]


def test_a_waiting_request_is_cancelled_in_the_line_and_in_the_car_park() -> None:
    world = World()
    world.ask("queued")
    world.ask("parked", min_version=9)

    world.router.cancel("queued", world.now)
    world.router.cancel("parked", world.now)
    world.engine("e", version=9, slots=2)

    assert world.sent == []
    assert sorted(world.client.results) == ["parked", "queued"]


def test_cancelled_requests_do_not_pile_up_in_the_line() -> None:
    world = World()
    for number in range(10_000):
        world.ask(str(number))
        world.router.withdraw(str(number), world.client, world.now)

    line = world.router._line  # pyright: ignore[reportPrivateUsage]
    assert len(line) == 0
    assert len(line._heap) < 200  # pyright: ignore[reportPrivateUsage]


def test_nothing_is_given_out_while_the_gate_is_closed() -> None:
    world = World()
    world.engine("e")
    world.router.close_gate()
    world.ask("a")

    assert world.step() == []
    world.router.open_gate()

    assert world.step() == ["a@e"]


def test_the_policy_version_is_the_highest_reported_and_engines_below_it_are_behind() -> None:
    world = World()
    world.engine("old", version=3)
    before = world.router.revision
    world.engine("new", version=5)
    world.ask("a")

    assert world.step() == ["a@new"]
    assert world.router.policy_version == 5
    old = world.router.engine("old")
    assert (old.state, old.detail) == (BEHIND, "serves version 3, waits for 5")
    assert world.router.revision > before


def test_an_engine_that_is_brought_up_to_date_serves() -> None:
    world = World()
    world.engine("new", version=5)
    world.engine("late", version=0)
    before = world.router.revision

    world.router.served(["late"], 5, world.now)

    assert world.router.engine("late").state == SERVING
    assert world.router.revision == before + 1


def test_a_late_answer_about_a_lost_engine_does_not_make_it_serve() -> None:
    world = World()
    world.engine("e", version=1)
    world.router.lost("e", "gone", world.now)

    world.router.served(["e"], 2, world.now)

    assert world.router.engine("e").state == CONNECTING


def test_the_requests_of_a_detached_engine_continue_elsewhere() -> None:
    world = World()
    world.engine("one")
    world.ask("a")
    world.step()
    world.engine("two")

    world.router.detach("one", world.now)

    assert world.step() == ["a@two"]
    with pytest.raises(UnknownEngine):
        world.router.detach("one", world.now)


def test_a_chunk_whose_arrays_disagree_is_refused_and_nothing_of_it_is_kept() -> None:
    world = World()
    world.engine("e")
    world.ask("a")
    world.step()
    bad = chunk("a", [5, 6])
    bad.version_spans[0].token_count = 3

    with pytest.raises(EngineMisbehaved, match="versions for 3 tokens"):
        world.router.receive("e", bad, world.now)
    world.tell("e", "a", [7], reason=STOP)

    assert ids_of(world.client.results["a"]) == [7]


def test_waiting_and_generating_are_measured_over_all_attempts() -> None:
    world = World()
    world.ask("a")
    world.now = 2.0
    world.engine("one")
    world.now = 3.5
    world.router.lost("one", "gone", world.now)
    world.now = 4.0
    world.engine("two")
    world.now = 10.0
    world.tell("two", world.sent[-1][1].request_id, [5], reason=STOP)

    result = world.client.results["a"]
    assert result.queue_duration.ToMilliseconds() == 2500
    assert result.generate_duration.ToMilliseconds() == 7500


def test_top_logprobs_are_joined_across_engines() -> None:
    world = World()
    world.engine("e")
    world.ask("a", top_logprobs=1)
    world.step()
    for ids, reason in (([5], ABORT), ([6], STOP)):
        more = chunk(world.sent[-1][1].request_id, ids, reason=reason)
        more.top_logprobs.width = 1
        more.top_logprobs.token_ids = tokens.pack_ids(ids)
        more.top_logprobs.logprobs = tokens.pack_logprobs([-0.5])
        world.router.receive("e", more, world.now)
        world.step()

    top = world.client.results["a"].top_logprobs
    assert (top.width, tokens.unpack_ids(top.token_ids).tolist()) == (1, [5, 6])
    assert tokens.unpack_logprobs(top.logprobs).tolist() == [-0.5, -0.5]


def test_limits_are_those_of_the_smallest_engine() -> None:
    world = World()
    assert (world.router.context_tokens, world.router.vocabulary_size) == (0, 0)

    world.engine("a", context=100)
    world.engine("b", context=60)

    assert (world.router.context_tokens, world.router.vocabulary_size) == (60, 50)
