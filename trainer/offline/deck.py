"""Which records each step gets: a pure function of the seed and the step, so that a resumed run goes on exactly.

An epoch has each data set's records as often as its weight says. Where that is no whole number, the records that come
once more are others in each epoch until all have.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rollfarm.records import order

Numbers = NDArray[np.int64]


class Deck:
    """The records of several data sets, numbered through: those of the first, then those of the second, and so on."""

    def __init__(self, counts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._counts = counts
        self._draws = [max(1, round(count * weight)) for count, weight in zip(counts, weights, strict=True)]
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = lru_cache(2)(self._make_epoch)

    @property
    def epoch_size(self) -> int:
        """Records of one epoch, each as often as it comes."""
        return sum(self._draws)

    def steps(self, epochs: int, batch_size: int) -> int:
        """Steps that so many epochs take; the last one may reach into the next epoch."""
        return -(-epochs * self.epoch_size // batch_size)

    def batch(self, step: int, batch_size: int) -> list[int]:
        """The numbers of the records of a step, from 0. Batches reach over the ends of epochs: none is ever smaller, so
        that a run that is given more epochs goes on with the very next record."""
        places = (divmod(place, self.epoch_size) for place in range(step * batch_size, (step + 1) * batch_size))
        return [int(self._epoch(epoch)[place]) for epoch, place in places]

    def _make_epoch(self, epoch: int) -> Numbers:
        starts = np.cumsum([0, *self._counts])
        parts = [
            start + self._drawn(count, draws, epoch)
            for start, count, draws in zip(starts, self._counts, self._draws, strict=False)
        ]
        numbers = np.concatenate(parts)
        # Deals have the keys from 0, and what is held out has -1: one order twice would be its own square.
        return numbers[np.array(order(len(numbers), self._seed, -2 - epoch))] if self._shuffle else numbers

    def _drawn(self, count: int, draws: int, epoch: int) -> Numbers:
        """What an epoch has of one data set: the next `draws` of its records, dealt anew whenever all had a turn."""
        places = np.arange(epoch * draws, (epoch + 1) * draws, dtype=np.int64)
        if not self._shuffle:
            return places % count
        deals = range(int(places[0] // count), int(places[-1] // count) + 1)
        dealt = np.concatenate([np.array(order(count, self._seed, deal), np.int64) for deal in deals])
        return dealt[places - deals[0] * count]
