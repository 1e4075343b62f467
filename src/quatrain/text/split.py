"""Which documents are validation: decided for whole documents by what they say, never by position.

Two documents of the same text therefore always land in the same split.
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import repeat

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest


def text_hashes(seed: int, texts: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each UTF-8 text (XXH3 of xxHash 0.8, with the seed), shape (texts,)."""
    # A hash of hashlib takes ten times as long, and gives the GIL away at every document (notes/0008).
    return np.fromiter(map(xxh3_64_intdigest, texts, repeat(seed % 2**64)), dtype=np.uint64)


def held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Whether each document is validation: its hash, as a number in [0, 1), is below the fraction (itself below 1)."""
    below: npt.NDArray[np.bool_] = hashes < np.uint64(math.ceil(Fraction(fraction) * 2**64))
    return below
