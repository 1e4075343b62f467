import json
import os
import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig, ShardsConfig
from quatrain.interop.exporting import export_store
from quatrain.text.tokenizers import ByteTokenizer
from quatrain.tokens.store import TokenStore
from test_cli import TINY, call, done, files_in, full_after, refused

EOT = 256
TRAIN = [list(f"document {number} of train\n".encode() * (number % 3 + 1)) for number in range(9)]
VAL = [list(b"a document of validation"), list(b"and another")]


def bytes_store(folder: Path, train: peers.Documents = TRAIN, val: peers.Documents = VAL) -> TokenStore:
    """A store of bytes in `folder/S`, over .npy shards beside it."""
    peers.npy(folder / "peer" / "x_train.npy", peers.stream(train, EOT))
    peers.npy(folder / "peer" / "x_val.npy", peers.stream(val, EOT))
    adopt(str(folder / "peer"), folder / "S", AdoptConfig(tokenizer="bytes", name="tale"))
    return TokenStore(folder / "S")


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> TokenStore:
    monkeypatch.chdir(tmp_path)
    return bytes_store(Path())


def test_llm_c_reads_its_shards_val_first():
    answer = done("export", "S", "--to", "llmc", "--out", "X", "--shard-size", "60", "--json")
    names = sorted(path.name for path in Path("X").glob("*.bin"))
    assert names[0] == "tale_train_000001.bin"
    assert names[-1] == "tale_val_000000.bin"
    assert [int(name[-10:-4]) for name in names[:-1]] == list(range(1, len(names)))
    assert answer.json["files"] == sorted([*names, "tokenizer.json"])
    assert (answer.json["format"], answer.json["documents"]) == ("llmc", 11)
    assert answer.out.count("\n") == 1
    streams = {"train": [], "val": []}
    for name in names:
        data = Path("X", name).read_bytes()
        magic, version, count, *rest = struct.unpack("<256i", data[:1024])
        assert (magic, version, set(rest)) == (20240520, 1, {0})
        streams["val" if "_val_" in name else "train"] += struct.unpack(f"<{count}H", data[1024:])
        assert count == 60 or name in (names[-1], names[-2])
    assert streams == {"train": peers.stream(TRAIN, EOT), "val": peers.stream(VAL, EOT)}
    assert f"train: its last shard is partial, {len(streams['train']) % 60} ids of 60" in answer.err


def test_validation_longer_than_a_shard_goes_on_before_train_begins():
    done("export", "S", "--to", "npy", "--out", "X", "--shard-size", "10")
    names = sorted((path.name for path in Path("X").glob("*.npy")), key=lambda name: name[-10:])
    length = len(peers.stream(VAL, EOT))
    assert [name[5:8] for name in names[:4]] == ["val"] * (-(-length // 10))
    assert names[4] == "tale_train_000004.npy"
    joined = np.concatenate([np.load(Path("X", name), allow_pickle=False) for name in names])
    assert joined.dtype == np.dtype("<u2")
    assert joined.tolist() == [*peers.stream(VAL, EOT), *peers.stream(TRAIN, EOT)]


def test_megatron_reads_documents_each_with_its_eot_behind_it():
    answer = done("export", "S", "--to", "megatron", "--out", "X", "--name", "web", "--json")
    assert answer.json["files"] == [
        "tokenizer.json",
        *(f"web_{s}.{e}" for s in ("train", "val") for e in ("bin", "idx")),
    ]
    assert peers.read_megatron(Path("X/web_train")) == [[*document, EOT] for document in TRAIN]
    assert peers.read_megatron(Path("X/web_val")) == [[*document, EOT] for document in VAL]


@pytest.mark.parametrize("last", [[1, 2, 3], []])
def test_a_closing_eot_is_no_shard_of_its_own_unless_it_says_something(last):
    documents = [[5] * 20, last]
    bytes_store(Path("more"), documents, VAL)
    size = len(peers.stream(documents, EOT)) - 1
    done("export", "more/S", "--to", "npy", "--out", "X", "--shard-size", size)
    shards = [np.load(path).tolist() for path in sorted(Path("X").glob("*_train_*.npy"))]
    assert shards == [peers.stream(documents, EOT)[:-1], *([] if last else [[EOT]])]
    done("adopt", "X", "--out", "back")
    assert TokenStore("back").train[:].tolist() == peers.stream(documents, EOT)
    assert TokenStore("back").document_starts("train").tolist() == peers.starts(documents)


DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=6)


@given(train=DOCUMENTS, val=DOCUMENTS, to=st.sampled_from(["llmc", "npy", "megatron"]), size=st.integers(1, 30))
def test_export_and_adopt_give_back_streams_and_document_starts(train, val, to, size):
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        folder = Path(place)
        store = bytes_store(folder, train, val)
        export_store(store, folder / "X", ShardsConfig(to=to, shard_size=size))
        adopt(str(folder / "X"), folder / "back")
        back = TokenStore(folder / "back")
        for split, documents in (("train", train), ("val", val)):
            assert np.asarray(back.split(split)).tolist() == peers.stream(documents, EOT)
            assert back.document_starts(split).tolist() == peers.starts(documents)
        assert back.facts["counts"]["cut"] == 0


def test_prepared_text_comes_back_through_every_format(sonnets):
    for to in ("llmc", "npy", "megatron"):
        done("export", sonnets.folder, "--to", to, "--out", f"X-{to}")
        done("adopt", f"X-{to}", "--out", f"back-{to}")
        back = TokenStore(f"back-{to}")
        for split in ("train", "val"):
            assert np.array_equal(np.asarray(back.split(split)), np.asarray(sonnets.split(split)))
            assert np.array_equal(back.document_starts(split), sonnets.document_starts(split))
        assert back.tokenizer.sha256 == sonnets.tokenizer.sha256


def test_the_same_export_again_says_so_and_another_is_refused():
    words = ["export", "S", "--to", "npy", "--out", "X"]
    first = done(*words, "--json").json
    before = files_in(Path("X"))
    again = done(*words, "--json")
    assert "X already holds this export" in again.err
    assert again.json | {"seconds": 0} == first | {"seconds": 0}
    assert files_in(Path("X")) == before
    assert "X: holds an export of another store or options; choose another --out" in refused(
        *words[:3], "llmc", *words[4:]
    )
    Path("X/tale_val_000000.npy").unlink()
    assert "X/tale_val_000000.npy: missing, and export.json names it" in refused(*words)


def test_a_foreign_folder_is_refused_and_not_touched():
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    said = refused("export", "S", "--to", "npy", "--out", "mine")
    assert "mine/notes.txt: --out must be absent, empty or our own; this file is not ours, nothing was touched" in said
    assert "file: a file; --out must be a folder" in refused("export", "S", "--to", "npy", "--out", "file")
    assert "is not ours" in refused("export", "S", "--to", "npy", "--out", "S")


@pytest.mark.parametrize("successes", [0, 2, 4, 7])
def test_a_full_disk_is_one_message_and_the_same_command_goes_on(monkeypatch, successes):
    words = ["export", "S", "--to", "llmc", "--shard-size", "60"]
    done(*words, "--out", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after(successes))
        answer = call(*words, "--out", "X")
    assert answer.code == 1
    assert re.search(r"error: X/\S+: cannot write [\d,]+ bytes: No space left on device; make room", answer.err)
    done(*words, "--out", "X")
    assert files_in(Path("X")) == files_in(Path("whole"))


def change_vocabulary(size: int) -> None:
    facts = json.loads(Path("S/store.json").read_text(encoding="utf-8"))
    facts["tokenizer"]["vocab_size"] = size
    Path("S/store.json").write_text(json.dumps(facts), encoding="utf-8")


@pytest.mark.parametrize("to", ["llmc", "npy"])
def test_case_51_a_vocabulary_that_a_format_cannot_hold_is_refused_by_name(to):
    change_vocabulary(65_537)
    said = refused("export", "S", "--to", to, "--out", "X")
    assert (
        f"S: its vocabulary has 65,537 ids, --to {to} holds 65,536; give --to megatron, which holds 32-bit ids" in said
    )
    change_vocabulary(65_536)
    done("export", "S", "--to", to, "--out", "X")


def test_a_large_vocabulary_goes_to_megatron_as_int32():
    change_vocabulary(70_000)
    done("export", "S", "--to", "megatron", "--out", "X")
    assert Path("X/tale_train.idx").read_bytes()[17] == 4
    assert peers.read_megatron(Path("X/tale_train")) == [[*document, EOT] for document in TRAIN]
    change_vocabulary(2**31 + 1)
    assert "--to megatron holds 2,147,483,648; no format here" in refused(
        "export", "S", "--to", "megatron", "--out", "Y"
    )


def test_case_51_an_id_beyond_the_vocabulary_is_not_written():
    path = Path("peer/x_train.npy")
    content = bytearray(path.read_bytes())
    content[-3] = 0xFF
    path.write_bytes(content)
    said = call("export", "S", "--to", "npy", "--out", "X")
    assert said.code == 2
    assert (
        "S: holds id 65,290, beyond its vocabulary of 257; find the damaged file with: quatrain inspect S" in said.err
    )


WRONG = [
    (["S", "--out", "X"], "--to"),
    (["S", "--to", "npy"], "--out"),
    (
        ["S", "--to", "nyp", "--out", "X"],
        "--to is nyp (did you mean 'npy'?); a token store goes to llmc, npy, megatron",
    ),
    (["S", "--to", "hf", "--out", "X"], "--to is hf; a token store goes to llmc, npy, megatron"),
    (["S", "--to", "npy", "--out", "X", "--shard-size", "0"], "--shard-size is 0, it must be at least 1"),
    (["S", "--to", "megatron", "--out", "X", "--shard-size", "9"], "--shard-size has no meaning with --to megatron"),
    (["nope", "--to", "npy", "--out", "X"], "nope: no such folder; make a token store with: quatrain prepare"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG)
def test_wrong_input_is_exit_2_and_one_message(words, expected):
    assert expected in refused("export", *words)


@pytest.mark.parametrize("to", ["hf", "llmc"])
def test_a_run_is_not_exported_yet_and_the_message_says_so(to):
    done("train", "sonnets", "--data", "S", "--out", "R", *TINY)
    for run in ("R", "R/checkpoints/step_00000006"):
        said = refused("export", run, "--to", to, "--out", "X")
        assert f"{run}: a run, and this version exports token stores alone" in said


def test_a_byte_tokenizer_s_json_travels_with_the_shards():
    done("export", "S", "--to", "llmc", "--out", "X")
    assert Path("X/tokenizer.json").read_bytes() == ByteTokenizer().json
