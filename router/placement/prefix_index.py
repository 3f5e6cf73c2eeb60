"""An estimate of which prompt prefixes each worker's engine has in its prefix cache."""

from collections import OrderedDict
from collections.abc import Set

from router.placement.request import PlacementRequest

_MAX_BLOCKS = 20_000  # of one worker: about 2 MB
_MIN_BLOCKS = 64
_MAX_FIRST_BLOCKS = 100_000  # of all workers
_SHRINK, _GROW = 0.9, 1.02  # of a worker's bound, after an answer
_NOBODY: Set[str] = frozenset()


class _Worker:
    """One engine's blocks, the least recently read first."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.blocks: OrderedDict[int, bool] = OrderedDict()  # True: it has answered for a prompt with this block
        self.max_blocks = float(_MAX_BLOCKS)


class PrefixIndex:
    """Learns from placements which prompts engines have read, and from answers how much of them they keep.

    Like the engines, the index evicts in LRU order. Answers report how many tokens the engine found in its cache; if
    they are fewer than expected, the index shrinks its estimate of that cache's size.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._by_first_block: OrderedDict[int, set[str]] = OrderedDict()

    def add(self, request: PlacementRequest, worker: str, incarnation: str) -> None:
        """Note that the worker's engine reads this prompt."""
        if not request.size.blocks:
            return
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            self.forget(worker)
            known = self._workers[worker] = _Worker(incarnation)
        keys = _keys(request)
        for key in keys:
            known.blocks.setdefault(key, False)
            known.blocks.move_to_end(key)
        self._by_first_block.setdefault(keys[0], set()).add(worker)
        self._by_first_block.move_to_end(keys[0])
        if len(self._by_first_block) > _MAX_FIRST_BLOCKS:
            self._by_first_block.popitem(last=False)
        while len(known.blocks) > known.max_blocks:
            self._no_longer_at(worker, known.blocks.popitem(last=False)[0])

    def was_read(self, request: PlacementRequest, worker: str, incarnation: str) -> None:
        """The worker's engine has read this prompt."""
        known = self._workers.get(worker)
        if known is not None and known.incarnation == incarnation:
            for key in _keys(request):
                if key in known.blocks:
                    known.blocks[key] = True

    def observe(self, worker: str, *, expected_tokens: float, cached_tokens: int) -> None:
        """Learn how many tokens of a prompt the worker's engine found in its cache."""
        known = self._workers.get(worker)
        if known is not None and expected_tokens > 0:
            if cached_tokens < expected_tokens / 2:
                known.max_blocks = max(_MIN_BLOCKS, _SHRINK * min(known.max_blocks, len(known.blocks)))
            else:
                known.max_blocks = min(_MAX_BLOCKS, _GROW * known.max_blocks)

    def cached_tokens(
        self, request: PlacementRequest, worker: str, incarnation: str, *, is_sure: bool = False
    ) -> float:
        """How many of the prompt's first tokens are probably in the worker's prefix cache once its queue is read.

        `is_sure`: without what the engine may still be reading, since it finds none of that in its cache.
        """
        if worker not in self.workers(request):
            return 0.0
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return 0.0
        num_blocks = 0
        for block in request.size.blocks:
            was_read = known.blocks.get(hash((request.namespace, request.revision_id, block)))
            if was_read is None or (is_sure and not was_read):
                break
            num_blocks += 1
        return min(num_blocks * request.size.tokens_per_block, request.size.prompt_tokens)

    def workers(self, request: PlacementRequest) -> Set[str]:
        """The workers that probably have the prompt's first block."""
        if not request.size.blocks:
            return _NOBODY
        return self._by_first_block.get(hash((request.namespace, request.revision_id, request.size.blocks[0])), _NOBODY)

    def forget(self, worker: str) -> None:
        """Forget a worker that has left, or whose engine was replaced."""
        known = self._workers.pop(worker, None)
        for key in known.blocks if known is not None else ():
            self._no_longer_at(worker, key)

    def _no_longer_at(self, worker: str, key: int) -> None:
        workers = self._by_first_block.get(key)
        if workers is not None:
            workers.discard(worker)
            if not workers:
                del self._by_first_block[key]


def _keys(request: PlacementRequest) -> list[int]:
    """Hashes that are equal only within one namespace and revision, like the engines' prefix-cache keys."""
    namespace, revision_id = request.namespace, request.revision_id
    return [hash((namespace, revision_id, block)) for block in request.size.blocks]
