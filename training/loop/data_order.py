"""Which examples a step trains: a permutation for each epoch, from the seed alone, so there is nothing to resume."""

import math
from functools import lru_cache

import numpy as np

_USUAL_STEPS, _MOST_EPOCHS = 100, 20


@lru_cache(maxsize=2)
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    # Not `permutation`, whose algorithm numpy may change: argsort of raw bits is the same in every release.
    bits = np.random.PCG64([seed, epoch]).random_raw(num_examples)
    return np.argsort(bits, kind="stable")


class DataOrder:
    """Every example once in an epoch; the last step of an epoch has what is left over."""

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self._num_examples, self._batch_size, self._seed = num_examples, batch_size, seed
        self.steps_per_epoch = math.ceil(num_examples / batch_size)

    def at(self, step: int) -> list[int]:
        """Numbers of the examples of this step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _permutation(self._num_examples, self._seed, epoch)
        return order[place * self._batch_size : (place + 1) * self._batch_size].tolist()

    def num_steps(self, num_epochs: float | None) -> int:
        """Steps of so many epochs, rounded up; None: of as many as 100 steps take, from 1 to 20."""
        if num_epochs is None:
            num_epochs = min(max(math.ceil(_USUAL_STEPS / self.steps_per_epoch), 1), _MOST_EPOCHS)
        return math.ceil(num_epochs * self.steps_per_epoch)
