"""Ids and back: no text gives eot, nothing is lost, and others who read our tokenizer.json get our ids."""

import hashlib
import json
import sys
from functools import cache
from importlib import resources

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from conftest import shared_file
from quatrain import build_tokenizer
from quatrain.errors import DataError, UsageError
from quatrain.text import tokenizers as ours
from quatrain.text.tokenizers import EOT_TEXT, CharTokenizer, FileTokenizer, Tokenizer, load_tokenizer, named_tokenizer

AWKWARD = [
    EOT_TEXT,
    "<|endof",
    "text|>",
    " ",
    "   ",
    "\n\n",
    "\r\n",
    "\t",
    "\0",
    "'ll",
    "'S",
    " the",
    "Ġ",
    "1234",
    "--",
]
AWKWARD += ["é", "e\u0301", "\u2028", "\u3000", "\ufeff", "\ufffd", "日本語", "😀", "👨‍👩‍👧", "ﷺ", "\U0010ffff"]
# Unassigned characters are left out: libraries differ in which Unicode version they know.
ASSIGNED = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12)
TEXT = st.lists(st.sampled_from(AWKWARD) | ASSIGNED, max_size=8).map("".join)
KINDS = ["char", "bytes", "gpt2", "file"]


def file_json(model: models.Model | None = None, specials: tuple[str, ...] = (EOT_TEXT,), **parts: object) -> bytes:
    """A tokenizer.json written by the `tokenizers` library: byte-level BPE with two merges unless told otherwise."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: rank for rank, letter in enumerate([*letters, "th", "the"])}
    made = tokenizers.Tokenizer(model or models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    byte_level = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    for name, part in ((byte_level if model is None else {}) | parts).items():
        setattr(made, name, part)
    made.add_special_tokens([AddedToken(word, special=True) for word in specials])
    return made.to_str().encode()


@cache
def file_tokenizer() -> FileTokenizer:
    return FileTokenizer(file_json(), "own/tokenizer.json")


def tokenizer_of(kind: str, text: str = "") -> Tokenizer:
    """One tokenizer of each kind; `char` is built to know the text."""
    return CharTokenizer(text + "ab") if kind == "char" else _fixed(kind)


@cache
def _fixed(kind: str) -> Tokenizer:
    return file_tokenizer() if kind == "file" else named_tokenizer(kind, lambda: "")


@cache
def theirs(content: bytes) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_buffer(content)
    made.encode_special_tokens = True
    return made


@pytest.fixture
def tiktoken_gpt2(tmp_path, monkeypatch) -> tiktoken.Encoding:
    """tiktoken's own gpt2, from its own loader and under OpenAI's hashes; our files stand in for the download."""
    vocab = json.loads(_fixed("gpt2").json)["model"]["vocab"]
    files = {
        "vocab.bpe": (resources.files("quatrain.text") / "vocab.bpe").read_bytes(),
        "encoder.json": json.dumps(vocab).encode(),
    }
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", lambda url: files[url.rpartition("/")[2]])
    return tiktoken.Encoding(**openai_public.gpt2())


def spells_out_the_marker(tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(f"a{EOT_TEXT}b")
    return tokenizer.eot not in ids and tokenizer.decode(ids) == f"a{EOT_TEXT}b"


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
def test_case_53_no_text_gives_eot_and_decode_inverts_encode(kind, text):
    tokenizer = tokenizer_of(kind, text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert tokenizer.eot not in ids
    assert (ids < tokenizer.vocab_size).all()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_case_52_a_text_that_holds_the_marker_is_ordinary_characters(kind):
    tokenizer = tokenizer_of(kind, EOT_TEXT)
    assert spells_out_the_marker(tokenizer)
    assert tokenizer.decode([tokenizer.eot]) == EOT_TEXT


def test_case_52_the_check_sees_a_tokenizer_that_allows_special_tokens(monkeypatch):
    gpt2 = ours.GPT2Tokenizer()
    monkeypatch.setattr(
        gpt2, "encode", lambda text: gpt2._encoding.encode_to_numpy(text, allowed_special="all"), raising=True
    )
    assert not spells_out_the_marker(gpt2)
    planted = FileTokenizer(file_json(), "own/tokenizer.json")
    planted._tokenizer.encode_special_tokens = False
    with pytest.raises(DataError, match=r"own/tokenizer.json: text gives the id 258 .* could forge a separator"):
        spells_out_the_marker(planted)


def test_the_marker_is_thirteen_characters_in_char():
    encode, _, V, eot = build_tokenizer([EOT_TEXT])
    assert len(encode(EOT_TEXT)) == 13
    assert (V, eot) == (len(set(EOT_TEXT)) + 1, len(set(EOT_TEXT)))


@pytest.mark.parametrize("kind", ["char", "bytes", "gpt2"])
@given(text=TEXT)
def test_the_tokenizers_library_reads_our_json_as_the_same_tokenizer(kind, text):
    tokenizer = tokenizer_of(kind, text)
    library = theirs(tokenizer.json)
    assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).tolist()
    assert library.token_to_id(EOT_TEXT) == tokenizer.eot
    assert library.get_vocab_size(with_added_tokens=True) == tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_decode_as_in_the_tokenizers_library_and_stream_as_they_decode(kind, data):
    tokenizer = tokenizer_of(kind, "日本 é😀")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    text = tokenizer.decode(ids)
    assert text == theirs(tokenizer.json).decode(ids, skip_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join([*(stream.push(token) for token in ids), stream.end()]) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_a_stream_never_shows_half_a_character(kind, text):
    tokenizer = tokenizer_of(kind, text)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(pieces) == text
    assert not stream.end()


def test_gpt2_is_openais_vocabulary_to_the_byte():
    vocab = json.loads(_fixed("gpt2").json)["model"]["vocab"]
    published = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # encoder.json, as tiktoken names it
    assert hashlib.sha256(json.dumps(vocab).encode()).hexdigest() == published


def test_gpt2_gives_the_ids_that_tiktoken_gives(tiktoken_gpt2):
    gpt2 = _fixed("gpt2")

    @given(text=TEXT)
    def equal(text):
        assert gpt2.encode(text).tolist() == tiktoken_gpt2.encode_ordinary(text)

    equal()
    assert (gpt2.vocab_size, gpt2.eot) == (tiktoken_gpt2.n_vocab, tiktoken_gpt2.eot_token) == (50257, 50256)
    assert [gpt2.decode([token]) for token in range(50257)] == [tiktoken_gpt2.decode([t]) for t in range(50257)]


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "eight_sonnets.txt"])
def test_gpt2_agrees_with_both_libraries_on_real_text(name, tiktoken_gpt2):
    gpt2, text = _fixed("gpt2"), shared_file(name).read_text(encoding="utf-8")[:200_000]
    assert gpt2.encode(text).tolist() == tiktoken_gpt2.encode_ordinary(text) == theirs(gpt2.json).encode(text).ids


def test_gpt2_never_downloads_and_gives_the_published_ids(monkeypatch):
    def refused(url):
        raise AssertionError(f"asked for {url}")

    monkeypatch.setattr(tiktoken.load, "read_file", refused)
    ids = ours.GPT2Tokenizer().encode("Hello, I'm a language model,")
    assert ids.tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]  # as in the GPT-2 tutorials


def test_a_damaged_vocab_bpe_is_refused_with_both_hashes(tmp_path, monkeypatch):
    shipped = (resources.files("quatrain.text") / "vocab.bpe").read_bytes()
    damaged = shipped[:-5] + b"X" + shipped[-4:]
    (tmp_path / "vocab.bpe").write_bytes(damaged)
    monkeypatch.setattr(ours.resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match=f"{hashlib.sha256(damaged).hexdigest()}.*{ours.VOCAB_BPE_SHA256}"):
        ours.GPT2Tokenizer()


@given(docs=st.lists(ASSIGNED, max_size=5))
def test_char_ids_are_the_sorted_characters_and_eot_the_last(docs):
    encode, decode, V, eot = build_tokenizer(docs)
    characters = "".join(sorted(set("".join(docs))))
    assert encode(characters) == list(range(V - 1))
    assert eot == V - 1 == len(characters)
    assert all(decode(encode(document)) == document for document in docs)
    assert all(type(token) is int for document in docs for token in encode(document))
    assert decode([eot, *encode(characters)]) == EOT_TEXT + characters


def test_a_character_that_char_never_saw_is_named_with_its_place():
    encode = build_tokenizer(["banana"])[0]
    with pytest.raises(DataError, match=r"'é' \(U\+00E9 LATIN SMALL LETTER E WITH ACUTE\) at position 3 .* 3 charac"):
        encode("banéna")
    with pytest.raises(DataError, match=r"'\\x07' \(U\+0007 without a name\) at position 0"):
        encode("\a")


def test_bytes_ids_are_the_bytes():
    tokenizer = _fixed("bytes")
    assert tokenizer.encode("aé\0").tolist() == list("aé\0".encode())
    assert (tokenizer.eot, tokenizer.vocab_size) == (256, 257)


@pytest.mark.parametrize("kind", ["char", "bytes", "gpt2"])
@given(text=TEXT)
def test_token_lengths_add_up_to_the_bytes_of_the_text(kind, text):
    tokenizer = tokenizer_of(kind, text)
    lengths = tokenizer.token_lengths()
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.eot] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_comes_back_from_its_json_whatever_the_file_is_called(kind, tmp_path):
    written = tokenizer_of(kind, "été")
    path = tmp_path / "any name.json"
    path.write_bytes(written.json)
    read = load_tokenizer(path)
    assert type(read) is type(written)
    assert (read.sha256, read.eot, read.vocab_size) == (written.sha256, written.eot, written.vocab_size)
    assert read.encode("bab").tolist() == written.encode("bab").tolist()
    (tmp_path / "tokenizer.json").write_bytes(written.json)
    assert named_tokenizer(str(tmp_path), lambda: "").sha256 == written.sha256  # a folder stands for its tokenizer.json


def test_a_char_vocabulary_with_other_settings_is_not_taken_for_ours(tmp_path):
    changed = json.loads(CharTokenizer("ab").json) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.json"), FileTokenizer)


def test_case_56_a_tokenizer_file_adds_no_bos_and_its_separator_is_the_named_one():
    llama_like = file_json(specials=("<s>", "</s>"))
    bos = json.loads(llama_like)["added_tokens"][0]["id"]
    adds_bos = file_json(
        specials=("<s>", "</s>"),
        post_processor=processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
    )
    tokenizer = FileTokenizer(adds_bos, "llama/tokenizer.json", "</s>")
    assert theirs(adds_bos).encode("the").ids[0] == bos  # the library alone would add it
    assert bos not in tokenizer.encode("the <s> </s>")
    assert tokenizer.decode(tokenizer.encode("the <s> </s>")) == "the <s> </s>"
    assert (tokenizer.eot, tokenizer.decode([tokenizer.eot])) == (bos + 1, "</s>")


def test_padding_and_truncation_in_a_tokenizer_file_do_not_touch_documents():
    plain = file_tokenizer()
    made = tokenizers.Tokenizer.from_buffer(file_json())
    made.enable_padding(length=64)
    made.enable_truncation(4)
    assert FileTokenizer(made.to_str().encode(), "x").encode("the end of it").tolist() == (
        plain.encode("the end of it").tolist()
    )


def test_ids_of_a_tokenizer_file_keep_their_gaps():
    words = models.WordLevel({"a": 0, "b": 70_000, "?": 5}, unk_token="?")
    tokenizer = FileTokenizer(file_json(words, pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "x")
    assert tokenizer.encode("b a b").tolist() == [70_000, 0, 70_000]
    assert tokenizer.vocab_size == 70_001


ORDINARY_EOT = models.WordLevel({EOT_TEXT: 0, "?": 1}, unk_token="?")


@pytest.mark.parametrize(
    ("content", "eot", "message"),
    [
        (b"not json", EOT_TEXT, "here/tokenizer.json: not a tokenizer.json that can be read"),
        (b"{}", EOT_TEXT, "here/tokenizer.json: not a tokenizer.json that can be read"),
        (file_json(), "</s>", "here/tokenizer.json: has no token '</s>'; name the one .* with --eot"),
        (
            file_json(ORDINARY_EOT, pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
            EOT_TEXT,
            r"here/tokenizer.json: text gives the id 0 of '<\|endoftext\|>' itself, so a document could forge",
        ),
    ],
)
def test_a_tokenizer_file_without_a_sure_separator_is_refused(content, eot, message):
    with pytest.raises(DataError, match=message):
        FileTokenizer(content, "here/tokenizer.json", eot)


def test_case_53_no_unknown_character_of_a_tokenizer_file_gives_eot():
    vocab = {EOT_TEXT: 0} | {letter: 1 + rank for rank, letter in enumerate(sorted({*EOT_TEXT, *" abc"}))}
    tokenizer = FileTokenizer(file_json(models.BPE(vocab=vocab, merges=[], unk_token=EOT_TEXT)), "x")
    assert 0 not in tokenizer.encode("ab")
    with pytest.raises(DataError, match=r"x: text gives the id 0 of '<\|endoftext\|>' itself"):
        tokenizer.encode("abé")


def test_a_deeply_nested_tokenizer_json_is_one_message(tmp_path):
    (tmp_path / "deep.json").write_bytes(b"[" * 100_000)
    with pytest.raises(DataError, match=r"deep\.json: not a tokenizer\.json that can be read"):
        load_tokenizer(tmp_path / "deep.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "place"), [("a\ud800", 1), ("\udfffab", 0)])
def test_a_lone_surrogate_is_refused_by_every_tokenizer(kind, text, place):
    with pytest.raises(DataError, match=rf"lone surrogate U\+{ord(text[place]):04X} at position {place}"):
        tokenizer_of(kind).encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_has_a_name_that_holds_no_path(kind):
    assert tokenizer_of(kind).name == ("tokenizer.json" if kind == "file" else kind)


def test_a_tokenizer_file_without_the_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_bytes(file_json())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"tokenizer.json: .*pip install 'quatrain\[hf\]'"):
        load_tokenizer(tmp_path / "tokenizer.json")
    for kind in ("char", "bytes", "gpt2"):  # our own need no library
        (tmp_path / "tokenizer.json").write_bytes(tokenizer_of(kind).json)
        assert load_tokenizer(tmp_path / "tokenizer.json").name == kind


def test_an_unknown_tokenizer_is_named_with_the_nearest_right_one():
    with pytest.raises(
        UsageError, match=r"no tokenizer 'gpt-2' \(did you mean 'gpt2'\?\); there is char, bytes, gpt2, or"
    ):
        named_tokenizer("gpt-2", lambda: "")
    with pytest.raises(DataError, match=r"missing.json: No such file .* expected a tokenizer.json"):
        load_tokenizer(ours.Path("missing.json"))
