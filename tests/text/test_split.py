"""The side of a document follows from its text and the seed alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.text.split import held_out, text_hashes

TEXTS = [f"document {number}".encode() for number in range(20_000)]


def chosen(fraction: float, seed: int) -> set[int]:
    return set(np.flatnonzero(held_out(text_hashes(seed, TEXTS), fraction)).tolist())


def text_hash(seed: int, text: bytes) -> int:
    return int(text_hashes(seed, [text])[0])


def near(count: int, share: float) -> bool:
    """Whether a count is within five standard deviations of a binomial share of the texts."""
    return abs(count - share * len(TEXTS)) < 5 * math.sqrt(share * (1 - share) * len(TEXTS))


@pytest.mark.parametrize("fraction", [0.005, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1337, -1])
def test_the_fraction_is_the_share_of_documents(fraction, seed):
    assert near(len(chosen(fraction, seed)), fraction)


def test_each_seed_chooses_by_itself():
    assert near(len(chosen(0.3, 1) & chosen(0.3, 2)), 0.09)


def test_a_larger_fraction_only_adds_documents():
    assert chosen(0.01, 7) < chosen(0.1, 7) < chosen(0.6, 7)


@given(text=st.binary(max_size=200), seed=st.integers(-(2**63), 2**63 - 1), fraction=st.floats(0, 1, exclude_max=True))
def test_the_same_text_has_one_side(text, seed, fraction):
    hashed = text_hash(seed, text)
    assert 0 <= hashed < 2**64
    assert hashed == text_hash(seed, bytes(bytearray(text)))
    one = np.array([hashed], dtype=np.uint64)
    assert held_out(one, fraction).tolist() == [hashed < fraction * 2**64]
    assert not held_out(one, 0).any()


def test_the_choice_never_changes_between_versions():
    # From outside: the vectors that XXH3's authors test it with (xxHash 0.8.2, tests/sanity_test_vectors.h).
    prime, filled, byte = 0x9E3779B185EBCA8D, bytearray(), 2654435761
    for _ in range(4096):
        filled.append(byte >> 56 & 255)
        byte = byte * prime % 2**64
    golden = {
        (0, 0): 0x2D06800538D394C2,
        (0, prime): 0xA8A6B918B2F0364A,
        (3, prime): 0x634B8990B4976373,
        (8, prime): 0x8F973410999B8F6B,
        (16, 0): 0x981B17D36C7498C9,
        (128, prime): 0x73FDE75280646649,
        (240, 0): 0x81C3C2B67F568CCF,
        (257, prime): 0x802A6FBF3CACD97C,
        (4096, prime): 0x2A3BBB20A5439DCD,
        (4096, 0): 0xE91206429D1F48F9,
    }
    assert {(size, seed): text_hash(seed, bytes(filled[:size])) for size, seed in golden} == golden
    assert text_hash(-1, b"a") == text_hash(2**64 - 1, b"a") != text_hash(1, b"a")
