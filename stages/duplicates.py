"""Near-duplicates: texts that share most of their runs of three words, found by MinHash and banding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rensa import RMinHash, RMinHashLSH

SHINGLE_WORDS = 3
PERMUTATIONS = 128
ROWS_OF_A_BAND = (16, 8, 4, 2)
MARGIN = 0.05  # so far below the wanted similarity lies the middle of the bands' curve
SEED = 1
FIRST_ROWS = 1024


class NearDuplicates:
    """Texts seen so far, by sketch; about 1 kB each.

    Similarity is the Jaccard index of two texts' sets of three-word runs, estimated from MinHash signatures
    (Broder 1997, On the resemblance and containment of documents); its standard error is at most 0.045.

    Args:
        share: similarity from which on two texts are near-duplicates.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._bands = RMinHashLSH(threshold=share, num_perm=PERMUTATIONS, num_bands=bands(share))
        self._digests_np = np.zeros((FIRST_ROWS, PERMUTATIONS), np.uint32)
        self._count = 0

    def like(self, sketch: Any) -> int | None:
        """Return the number of the added text that is most similar, if it is a near-duplicate."""
        candidates = sorted(self._bands.query(sketch))
        if not candidates:
            return None
        equal_n = (self._digests_np[candidates] == np.array(sketch.digest(), np.uint32)).mean(axis=1)
        best = int(equal_n.argmax())
        return int(candidates[best]) if equal_n[best] >= self._share else None

    def add(self, sketch: Any) -> None:
        """Remember a text."""
        if self._count == len(self._digests_np):
            self._digests_np = np.concatenate([self._digests_np, np.zeros_like(self._digests_np)])
        self._digests_np[self._count] = sketch.digest()
        self._bands.insert(self._count, sketch)
        self._count += 1


def bands(share: float) -> int:
    """Return into how many bands to cut a signature: b bands of r rows have their middle at (1/b)^(1/r)."""
    for rows in ROWS_OF_A_BAND:
        count = PERMUTATIONS // rows
        if (1 / count) ** (1 / rows) <= share - MARGIN:
            return count
    return PERMUTATIONS


def sketches(texts: Sequence[Sequence[str]]) -> list[Any]:
    """Return the MinHash signature of each text, given as its words."""
    return sketched([shingles(words) for words in texts])


def sketched(sets: Sequence[set[str]]) -> list[Any]:
    """Return the MinHash signature of each text, given as its shingles."""
    return list(RMinHash.from_token_sets(list(sets), PERMUTATIONS, SEED))


def shingles(words: Sequence[str]) -> set[str]:
    """Return the runs of three words of a text; all of it if it is shorter."""
    if len(words) < SHINGLE_WORDS:
        return {" ".join(words)}
    return set(map(" ".join, zip(*(words[first:] for first in range(SHINGLE_WORDS)), strict=False)))
