"""Tasks that say nearly the same: found by MinHash (the `datasketch` library), decided by the exact similarity.

Similarity is the Jaccard index of the sets of character trigrams, upper and lower case and spaces made alike; which
similarity is meant is our own choice, the paper names the bound alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from orchard.data.curation.features import Features
from orchard.data.curation.selectors import Drops, Selector
from orchard.data.errors import DataError, MissingExtraError

THRESHOLD: Final = 0.95
_PERMUTATIONS: Final = 128
_CANDIDATE: Final = 0.75
"""How much lower candidates are looked for, so that MinHash's error loses none."""
_SPACES: Final = re.compile(r"\s+")


def near_duplicates(above: float = THRESHOLD, of: str = "all") -> Selector:
    """Of tasks that are more alike than a bound, the first in the source stays."""
    if not 0 < above < 1:
        raise DataError(f"above is {above}", fix="give a similarity between 0 and 1")

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        del seed
        return _drops(pool, above)

    return Selector("near_duplicates", {"above": above, "of": of}, choose, of, intents=True)


def trigrams(text: str) -> frozenset[str]:
    """The set of character trigrams of a text; a shorter text is its own."""
    plain = _SPACES.sub(" ", text).strip().casefold()
    return frozenset(plain[start : start + 3] for start in range(max(1, len(plain) - 2)))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """The Jaccard index of two sets."""
    return len(one & other) / len(one | other) if one | other else 1.0


def _drops(pool: Sequence[Features], above: float) -> Drops:
    minhash, index = _library()(above * _CANDIDATE)
    kept: dict[str, frozenset[str]] = {}
    same: dict[frozenset[str], str] = {}
    drops: Drops = {}
    for one in pool:
        grams = trigrams(one.intent)
        if (twin := same.get(grams)) is not None:
            drops[one.id] = f"its task is that of {twin}"
            continue
        sketch = minhash(grams)
        alike = [(similarity(grams, kept[name]), name) for name in sorted(index.query(sketch))]
        best = max(alike, default=(0.0, ""), key=lambda pair: pair[0])
        if best[0] > above:
            drops[one.id] = f"its task is nearly that of {best[1]}"
            continue
        same[grams] = one.id
        kept[one.id] = grams
        index.insert(one.id, sketch)
    return drops


def _library() -> Any:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise MissingExtraError("near_duplicates", "datasketch", "data") from None

    def made(threshold: float) -> tuple[Any, Any]:
        def minhash(grams: frozenset[str]) -> Any:
            sketch = MinHash(num_perm=_PERMUTATIONS, seed=1)
            sketch.update_batch([gram.encode("utf-8", "surrogatepass") for gram in sorted(grams)])
            return sketch

        return minhash, MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)

    return made
