from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.mixing import derive
from quatrain.tokens import order
from quatrain.tokens.order import permute, window_starts, windows_per_epoch
from quatrain.tokens.store import TokenStream

KEYS = st.integers(0, 2**64 - 1)
SEEDS = st.integers(0, 2**63)
Shuffle = Callable[[np.ndarray, int, int], np.ndarray]


@pytest.mark.parametrize(
    ("index", "k", "key", "expected"),
    [
        (range(5), 5, 0, [1, 2, 0, 4, 3]),
        (range(13), 13, 7, [7, 9, 5, 8, 0, 11, 4, 10, 12, 1, 3, 2, 6]),
        (range(0, 800, 100), 1000, 2**63 + 5, [750, 497, 191, 383, 767, 399, 763, 854]),
        ([0, 10**9 - 1, 123456789], 10**9, 42, [504144838, 593831471, 658061575]),
    ],
)
def test_golden_permutations(index, k, key, expected):
    assert permute(np.array(index), k, key).tolist() == expected


@pytest.mark.parametrize(
    ("name", "long", "short"),
    [
        ("shuffle", [337, 529, 417, 929, 737, 97], [35, 28, 42, 14, 7, 0, 21, 0, 35, 28, 14, 42]),
        ("sequential", [832, 896, 0, 64, 128, 192], [0, 7, 14, 21, 28, 35, 42, 0, 7, 14, 21, 28]),
        ("random", [878, 568, 578, 502, 722, 789], [15, 22, 37, 11, 9, 10, 30, 37, 42, 28, 6, 32]),
    ],
)
def test_golden_starts_within_and_across_epochs(name, long, short):
    assert window_starts(name, 1000, 64, 1337, np.arange(28, 34)).tolist() == long  # 15 windows an epoch
    assert window_starts(name, 50, 7, 1, np.arange(12)).tolist() == short  # 7 windows an epoch


@given(k=st.integers(1, 3000), key=KEYS)
def test_permute_is_a_bijection(k, key):
    assert np.array_equal(np.sort(permute(np.arange(k), k, key)), np.arange(k))


@pytest.mark.parametrize("k", [255, 256, 257, 1023, 1024, 1025, 65537])
def test_permute_is_a_bijection_around_powers_of_its_domain(k):
    assert len(np.unique(permute(np.arange(k), k, key=3))) == k


@given(k=st.integers(2**32, 2**50), key=KEYS, index=st.lists(st.integers(0, 2**32 - 1), min_size=2, unique=True))
def test_permute_of_a_huge_domain_stays_inside_and_keeps_indices_apart(k, key, index):
    values = permute(np.array(index), k, key)
    assert 0 <= values.min() <= values.max() < k
    assert len(np.unique(values)) == len(index)


def excess(counts: np.ndarray, weights: np.ndarray) -> float:
    """Standard deviations by which chi-square exceeds its mean (Wilson and Hilferty 1931)."""
    counts, weights = counts[weights > 0], weights[weights > 0]
    expected = counts.sum() * weights / weights.sum()
    assert expected.min() >= 5
    df, chi2 = counts.size - 1, ((counts - expected) ** 2 / expected).sum()
    return float(((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5)


def excess_of_first_and_pairs(shuffle: Shuffle, n: int) -> tuple[float, float]:
    keys = {5: 80, 13: 120}.get(n, 300)
    values = np.stack([shuffle(np.arange(n), n, derive(1, epoch, order.PERMUTATION)) for epoch in range(keys)])
    cells = np.arange(n) * min(n, 20) // n  # every value a cell of its own up to n = 20
    size = cells[-1] + 1
    first = np.bincount(cells[values[:, 0]], minlength=size)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (cells[values[:, :-1]], cells[values[:, 1:]]), 1)
    per_cell = np.bincount(cells)
    distinct = np.outer(per_cell, per_cell) - np.diag(per_cell)  # ordered pairs of different values
    return excess(first, per_cell), excess(pairs, distinct)


@pytest.mark.parametrize("n", [5, 13, 64, 1000])
def test_every_value_comes_first_and_every_pair_is_adjacent_equally_often(n):
    first, pairs = excess_of_first_and_pairs(permute, n)
    assert abs(first) < 3.5
    assert abs(pairs) < 3.5


@pytest.mark.parametrize("n", [13, 1000])
@pytest.mark.parametrize("fault", ["identity", "rotation", "one round"])
def test_weak_shuffles_fail_the_chi_square_tests(n, fault, monkeypatch):
    monkeypatch.setattr(order, "ROUNDS", 1)
    monkeypatch.setattr(order, "_round_keys", order._round_keys.__wrapped__)
    shuffles: dict[str, Shuffle] = {
        "identity": lambda index, k, key: index,
        "rotation": lambda index, k, key: (index + key % k) % k,
        "one round": permute,
    }
    assert max(excess_of_first_and_pairs(shuffles[fault], n)) > 10


def pieces_of(sizes: list[int]) -> list[np.ndarray]:
    """Shards in which every id is its position in the stream."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def two_epochs(
    name: str,
    T: int,
    rows_per_rank: int,
    stream_of: list[TokenStream],
    seed_of: list[int],
    slice_of: list[int],
) -> np.ndarray:
    """Windows of the steps that cover two epochs; each rank (an entry of the lists) computes its slice alone."""
    n, rows_per_step = len(stream_of[0]), rows_per_rank * len(stream_of)
    windows = []
    for step in range(-(-2 * ((n - 1) // T) // rows_per_step)):  # one of these steps may span both epochs
        for stream, seed, part in zip(stream_of, seed_of, slice_of, strict=True):
            rows = step * rows_per_step + part * rows_per_rank + np.arange(rows_per_rank)
            windows.append(stream.gather(window_starts(name, n, T, seed, rows), T + 1))
    return np.concatenate(windows)


def each_target_once(windows: np.ndarray, n: int, T: int) -> bool:
    """Whether an epoch's targets are all but the (n-1) mod T that a phase leaves out at the stream's ends."""
    targets = np.sort(windows[:, 1:], axis=None)
    first = targets[0]
    omitted = (n - 1) % T
    return 1 <= first <= 1 + omitted and np.array_equal(targets, np.arange(first, first + n - 1 - omitted))


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1),
    data=st.data(),
    rows_per_rank=st.integers(1, 5),
    world_size=st.integers(1, 4),
    name=st.sampled_from(["shuffle", "sequential"]),
    seed=SEEDS,
)
def test_case_01_02_03_04_every_target_once_an_epoch_for_any_shards_and_ranks(
    sizes, data, rows_per_rank, world_size, name, seed
):
    n = sum(sizes)
    T = data.draw(st.integers(1, n - 1), label="T")
    k = (n - 1) // T
    streams = [TokenStream(pieces_of(sizes))] * world_size
    windows = two_epochs(name, T, rows_per_rank, streams, [seed] * world_size, list(range(world_size)))
    assert (np.diff(windows, axis=1) == 1).all()  # consecutive ids across every border
    assert each_target_once(windows[:k], n, T)
    assert each_target_once(windows[k : 2 * k], n, T)


@pytest.mark.parametrize(
    ("fault", "planted"),
    [
        ("none", {}),
        ("case_03: ranks permute differently", {"seed_of": [1, 2]}),
        ("case_04: files in another order on each node", {"swap": True}),
        ("case_05: both ranks read the same rows", {"slice_of": [0, 0]}),
    ],
)
def test_faults_between_ranks_are_noticed(fault, planted):
    sizes, T = [70, 31, 60], 8
    pieces = pieces_of(sizes)
    streams = [TokenStream(pieces), TokenStream(pieces[::-1] if planted.get("swap") else pieces)]
    windows = two_epochs("shuffle", T, 2, streams, planted.get("seed_of", [1, 1]), planted.get("slice_of", [0, 1]))
    assert each_target_once(windows[:20], sum(sizes), T) == (fault == "none")


def test_case_01_windows_cut_shard_by_shard_are_noticed():
    sizes, T = [70, 31, 60], 8
    per_shard = [piece[: (len(piece) - 1) // T * T + 1] for piece in pieces_of(sizes)]  # tails dropped
    windows = np.concatenate([np.lib.stride_tricks.sliding_window_view(piece, T + 1)[::T] for piece in per_shard])
    assert not each_target_once(windows, sum(sizes), T)


@given(n=st.integers(60, 400), T=st.integers(1, 20), seed=SEEDS, first=st.integers(0, 300), count=st.integers(1, 60))
def test_rows_computed_together_apart_or_in_another_order_agree(n, T, seed, first, count):
    rows = np.arange(first, first + count)
    for name in ("shuffle", "sequential", "random"):
        together = window_starts(name, n, T, seed, rows)
        assert np.array_equal(together[::-1], window_starts(name, n, T, seed, rows[::-1]))
        apart = [window_starts(name, n, T, seed, rows[i : i + 1])[0] for i in (0, count // 2, count - 1)]
        assert apart == [together[0], together[count // 2], together[-1]]


def test_case_12_order_differs_by_seed_and_epoch_and_is_equal_for_equal_seed(monkeypatch):
    n, T, k = 3201, 32, 100

    def epochs(name: str, seed: int) -> np.ndarray:
        return window_starts(name, n, T, seed, np.arange(2 * k)).reshape(2, k)

    def differ(name: str) -> bool:
        one, other = epochs(name, 1), epochs(name, 2)
        return (one[0] == one[1]).mean() < 0.1 and (one == other).mean() < 0.1

    for name in ("shuffle", "random"):
        assert np.array_equal(epochs(name, 1), epochs(name, 1))
        assert differ(name)
    monkeypatch.setattr(order, "_round_keys", order._round_keys.__wrapped__)
    monkeypatch.setattr(order, "derive", lambda seed, *words: derive(0, *words))  # the seed is never passed
    assert not differ("shuffle")


def test_every_phase_is_drawn():
    n, T = 11, 4  # 2 windows, 2 targets left out: phases 0, 1, 2
    starts = window_starts("shuffle", n, T, 5, np.arange(2 * 20)).reshape(20, 2)
    assert set((starts % T).ravel().tolist()) == {0, 1, 2}


def test_case_13_one_shuffled_step_mixes_the_whole_corpus():
    n, T, rows_per_step = 100_001, 10, 250
    starts = {name: window_starts(name, n, T, 1, np.arange(10_000)) for name in ("shuffle", "sequential")}
    means = {name: rows.reshape(-1, rows_per_step).mean(axis=1) / n for name, rows in starts.items()}
    assert np.abs(means["shuffle"] - 0.5).max() < 4 * 0.2887 / rows_per_step**0.5  # each step sees a fair sample
    assert np.ptp(means["sequential"]) > 0.9  # the fault: a sorted corpus is met in its order


@given(n=st.integers(2, 500), data=st.data(), seed=SEEDS)
def test_random_starts_stay_inside(n, data, seed):
    T = data.draw(st.integers(1, n - 1))
    starts = window_starts("random", n, T, seed, np.arange(50))
    assert 0 <= starts.min() <= starts.max() <= n - T - 1


def test_random_starts_are_uniform_and_reach_both_ends():
    n, T = 27, 7
    starts = window_starts("random", n, T, 3, np.arange(4000))
    counts = np.bincount(starts, minlength=n - T)
    assert (starts.min(), starts.max(), len(counts)) == (0, n - T - 1, n - T)
    assert abs(excess(counts, np.ones(n - T))) < 3.5


@pytest.mark.parametrize(("n", "T", "k"), [(2, 1, 1), (65, 64, 1), (128, 64, 1), (129, 64, 2), (1001, 10, 100)])
def test_case_06_an_epoch_counts_its_last_window(n, T, k):
    assert windows_per_epoch(n, T) == k
    last = window_starts("sequential", n, T, 0, np.array([k - 1]))
    assert last + T + 1 <= n < last + 2 * T + 1


@pytest.mark.parametrize("n", [0, 1, 64])
def test_case_08_a_split_without_one_window_is_refused_with_both_numbers(n):
    with pytest.raises(DataError, match=rf"the val split has {n} ids.*seq_len 64 needs 65"):
        windows_per_epoch(n, 64, "val")
    with pytest.raises(DataError, match="needs 65"):
        window_starts("shuffle", n, 64, 0, np.arange(1))
