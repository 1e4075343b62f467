"""The fast engine gives the reference's ids, or does not run at all."""

import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import QuatrainError
from quatrain.text.fast import HARD_STRINGS, FastBPE
from quatrain.text.tokenizers import gpt2

pytest.importorskip("gigatoken", reason="no optional library: gigatoken")


@pytest.fixture(scope="module")
def fast() -> FastBPE:
    engine = FastBPE.load(gpt2().json, gpt2().encode)
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


def test_no_text_gives_eot(fast):
    assert gpt2().eot not in parts(fast, ["<|endoftext|>", "a<|endoftext|>"])[0]


def test_the_batch_of_the_tokenizer_is_the_engine_s(monkeypatch):
    texts = [text.encode() for text in HARD_STRINGS]
    by_engine = gpt2().encode_batch(texts)
    monkeypatch.setitem(gpt2().__dict__, "_fast", None)
    by_reference = gpt2().encode_batch(texts)
    for one, other in zip(by_engine, by_reference, strict=True):
        assert np.array_equal(one, other)


def test_an_engine_that_differs_on_a_hard_string_is_refused():
    content = json.loads(gpt2().json)
    content["model"]["merges"] = content["model"]["merges"][1:]  # without "Ġ t"
    with pytest.raises(QuatrainError, match="gigatoken and tiktoken differ on"):
        FastBPE.load(json.dumps(content).encode(), gpt2().encode)


def test_without_a_wheel_the_reference_does_the_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert FastBPE.load(gpt2().json, gpt2().encode) is None
