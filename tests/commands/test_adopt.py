import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import peers
from quatrain.interop import adoption, scan
from quatrain.text.tokenizers import gpt2
from quatrain.tokens.overlap import SPAN
from quatrain.tokens.store import TokenStore
from test_cli import TINY, call, done, files_in, full_after, in_process, refused

KEYS = {
    "documents",
    "tokens",
    "train_tokens",
    "val_tokens",
    "shards",
    "format",
    "eot_style",
    "eots_supplied",
    "empty",
    "cut",
    "share_in_train",
    "seconds",
    "fingerprint",
}
EOT = 50_256
SIZE = 150  # ids a shard
TEXTS = [f"This is document {number}, and {number * 7919} is a number in it.\n" for number in range(40)]


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """The ids of the texts under gpt2."""
    return [gpt2().encode(text).tolist() for text in TEXTS]


@pytest.fixture(autouse=True)
def edu(tmp_path, monkeypatch, documents) -> Path:
    """An empty folder with build-nanogpt's five shards in `edu`."""
    monkeypatch.chdir(tmp_path)
    peers.build_nanogpt(Path("edu"), peers.flat([EOT, *document] for document in documents), SIZE)
    return Path("edu")


def adopt(*words: object) -> list[object]:
    return ["adopt", *words, "--out", "S", *([] if "--tokenizer" in words or "--chars-from" in words else GPT2)]


GPT2 = ["--tokenizer", "gpt2"]


def test_build_nanogpt_s_shards_become_a_store_without_being_copied(edu, documents):
    ids = peers.flat([EOT, *document] for document in documents)
    answer = done(*adopt("edu"), "--json")
    told = answer.json
    assert set(told) == KEYS
    assert told | {"seconds": 0, "fingerprint": ""} == {
        "documents": 41,  # the one that the border cut counts twice
        "tokens": len(ids) + 3,
        "train_tokens": len(ids) - SIZE + 2,
        "val_tokens": SIZE + 1,
        "shards": 5,
        "format": ".npy",
        "eot_style": "before",
        "eots_supplied": 3,
        "empty": 0,
        "cut": 1,
        "share_in_train": None,
        "seconds": 0,
        "fingerprint": "",
    }
    assert answer.out.count("\n") == 1
    assert "edufineweb_train_000001.npy (train) begins inside a document: a border of the peer's own" in answer.err
    store = TokenStore("S")
    assert np.asarray(store.val).tolist() == [*ids[:SIZE], EOT]
    assert np.asarray(store.train).tolist() == [EOT, *ids[SIZE:], EOT]
    assert sum(path.stat().st_size for path in Path("S").glob("*.bin")) == 4  # two shards of one eot
    files = [shard["file"] for shard in store.facts["splits"]["train"]["shards"]]
    assert [Path(file).is_absolute() for file in files] == [False, *[True] * (len(files) - 2), False]
    assert store.facts["splits"]["train"]["bytes"] + store.facts["splits"]["val"]["bytes"] == sum(map(len, TEXTS))
    assert store.facts["sources"][0]["name"] == "edu"
    assert store.fingerprint == told["fingerprint"]


def test_a_user_sees_the_text_that_the_ids_stand_for(edu):
    answer = done(*adopt("edu"))
    assert re.search(r"train begins: '<\|endoftext\|>.*document \d+, and", answer.out)
    assert "S: 5 shards (.npy) adopted where they lie: 41 documents" in answer.out
    assert "eot before each document; 3 supplied that no file holds" in answer.out
    assert answer.err == ""


def test_nothing_is_written_beside_the_peer_s_files_which_may_be_read_only(edu):
    before = files_in(edu)
    times = [path.stat().st_mtime_ns for path in [edu, *sorted(edu.iterdir())]]
    for path in edu.iterdir():
        path.chmod(0o444)
    edu.chmod(0o555)
    try:
        done(*adopt("edu"), "--overlap")
        done("inspect", "S", "--verify")
        done("train", "sonnets", "--data", "S", "--out", "R", *TINY)
    finally:
        edu.chmod(0o755)
    assert files_in(edu) == before
    assert [path.stat().st_mtime_ns for path in [edu, *sorted(edu.iterdir())]] == times


def test_nano_gpt_s_eot_behind_each_document_gives_the_same_stream(documents):
    for name, part in (("train", documents[:30]), ("val", documents[30:])):
        peers.raw(Path("owt", f"{name}.bin"), peers.flat([*document, EOT] for document in part))
    told = done(*adopt("owt"), "--json").json
    assert (told["format"], told["eot_style"], told["eots_supplied"], told["cut"]) == ("headerless", "after", 2, 0)
    store = TokenStore("S")
    assert np.asarray(store.train).tolist() == peers.stream(documents[:30], EOT)
    assert np.asarray(store.val).tolist() == peers.stream(documents[30:], EOT)
    assert store.document_starts("val").tolist() == peers.starts(documents[30:])


def test_llm_c_s_and_modded_nanogpt_s_shards(documents):
    ids = peers.flat([EOT, *document] for document in documents)
    for number, start in enumerate(range(0, len(ids), 300)):
        split = "train" if number else "val"
        peers.llmc(Path("fineweb10B", f"fineweb_{split}_{number:06d}.bin"), ids[start : start + 300])
    told = done(*adopt("fineweb10B"), "--json").json
    assert (told["format"], told["eot_style"]) == ("llm.c", "before")
    assert np.asarray(TokenStore("S").train).tolist() == [EOT, *ids[300:], EOT]
    assert TokenStore("S").facts["splits"]["train"]["shards"][1]["offset"] == 1024


def character_set(folder: Path, text: str) -> None:
    """nanoGPT's shakespeare_char: ids of sorted characters, cut at nine tenths, and a pickle beside them."""
    characters = sorted(set(text))
    ids = [characters.index(character) for character in text]
    peers.raw(folder / "train.bin", ids[: len(ids) * 9 // 10])
    peers.raw(folder / "val.bin", ids[len(ids) * 9 // 10 :])
    (folder / "input.txt").write_text(text, encoding="utf-8", newline="")
    (folder / "meta.pkl").write_bytes(b"\x80\x04cos\nsystem\n(S'touch opened'\ntR.")


def test_a_character_set_needs_its_text_and_its_pickle_stays_closed():
    text = "".join(TEXTS) + "Übergröße\r\n"
    character_set(Path("chars"), text.replace("\r\n", "\n"))
    said = refused("adopt", "chars", "--out", "S")
    assert "chars/meta.pkl: a pickle, which runs whatever code is in it: quatrain opens none" in said
    assert "--chars-from input.txt" in said
    assert "a pickle" in refused("adopt", "chars", "--out", "S", "--tokenizer", "chars/meta.pkl")
    answer = done(*adopt("chars", "--chars-from", "chars/input.txt"))
    assert "each split is one document, and where they are one text cut in two" in answer.out
    assert "passed over input.txt, meta.pkl" in answer.out
    store = TokenStore("S")
    joined = store.tokenizer.decode([*store.train[1:-1].tolist(), *store.val[1:-1].tolist()])
    assert joined == text.replace("\r\n", "\n")
    assert (store.train[0], store.train[-1], store.eot) == (store.eot, store.eot, len(set(joined)))
    assert [store.facts["splits"][split]["documents"] for split in ("train", "val")] == [1, 1]
    assert not Path("opened").exists()


def test_megatron_s_documents_without_eot_get_theirs_from_the_index(documents):
    peers.megatron(Path("meg", "web_train_text_document"), documents[:30])
    peers.megatron(Path("meg", "web_val_text_document"), documents[30:])
    told = done(*adopt("meg"), "--json").json
    assert (told["format"], told["eot_style"], told["eots_supplied"]) == ("megatron", "none", 40 + 2)
    store = TokenStore("S")
    assert np.asarray(store.train).tolist() == peers.stream(documents[:30], EOT)
    done("inspect", "S", "--verify")
    trained = done("train", "sonnets", "--data", "S", "--out", "R", *TINY, "--json").json
    scored = done("evaluate", "R", "--json").json
    assert scored["tokens"] == told["val_tokens"] - 1
    assert scored["loss"] == pytest.approx(trained["val_loss"])
    assert scored["bytes"] == sum(map(len, TEXTS[30:]))


def test_datatrove_s_files_all_in_train_need_the_validation_named(documents):
    for number in range(4):
        part = [[*document, EOT] for document in documents[number * 10 : number * 10 + 10]]
        peers.datatrove(Path("ds", f"{number:05d}_shuffled.ds"), part, metadata="gpt2|2\n9\n9 T")
    said = refused(*adopt("ds"))
    assert "ds: no validation among its 4 files ('val' in a name makes one); move some there with --val-files" in said
    done(*adopt("ds", "--val-files", "0000[3]*"))
    store = TokenStore("S")
    assert np.asarray(store.val).tolist() == peers.stream(documents[30:], EOT)
    assert np.asarray(store.train).tolist() == peers.stream(documents[:30], EOT)
    assert store.facts["split"] == {"rule": "file names", "val_files": "0000[3]*"}


def test_the_same_request_again_says_so_and_reads_no_ids(edu, monkeypatch):
    first = done(*adopt("edu"), "--json").json
    before = files_in(Path("S"))
    monkeypatch.setattr(adoption, "scan_all", None)
    again = done(*adopt(Path("edu").resolve()), "--json")
    assert "S already holds the store of this request" in again.err
    assert files_in(Path("S")) == before
    assert again.json | {"seconds": 0} == first | {"seconds": 0}


def test_a_shard_that_changed_since_is_seen_and_one_that_was_touched_is_not(edu):
    done(*adopt("edu"))
    shard = edu / "edufineweb_train_000002.npy"
    later = Path("S/store.json").stat().st_mtime_ns + 10**9
    os.utime(shard, ns=(later, later))
    assert "already holds" in done(*adopt("edu")).out
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\1\0")
    os.utime(shard, ns=(later, later))
    assert "edufineweb_train_000002.npy: changed since S adopted it; restore it, or" in refused(*adopt("edu"))


def test_another_request_and_a_foreign_file_are_refused_and_not_touched(edu):
    done(*adopt("edu"))
    assert "holds a finished store of other sources or options" in refused(*adopt("edu", "--name", "other"))
    assert "S: a token store already; give it to: quatrain train" in refused(*adopt("S"))
    Path("T").mkdir()
    Path("T/notes.txt").write_text("mine")
    said = refused("adopt", "edu", *GPT2, "--out", "T")
    assert "T/notes.txt: --out must be absent, empty or our own; this file is not ours, nothing was touched" in said
    assert "is not ours" in refused("adopt", "edu", *GPT2, "--out", "edu")


def test_an_interrupted_adoption_is_taken_up_again(edu, monkeypatch):
    expected = done("adopt", "edu", *GPT2, "--out", "T", "--name", "edu", "--json").json["fingerprint"]

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adoption, "scan_all", interrupt)
        assert call(*adopt("edu")).code == 130
    assert "unfinished preparation; give its adopt command again" in refused("inspect", "S")
    assert done(*adopt("edu"), "--json").json["fingerprint"] == expected
    assert not Path("S/prepare.json").exists()


@pytest.mark.parametrize("successes", [0, 1, 2, 5, 8])
def test_a_full_disk_is_one_message_and_the_same_command_goes_on(edu, monkeypatch, successes):
    expected = done("adopt", "edu", *GPT2, "--out", "T", "--name", "edu", "--json").json["fingerprint"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after(successes))
        answer = call(*adopt("edu"))
    assert answer.code == 1
    assert re.search(r"error: S/\S+: cannot write.* bytes: No space left on device; make room", answer.err)
    assert done(*adopt("edu"), "--json").json["fingerprint"] == expected


def test_what_cannot_be_adopted_leaves_no_folder_behind(edu, documents):
    peers.raw(edu / "x_val.bin", [1, 2, 60_000])
    peers.raw(edu / "x_train.bin", documents[0])
    assert "60,000 at place 2" in refused("adopt", "edu", *GPT2, "--out", "S", "--files", "x_*")
    assert not Path("S").exists()


def beyond(folder: Path, *shards: list[int]) -> None:
    for number, ids in enumerate(shards):
        peers.raw(folder / f"{'train' if number else 'val'}_{number}.bin", ids)


def test_an_id_beyond_the_vocabulary_is_refused_with_file_and_place():
    beyond(Path("x"), [EOT, 1], [EOT, 2, 50_257, 60_000])
    said = refused(*adopt("x"))
    assert "x/train_1.bin: id 50,257 at place 2, and the tokenizer gpt2 has 50,257 ids; give the tokenizer and" in said
    shutil.rmtree("x")
    peers.npy(Path("x/val.npy"), [EOT, 1], "<i4")
    peers.npy(Path("x/train.npy"), [EOT, 5, -1], "<i4")
    said = refused(*adopt("x"))
    assert "x/train.npy: id 4,294,967,295 (or -1) at place 2, and the tokenizer gpt2 has" in said
    assert "--dtype" not in said


def test_an_id_beyond_the_vocabulary_is_found_behind_the_first_chunk(monkeypatch):
    monkeypatch.setattr(scan, "CHUNK", 4)
    beyond(Path("x"), [EOT, 1], [EOT, 1, 2, 3, 4, 5, 6, EOT, 8, 60_000])
    assert "x/train_1.bin: id 60,000 at place 9" in refused(*adopt("x"))
    beyond(Path("x"), [EOT, 1], [EOT, 1, 2, 3, 4, 5, 6, EOT, 8])
    done(*adopt("x"))
    assert TokenStore("S").document_starts("train").tolist() == [0, 7]


WRONG = [
    ([], "which tokenizer made these ids? Give --tokenizer gpt2 (nanoGPT, build-nanogpt, llm.c"),
    (["--tokenizer", "gtp2"], "no tokenizer 'gtp2' (did you mean 'gpt2'?)"),
    (["--tokenizer", "char"], "--chars-from is missing: the ids of tokenizer char are the sorted characters of a text"),
    (["--tokenizer", "gpt2", "--chars-from", "x"], "--chars-from makes the tokenizer char, and the tokenizer is gpt2"),
    (["--chars-from", "none.txt"], "none.txt: cannot be read as text (No such file or directory)"),
    (["--tokenizer", "gpt2", "--val-files", "*.bin"], "--val-files '*.bin' matches none of the 5 files, such as edu"),
    (
        ["--tokenizer", "gpt2", "--val-files", "*"],
        "its 5 files are all validation, such as edufineweb_train_000001.npy",
    ),
    (["--tokenizer", "gpt2", "--files", "*.bin"], "edu: no shards (.bin, .npy, .ds) under names that match '*.bin'"),
    (["--tokenizer", "gpt2", "--files", "*_val_*"], "its 1 files are all validation"),
    (["--tokenizer", "gpt2", "--dtype", "int8"], "dtype"),
    (["--tokenizer", "gpt2", "--vall-files", "x"], "did you mean '--val-files'?"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG)
def test_wrong_input_is_exit_2_and_one_message(words, expected):
    assert expected in refused("adopt", "edu", "--out", "S", *words)


def test_a_folder_that_is_none_says_so():
    Path("file.bin").write_bytes(b"")
    assert "nope: no such folder; expected a folder of shards, or hub:OWNER/NAME" in refused(*adopt("nope"))
    assert "file.bin: a file; expected a folder of shards" in refused(*adopt("file.bin"))
    Path("alone").mkdir()
    peers.raw(Path("alone/train.bin"), [EOT, 1])
    assert "this is the only file: add another, for ids are not split by position" in refused(*adopt("alone"))


def test_two_formats_in_a_folder_are_not_joined(edu):
    peers.raw(edu / "x_val.bin", [EOT, 1])
    said = refused(*adopt("edu"))
    assert "of format headerless: the same ids twice? Choose one kind with --files" in said
    assert done(*adopt("edu", "--files", "*.npy"), "--json").json["shards"] == 5


def test_a_file_called_test_goes_into_train_with_a_warning():
    for name in ("train", "val", "test"):
        peers.raw(Path("x", f"{name}.bin"), [EOT, 1])
    assert (
        "warning: test.bin goes into train, whatever 'test' means; leave it out with --files" in done(*adopt("x")).out
    )


def test_the_folder_s_own_tokenizer_is_taken_and_said(edu):
    (edu / "tokenizer.json").write_bytes(gpt2().json)
    assert "tokenizer: edu/tokenizer.json" in done("adopt", "edu", "--out", "S").out
    assert TokenStore("S").tokenizer.name == "gpt2"


def test_a_tokenizer_of_other_names_and_without_a_byte_table(edu):
    tokenizers = pytest.importorskip("tokenizers", reason="no optional library tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(90_000)}, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    made.save("words.json")
    documents = [[70_000, 4_464, number] for number in range(20)]
    peers.raw(Path("x/val.bin"), peers.flat([*document, 90_000] for document in documents[:3]), "I")
    peers.raw(Path("x/train.bin"), peers.flat([*document, 90_000] for document in documents), "I")
    words = ["x", "--tokenizer", "words.json", "--eot", "</s>"]
    said = refused(*adopt(*words, "--dtype", "uint16"))
    assert "x/train.bin: read as uint16, every other id is at most 1: the ids are 4 bytes wide; give --dtype" in said
    assert done(*adopt(*words), "--json").json["documents"] == 23
    store = TokenStore("S")
    assert np.asarray(store.train).tolist() == peers.stream(documents, 90_000)  # case_51: 70,000 is not 4,464
    assert store.facts["splits"]["val"]["bytes"] is None
    done("train", "sonnets", "--data", "S", "--out", "R", *TINY)
    assert done("evaluate", "R", "--json").json["bits_per_byte"] is None


def test_overlap_is_computed_when_asked_for_and_kept(edu, documents):
    leak = peers.flat(documents[:20])[: 3 * SPAN]
    for name, part in (("train", [*documents, leak]), ("val", [leak])):
        peers.raw(Path("x", f"{name}.bin"), peers.flat([EOT, *document] for document in part))
    assert done(*adopt("x"), "--json").json["share_in_train"] is None
    answer = done(*adopt("x", "--overlap"), "--json")
    assert "already holds" in answer.err
    assert "100.00% of sampled 32-token validation spans stand in train" in answer.err
    assert answer.json["share_in_train"] == 1.0
    assert TokenStore("S").facts["splits"]["val"]["share_in_train"] == 1.0
    assert done(*adopt("x"), "--json").json["share_in_train"] == 1.0
    done("inspect", "S", "--verify")


def test_overlap_is_the_same_however_the_stream_is_cut_into_chunks(documents, monkeypatch):
    rng = np.random.default_rng(5)
    train = [rng.integers(0, 50, 200).tolist() for _ in range(8)]
    val = [[*train[0][20:90], *rng.integers(0, 50, 80).tolist()], train[3][5:30]]
    for name, part in (("train", train), ("val", val)):
        peers.raw(Path("x", f"{name}.bin"), peers.flat([EOT, *document] for document in part))
    shares = set()
    for size in (1 << 24, 64, 7):
        monkeypatch.setattr(adoption, "SPAN_CHUNK", size)
        shares.add(done("adopt", "x", *GPT2, "--overlap", "--out", f"S{size}", "--json").json["share_in_train"])
    spans = [tuple(document[at : at + SPAN]) for document in train for at in range(len(document) - SPAN + 1)]
    wanted = [tuple(document[at : at + SPAN]) for document in val for at in range(len(document) - SPAN + 1)]
    assert shares == {round(sum(span in set(spans) for span in wanted) / len(wanted), 6)}


def test_progress_is_said_on_long_work(edu, monkeypatch):
    monkeypatch.setattr(scan, "SECONDS_BETWEEN_LINES", -1.0)
    assert re.search(r"0\.0 of 0\.0 GB read and hashed", done(*adopt("edu")).out)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_data_set_of_the_hub_is_taken_at_one_revision(edu, monkeypatch):
    asked = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options))
        shutil.copytree("edu", f"cache/{COMMIT}", dirs_exist_ok=True)
        return f"cache/{COMMIT}"

    hub = pytest.importorskip("huggingface_hub", reason="no optional library huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    done(*adopt("hub:somebody/fineweb10B-gpt2@v1.0"))
    done("adopt", "hub:somebody/fineweb10B-gpt2", *GPT2, "--files", "*_00000[0-2].npy", "--out", "T")
    (name, first), (_, second) = asked
    assert (name, first["repo_type"], first["revision"]) == ("somebody/fineweb10B-gpt2", "dataset", "v1.0")
    assert {"*.bin", "*.npy", "*.ds", "*.idx", "*.index"} <= set(first["allow_patterns"])
    assert (second["revision"], second["allow_patterns"][0]) == (None, "*_00000[0-2].npy")
    source = TokenStore("S").facts["sources"][0]
    assert (source["name"], source["revision"], source["files"]) == ("somebody/fineweb10B-gpt2", COMMIT, 5)
    assert TokenStore("T").facts["sources"][0]["files"] == 3
    assert Path("S/fineweb10B-gpt2_train.idx").exists()


OFFLINE = """
import sys
from quatrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_hub_s_cache_serves_offline_and_what_is_not_in_it_is_said(edu):
    pytest.importorskip("huggingface_hub", reason="no optional library huggingface_hub")
    cache = Path("cache/datasets--somebody--shards").resolve()
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(COMMIT)
    shutil.copytree("edu", cache / "snapshots" / COMMIT)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache.parent)}
    process = in_process(OFFLINE, *adopt("hub:somebody/shards"), "--json", **offline)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["documents"] == 41
    assert TokenStore("S").facts["sources"][0]["revision"] == COMMIT
    process = in_process(OFFLINE, "adopt", "hub:somebody/else", *GPT2, "--out", "T", **offline)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("error: hub:somebody/else: cannot be fetched (")
    assert "Traceback" not in process.stderr
    assert not Path("T").exists()


def test_the_hub_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "needs the library 'huggingface_hub': pip install quatrain[hub]" in refused(*adopt("hub:a/b"))
    assert "expected hub:OWNER/NAME, or hub:OWNER/NAME?revision=REVISION" in refused(*adopt("hub:alone"))


def test_a_data_set_that_is_not_there_is_exit_2(monkeypatch):
    errors = types.SimpleNamespace(
        HFValidationError=KeyError, RevisionNotFoundError=KeyError, RepositoryNotFoundError=KeyError
    )

    def snapshot_download(*words: object, **options: object) -> str:
        raise KeyError("404 Client Error.\n\nRepository Not Found")

    fake = types.SimpleNamespace(snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    assert "hub:a/b: '404 Client Error" in refused(*adopt("hub:a/b"))
