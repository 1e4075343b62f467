"""Which documents are validation: decided for whole documents by what they say, never by position.

Two documents of the same text therefore always land in the same split.
"""

import hashlib
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def text_hashes(seed: int, texts: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each UTF-8 text (BLAKE2b keyed with the seed, RFC 7693), shape (texts,)."""
    key = seed.to_bytes(8, "little", signed=True)
    digests = [hashlib.blake2b(text, digest_size=8, key=key).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Whether each document is validation: its hash, as a number in [0, 1), is below the fraction (itself below 1)."""
    below: npt.NDArray[np.bool_] = hashes < np.uint64(math.ceil(Fraction(fraction) * 2**64))
    return below
