import random
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from env_manager.environments.countdown import Countdown
from env_manager.environments.expressions import BadExpression, compute
from rollfarm.env import Action, Step, ToolCall


def countdown(numbers: list[int], target: int, **settings) -> Countdown:
    environment = Countdown(**settings)
    environment.reset(0, 0)
    environment._numbers, environment._target = numbers, target
    return environment


@st.composite
def sums(draw: st.DrawFn) -> str:
    """Text that Python's own parser reads as ours does."""
    spaces = draw(st.sampled_from(["", " "]))
    return draw(
        st.recursive(
            st.integers(0, 99).map(str),
            lambda part: (
                st.tuples(part, st.sampled_from("+-*/"), part).map(spaces.join) | part.map(lambda text: f"({text})")
            ),
            max_leaves=6,
        )
    )


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(text=sums())
def test_an_expression_makes_what_python_says_that_it_makes(text: str):
    hypothesis.assume(len(text) <= 100)
    exact = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
    try:
        expected = eval(exact, {"Fraction": Fraction})  # noqa: S307
    except ZeroDivisionError:
        with pytest.raises(BadExpression, match="divides by zero"):
            compute(text)
        return

    made = compute(text)

    assert made.value == expected
    assert list(made.numbers) == [int(part) for part in _parts(text) if part.isdigit()]


def _parts(text: str) -> list[str]:
    for sign in "+-*/()":
        text = text.replace(sign, f" {sign} ")
    return text.split()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not an expression"),
        ("3 +", "not an expression"),
        ("3 4", "not an expression"),
        ("-3", "not an expression"),
        ("(3", "not an expression"),
        ("3)", "not an expression"),
        ("3 ** 4", "not an expression"),
        ("3 % 2", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("٣ + 4", "not an expression"),
        ("1" * 50, "not an expression"),
        ("3 / (2 - 2)", "divides by zero"),
        ("(" * 101, "too long"),
        ("(" * 100, "not an expression"),
    ],
)
def test_what_is_no_expression_is_refused_in_words(text: str, problem: str):
    with pytest.raises(BadExpression, match=problem):
        compute(text)


def test_typographic_signs_are_read():
    assert compute("(7 − 2) × 6 ÷ 3").value == 10


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(seed=st.integers(0, 2**63), count=st.integers(2, 6), high=st.integers(9, 100))
def test_every_target_can_be_reached_by_what_is_known_to_reach_it(seed: int, count: int, high: int):
    environment = Countdown(count=count, high=high)
    observation = environment.reset(seed, 0)

    step = environment.step(environment.solve())

    assert (step.reward, step.done, step.truncated, step.metrics) == (1.0, True, False, {"success": 1.0})
    assert observation.text.endswith(f"target {compute(observation.reference).value}")
    assert 10 <= environment._target <= 100


def answers(environment: Countdown, *actions: str) -> list[Step]:
    return [environment.step(action) for action in actions]


def test_the_first_valid_miss_pays_a_tenth_and_the_target_the_rest():
    low, high, right = answers(countdown([3, 4, 5], 35), "3 + 4", "3 * 4 * 5", "I think\n(3 + 4) * 5 = 35")

    assert (low.text, low.reward) == ("too low", 0.1)
    assert (high.text, high.reward) == ("too high", 0.0)
    assert (right.text, right.reward, right.done) == ("", 0.9, True)


@pytest.mark.parametrize("action", ["5 * 7", "5 + 5 * 5", "35", "3 + 4 + 5 + 3"])
def test_a_number_that_is_not_given_so_often_makes_an_answer_invalid(action: str):
    (step,) = answers(countdown([3, 4, 5], 35), action)

    assert (step.text, step.reward, step.done) == ("uses what is not given", 0.0, False)


def call(name: str, expression: object, tool_call_id: str = "1") -> ToolCall:
    return ToolCall(tool_call_id, name, {"expression": expression})


def test_the_calculator_computes_and_is_no_answer():
    environment = countdown([3, 4, 5], 35, tools=True)

    step = environment.step(Action("", [call("calculate", "7/2"), call("calculate", "x", "2"), call("sing", "x", "3")]))

    told = [(result.tool_call_id, result.name, result.text) for result in step.tool_results]
    assert told == [("1", "calculate", "7/2"), ("2", "calculate", "not an expression"), ("3", "sing", "no such tool")]
    assert (step.text, step.reward, step.done) == ("", 0.0, False)


def test_the_answer_tool_answers_once_a_turn():
    environment = countdown([3, 4, 5], 35, tools=True)

    missed = environment.step(Action("", [call("answer", "3 + 4"), call("answer", "(3 + 4) * 5", "2")]))
    reached = environment.step(Action("", [call("answer", "(3 + 4) * 5")]))

    assert [result.text for result in missed.tool_results] == ["too low", "one answer a turn"]
    assert (missed.reward, missed.done) == (0.1, False)
    assert (reached.reward, reached.done, reached.tool_results[0].text) == (0.9, True, "right")


def test_tools_are_shown_and_obeyed_only_where_they_are_asked_for():
    shown = [tool["function"]["name"] for tool in Countdown(tools=True).reset(0, 0).tools]
    plain = countdown([3, 4, 5], 35)

    step = plain.step(Action("3 + 4", [call("answer", "(3 + 4) * 5")]))

    assert shown == ["calculate", "answer"]
    assert Countdown().reset(0, 0).tools == ()
    assert step.text == "too low"


@pytest.mark.parametrize("arguments", [{}, {"expression": None}, {"expression": [1]}, {"expression": 10**50}, {"x": 1}])
def test_arguments_that_are_not_what_they_should_be_are_answered(arguments: dict[str, object]):
    environment = countdown([3, 4, 5], 35, tools=True)

    step = environment.step(Action("", [ToolCall("1", "answer", arguments), ToolCall("2", "calculate", arguments)]))

    assert [result.text for result in step.tool_results] == ["not an expression"] * 2


def test_a_hash_tells_tries_apart_and_not_their_order():
    first, second, third = (countdown([3, 4, 5], 35) for _ in range(3))

    hashes = [
        answers(first, "3 + 4", "5")[-1].state_hash,
        answers(second, "5", "4 + 3")[-1].state_hash,
        answers(third, "5", "nonsense")[-1].state_hash,
    ]

    assert hashes[0] == hashes[1] != hashes[2]


def test_random_actions_are_valid_answers():
    environment = Countdown(turns=100)
    environment.reset(3, 0)

    told = {environment.step(action).text for action in random.Random(0).sample(environment.actions(), 20)}

    assert told <= {"too low", "too high", ""}
