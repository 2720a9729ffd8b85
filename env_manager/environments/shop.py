"""Buy what is wished for: search, open an item, choose its options, buy. After WebShop (arXiv 2207.01206).

The policy answers `search[ words ]` on the first page and `click[ what stands in brackets ]` on every page; of a longer
answer the last line counts. As tools, `search` and `click` do the same. What does not work shows the page again.

Buying pays the share of the wish that was fulfilled, and ends the episode; nothing else pays. See shop_catalogue.score.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from env_manager.environments.shop_catalogue import Item, catalogue_words, find, make_catalogue, make_wish, score
from env_manager.environments.solvable import Instant, digest, last_line
from env_manager.environments.toolbox import argument, calls_of, problem_of, tool
from rollfarm.env import Observation, Step, ToolCall, ToolResult

PER_PAGE = 5

BUY, FEATURES, NEXT, PREVIOUS, RESTART = "buy now", "features", "next", "previous", "back to search"

RULES = (
    "Buy what is wished for. On the first page answer search[ words ], and on every page click[ name ] with what the "
    "page shows in brackets. Choose every option before you buy."
)

TOOLS = (
    tool("search", "Search the shop; only on its first page.", query="Words that the item should have"),
    tool(
        "click", "Click what the page shows in brackets.", element="What stands in the brackets, for example: buy now"
    ),
)

_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]")


class Shop(Instant):
    """Multi-turn shopping in a catalogue of its own."""

    name = "shop"

    def __init__(
        self,
        *,
        items: Annotated[int, Field(ge=10, le=1000)] = 100,
        turns: Annotated[int, Field(ge=1)] = 15,
        tools: bool = False,
        rules: bool = True,
    ) -> None:
        """The shop has `items`. `tools` offers the actions as tools too. `rules` explains it in a system message."""
        self._count = items
        self._turns_left = turns
        self._tools = TOOLS if tools else ()
        self._rules = RULES if rules else ""
        self._query = ""
        self._found: list[Item] = []
        self._page = 0
        self._item: Item | None = None
        self._shows_features = False
        self._chosen: dict[str, str] = {}
        self._paid: float | None = None

    def words(self) -> Iterator[str]:
        yield from catalogue_words(self._count)
        yield from map(str, range(1, self._count // PER_PAGE + 2))
        yield from ("search", "search[", "click[", "[", "]", "page", "of", "price", "chosen", "nothing", "found")
        yield from " ".join((BUY, FEATURES, NEXT, PREVIOUS, RESTART, self._rules)).split()

    def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        self._seed = seed
        self._items = make_catalogue(chance, self._count)
        self._target = chance.choice(self._items)
        self._wish = make_wish(chance, self._target)
        return Observation(self._look(), system=self._rules, state_hash=self._state(), tools=self._tools)

    def step(self, action: str) -> Step:
        self._turns_left -= 1
        calls = calls_of(action) if self._tools else ()
        problem = problem_of(action) if self._tools else ""
        results = [self._call(call) for call in calls]
        if not calls and (match := _ACTION.search(last_line(action))):
            self._act(match[1], match[2])
        bought = self._paid is not None
        over = bought or self._turns_left == 0
        return Step(
            problem or ("" if over or calls else self._look()),
            reward=self._paid or 0.0,
            done=over,
            truncated=over and not bought,
            state_hash=self._state(),
            metrics={"success": float(self._paid == 1.0), "bought": float(bought)},
            tool_results=results,
        )

    def solve(self) -> str:
        if self._item is not None and self._item != self._target:
            return _click(PREVIOUS)
        if self._item is not None:
            missing = (value for name, value in self._wish.options.items() if self._chosen.get(name) != value)
            return _click(next(missing, BUY))
        if not self._found:
            return f"search[ {self._target.title} ]"
        if self._target in self._shown():
            return _click(self._target.item_id)
        return _click(NEXT if self._target in self._found[self._page * PER_PAGE :] else RESTART)

    def actions(self) -> list[str]:
        """A search for any one item where that is possible, and everything that can be clicked."""
        searches = [] if self._found or self._item else [f"search[ {item.title} ]" for item in self._items]
        return searches + [_click(name) for name in self._names()]

    def _call(self, call: ToolCall) -> ToolResult:
        self._act(call.name, argument(call, "query" if call.name == "search" else "element").lower())
        return ToolResult(call.tool_call_id, call.name, self._look() if self._paid is None else "bought")

    def _act(self, verb: str, what: str) -> None:
        name = " ".join(what.split())
        if self._paid is not None:
            return
        if verb == "search" and not self._found and self._item is None:
            self._found, self._page, self._query = find(self._items, name), 0, name
        elif verb == "click" and name in self._names():
            self._click(name)

    def _click(self, name: str) -> None:
        if name == RESTART:
            self._found, self._item, self._page, self._query = [], None, 0, ""
        elif self._item is not None:
            self._click_on_item(self._item, name)
        elif name == NEXT:
            self._page += 1
        elif name == PREVIOUS:
            self._page -= 1
        else:
            self._item = next(item for item in self._shown() if item.item_id == name)
            self._chosen, self._shows_features = {}, False

    def _click_on_item(self, item: Item, name: str) -> None:
        if name == BUY:
            self._paid = score(self._wish, item, self._chosen)
        elif name == FEATURES:
            self._shows_features = True
        elif name == PREVIOUS:
            self._item = None
        else:
            self._chosen |= {option: name for option, values in item.options.items() if name in values}

    def _names(self) -> list[str]:
        """What can be clicked."""
        if self._item is not None:
            values = [value for values in self._item.options.values() for value in values]
            return [*values, FEATURES, BUY, PREVIOUS, RESTART]
        if not self._found:
            return []
        names = [item.item_id for item in self._shown()]
        if self._page > 0:
            names.append(PREVIOUS)
        if (self._page + 1) * PER_PAGE < len(self._found):
            names.append(NEXT)
        return [*names, RESTART]

    def _shown(self) -> Sequence[Item]:
        return self._found[self._page * PER_PAGE : (self._page + 1) * PER_PAGE]

    def _look(self) -> str:
        return "\n".join((self._wish.text, *self._lines()))

    def _lines(self) -> Iterator[str]:
        if self._item is not None:
            yield from self._item_lines(self._item)
        elif self._found:
            yield f"page {self._page + 1} of {-(-len(self._found) // PER_PAGE)}"
            yield from (f"[ {item.item_id} ] {item.title} {item.price} dollars" for item in self._shown())
            yield " ".join(_button(name) for name in self._names() if name in (PREVIOUS, NEXT, RESTART))
        elif self._query:
            yield "nothing found"
            yield _button("search")
        else:
            yield _button("search")

    def _item_lines(self, item: Item) -> Iterator[str]:
        yield item.title
        yield f"price {item.price} dollars"
        for option, values in item.options.items():
            chosen = f" chosen {self._chosen[option]}" if option in self._chosen else ""
            yield f"{option} {' '.join(map(_button, values))}{chosen}"
        yield f"features {' and '.join(item.features)}" if self._shows_features else _button(FEATURES)
        yield " ".join(map(_button, (BUY, PREVIOUS, RESTART)))

    def _state(self) -> str:
        where = self._item.item_id if self._item else "", self._shows_features, sorted(self._chosen.items())
        return digest(self._seed, self._query, self._page, where, self._paid)


def _button(name: str) -> str:
    return f"[ {name} ]"


def _click(name: str) -> str:
    return f"click[ {name} ]"
