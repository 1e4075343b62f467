"""Which documents are validation: decided for whole documents by what they say, never by position.

Two documents of the same text therefore always land in the same split.
"""

import hashlib
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def text_hash(seed: int, text: bytes) -> int:
    """A 64-bit number from the UTF-8 text and the seed (BLAKE2b keyed with the seed, RFC 7693)."""
    key = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Whether each document is validation: its hash, as a number in [0, 1), is below the fraction (itself below 1)."""
    below: npt.NDArray[np.bool_] = hashes < np.uint64(math.ceil(Fraction(fraction) * 2**64))
    return below
