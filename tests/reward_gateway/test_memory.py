from reward_gateway.memory import MOST_DETAIL, Memory, key_of
from rollfarm.reward import Score
from tests.reward_gateway.support import episode


def test_what_was_not_asked_for_longest_is_forgotten_first():
    memory = Memory(2)
    memory.put(b"a", Score(1))
    memory.put(b"b", Score(2))
    memory.get(b"a")

    memory.put(b"c", Score(3))

    assert (memory.get(b"a"), memory.get(b"b"), memory.get(b"c")) == (Score(1), None, Score(3))
    assert len(memory) == 2


def test_a_memory_of_no_size_remembers_nothing():
    memory = Memory(0)

    memory.put(b"a", Score(1))

    assert memory.get(b"a") is None


def test_a_score_that_says_too_much_is_not_remembered():
    memory = Memory(2)

    memory.put(b"a", Score(1, "x" * (MOST_DETAIL + 1)))

    assert memory.get(b"a") is None


def test_the_key_is_of_all_that_a_reward_sees_and_of_nothing_else():
    same, other_task = episode("4", reference="4"), episode("4", reference="4")
    other_task.task.index = 7
    changed = [episode("5", reference="4"), episode("4", reference="5"), episode("4", reference="4", steps=(1.0,))]
    other_metrics = episode("4", reference="4")
    other_metrics.metrics["success"] = 1.0

    key = key_of("maths", {"digits": 3}, same)

    assert key_of("maths", {"digits": 3}, other_task) == key
    assert key_of("exact", {"digits": 3}, same) != key
    assert key_of("maths", {"digits": 4}, same) != key
    assert all(key_of("maths", {"digits": 3}, other) != key for other in [*changed, other_metrics])


def test_metrics_give_the_same_key_in_any_order():
    one, other = episode("4"), episode("4")
    for name in ("a", "b", "c", "d"):
        one.metrics[name] = 1.0
    for name in ("d", "c", "b", "a"):
        other.metrics[name] = 1.0

    assert key_of("maths", {}, one) == key_of("maths", {}, other)
