"""The fast engine gives the reference's ids, or does not run at all."""

import contextlib
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import shared_file
from quatrain.errors import DataError, QuatrainError
from quatrain.text.fast import HARD_STRINGS, FastBPE
from quatrain.text.reading import read_texts
from quatrain.text.rows import Reading
from quatrain.text.sources import _recognise, find_sources
from quatrain.text.tokenizers import FileTokenizer, gpt2

pytest.importorskip("gigatoken", reason="no optional library: gigatoken")


def loaded() -> FastBPE | None:
    return FastBPE.of_ranks(gpt2().token_bytes[:-1], "gpt2", gpt2().encode)


@pytest.fixture(scope="module")
def fast() -> FastBPE:
    engine = loaded()
    assert engine is not None
    return engine


def parts(fast: FastBPE, texts: list[str]) -> list[list[int]]:
    ids, offsets = fast.encode([text.encode() for text in texts])
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(ids), len(texts) + 1)
    return [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]


CHARACTERS = st.characters(exclude_categories=["Cs"])
MARKED = st.lists(st.one_of(st.text(CHARACTERS), st.sampled_from(HARD_STRINGS), st.text(" \n\t\r\u00a0'sdmtrvel")))


@given(st.lists(MARKED.map("".join), max_size=6))
def test_batches_have_the_ids_of_tiktoken(fast, texts):
    assert parts(fast, texts) == [gpt2().encode(text).tolist() for text in texts]


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
@given(st.lists(MARKED.map("".join), min_size=10, max_size=10))
def test_a_hundred_thousand_strings_have_the_ids_of_tiktoken_and_come_back(fast, texts):
    found = parts(fast, texts)
    assert found == [gpt2().encode(text).tolist() for text in texts]
    assert [gpt2().decode(ids) for ids in found] == texts


@pytest.mark.soak
def test_all_of_the_shared_data_has_the_ids_of_tiktoken(fast):
    words = [str(path) for path in sorted(shared_file("fineweb.parquet").parent.rglob("*")) if _recognise(path)]
    count = 0
    for source in find_sources(words)[0]:
        column = "ctx" if "hellaswag" in source.name else "text"
        for text in read_texts(source, Reading(column)):
            ids, _ = fast.encode([text])
            assert np.array_equal(ids, gpt2().encode(text.decode())), source.name
            assert gpt2().decode(ids.tolist()).encode() == text
            count += 1
    assert count > 10_000


def test_no_text_gives_eot(fast):
    assert gpt2().eot not in parts(fast, ["<|endoftext|>", "a<|endoftext|>"])[0]


def test_the_batch_of_the_tokenizer_is_the_engine_s(monkeypatch):
    texts = [text.encode() for text in HARD_STRINGS]
    by_engine = gpt2().encode_batch(texts)
    monkeypatch.setitem(gpt2().__dict__, "_engine", None)
    by_reference = gpt2().encode_batch(texts)
    for one, other in zip(by_engine, by_reference, strict=True):
        assert np.array_equal(one, other)


def test_an_engine_that_differs_on_a_hard_string_is_refused():
    with pytest.raises(QuatrainError, match="gigatoken and tiktoken differ on"):
        FastBPE.of_ranks(gpt2().token_bytes[:-1], "cl100k", gpt2().encode)  # another pattern cuts before merging


def test_threads_that_share_an_engine_do_not_mix_their_documents(fast):
    batches = [[text * number for text in HARD_STRINGS] for number in range(1, 25)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: parts(fast, batch), batches))
    assert together == [parts(fast, batch) for batch in batches]


def trained(folder: Path, **changes: object) -> FileTokenizer:
    """A small byte-level BPE as Hugging Face writes it, with members of its file changed."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*HARD_STRINGS, "the cat and the other cat sat on the mat " * 9], trainer)
    content = json.loads(made.to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return FileTokenizer((folder / "tokenizer.json").read_bytes(), "tokenizer.json")


@given(texts=st.lists(MARKED.map("".join) | st.just("<|im_start|>user<|endoftext|>"), max_size=5))
def test_a_tokenizer_json_of_byte_level_bpe_has_the_ids_of_tokenizers(tmp_path_factory, texts):
    tokenizer = trained(tmp_path_factory.mktemp("x"))
    assert tokenizer._engine is not None
    ids, offsets = tokenizer.encode_batch([text.encode() for text in texts])
    found = [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]
    assert found == [tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [{"id": 0, "content": "<|endoftext|>", "special": False}]},
    ],
)
def test_what_the_engine_does_not_read_alike_is_left_to_the_reference(tmp_path, changes):
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    changes = {
        key: [added | token for token in value] if key == "added_tokens" else value for key, value in changes.items()
    }
    with contextlib.suppress(DataError):  # a marker that is not special forges eot, and is refused by itself
        tokenizer = trained(tmp_path, **changes)
        ids, _ = tokenizer.encode_batch([b"The CAT sat"])
        assert ids.tolist() == tokenizer.encode("The CAT sat").tolist()
        assert tokenizer._engine is None or "normalizer" in changes


def test_without_a_wheel_the_reference_does_the_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert loaded() is None


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_instances_are_replaced_before_they_remember_too_much(monkeypatch, threads):
    monkeypatch.setattr("quatrain.text.fast.REMEMBERED", 6000)
    engine = loaded()
    assert engine is not None
    load, made = engine._load, []
    monkeypatch.setattr(engine, "_load", lambda: made.append(1) or load())
    engine.forget()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda number: parts(engine, [f"{number} " * 100]), range(40)))
    assert found == [[gpt2().encode(f"{number} " * 100).tolist()] for number in range(40)]
    # 14 kB of text, of which all together may know 6; the last one that an instance takes may go beyond.
    assert 2 <= len(made) <= 14
    assert sum(met for _, met in engine._idle) < 6000
    engine.forget()
    assert (engine._idle, engine._alive) == ([], 0)
    assert parts(engine, ["again"]) == [gpt2().encode("again").tolist()]
