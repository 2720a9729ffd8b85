"""Environments whose tools are methods."""

import asyncio
from typing import Annotated, Any

import pytest
from pydantic import Field

from rollfarm.env import Action, Observation, Step, ToolCall, ToolResult
from rollfarm.errors import EnvironmentFailed
from rollfarm.playing import Play
from rollfarm.tools import ToolEnvironment, tool


class Shop(ToolEnvironment):
    def reset(self, seed: int, index: int) -> Observation:
        self.bought: list[str] = []
        return Observation("Buy a hat.", tools=self.tools)

    @tool
    def price(self, item: str, count: Annotated[int, Field(ge=1, description="how many")] = 1) -> str:
        """Look up a price."""
        return f"{item}: {3 * count}"

    @tool
    def buy(self, item: str) -> Step:
        """Buy an item."""
        self.bought.append(item)
        return Step(f"bought {item}", reward=0.5, done=item == "hat", metrics={"bought": len(self.bought)})

    @tool
    def broken(self) -> Any:
        """Return nothing."""

    def answer(self, text: str) -> Step:
        return Step(f"you said {text}", truncated=True)


class AsyncShop(Shop):
    @tool
    async def price(self, item: str, count: int = 1) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        return super().price(item, count)


def calls(*made: tuple[str, dict[str, Any]], problem: str = "") -> Action:
    return Action("", [ToolCall(f"c{place}", name, given) for place, (name, given) in enumerate(made)], problem)


async def played(action: Action, kind: type[Shop] = Shop) -> Step:
    play = Play(kind, {})
    await play.reset(0, 0)
    try:
        return await play.step(action)
    finally:
        await play.close()


def test_a_method_is_described_by_its_docstring_and_its_hints():
    described = {described["function"]["name"]: described for described in Shop.tools}

    assert sorted(described) == ["broken", "buy", "price"]
    assert described["price"] == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up a price.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer", "minimum": 1, "default": 1, "description": "how many"},
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize("kind", [Shop, AsyncShop])
async def test_the_calls_of_an_action_are_made_in_order_until_one_ends_the_episode(kind: type[Shop]):
    step = await played(
        calls(
            ("price", {"item": "hat", "count": "2"}), ("buy", {"item": "cap"}), ("buy", {"item": "hat"}), ("buy", {})
        ),
        kind,
    )

    assert step.tool_results == [
        ToolResult("c0", "price", "hat: 6"),
        ToolResult("c1", "buy", "bought cap"),
        ToolResult("c2", "buy", "bought hat"),
    ]
    assert (step.text, step.reward, step.done, step.metrics) == ("", 1.0, True, {"bought": 2})


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (("prize", {"item": "hat"}), "Error: unknown tool 'prize'. Did you mean 'price'? Known: broken, buy, price."),
        (("price", {}), "Error: wrong arguments of price: item: Field required."),
        (("price", {"item": "hat", "count": 0}), "Error: wrong arguments of price: count: Input should be greater"),
        (("price", {"item": "hat", "size": 3}), "Error: wrong arguments of price: size: Extra inputs are not"),
        (("reset", {"seed": 1, "index": 1}), "Error: unknown tool 'reset'"),
    ],
)
async def test_a_call_that_makes_no_sense_is_answered_in_words(made: tuple[str, dict[str, Any]], told: str):
    step = await played(calls(made))

    assert step.tool_results[0].text.startswith(told)
    assert (step.reward, step.done) == (0.0, False)


async def test_a_call_that_could_not_be_read_is_answered_with_the_problem():
    alone = await played(calls(problem="no closing tag"))
    beside = await played(calls(("price", {"item": "hat"}), problem="no closing tag"))

    assert (alone.text, alone.done) == ("Error: no closing tag", False)
    assert (beside.text, beside.tool_results) == ("Error: no closing tag", [ToolResult("c0", "price", "hat: 3")])


async def test_an_action_without_a_call_is_the_answer():
    step = await played(Action("three"))

    assert (step.text, step.truncated) == ("you said three", True)


async def test_a_tool_that_returns_neither_a_text_nor_a_step_fails_the_episode():
    with pytest.raises(EnvironmentFailed, match="tool broken returned NoneType, not a str or a Step"):
        await played(calls(("broken", {})))


def test_a_tool_whose_parameters_have_no_names_is_refused_with_its_class():
    with pytest.raises(TypeError, match="Tool many: a policy cannot give"):

        class Many(ToolEnvironment):
            @tool
            def many(self, *items: str) -> str:
                return ""
