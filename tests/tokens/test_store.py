"""A store reads as the plain files say, and a file that is not as written is named."""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from quatrain import TokenStore, prepare
from quatrain.errors import DataError
from quatrain.text.tokenizers import ByteTokenizer, load_tokenizer
from quatrain.tokens import encoding, shards, writer
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import AGAIN, SeparatedStream, TokenStream, fingerprint

PIECES = st.lists(
    arrays.arrays(st.sampled_from([np.uint16, np.uint32]), st.integers(0, 6), elements=st.integers(0, 60_000)),
    min_size=1,
    max_size=6,
)
TEXTS = ["one", "two <|endoftext|> four", "é" * 30, "four"]


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """Many small stores: what is tested here does not depend on a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small store of bytes over many shards; document 3 is validation."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    config = PrepareConfig(tokenizer="bytes", val_docs=(3,), shard_size=7)
    prepare([str(tmp_path / "texts.jsonl")], tmp_path / "store", config)
    return tmp_path / "store"


def change_facts(folder: Path, **changes: object) -> None:
    path = folder / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@given(pieces=PIECES, data=st.data())
def test_a_stream_over_pieces_reads_as_the_pieces_joined(pieces, data):
    stream, joined = TokenStream(pieces), np.concatenate(pieces)
    assert len(stream) == len(joined)
    assert stream.dtype == joined.dtype
    assert np.array_equal(np.asarray(stream), joined)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(joined))] * 2)))
    assert np.array_equal(stream.read(start, stop), joined[start:stop])
    bounds = st.none() | st.integers(-40, 40)
    where = slice(data.draw(bounds), data.draw(bounds))
    assert np.array_equal(stream[where], joined[where])


@given(pieces=PIECES, data=st.data())
def test_gathered_rows_are_int64_copies_that_cross_any_border(pieces, data):
    stream, joined = TokenStream(pieces), np.concatenate(pieces)
    length = data.draw(st.integers(0, len(joined)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(joined) - length), min_size=1, max_size=4)))
    rows = stream.gather(starts, length)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, np.stack([joined[start : start + length] for start in starts]))
    rows[:] = -1
    assert np.array_equal(np.asarray(stream), joined)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_reading_outside_a_stream_is_an_error_not_a_shorter_row(start, stop):
    stream = TokenStream([np.arange(3), np.arange(2)])
    with pytest.raises(IndexError, match=f"{start}..{stop} of a stream of 5"):
        stream.read(start, stop)
    with pytest.raises(IndexError, match="steps of 1"):
        stream[::2]
    if start < stop:
        with pytest.raises(IndexError, match=f"rows of {stop - start} ids at {start}..{start} of a stream of 5"):
            stream.gather(np.array([start]), stop - start)


def test_a_stream_gives_single_ids_as_an_array_does(folder):
    stream = TokenStore(folder).train
    assert [stream[0], stream[-1]] == [256, 256]
    assert list(stream) == np.asarray(stream).tolist()


def test_the_shards_are_plain_files_for_fromfile(folder):
    store = TokenStore(folder)
    for name, stream in (("train", store.train), ("val", store.val)):
        files = sorted(folder.glob(f"texts_{name}_*.bin"))
        plain = np.concatenate([np.fromfile(file, dtype="<u2") for file in files])
        assert np.array_equal(np.asarray(stream), plain)
        assert np.array_equal(store.document_starts(name), np.fromfile(folder / f"texts_{name}.idx", dtype="<u8"))
        assert np.array_equal(np.flatnonzero(plain == store.eot)[:-1], store.document_starts(name))
    assert len(list(folder.glob("texts_train_*.bin"))) == len(store.facts["splits"]["train"]["shards"]) > 10


def test_opening_maps_the_files_and_reads_no_ids(folder):
    store = TokenStore(folder)
    assert all(isinstance(piece, np.memmap) for piece in [*store.train.pieces, *store.val.pieces])
    assert not any(piece.flags.writeable for piece in store.train.pieces)


def test_a_store_moves_with_its_folder_and_opens_from_a_string(folder, tmp_path):
    moved = shutil.move(folder, tmp_path / "elsewhere")
    assert TokenStore(str(moved)).tokenizer.decode(TokenStore(moved).val[:]) == "<|endoftext|>four<|endoftext|>"


def test_a_shard_may_begin_behind_a_header_and_lie_elsewhere(folder, tmp_path):
    facts = json.loads((folder / "store.json").read_text())
    shard = facts["splits"]["val"]["shards"][0]
    before = np.asarray(TokenStore(folder).val)
    (tmp_path / "headed.bin").write_bytes(bytes(1024) + (folder / shard["file"]).read_bytes())
    shard |= {"file": str(tmp_path / "headed.bin"), "offset": 1024}
    change_facts(folder, splits=facts["splits"])
    store = TokenStore(folder)
    assert np.array_equal(np.asarray(store.val), before)
    read: list[int] = []
    assert list(store.damaged(read.append)) == []
    assert sum(read) == sum(store.hashed_sizes()) > 0


@pytest.mark.parametrize("name", ["texts_train_000000.bin", "texts_train_000002.bin", "texts_val.idx"])
def test_a_flipped_bit_is_found_in_the_file_that_has_it(folder, name):
    assert list(TokenStore(folder).damaged()) == []
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    assert [re.match(r"\S+/(\S+): sha256 is", sentence)[1] for sentence in TokenStore(folder).damaged()] == [name]


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_the_check_reads_the_tokenizer_too(folder, how):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n") if how == "changed" else path.unlink()
    (sentence,) = TokenStore(folder).damaged()
    assert re.match(r"\S+/tokenizer.json: (sha256 is|No such file)", sentence)


@pytest.mark.parametrize(("change", "found"), [(lambda data: data[:-1], "13"), (lambda data: data + b"\0\0", "16")])
def test_a_shard_of_another_size_is_refused_at_opening(folder, change, found):
    path = folder / "texts_train_000001.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"texts_train_000001.bin: {found} bytes, store.json says 14; {AGAIN}"):
        TokenStore(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "texts_val_000000.bin").unlink()
    with pytest.raises(
        DataError, match=rf"texts_val_000000.bin: No such file or directory; store.json names this file: {AGAIN}"
    ):
        TokenStore(folder)


def test_an_index_of_another_size_is_refused_at_opening(folder):
    (folder / "texts_train.idx").write_bytes(bytes(8))
    with pytest.raises(DataError, match=rf"texts_train.idx: 8 bytes, store.json says 24; {AGAIN}"):
        TokenStore(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_index_is_seen_at_opening_and_is_a_sentence_of_the_check(folder, split):
    store = TokenStore(folder)
    (folder / f"texts_{split}.idx").unlink()
    with pytest.raises(DataError, match=rf"texts_{split}.idx: No such file or directory; .*{AGAIN}"):
        TokenStore(folder)
    assert list(store.damaged()) == [f"{folder}/texts_{split}.idx: No such file or directory"]


def test_another_tokenizer_in_the_folder_is_refused(folder):
    (folder / "tokenizer.json").write_bytes(load_tokenizer(folder / "tokenizer.json").json + b"\n")
    with pytest.raises(DataError, match=rf"tokenizer.json: sha256 is \w{{64}}, store.json says \w{{64}}; {AGAIN}"):
        _ = TokenStore(folder).tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", rf"store.json: not a store's description \(JSONDecodeError.*\); {AGAIN}$"),
        ("[]", r"store.json: not a store's description"),
        ("{}", rf"store.json: not a store's description \(KeyError\('version'\)\); {AGAIN}$"),
        ('{"version": 1}', rf"store.json: not a store's description \(KeyError.*\); {AGAIN}$"),
        ('{"version": 1, "fingerprint": "x", "tokenizer": 3}', r"store.json: not a store's description \(TypeError"),
        ('{"version": 2}', r"store.json: version 2 of the format, this quatrain reads version 1"),
    ],
)
def test_a_description_that_cannot_be_read_is_one_message(folder, content, message):
    (folder / "store.json").write_text(content)
    with pytest.raises(DataError, match=message):
        TokenStore(folder)


def test_a_folder_that_is_no_store_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"absent: no such folder; .*quatrain prepare SOURCE --out .*absent"):
        TokenStore(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no token store here .*give the folder that prepare wrote"):
        TokenStore(tmp_path)


def test_an_unfinished_store_is_not_taken_for_whole(folder):
    (folder / "store.json").rename(folder / "prepare.json")
    with pytest.raises(DataError, match="an unfinished preparation; give its prepare command again"):
        TokenStore(folder)


def test_the_fingerprint_is_of_ids_and_tokenizer_never_of_names(folder):
    facts = json.loads((folder / "store.json").read_text())
    tokenizer, splits = facts["tokenizer"], facts["splits"]
    assert fingerprint(tokenizer, splits) == facts["fingerprint"]

    def with_shard(**changes: object) -> dict[str, object]:
        first, *rest = splits["train"]["shards"]
        return splits | {"train": splits["train"] | {"shards": [first | changes, *rest]}}

    same = [with_shard(file="other.bin", offset=8), splits | {"val": splits["val"] | {"share_in_train": 1.0}}]
    other = [
        with_shard(sha256="0" * 64),
        with_shard(tokens=6),
        splits | {"train": splits["train"] | {"shards": splits["train"]["shards"][::-1]}},
        splits | {"val": splits["val"] | {"idx": {"sha256": "0" * 64}}},
        {"train": splits["val"], "val": splits["train"]},
    ]
    assert {fingerprint(tokenizer, changed) for changed in same} == {facts["fingerprint"]}
    others = [fingerprint(tokenizer, changed) for changed in other]
    others += [fingerprint(tokenizer | changed, splits) for changed in ({"eot": 0}, {"sha256": "0" * 64})]
    assert len({facts["fingerprint"], *others}) == len(others) + 1


@pytest.fixture
def vocabulary_of_70k(tmp_path) -> Path:
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(70_000)} | {"?": 70_000}, "?")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "words.json"))
    (tmp_path / "words.jsonl").write_text('{"text": "w69999 w70 w4463"}\n{"text": "w65536"}\n')
    return tmp_path / "words.json"


def stored_by(tokenizer: Path, out: Path) -> tuple[list[int], list[int]]:
    """What stands in the shards of the two documents: by our reader, and by `np.fromfile` with the stated dtype."""
    config = PrepareConfig(tokenizer=str(tokenizer), val_docs=(1,))
    prepare([str(tokenizer.with_suffix(".jsonl"))], out, config)
    store = TokenStore(out)
    shard = store.facts["splits"]["train"]["shards"][0]
    return store.train[:].tolist(), np.fromfile(out / shard["file"], dtype=shard["dtype"]).tolist()


def test_case_51_ids_above_65535_are_stored_as_uint32(vocabulary_of_70k, tmp_path):
    expected = [70_001, 69_999, 70, 4463, 70_001]
    assert stored_by(vocabulary_of_70k, tmp_path / "store") == (expected, expected)
    shard = TokenStore(tmp_path / "store").facts["splits"]["train"]["shards"][0]
    assert shard["dtype"] == "uint32"
    assert (tmp_path / "store" / shard["file"]).stat().st_size == 4 * len(expected)


def test_case_51_the_check_sees_ids_that_wrap(vocabulary_of_70k, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "dtype_of", lambda tokenizer: np.dtype("<u2"))
    monkeypatch.setattr(writer, "dtype_of", lambda tokenizer: np.dtype("<u2"))
    with pytest.raises(OverflowError):
        stored_by(vocabulary_of_70k, tmp_path / "store")


@pytest.mark.parametrize(("vocab_size", "kind"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_the_dtype_follows_the_largest_id_that_can_come(tmp_path, monkeypatch, vocab_size, kind):
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(tokenizer, "vocab_size", vocab_size)
    monkeypatch.setattr(tokenizer, "eot", vocab_size - 1)
    monkeypatch.setattr(tokenizer, "encode", lambda text: np.array([1, vocab_size - 2], dtype=np.uint32))
    dtype = encoding.dtype_of(tokenizer)
    ids = np.array([tokenizer.eot, *tokenizer.encode("ab")], dtype=dtype)
    made = shards.SplitWriter(tmp_path, "x_train", dtype, tokenizer.eot, 10)
    made.add(shards.Piece(ids, np.array([0]), 2))
    shard = made.close()["shards"][0]
    ids = np.fromfile(tmp_path / shard["file"], dtype=kind)
    assert ids.tolist() == [vocab_size - 1, 1, vocab_size - 2, vocab_size - 1]
    assert shard["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()


def test_case_51_a_stream_does_not_wrap_ids_into_a_narrower_dtype():
    stream = TokenStream([np.array([1, 2], dtype=np.uint16), np.array([70_000], dtype=np.uint32)])
    assert stream[:].tolist() == [1, 2, 70_000]
    assert np.asarray(stream, dtype=np.int64).tolist() == [1, 2, 70_000]
    with pytest.raises(OverflowError, match="the stream holds ids up to 70,000, which uint16 cannot hold"):
        np.asarray(stream, dtype=np.uint16)
    assert np.asarray(TokenStream([np.array([7], dtype=np.uint32)]), dtype=np.uint16).dtype == np.uint16


@pytest.mark.parametrize("kinds", [(np.int64, np.uint64), (np.float32,), (np.uint16, np.float64)])
def test_case_51_pieces_that_would_make_ids_floats_are_refused(kinds):
    with pytest.raises(TypeError, match="ids are integers, these pieces are"):
        TokenStream([np.zeros(2, dtype=kind) for kind in kinds])


@given(documents=st.lists(st.lists(st.integers(0, 400), max_size=5), min_size=1, max_size=8), data=st.data())
def test_a_stream_with_eots_by_its_index_reads_as_if_the_files_held_them(documents, data):
    ids = np.array([token for document in documents for token in document], dtype=np.uint16)
    cut = data.draw(st.integers(0, len(ids)))
    lengths = np.array([len(document) + 1 for document in documents])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)
    eot = data.draw(st.sampled_from([500, 70_000]))
    plain = np.array([token for document in documents for token in [eot, *document]])
    stream = SeparatedStream([ids[:cut], ids[cut:]], starts, eot)
    assert len(stream) == len(plain)
    assert np.array_equal(np.asarray(stream), plain)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(plain))] * 2)))
    assert np.array_equal(stream.read(start, stop), plain[start:stop])
    with pytest.raises(IndexError, match="of a stream of"):
        stream.read(0, len(plain) + 1)
    length = data.draw(st.integers(0, len(plain)))
    every = np.arange(len(plain) - length + 1)
    assert np.array_equal(stream.gather(every, length), np.stack([plain[at : at + length] for at in every]))


def test_a_window_costs_the_same_however_many_eots_the_index_supplies():
    count = 5_000_000
    starts = np.arange(count, dtype=np.uint64) * np.uint64(5)
    stream = SeparatedStream([np.zeros(4 * count, dtype=np.uint16)], starts, 9)
    began = time.perf_counter()
    for start in range(0, len(stream) - 1024, len(stream) // 100):
        assert (stream.read(start, start + 1024) == 9).sum() in (204, 205)
    assert time.perf_counter() - began < 0.5  # one pass over the index for each would take seconds


SHARD, SHARDS = 100_000_000, 100  # ids a shard, and shards: 10 billion ids


@pytest.fixture
def ten_billion(folder, tmp_path) -> Path:
    """A store of 10 billion ids over sparse files: 100 shards of train; 10 million documents."""
    facts = json.loads((folder / "store.json").read_text())
    train = facts["splits"]["train"]
    shard = {"tokens": SHARD, "dtype": "uint16", "offset": 0, "sha256": "0" * 64}
    train["shards"] = [shard | {"file": f"big_train_{number:06d}.bin"} for number in range(SHARDS)]
    train |= {"tokens": SHARD * SHARDS, "documents": 10_000_000}
    for part in train["shards"]:
        with (folder / part["file"]).open("wb") as file:
            file.truncate(2 * SHARD)
    with (folder / train["idx"]["file"]).open("r+b") as file:
        file.truncate(8 * train["documents"])
    with (folder / train["shards"][-2]["file"]).open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(np.array([1, 2, 3], dtype="<u2").tobytes())
    with (folder / train["shards"][-1]["file"]).open("r+b") as file:
        file.write(np.array([4, 5], dtype="<u2").tobytes())
        file.seek(-8, os.SEEK_END)
        file.write(np.array([6, 7, 8, 256], dtype="<u2").tobytes())
    change_facts(folder, splits=facts["splits"])
    return folder


def test_ten_billion_ids_open_at_once_and_give_their_last_window(ten_billion):
    TokenStore(ten_billion)  # the kernel has now seen the names
    began = time.perf_counter()
    store = TokenStore(ten_billion)
    assert time.perf_counter() - began < 0.1
    n = len(store.train)
    assert n == 10_000_000_000
    assert store.train.read(n - 5, n).tolist() == [0, 6, 7, 8, 256]
    rows = store.train.gather(np.array([n - SHARD - 3, n - 1025]), 1025)
    assert rows[0, :6].tolist() == [1, 2, 3, 4, 5, 0]
    assert rows[1, -5:].tolist() == [0, 6, 7, 8, 256]
    assert len(store.document_starts("train")) == 10_000_000
    loader = Loader(store.train, DataConfig(seq_len=1024, order="sequential"), store.eot)
    last = loader.rows_per_epoch - 1
    start = last * 1024
    assert loader.batch(last, 1).targets[0].tolist() == store.train.read(start + 1, start + 1025).tolist()


def test_an_unfinished_store_names_the_command_that_was_writing_it(folder):
    (folder / "store.json").rename(folder / "prepare.json")
    for content, command in (("{}", "prepare"), ("{", "prepare"), ('{"command": "adopt"}', "adopt")):
        (folder / "prepare.json").write_text(content)
        with pytest.raises(DataError, match=f"an unfinished preparation; give its {command} command again"):
            TokenStore(folder)
