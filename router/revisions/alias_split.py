"""Which revision of a split alias answers a request: the same for the same key, at every router and after restarts.

A hash of alias and key is a point from 0 to 99; the newer revision answers those below its percent. So a share that
grows adds keys and moves no other. The alias is hashed, too: else the same keys would get the news of every adapter.

    percent of the newer     0    5        20                                       100
    5                        |new |older                                              |
    20                       |new          |older                                     |
"""

from hashlib import blake2b

from adapters.catalog.records import AliasSplit

_NUM_POINTS = 100  # shares are whole percents


def gets_newer(split: AliasSplit, key: str) -> bool:
    """Whether the newer of the two revisions answers a key.

    `key`: who or what must stay at one revision (`ValidatedRequest.sticky_key`), or anything random.
    """
    digest = blake2b(f"{split.alias}\0{key}".encode(), digest_size=8).digest()  # an alias has no NUL
    return int.from_bytes(digest) % _NUM_POINTS < split.target.percent
