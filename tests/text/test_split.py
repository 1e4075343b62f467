"""The side of a document follows from its text and the seed alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.text.split import by_fraction, by_hashes, text_hash

TEXTS = [f"document {number}".encode() for number in range(20_000)]


def chosen(fraction: float, seed: int) -> set[int]:
    rule = by_fraction(fraction)
    return {number for number, text in enumerate(TEXTS) if rule(text_hash(seed, text))}


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
    assert by_fraction(fraction)(hashed) == (hashed < fraction * 2**64)
    assert by_hashes({hashed})(hashed)
    assert not by_fraction(0)(hashed)
    assert not by_hashes(())(hashed)


def test_the_choice_never_changes_between_versions():
    # From outside: printf a | openssl mac -macopt hexkey:3905000000000000 -macopt size:8 BLAKE2BMAC, read backwards.
    golden = {
        (1337, b""): 0x62A43AE0019C9F74,
        (1337, b"a"): 0xBA9343C39F903C3C,
        (-1, "é".encode()): 0xEABA3D7E7928855C,
    }
    assert {key: text_hash(*key) for key in golden} == golden
