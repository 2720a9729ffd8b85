"""The records of a run: read once as it starts, tokenised as their turn comes."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from rollfarm.records import Record, load_records, parts
from trainer.checkpoints import Json
from trainer.config import TrainerRoot
from trainer.offline.config import OfflineConfig
from trainer.offline.deck import Deck
from trainer.offline.pipelines import Rendered, reader_of
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
    """What may not change while a run goes on: its steps would have other records, or another aim."""


def load_data(root: TrainerRoot, offline: OfflineConfig) -> Data:
    """Every record of every data set, in order. Raises ConfigError for one that is wrong, and names it."""
    read, seed = reader_of(offline), root.trainer.seed
    items: list[Item] = []
    held_out: list[Item] = []
    counts: list[int] = []
    digests: list[str] = []
    for each in offline.records:
        source = each.to_source()
        records = load_records(source)
        trained, held = parts(len(records), offline.validation_share, seed)
        items += [read(records[number], source, number) for number in trained]
        held_out += [read(records[number], source, number) for number in held]
        counts.append(len(trained))
        digests.append(_digest(records))
    weights = [each.weight for each in offline.records]
    identity = {**_aim(root, offline), "counts": counts, "digests": digests, "weights": weights}
    return Data(items, held_out, Deck(counts, weights, seed=seed, shuffle=offline.shuffle), identity)


def _aim(root: TrainerRoot, offline: OfflineConfig) -> dict[str, Json]:
    """Of the configuration, what says which records come when, and what is minimised. Null is what is not used."""
    is_dpo = offline.pipeline == "dpo"
    teacher = root.trainer.teacher
    return {
        "pipeline": offline.pipeline,
        "records": [[each.source, each.subset, each.split] for each in offline.records],
        "batch_size": offline.batch_size,
        "validation_share": offline.validation_share,
        "shuffle": offline.shuffle,
        "seed": root.trainer.seed,
        "beta": offline.beta if is_dpo else None,
        "reference": (root.trainer.kl.reference or root.model.path) if is_dpo else None,
        "teacher": teacher.path if teacher is not None else None,
    }


def _digest(records: Iterable[Record]) -> str:
    """Another one for other records, or for another order."""
    found = hashlib.sha256()
    for record in records:
        # Tables have values that JSON has not, such as times.
        found.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return found.hexdigest()[:16]


class Sieve:
    """Items to rows, without those that are too long."""

    def __init__(self, renderer: Renderer, max_tokens: int) -> None:
        """Longest row; 0 is the model's context."""
        self._renderer = renderer
        self._max_tokens = max_tokens or renderer.context_tokens
        self._has_told = False

    def check(self, data: Data) -> None:
        """Render everything once. Raises ConfigError for an item that the template cannot show, and names it."""
        log.info("records are rendered once, to find what is wrong", records=len(data.items) + len(data.held_out))
        for item in (*data.items, *data.held_out):
            self._renderer.rows(item)

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
