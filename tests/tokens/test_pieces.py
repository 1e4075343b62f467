"""A stream reads its files at their place: the same ids as the maps hold, and nothing worse than a message."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.tokens import pieces as pieces_module
from quatrain.tokens.store import SeparatedStream, TokenStream

DTYPES = ["<u2", ">u2", "<u4", "<i4", "<i8"]


def mapped(path: Path, ids: np.ndarray, offset: int = 0, mode: str = "r") -> np.memmap:
    path.write_bytes(bytes(range(256))[:offset] + ids.tobytes())
    return np.memmap(path, dtype=ids.dtype, mode=mode, offset=offset)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The names of the files that were opened since, by their descriptors."""
    names: dict[int, str] = {}
    really_open = os.open

    def noting(path, flags, *rest, **more):
        descriptor = really_open(path, flags, *rest, **more)
        names[descriptor] = Path(path).name
        return descriptor

    monkeypatch.setattr(os, "open", noting)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


@given(
    shards=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    data=st.data(),
)
def test_files_of_any_dtype_and_header_give_what_their_maps_hold(folder, shards, data):
    ids = [np.arange(size).astype(dtype) * 257 + number for number, (dtype, size, _) in enumerate(shards)]
    maps = [
        mapped(folder / f"{n}.bin", part, header)
        for n, (part, (*_, header)) in enumerate(zip(ids, shards, strict=True))
    ]
    stream, joined = TokenStream(maps), np.concatenate([part.astype(np.int64) for part in ids])
    assert np.array_equal(np.asarray(stream), joined)
    length = data.draw(st.integers(0, len(joined)))
    every = np.arange(len(joined) - length + 1)
    rows = stream.gather(every, length)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, np.stack([joined[at : at + length] for at in every]))
    assert stream.gather(every, length, stream.dtype).dtype == stream.dtype
    stream.advise(every, length)


def test_a_file_that_was_cut_short_is_a_message_where_a_map_would_end_the_process(tmp_path):
    ids = np.arange(100_000, dtype="<u2")
    stream = TokenStream([mapped(tmp_path / "a.bin", ids, 10)])
    assert stream.read(99_999, 100_000) == [99_999 % 65_536]
    os.truncate(tmp_path / "a.bin", 10 + 2 * 50_000)
    assert stream.gather(np.array([49_000]), 1000)[0, -1] == 49_999
    message = r"a\.bin: ends at byte 100,010, it was longer when it was opened; copy it again"
    with pytest.raises(DataError, match=message):
        stream.gather(np.array([49_500]), 1000)
    with pytest.raises(DataError, match=message):
        stream.read(50_000, 50_001)


def test_a_file_that_is_gone_before_its_first_read_is_a_message(tmp_path):
    stream = TokenStream([mapped(tmp_path / "a.bin", np.arange(9, dtype="<u2"))])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin: No such file or directory, it was there when it was opened; copy it"):
        stream.read(0, 1)


def test_reads_that_the_system_cuts_short_are_put_together(tmp_path, monkeypatch):
    ids = np.arange(1000, dtype="<u2")
    stream = TokenStream([mapped(tmp_path / "a.bin", ids)])
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, where: whole(descriptor, min(size, 7), where))
    assert np.array_equal(stream.gather(np.array([3, 500]), 400), [ids[3:403], ids[500:900]])


def test_what_somebody_may_write_to_is_read_through_its_map(tmp_path):
    writable = mapped(tmp_path / "a.bin", np.zeros(9, dtype="<u2"), mode="r+")
    private = mapped(tmp_path / "b.bin", np.zeros(9, dtype="<u2"), mode="c")
    stream = TokenStream([writable, private])
    writable[3], private[4] = 5, 6
    assert stream[:].tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0]


def test_a_platform_that_cannot_read_at_a_place_or_advise_reads_the_map(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    ids = np.arange(9, dtype="<u2")
    stream = TokenStream([mapped(tmp_path / "a.bin", ids)])
    stream.advise(np.array([0]), 9)
    assert np.array_equal(stream.gather(np.array([2]), 5), [ids[2:7]])


def test_files_are_opened_by_the_first_read_and_closed_with_the_stream(tmp_path, opened):
    stream = TokenStream([mapped(tmp_path / f"{number}.bin", np.arange(9, dtype="<u2")) for number in range(3)])
    assert opened == {}
    for _ in range(2):
        stream.read(10, 12)
        stream.gather(np.array([9]), 9)
    assert list(opened.values()) == ["1.bin"]
    (descriptor,) = opened
    os.fstat(descriptor)
    del stream
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_advised_is_what_the_rows_read(tmp_path, monkeypatch, opened):
    advised: list[tuple[str, int, int]] = []

    def advise(descriptor: int, where: int, size: int, advice: int) -> None:
        assert advice == 3
        advised.append((opened[descriptor], where, size))
        raise OSError(22, "Invalid argument")  # a file system that takes no advice changes nothing

    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    maps = [mapped(tmp_path / f"{n}.bin", np.arange(50, dtype=dtype), 6) for n, dtype in enumerate(["<u2", "<u4"])]
    TokenStream(maps).advise(np.array([60, 0, 45]), 8)
    assert advised == [("1.bin", 6 + 40, 32), ("0.bin", 6, 16), ("0.bin", 6 + 90, 16)]
    advised.clear()
    # eots before 0, 20 and 40: position 30 of the stream is id 28 of the files
    SeparatedStream(maps[:1], np.array([0, 20, 40], dtype=np.uint64), 9).advise(np.array([30]), 8)
    assert advised == [("0.bin", 6 + 2 * 28, 16)]


def test_gathering_leaves_no_page_of_the_files_in_the_process(tmp_path):
    size = 64 << 20
    ids = np.zeros(size // 2, dtype="<u2")
    stream = TokenStream([mapped(tmp_path / "a.bin", ids)])
    assert isinstance(stream._sources[0], pieces_module._File)
    assert not stream.gather(np.arange(0, len(ids) - 1025, 1024), 1025, stream.dtype).any()
    if not Path("/proc/self/smaps").exists():
        return  # only Linux tells the pages of one map
    held = Path("/proc/self/smaps").read_text().split(str(tmp_path / "a.bin"))[1]
    assert int(held.split("Rss:")[1].split()[0]) == 0
