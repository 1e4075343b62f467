"""Numbers that are a function of other numbers: what rows, dropout and samples use in place of generator states.

Part of the format of runs: golden values in the tests keep it from changing. It does not lean on
numpy's distributions, whose streams may change between versions.
"""


def uniform(key: int, count: int) -> int:
    """A number in 0..count-1, uniform up to 2^-64 count, from a key."""
    return (mix(key) * count) >> 64


def derive(*words: int) -> int:
    """A 64-bit key from integers, in which every bit of every word counts.

    >>> derive(1337, 0) == derive(1337, 0), derive(1337, 0) == derive(0, 1337)
    (True, False)
    """
    key = 0
    for word in words:
        key = mix((key + 0x9E3779B97F4A7C15) ^ mix(word))
    return key


def mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit numbers."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)
