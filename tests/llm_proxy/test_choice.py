"""Which engine a request goes to: least to do, sessions and prompts where they are cached."""

import time

from hypothesis import given
from hypothesis import strategies as st

from llm_proxy.choice import Memory
from tests.llm_proxy.world import LENGTH, World


def test_a_prompt_costs_a_part_of_what_an_output_costs() -> None:
    world = World(prefill_token_share=0.1)
    world.engine("a", slots=8, context=1000)
    world.engine("b", slots=8, context=1000)
    world.ask("long prompt", prompt=[1] * 400, tokens_=10)
    world.ask("long output", prompt=[2], tokens_=60)
    world.step()

    assert [engine.load for engine in world.router.engines] == [40 + 10, 60]
    world.ask("next", prompt=[3])
    assert world.step() == ["next@a"]


def test_a_prompt_goes_where_it_was_seen_last_while_that_saves_more_than_it_delays() -> None:
    world = World(prefill_token_share=0.1)
    world.engine("a", slots=8, context=1000)
    world.engine("b", slots=8, context=1000)
    prompt = list(range(400))
    world.ask("first", prompt=prompt, tokens_=30)
    world.ask("other", prompt=[9], tokens_=10)
    assert world.step() == ["first@a", "other@b"]
    world.tell("a", "first", [7] * 30, reason=LENGTH)

    siblings = [f"sibling {number}" for number in range(4)]
    for sibling in siblings:
        world.ask(sibling, prompt=prompt, tokens_=30)

    # a starts with 0 and b with 10; each sibling is 30 where the prompt is cached, and the prompt is worth 40.
    assert world.step() == ["sibling 0@a", "sibling 1@a", "sibling 2@b", "sibling 3@b"]


def test_a_common_beginning_is_found_where_the_whole_prompt_is_new() -> None:
    world = World(prefill_token_share=0.1, prefix_tokens=100)
    world.engine("a", slots=8, context=1000)
    world.engine("b", slots=8, context=1000)
    beginning = list(range(100))
    world.ask("first", prompt=[*beginning, 1, 2], tokens_=2)
    world.ask("unrelated", prompt=[5], tokens_=9)
    assert world.step() == ["first@a", "unrelated@b"]

    world.ask("second", prompt=[*beginning, 3, 4], tokens_=2)
    world.step()

    assert world.sent[-1][0] == "a"
    assert world.router.engine("a").load == (10 + 2) + 2


def test_small_prompts_do_not_pull_requests_together() -> None:
    world = World()
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    for number in range(8):
        world.ask(str(number), prompt=[1, 2, 3])
    world.step()

    assert [len(engine.attempts) for engine in world.router.engines] == [4, 4]


def test_a_session_s_cached_tokens_cost_nothing() -> None:
    world = World(prefill_token_share=0.1)
    world.engine("a", slots=8, context=1000)
    world.ask("turn 1", prompt=[1] * 200, tokens_=10, session_id="s")
    world.step()
    world.tell("a", "turn 1", [1] * 10, reason=LENGTH)

    world.ask("turn 2", prompt=[1] * 250, tokens_=10, session_id="s")
    world.step()

    assert world.router.engine("a").load == 5 + 10


def test_a_new_session_goes_where_its_prompt_is_cached() -> None:
    world = World(prefill_token_share=0.1)
    world.engine("a", slots=8, context=1000)
    world.engine("b", slots=8, context=1000)
    prompt = list(range(300))
    world.ask("one", prompt=prompt, session_id="s", tokens_=2)
    world.ask("two", prompt=prompt, session_id="t", tokens_=2)

    assert world.step() == ["one@a", "two@b"]
    world.tell("a", "one", [1, 1], reason=LENGTH)
    world.tell("b", "two", [1, 1], reason=LENGTH)
    world.ask("three", prompt=prompt, session_id="u", tokens_=2)

    assert world.step() == ["three@b"]


def test_a_bound_of_0_looks_at_caches_between_equals_alone() -> None:
    world = World(affinity_bound_tokens=0)
    world.engine("a", slots=8, context=1000)
    world.engine("b", slots=8, context=1000)
    for number in range(4):
        world.ask(str(number), prompt=[1] * 500)

    assert sorted(world.step()) == ["0@a", "1@b", "2@b", "3@a"]


@given(keys=st.lists(st.integers(0, 9), max_size=60), size=st.integers(1, 4))
def test_the_latest_are_remembered(keys: list[int], size: int) -> None:
    memory = Memory(size)
    for number, key in enumerate(keys):
        memory.put(key, ("e", number))

    last = {key: number for number, key in enumerate(keys)}
    latest = sorted(last, key=lambda key: -last[key])
    assert [memory.get(key) for key in latest[:size]] == [("e", last[key]) for key in latest[:size]]
    assert all(memory.get(key) in (None, ("e", last[key])) for key in last)
    assert sum(memory.get(key) is not None for key in range(10)) <= 2 * size


def test_a_full_memory_forgets_as_quickly_as_it_remembers() -> None:
    memory = Memory(50_000)

    filling, full = seconds_to_put(memory, range(50_000)), seconds_to_put(memory, range(50_000, 150_000))

    assert full / 2 < 8 * filling


def seconds_to_put(memory: Memory, keys: range) -> float:
    began = time.process_time()
    for key in keys:
        memory.put(key, ("e", 1))
    return time.process_time() - began
