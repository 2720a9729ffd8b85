import random

import hypothesis
import pytest
from hypothesis import strategies as st

from env_manager.environments.shop import Shop
from env_manager.environments.shop_catalogue import Item, Wish, find, make_catalogue, make_wish, score
from rollfarm.env import Action, Step, ToolCall

BOOTS = Item("b001", "acorn wide fit vegan hiking boots", "shoes", "hiking boots", ("wide fit", "vegan"),
             {"color": ("red", "blue"), "size": ("8", "9")}, 50)  # fmt: skip
WISH = Wish("shoes", "hiking boots", ("vegan", "waterproof"), {"color": "red", "size": "9"}, most=50)


@pytest.mark.parametrize(
    ("changed", "chosen", "reward"),
    [
        # One of two features, two of two options, and the price: 4 of 5.
        ({}, {"color": "red", "size": "9"}, 4 / 5),
        ({}, {"color": "blue"}, 2 / 5),
        ({"features": ("waterproof", "vegan")}, {"color": "red", "size": "9"}, 1.0),
        ({"price": 51}, {"color": "red", "size": "9"}, 3 / 5),
        ({"kind": "sandals"}, {"color": "red", "size": "9"}, 0.5 * 4 / 5),
        ({"kind": "shirt", "category": "clothing"}, {"color": "red", "size": "9"}, 0.0),
    ],
)
def test_the_score_is_the_share_that_matches_times_what_the_type_is_worth(changed, chosen, reward: float):
    item = Item(**{name: changed.get(name, getattr(BOOTS, name)) for name in Item.__dataclass_fields__})

    assert score(WISH, item, chosen) == pytest.approx(reward)


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(seed=st.integers(0, 2**63), count=st.integers(10, 120))
def test_every_wish_can_be_fulfilled_and_found(seed: int, count: int):
    chance = random.Random(seed)
    items = make_catalogue(chance, count)
    item = chance.choice(items)
    wish = make_wish(chance, item)

    assert score(wish, item, wish.options) == 1.0
    assert item in find(items, wish.text)
    assert all(wish.options[name] in values for name, values in item.options.items())
    assert len({item.item_id for item in items}) == count


def test_a_search_shows_what_has_most_of_the_words_first():
    others = [
        Item(f"b{n}", title, "shoes", "sandals", (), {}, 1) for n, title in enumerate(["red", "vegan hat", "tin"])
    ]

    assert [item.title for item in find([*others, BOOTS], "vegan boots red")] == [BOOTS.title, "red", "vegan hat"]


def shop(**settings) -> Shop:
    environment = Shop(**settings)
    environment.reset(5, 0)
    return environment


def steps(environment: Shop, *actions: str) -> list[Step]:
    return [environment.step(action) for action in actions]


def test_one_searches_opens_chooses_and_buys():
    environment = shop()
    wish, target = environment._wish, environment._target

    results, item, *_ = steps(environment, f"search[{target.title}]", f"click[{target.item_id}]")
    *_, chosen = steps(environment, *(f"Good.\nclick[ {value} ]" for value in wish.options.values()))
    bought = environment.step("click[buy now]")

    assert f"[ {target.item_id} ] {target.title} {target.price} dollars" in results.text
    assert item.text.splitlines()[:3] == [wish.text, target.title, f"price {target.price} dollars"]
    assert all(f"chosen {value}" in chosen.text for value in wish.options.values())
    assert (bought.reward, bought.done, bought.metrics) == (1.0, True, {"success": 1.0, "bought": 1.0})


def test_pages_are_turned_both_ways_and_the_search_is_left():
    first, second, back, start = steps(
        shop(), "search[shoes clothing kitchen]", "click[next]", "click[previous]", "click[back to search]"
    )

    assert "page 1 of" in first.text
    assert "page 2 of" in second.text
    assert back.text == first.text
    assert back.state_hash == first.state_hash != second.state_hash
    assert start.text.endswith("[ search ]")


def test_features_stand_on_the_item_s_page_once_they_are_asked_for():
    environment = shop()
    target = environment._target

    *_, before, after = steps(environment, f"search[{target.title}]", f"click[{target.item_id}]", "click[features]")

    assert "[ features ]" in before.text
    assert f"features {' and '.join(target.features)}" in after.text


@pytest.mark.parametrize(
    "action", ["", "buy now", "click[buy now]", "click[b000]", "search[zzz]", "search[]", "click[[", "click[" * 2**17]
)
def test_what_does_not_work_shows_the_page_again(action: str):
    environment = shop()
    wish = environment._wish.text

    step = environment.step(action)

    assert step.text.splitlines()[0] == wish
    assert step.text.splitlines()[-1] == "[ search ]"
    assert (step.reward, step.done) == (0.0, False)


def test_an_option_can_be_changed_before_buying():
    environment = shop()
    target, wish = environment._target, environment._wish
    option, values = next(iter(target.options.items()))
    wrong = next(value for value in values if value != wish.options[option])

    *_, bought = steps(
        environment,
        f"search[{target.title}]",
        f"click[{target.item_id}]",
        f"click[{wrong}]",
        *(f"click[{value}]" for value in wish.options.values()),
        "click[buy now]",
    )

    assert bought.reward == 1.0


def test_tools_do_what_the_text_does():
    environment = shop(tools=True)
    target = environment._target
    calls = [
        ToolCall("1", "search", {"query": target.title}),
        ToolCall("2", "click", {"element": target.item_id.upper()}),
        ToolCall("3", "click", {"element": 7}),
        ToolCall("4", "fly", {}),
        ToolCall("5", "click", {"element": "buy now"}),
        ToolCall("6", "click", {"element": "buy now"}),
    ]

    first = environment.step(Action("", calls[:1]))
    bought = environment.step(Action("", calls[1:]))

    assert [tool["function"]["name"] for tool in shop(tools=True)._tools] == ["search", "click"]
    assert first.tool_results[0].tool_call_id == "1"
    assert target.title in first.tool_results[0].text
    assert first.text == ""
    assert [result.text.splitlines()[-1] for result in bought.tool_results[3:]] == ["bought", "bought"]
    assert bought.done
    assert 0 < bought.reward < 1


def test_without_tools_calls_are_not_obeyed():
    step = shop().step(Action("", [ToolCall("1", "search", {"query": "shoes"})]))

    assert not step.tool_results
    assert step.text.endswith("[ search ]")
