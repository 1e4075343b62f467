"""The mixing is part of the format of runs: its numbers never change."""

from hypothesis import given
from hypothesis import strategies as st

from quatrain.mixing import derive, mix, uniform

KEYS = st.integers(0, 2**64 - 1)


def test_golden_keys_and_uniform_numbers():
    assert (mix(0), mix(1)) == (16294208416658607535, 10451216379200822465)
    words = [(), (0,), (0, 0), (1337, 0, 1), (1337, 0, 2), (2**64 - 1, 5, 3)]
    assert [derive(*word) for word in words] == [
        0,
        9048247064618004702,
        1929891763649148612,
        3112217816269340181,
        15914674318030806260,
        15949394632593072562,
    ]
    cases = [(0, 10), (1, 10), (2**64 - 1, 1000), (12345, 10**12), (7, 1)]
    assert [uniform(key, count) for key, count in cases] == [8, 5, 893, 133079668661, 0]


@given(key=KEYS, count=st.integers(1, 2**40))
def test_uniform_stays_inside(key, count):
    assert 0 <= uniform(key, count) < count


def test_derive_depends_on_every_word_and_on_their_order():
    keys = {derive(*words) for words in [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 0), (0, 1, 2), (2**63 + 1, 2, 3), (1, 3)]}
    assert len(keys) == 7
