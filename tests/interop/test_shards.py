"""What other programs write is read as they mean it: formats, order, splits, and the eots that a file lacks."""

import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from quatrain.errors import DataError
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig
from quatrain.interop.megatron import index_bytes, read_index
from quatrain.interop.shards import PeerShard, find_shards, follows, matches, read_shard, split_of
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import TokenStore

EOT = 256  # of the tokenizer bytes
BYTES = AdoptConfig(tokenizer="bytes")
IDS = list(b"some ids, as any program writes them")


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """Many small stores: what is tested here does not depend on a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def read(path: Path, dtype: str = "", vocab_size: int = 50_257) -> PeerShard:
    return read_shard(path, dtype, vocab_size)


def ids_of(shard: PeerShard) -> list[int]:
    data = shard.path.read_bytes()[shard.offset :]
    return np.frombuffer(data, shard.dtype, shard.tokens).tolist()


def test_every_format_is_recognised_and_its_ids_lie_where_it_says(tmp_path):
    ids = [50_256, *IDS, 7]
    wide = [70_000, *IDS]
    cases = [
        (peers.raw(tmp_path / "a.bin", ids), ("headerless", "uint16", 0), ids),
        (peers.llmc(tmp_path / "b.bin", ids), ("llm.c", "uint16", 1024), ids),
        (peers.llmc(tmp_path / "c.bin", wide, 20240801, 7, kind="I"), ("llm.c", "uint32", 1024), wide),
        (peers.npy(tmp_path / "d.npy", ids), (".npy", "uint16", 128), ids),
        (peers.npy(tmp_path / "e.npy", wide, "<u4"), (".npy", "uint32", 128), wide),
        (peers.npy(tmp_path / "f.npy", wide, "<i8"), (".npy", "uint64", 128), wide),
        (peers.npy(tmp_path / "g.npy", IDS, "u1"), (".npy", "uint8", 128), IDS),
    ]
    for path, expected, content in cases:
        shard = read(path)
        assert (shard.format, shard.dtype.name, shard.offset) == expected, path
        assert ids_of(shard) == content
        assert shard.path.is_absolute()
        assert shard.ends is None


@pytest.mark.parametrize(("code", "dtype"), [(1, "uint8"), (3, "uint16"), (4, "uint32"), (5, "uint64"), (8, "uint16")])
@pytest.mark.parametrize("sentences", [1, 3])
def test_megatron_s_index_says_dtype_and_documents(tmp_path, code, dtype, sentences):
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]
    peers.megatron(tmp_path / "x_train", documents, code, sentences)
    shard = read(tmp_path / "x_train.bin")
    assert (shard.format, shard.dtype.name, shard.ends.tolist()) == ("megatron", dtype, [3, 3, 4, 9])
    assert ids_of(shard) == peers.flat(documents)


@pytest.mark.parametrize(("kind", "dtype"), [("H", "uint16"), ("I", "uint32")])
def test_datatrove_s_index_says_dtype_and_documents(tmp_path, kind, dtype):
    peers.datatrove(tmp_path / "00000_x.ds", [[1, 2], [3]], kind)
    shard = read(tmp_path / "00000_x.ds")
    assert (shard.format, shard.dtype.name, shard.ends.tolist()) == ("datatrove", dtype, [2, 3])
    assert ids_of(shard) == [1, 2, 3]


def test_datatrove_without_an_index_is_as_its_metadata_or_the_user_says(tmp_path):
    peers.datatrove(tmp_path / "a.ds", [IDS], "I", index=False, metadata="gpt2|4\n36\n36 T")
    peers.datatrove(tmp_path / "b.ds", [IDS], "I", index=False)
    assert ids_of(read(tmp_path / "a.ds")) == ids_of(read(tmp_path / "b.ds", "uint32")) == IDS
    assert read(tmp_path / "a.ds").ends is None
    with pytest.raises(DataError, match="give --dtype uint32"):
        read(tmp_path / "b.ds")


def test_the_width_of_headerless_ids_follows_the_vocabulary_unless_told(tmp_path):
    path = peers.raw(tmp_path / "a.bin", [1, 2, 3, 4])
    assert read(path, vocab_size=65_536).dtype == np.uint16
    assert read(path, vocab_size=65_537).dtype == np.uint32
    assert read(path, "uint32").dtype == np.uint32
    assert read(path, "uint16", 65_537).dtype == np.uint16


def test_megatron_s_index_is_written_as_its_reader_finds_it(tmp_path):
    documents = [[5, 6, 7], [8], list(range(100, 160))]
    for dtype in (np.dtype("<u2"), np.dtype("<i4")):
        content = index_bytes(np.array([len(document) for document in documents]), dtype)
        (tmp_path / "x.idx").write_bytes(content)
        (tmp_path / "x.bin").write_bytes(np.array(peers.flat(documents), dtype).tobytes())
        assert peers.read_megatron(tmp_path / "x") == documents
        assert read_index(tmp_path / "x.idx").ends.tolist() == [3, 4, 64]


def damaged_index(change) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        peers.megatron(Path(folder) / "x", [[1, 2, 3], [4]])
        data = bytearray((Path(folder) / "x.idx").read_bytes())
    return bytes(change(data))


def put(place: int, form: str, value: int):
    def change(data: bytearray) -> bytearray:
        struct.pack_into(form, data, place, value)
        return data

    return change


HEAD = 34
WRONG_INDICES = [
    (lambda data: b"TNTIDX\x00\x00" + bytes(40), "x.idx: an index of the old TNTIDX kind; expected MMIDIDX"),
    (lambda data: b"nonsense" + bytes(40), r"x.idx: no Megatron index \(expected it to begin with MMIDIDX\)"),
    (lambda data: data[:20], "x.idx: no Megatron index"),
    (put(9, "<Q", 2), "x.idx: version 2 of the index, expected 1"),
    (put(17, "<B", 7), "x.idx: its ids are of type float32; expected whole numbers from 0"),
    (put(17, "<B", 99), "x.idx: its ids are of type 99"),
    (lambda data: data[:-3], "x.idx: 79 bytes, its 2 sequences and 3 document indices need 82"),
    (lambda data: data + bytes(2), "x.idx: 84 bytes, .*copied in part, or multimodal"),
    (put(HEAD, "<i", -3), "x.idx: its sequences do not lie one behind the other"),
    (put(HEAD + 8 + 8, "<q", 2), "x.idx: its sequences do not lie one behind the other"),
    (put(HEAD + 24, "<q", 1), "x.idx: its document indices do not cover its 2 sequences"),
    (put(HEAD + 24 + 16, "<q", 1), "x.idx: its document indices do not cover its 2 sequences"),
    (put(HEAD + 24 + 8, "<q", 7), "x.idx: its document indices do not cover its 2 sequences"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_INDICES)
def test_an_index_that_is_none_is_refused_by_name(tmp_path, change, message):
    peers.raw(tmp_path / "x.bin", [1, 2, 3, 4])
    (tmp_path / "x.idx").write_bytes(damaged_index(change))
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x.bin")


WRONG_FILES = [
    (
        lambda path: peers.llmc(path / "x.bin", IDS, count=99),
        r"x.bin: its header says 99 ids of uint16, 1,222 bytes with the header; it has 1,096: get the file again",
    ),
    (
        lambda path: peers.llmc(path / "x.bin", IDS, version=2),
        "x.bin: version 2 of llm.c's shards with magic 20240520, expected 1",
    ),
    (
        lambda path: peers.llmc(path / "x.bin", IDS, 20240801),
        "x.bin: version 1 of llm.c's shards with magic 20240801, expected 7",
    ),
    (
        lambda path: peers.llmc(path / "x.bin", IDS, 20240522),
        r"x.bin: evaluation questions of llm.c \(magic 20240522\), not ids; leave it out with --files",
    ),
    (lambda path: peers.llmc(path / "x.bin", IDS, 20240326), "x.bin: a model of llm.c"),
    (
        lambda path: peers.raw(path / "x.bin", [1, 2, 3], "B"),
        r"x.bin: 3 bytes are no whole number of uint16 ids \(2 bytes each\); copied in part, or of another --dtype",
    ),
    (
        lambda path: peers.raw(path / "x.bin", IDS, "I"),
        r"x.bin: read as uint16, every other id is at most 0: the ids are 4 bytes wide; give --dtype uint32",
    ),
    (lambda path: peers.npy(path / "x.npy", np.array([IDS, IDS])), "x.npy: expected a 1-D array .* 2-D of uint16"),
    (lambda path: peers.npy(path / "x.npy", IDS, "<f4"), "x.npy: expected a 1-D array .* 1-D of float32"),
    (lambda path: peers.npy(path / "x.npy", IDS, ">u2"), "x.npy: its ids are big-endian; .*little-endian uint16"),
    (lambda path: np.save(path / "x.npy", np.array([{}])), r"x.npy: not a whole .npy file of ids \("),
    (lambda path: (path / "x.npy").write_bytes(b""), r"x.npy: not a whole .npy file of ids \("),
    (lambda path: (path / "x.npy").write_bytes(b"PK\3\4 and so on"), r"x.npy: not a whole .npy file of ids \("),
    (
        lambda path: (path / "x.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "x.bin: a Git LFS pointer in place of the file; fetch it with: git lfs pull",
    ),
    (
        lambda path: (peers.megatron(path / "x", [[1, 2, 3]]), peers.raw(path / "x.bin", [1, 2])),
        "x.bin: 4 bytes, its .idx says 3 ids of uint16 .6 bytes.: get both files again",
    ),
    (
        lambda path: (peers.datatrove(path / "x.ds", [[1, 2, 3]]), peers.raw(path / "x.ds", [1, 2])),
        "x.ds: 4 bytes, and x.ds.index says 3 ids, of 2 or 4 bytes each: get both files again",
    ),
    (
        lambda path: (peers.datatrove(path / "x.ds", [[1, 2, 3]]), (path / "x.ds.index").write_bytes(bytes(7))),
        "x.ds.index: 7 bytes, expected 8 for each document",
    ),
]


@pytest.mark.parametrize(("write", "message"), WRONG_FILES)
def test_a_file_that_is_not_as_it_says_is_refused_by_name(tmp_path, write, message):
    write(tmp_path)
    (path,) = (path for path in tmp_path.iterdir() if path.suffix in (".bin", ".npy", ".ds"))
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_npy_file_cut_short_or_longer_than_its_header_says_is_refused(tmp_path):
    path = peers.npy(tmp_path / "x.npy", IDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"x.npy: not a whole .npy file of ids \("):
        read(path)
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(DataError, match=r"x.npy: its header says 200 bytes, it has 202: get the file again"):
        read(path)


def test_ids_of_64_bits_without_a_header_are_seen(tmp_path):
    path = peers.raw(tmp_path / "x.bin", IDS, "q")
    with pytest.raises(DataError, match="give --dtype uint32"):
        read(path)
    with pytest.raises(DataError, match="the ids are 8 bytes wide; write them again as uint16 or uint32"):
        read(path, "uint32")


def test_few_zeros_at_every_other_place_are_ids(tmp_path):
    assert ids_of(read(peers.raw(tmp_path / "x.bin", [5, 0, 7, 0]))) == [5, 0, 7, 0]


def test_datatrove_s_index_and_the_user_s_dtype_may_not_differ(tmp_path):
    peers.datatrove(tmp_path / "x.ds", [[1, 2]])
    with pytest.raises(DataError, match=r"x.ds: its index says uint16, --dtype says uint32; leave --dtype out"):
        read(tmp_path / "x.ds", "uint32")


def test_shards_are_found_whole_in_the_order_of_their_numbers(tmp_path):
    for name in ["x_10.bin", "x_2.bin", "x_1.bin", "sub/x_3.npy", ".cache/x_4.bin", "store/x_5.bin", ".x_6.bin"]:
        peers.raw(tmp_path / name, [1])
    for name in ["store/store.json", "notes.txt", "x_1.idx", "a.ds.index", "tokenizer.json"]:
        (tmp_path / name).write_text("")
    shards, passed_over = find_shards(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in shards] == [
        "sub/x_3.npy",
        "x_1.bin",
        "x_2.bin",
        "x_10.bin",
    ]
    assert [path.name for path in passed_over] == ["notes.txt"]
    assert [path.name for path in find_shards(tmp_path, "*_1*")[0]] == ["x_1.bin", "x_10.bin"]
    assert [path.name for path in find_shards(tmp_path, "sub/*")[0]] == ["x_3.npy"]
    assert matches(tmp_path / "sub/x_3.npy", tmp_path, "x_?.npy")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.bin", "train"),
        ("val.bin", "val"),
        ("fineweb_val_000000.bin", "val"),
        ("edufineweb_train_000001.npy", "train"),
        ("owt-valid.npy", "val"),
        ("x_validation_text_document.bin", "val"),
        ("VAL0.bin", "val"),
        ("interval_3.bin", "train"),
        ("retrieval.bin", "train"),
        ("00000_00001_shuffled.ds", "train"),
        ("val/00000.ds", "val"),
        ("val/train_3.ds", "train"),
        ("trainval_1.bin", "train"),
    ],
)
def test_a_file_s_name_decides_its_split(name, split):
    assert split_of(Path("val/of/somebody", name), Path("val/of/somebody")) == split


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("x_train_000001.bin", "x_train_000002.bin", True),
        ("x_train_9.bin", "x_train_10.bin", True),
        ("x_train_000001.bin", "x_train_000003.bin", False),
        ("x_val_000000.bin", "x_train_000001.bin", False),
        ("a/1.bin", "b/2.bin", False),
        ("train.bin", "train.bin", False),
        ("1.bin", "2.npy", False),
    ],
)
def test_text_goes_on_where_the_number_goes_on(first, second, expected):
    assert follows(Path(first), Path(second)) is expected


def adopted(folder: Path, config: AdoptConfig = BYTES) -> TokenStore:
    adopt(str(folder), folder.parent / "store", config)
    return TokenStore(folder.parent / "store")


def check(store: TokenStore, split: str, documents: peers.Documents) -> None:
    """A split's stream, length, windows and document starts are those of these documents."""
    expected = np.array(peers.stream(documents, EOT))
    stream = store.split(split)
    assert len(stream) == len(expected) == store.facts["splits"][split]["tokens"]
    assert np.array_equal(np.asarray(stream), expected)
    assert store.document_starts(split).tolist() == peers.starts(documents)
    for length in (1, 2, 7):
        where = np.arange(0, max(1, len(expected) - length))
        if len(expected) >= length:
            assert np.array_equal(stream.gather(where, length), np.stack([expected[at : at + length] for at in where]))
    assert store.facts["splits"][split]["documents"] == len(documents)
    assert store.facts["splits"][split]["bytes"] == sum(map(len, documents))
    assert list(store.damaged()) == []


DOCUMENTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=6)
SIZES = st.integers(1, 20)


def write_shards(folder: Path, name: str, ids: list[int], size: int, first: int = 0) -> None:
    for number, start in enumerate(range(0, len(ids), size), first):
        peers.raw(folder / f"{name}_{number:06d}.bin", ids[start : start + size])


@given(train=DOCUMENTS, val=DOCUMENTS, size=SIZES, style=st.sampled_from(["before", "after", "both", "none"]))
def test_a_peer_s_eots_wherever_they_stand_become_the_stream_s(train, val, size, style):
    framed = {
        "before": lambda documents: peers.flat([EOT, *document] for document in documents),
        "after": lambda documents: peers.flat([*document, EOT] for document in documents),
        "both": lambda documents: peers.stream(documents, EOT),
        "none": peers.flat,
    }[style]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "peer")
        for split, documents in (("train", train), ("val", val)):
            write_shards(folder, split, framed(documents), size)
        store = adopted(folder)
        told = {"both": "before"}.get(style, style)
        assert store.facts["eot_style"] == told
        assert store.facts["counts"] == {"empty": 0, "cut": 0}
        for split, documents in (("train", train), ("val", val)):
            check(store, split, [peers.flat(documents)] if style == "none" else documents)


@given(documents=DOCUMENTS, size=st.integers(2, 20))
def test_a_stream_cut_by_its_own_border_keeps_every_id(documents, size):
    ids = peers.flat([EOT, *document] for document in documents)
    if len(ids) <= size:
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "peer")
        peers.build_nanogpt(folder, ids, size)
        val, train = ids[:size], ids[size:]
        expected_val = [*val, *([EOT] if val[-1] != EOT else [])]
        expected_train = [*([EOT] if train[0] != EOT else []), *train, *([EOT] if train[-1] != EOT else [])]
        if expected_val == [EOT] or expected_train == [EOT]:
            return
        store = adopted(folder)
        assert np.asarray(store.val).tolist() == expected_val
        assert np.asarray(store.train).tolist() == expected_train
        assert store.facts["counts"]["cut"] == (train[0] != EOT)
        assert store.facts["eot_style"] == "before"


@given(train=DOCUMENTS, val=DOCUMENTS, eot=st.sampled_from(["", "after", "before"]), peer=st.booleans(), data=st.data())
def test_documents_known_by_an_index_are_the_stream_s_with_eot_in_the_files_and_without(train, val, eot, peer, data):
    framed = {"": list, "after": lambda document: [*document, EOT], "before": lambda document: [EOT, *document]}[eot]
    empty_at = data.draw(st.integers(0, len(train))) if not eot else 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "peer")
        for split, documents in (("train", train), ("val", val)):
            written = [framed(document) for document in documents]
            if split == "train" and not eot:
                written.insert(empty_at, [])  # of no ids: no document
            half = len(written) // 2
            for number, part in enumerate([written[:half], written[half:]] if half else [written]):
                name = folder / f"x_{split}_{number}"
                peers.megatron(name, part) if peer else peers.datatrove(name.with_suffix(".ds"), part)
        store = adopted(folder)
        assert store.facts["eot_style"] == (eot or "none")
        assert store.facts["splits"]["train"]["eot_by_index"] is (not eot)
        for split, documents in (("train", train), ("val", val)):
            check(store, split, documents)


def test_the_loader_reads_an_adopted_stream_as_any_other(tmp_path):
    documents = [list(range(number % 7 + 1)) for number in range(40)]
    peers.megatron(tmp_path / "peer" / "x_train", documents)
    peers.megatron(tmp_path / "peer" / "x_val", documents[:5])
    store = adopted(tmp_path / "peer")
    plain = np.array(peers.stream(documents, EOT))
    loader = Loader(store.train, DataConfig(seq_len=9, order="sequential", packing="document"), store.eot)
    batch = loader.batch(0, 6)
    assert batch.inputs.tolist() == plain[: 6 * 9].reshape(6, 9).tolist()
    assert batch.targets.tolist() == plain[1 : 6 * 9 + 1].reshape(6, 9).tolist()


def test_an_index_that_contradicts_the_eots_is_refused_with_what_to_do(tmp_path):
    peers.megatron(tmp_path / "peer" / "x_train", [[1, EOT], [2], [3, EOT]])
    peers.megatron(tmp_path / "peer" / "x_val", [[1, EOT]])
    with pytest.raises(DataError, match=r"x_train.bin: document 1 of its index has no eot.*--append-eod"):
        adopted(tmp_path / "peer")
    assert not (tmp_path / "store").exists()


def test_files_without_any_eot_beside_files_with_them_are_refused(tmp_path):
    peers.megatron(tmp_path / "peer" / "x_train", [[1], [2], [3]])
    peers.megatron(tmp_path / "peer" / "x_val", [[1, EOT]])
    with pytest.raises(DataError, match=r"x_train.bin: holds no eot, and other files do; .*--append-eod"):
        adopted(tmp_path / "peer")


@pytest.mark.parametrize("documents", [[[]], [[], [5]], [[], []], [[5], []]])
def test_a_document_of_an_index_that_is_its_eot_alone_is_an_empty_text(tmp_path, documents):
    for split in ("train", "val"):
        peers.megatron(tmp_path / "peer" / f"x_{split}", [[*document, EOT] for document in documents])
    store = adopted(tmp_path / "peer")
    check(store, "train", documents)
    assert store.facts["counts"]["empty"] == 2 * documents.count([])


def test_documents_with_an_eot_at_both_ends_need_none(tmp_path):
    for split in ("train", "val"):
        peers.megatron(tmp_path / "peer" / f"x_{split}", [[EOT, 1, EOT], [EOT, 2, EOT]])
    assert adopted(tmp_path / "peer").train[:].tolist() == [EOT, 1, EOT, EOT, 2, EOT]


def test_a_shard_taken_out_for_validation_leaves_no_glued_document(tmp_path):
    """Shard 1 of 0, 1, 2 becomes validation: what stood before and behind it is no one document."""
    ids = [EOT, 1, 2, 3, 4, EOT, 5, 6, 7, 8]
    for number, part in enumerate((ids[:4], ids[4:7], ids[7:])):
        peers.raw(tmp_path / "peer" / f"x_{number}.bin", part)
    store = adopted(tmp_path / "peer", AdoptConfig(tokenizer="bytes", val_files="x_1.bin"))
    assert store.train[:].tolist() == [EOT, 1, 2, 3, EOT, 6, 7, 8, EOT]
    assert store.val[:].tolist() == [EOT, 4, EOT, 5, EOT]
    assert store.document_starts("train").tolist() == [0, 4]
    assert store.facts["counts"] == {"empty": 0, "cut": 2}


def test_two_eots_in_a_row_are_a_document_without_ids_and_counted(tmp_path):
    peers.raw(tmp_path / "peer" / "train.bin", [EOT, 1, EOT, EOT, 2])
    peers.raw(tmp_path / "peer" / "val.bin", [EOT, 3])
    store = adopted(tmp_path / "peer")
    assert store.document_starts("train").tolist() == [0, 2, 3]
    assert store.facts["counts"] == {"empty": 1, "cut": 0}


@pytest.mark.parametrize("ids", [[EOT], [EOT, EOT]])
def test_a_split_of_eots_alone_is_no_split(tmp_path, ids):
    peers.raw(tmp_path / "peer" / "train.bin", [EOT, 1])
    peers.raw(tmp_path / "peer" / "val.bin", ids)
    if len(ids) == 1:
        with pytest.raises(DataError, match=r"val.bin: the val split holds no document, only an eot"):
            adopted(tmp_path / "peer")
    else:
        assert adopted(tmp_path / "peer").facts["counts"]["empty"] == 1


def test_empty_shards_are_left_out_and_a_split_of_nothing_else_is_refused(tmp_path):
    peers.raw(tmp_path / "peer" / "train_0.bin", [])
    peers.raw(tmp_path / "peer" / "train_1.bin", [EOT, 1])
    peers.raw(tmp_path / "peer" / "val.bin", [EOT, 2])
    store = adopted(tmp_path / "peer")
    assert len(store.facts["splits"]["train"]["shards"]) == 2  # the shard, and the closing eot
    peers.raw(tmp_path / "other" / "train.bin", [EOT, 1])
    peers.raw(tmp_path / "other" / "val.bin", [])
    with pytest.raises(DataError, match=r"val.bin: empty, and no other file of the val split holds an id"):
        adopt(str(tmp_path / "other"), tmp_path / "more", BYTES)
