"""What a chunk becomes: each document's ids behind an eot, whatever makes room for it."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from quatrain.errors import DataError, QuatrainError
from quatrain.text.reading import Span, chunks
from quatrain.text.rows import Reading
from quatrain.text.sources import find_sources
from quatrain.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, gpt2
from quatrain.tokens import encoding
from quatrain.tokens.encoding import Encoder, Tokenized

TEXTS = ["one", "", "<|endoftext|>", "a\n\nb", "!", "!!", "éé", "\x00"]


def tokenized(folder: Path, tokenizer: Tokenizer, texts: list[str] = TEXTS) -> Tokenized:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    [source] = find_sources([str(path)])[0]
    span = Span(source, 0, source.size)
    [chunk] = chunks(span, Reading())
    return Encoder(tokenizer, Reading(), 1)(0, span, chunk)


TOKENIZERS: list[Callable[[], Tokenizer]] = [gpt2, ByteTokenizer, lambda: CharTokenizer("".join(TEXTS))]


@pytest.mark.parametrize("no_filler", [False, True])
@pytest.mark.parametrize("make", TOKENIZERS, ids=["gpt2", "bytes", "char"])
def test_every_document_stands_behind_its_eot(tmp_path, monkeypatch, make, no_filler):
    if no_filler:
        monkeypatch.setattr(encoding, "FILLERS", 0)
    tokenizer = make()
    found = tokenized(tmp_path, tokenizer)
    texts = [text for text in TEXTS if text]
    expected = [[tokenizer.eot, *tokenizer.encode(text)] for text in texts]
    assert found.ids.dtype == np.uint16
    assert found.ids.tolist() == [one for ids in expected for one in ids]
    assert found.documents["tokens"].tolist() == [len(ids) - 1 for ids in expected]
    assert found.documents["bytes"].tolist() == [len(text.encode()) for text in texts]
    assert (found.read, found.empty) == (len(TEXTS), 1)
    borders = [*np.flatnonzero(found.ids == tokenizer.eot).tolist(), len(found.ids)]
    assert [tokenizer.decode(found.ids[start + 1 : end].tolist()) for start, end in pairwise(borders)] == texts


@pytest.mark.parametrize("make", TOKENIZERS, ids=["gpt2", "bytes", "char"])
def test_a_filler_is_one_id_of_the_tokenizer(make):
    filler = Encoder(make(), Reading(), 1).filler
    assert filler is not None
    assert len(make().encode_batch([filler, filler])[0]) == 2


def test_a_character_that_has_no_id_is_named_with_its_row(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: character 'z' \(U\+007A LATIN SMALL LETTER Z\)"):
        tokenized(tmp_path, CharTokenizer("one"), ["one", "z"])


@pytest.mark.parametrize("wrong", [256, 257, 70_000])
def test_an_id_that_no_text_may_have_is_refused(tmp_path, monkeypatch, wrong):
    honest = ByteTokenizer.encode_batch

    def forging(self, texts):
        ids, offsets = honest(self, texts)
        ids[-1] = wrong
        return ids, offsets

    monkeypatch.setattr(ByteTokenizer, "encode_batch", forging)
    with pytest.raises(QuatrainError, match=r"an id that no text may have, in a batch from .*a\.jsonl:1 on"):
        tokenized(tmp_path, ByteTokenizer())


def test_a_filler_that_is_not_one_id_everywhere_is_refused(tmp_path, monkeypatch):
    honest = ByteTokenizer.encode_batch
    monkeypatch.setattr(
        ByteTokenizer,
        "encode_batch",
        lambda self, texts: honest(self, [text * 2 if text == b"\0" else text for text in texts]),
    )
    with pytest.raises(QuatrainError, match=r"more than one id for b'\\x00', in a batch from .*a\.jsonl:1 on"):
        tokenized(tmp_path, ByteTokenizer(), ["ab", "c"])
