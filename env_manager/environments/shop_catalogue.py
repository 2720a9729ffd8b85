"""What the shop sells: made up from a seed, of kinds, features and options that are listed here. Pure."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Category:
    """What is alike."""

    kinds: tuple[str, ...]
    features: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    """By name, the values that one of them is chosen from."""

    prices: tuple[int, int]
    """The lowest and the highest, in dollars."""


COLORS = ("black", "white", "red", "blue", "green", "grey", "brown", "pink")

CATEGORIES: dict[str, Category] = {
    "shoes": Category(
        ("running shoes", "hiking boots", "sandals", "slippers", "sneakers"),
        ("waterproof", "lightweight", "breathable", "non slip", "memory foam", "wide fit", "vegan", "quick drying"),
        {"color": COLORS, "size": ("6", "7", "8", "9", "10", "11", "12")},
        (15, 120),
    ),
    "clothing": Category(
        ("shirt", "rain jacket", "sweater", "jeans", "winter coat", "shorts"),
        ("cotton", "wool", "machine washable", "long sleeve", "slim fit", "wrinkle free", "hooded", "stretchy"),
        {"color": COLORS, "size": ("small", "medium", "large", "extra large")},
        (10, 150),
    ),
    "kitchen": Category(
        ("frying pan", "kettle", "coffee grinder", "knife set", "lunch box"),
        ("stainless steel", "dishwasher safe", "non stick", "compact", "cordless", "heat resistant", "leak proof"),
        {"color": COLORS, "pack": ("single", "pack of 2", "pack of 4")},
        (8, 90),
    ),
    "electronics": Category(
        ("headphones", "phone charger", "bluetooth speaker", "keyboard", "webcam"),
        ("wireless", "noise cancelling", "fast charging", "portable", "long lasting", "water resistant", "foldable"),
        {"color": COLORS, "warranty": ("1 year", "2 years", "3 years")},
        (12, 200),
    ),
    "beauty": Category(
        ("shampoo", "face cream", "hand soap", "sunscreen", "lip balm"),
        ("cruelty free", "fragrance free", "for dry skin", "organic", "alcohol free", "anti aging", "natural"),
        {"scent": ("lavender", "citrus", "mint", "vanilla", "coconut"), "pack": ("single", "pack of 2", "pack of 6")},
        (4, 40),
    ),
    "furniture": Category(
        ("desk lamp", "bookshelf", "office chair", "coffee table", "storage bench"),
        ("solid wood", "easy assembly", "adjustable", "space saving", "scratch resistant", "modern", "heavy duty"),
        {"color": COLORS, "height": ("low", "middle", "tall")},
        (20, 300),
    ),
}

BRANDS = (
    "acorn",
    "bluepeak",
    "corvo",
    "dalia",
    "elmwood",
    "fjord",
    "gramo",
    "halden",
    "inka",
    "juno",
    "kestrel",
    "lumo",
)

OPTION_VALUES = 4
"""Most values of an option that one item comes in."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something to buy."""

    item_id: str
    title: str
    category: str
    kind: str
    features: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int
    """Dollars."""

    @property
    def words(self) -> frozenset[str]:
        """What a search finds it by."""
        return frozenset(" ".join((self.title, self.category, *self.features)).split())


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be bought."""

    category: str
    kind: str
    features: tuple[str, ...]
    options: Mapping[str, str]
    most: int
    """Dollars."""

    @property
    def text(self) -> str:
        options = " and ".join(f"{name} {value}" for name, value in self.options.items())
        return f"i want {' '.join(self.features)} {self.kind} with {options} for at most {self.most} dollars"


def make_catalogue(chance: random.Random, count: int) -> list[Item]:
    return [_make_item(chance, f"b{number:03}") for number in range(count)]


def make_wish(chance: random.Random, item: Item) -> Wish:
    """A wish that `item` fulfils."""
    features = tuple(chance.sample(item.features, chance.randint(1, 2)))
    options = {name: chance.choice(values) for name, values in item.options.items()}
    return Wish(item.category, item.kind, features, options, most=item.price + 10 - item.price % 10)


def find(items: Sequence[Item], query: str) -> list[Item]:
    """Those that have a word of the query, the ones that have most of them first."""
    wanted = set(query.split())
    found = [(-len(wanted & item.words), item.item_id, item) for item in items]
    return [item for lack, _, item in sorted(found, key=lambda entry: entry[:2]) if lack]


def score(wish: Wish, item: Item, chosen: Mapping[str, str]) -> float:
    """WebShop's reward (arXiv 2207.01206): the share of features, options and the price that match, times the type's.

    The type is worth 1 for the kind that was wished for, 0.5 for another kind of its category, and else 0.
    """
    kind = 1.0 if item.kind == wish.kind else 0.5 if item.category == wish.category else 0.0
    features = len(set(wish.features) & set(item.features))
    options = sum(chosen.get(name) == value for name, value in wish.options.items())
    matched = features + options + (item.price <= wish.most)
    return kind * matched / (len(wish.features) + len(wish.options) + 1)


def catalogue_words(count: int) -> Iterator[str]:
    """Every word of a catalogue of `count` items and of what may be wished for."""
    yield from BRANDS
    yield from (f"b{number:03}" for number in range(count))
    for name, category in CATEGORIES.items():
        yield from " ".join((name, *category.kinds, *category.features, *category.options)).split()
        for values in category.options.values():
            yield from " ".join(values).split()
        low, high = category.prices
        yield from map(str, range(low, high + 11))
    yield from ("i", "want", "with", "and", "for", "at", "most", "dollars")


def _make_item(chance: random.Random, item_id: str) -> Item:
    name = chance.choice(list(CATEGORIES))
    category = CATEGORIES[name]
    kind = chance.choice(category.kinds)
    features = tuple(chance.sample(category.features, 4))
    options = {
        option: tuple(sorted(chance.sample(values, min(OPTION_VALUES, len(values))), key=values.index))
        for option, values in category.options.items()
    }
    title = f"{chance.choice(BRANDS)} {' '.join(features[:2])} {kind}"
    return Item(item_id, title, name, kind, features, options, price=chance.randint(*category.prices))
