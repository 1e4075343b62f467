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
    # From outside: printf a | openssl mac -macopt hexkey:3905000000000000 -macopt size:8 BLAKE2BMAC, read backwards.
    golden = {
        (1337, b""): 0x62A43AE0019C9F74,
        (1337, b"a"): 0xBA9343C39F903C3C,
        (-1, "é".encode()): 0xEABA3D7E7928855C,
    }
    assert {key: text_hash(*key) for key in golden} == golden
