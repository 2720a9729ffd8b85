"""The records of a run: read once as it starts, tokenised as their turn comes."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from rollfarm.records import parts, read_records
from trainer.checkpoints import Json
from trainer.offline.config import OfflineConfig
from trainer.offline.deck import Deck
from trainer.offline.pipelines import Read, Rendered
from trainer.rows import Row
from trainer.texts import Item, Renderer

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on, and what is only measured."""

    items: Sequence[Item]
    """Numbered as in the deck."""

    held_out: Sequence[Item]
    deck: Deck

    identity: dict[str, Json]
    """What may not change while a run goes on: its steps would have other records."""


def load_data(offline: OfflineConfig, read: Read, *, seed: int) -> Data:
    """Every record of every data set, in order. Raises ConfigError for one that is wrong, and names it."""
    items: list[Item] = []
    held_out: list[Item] = []
    counts: list[int] = []
    for each in offline.records:
        source = each.to_source()
        records = read_records(source)
        trained, held = parts(len(records), offline.validation_share, seed)
        items += [read(records[number], source, number) for number in trained]
        held_out += [read(records[number], source, number) for number in held]
        counts.append(len(trained))
    weights = [each.weight for each in offline.records]
    identity: dict[str, Json] = {
        "pipeline": offline.pipeline,
        "records": [each.source for each in offline.records],
        "counts": counts,
        "weights": weights,
        "batch_size": offline.batch_size,
        "shuffle": offline.shuffle,
        "seed": seed,
    }
    return Data(items, held_out, Deck(counts, weights, seed=seed, shuffle=offline.shuffle), identity)


class Sieve:
    """Items to rows, without those that are too long."""

    def __init__(self, renderer: Renderer, max_tokens: int) -> None:
        """Longest row; 0 is the model's context."""
        self._renderer = renderer
        self._max_tokens = max_tokens or renderer.context_tokens
        self._has_told = False

    def rendered(self, items: Sequence[Item]) -> Rendered:
        """Of each item that fits the rows of its texts. Raises ConfigError where the template cannot show one."""
        kept: list[tuple[list[Row], ...]] = []
        for item in items:
            texts = self._renderer.rows(item)
            longest = max(len(row) for rows in texts for row in rows)
            if longest <= self._max_tokens:
                kept.append(texts)
            elif not self._has_told:
                self._has_told = True
                log.warning(
                    "records are left out that are too long; left_out counts them",
                    first=item.where,
                    tokens=longest,
                    max_tokens=self._max_tokens,
                )
        return kept
