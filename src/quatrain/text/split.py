"""Which documents are validation: decided for whole documents by what they say, never by position.

Two documents of the same text therefore always land in the same split.
"""

import hashlib
from collections.abc import Callable, Container

Rule = Callable[[int], bool]
"""Whether a document is validation, from its `text_hash`."""


def text_hash(seed: int, text: bytes) -> int:
    """A 64-bit number from the UTF-8 text and the seed (BLAKE2b keyed with the seed, RFC 7693)."""
    key = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def by_fraction(fraction: float) -> Rule:
    """Validation is every document whose hash, as a number in [0, 1), is below the fraction."""
    return lambda hashed: hashed / 2**64 < fraction


def by_hashes(hashes: Container[int]) -> Rule:
    """Validation is every document with one of these hashes."""
    return lambda hashed: hashed in hashes
