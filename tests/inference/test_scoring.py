"""Scores against the loss of every single target, computed one at a time."""

import hashlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quatrain.errors import ConfigError, DataError
from quatrain.inference import scoring
from quatrain.inference.scoring import data_hash, evaluate, evaluate_text, score, scored_targets
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import TokenStore, TokenStream
from quatrain.tokens.writer import prepare

EOT, VOCAB = 49, 50


def network(vocab_size: int = VOCAB, block_size: int = 64, **changes: object) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": block_size, "vocab_size": vocab_size} | changes
    model = GPT(ModelConfig(**shape), torch.Generator().manual_seed(1))
    with torch.no_grad():  # far from uniform, so that no two targets have the same loss
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model.eval()


def stream_of(n: int = 61) -> TokenStream:
    """Random ids with eots among them, over three pieces."""
    ids = np.random.default_rng(2).integers(0, VOCAB, n).astype(np.uint16)
    ids[[0, 9, 10, 30, n - 1]] = EOT
    starts = np.flatnonzero(ids == EOT)[:-1].astype(np.uint64)
    return TokenStream(np.array_split(ids, [n // 3, n // 2]), starts)


@torch.no_grad()
def one_by_one(model: GPT, ids: list[int], seq_len: int, packing: str, total: int) -> list[float]:
    """The loss of each target from a forward over what its row shows of it, and nothing else."""
    found = []
    for target in range(1, total + 1):
        start = (target - 1) // seq_len * seq_len
        if packing == "document":
            start = max([start, *(place for place in range(start, target) if ids[place] == EOT)])
        elif packing in ("pad", "best_fit"):
            begin = max(place for place in range(target) if ids[place] == EOT)
            start = begin + (target - 1 - begin) // seq_len * seq_len
        logits = model(torch.tensor([ids[start:target]]))[0, -1].double()
        found.append(float(logits.logsumexp(0) - logits[ids[target]]))
    return found


def bits_of(nats: float) -> float:
    return nats / math.log(2)


@pytest.mark.parametrize("packing", ["concat", "document", "pad", "best_fit"])
@pytest.mark.parametrize("seq_len", [1, 7, 12, 60, 64])
def test_the_score_is_the_sum_over_every_single_target(seq_len: int, packing: str) -> None:
    """n - 1 = 60: windows that divide it, one that leaves a short last one, and one longer than the split."""
    model, stream = network(), stream_of()
    result = score(model, stream, seq_len, packing, EOT)
    expected = one_by_one(model, stream.read(0, 61).tolist(), seq_len, packing, 60)
    assert (result.tokens, result.complete) == (60, True)
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)
    assert result.loss == pytest.approx(np.mean(expected), rel=1e-6)


def test_document_packing_differs_from_concat() -> None:
    document, concat = (score(network(), stream_of(), 60, packing, EOT).loss for packing in ("document", "concat"))
    assert abs(document - concat) > 1e-3


@pytest.mark.parametrize("max_tokens", [1, 11, 12, 13, 24, 59, 60, 61, 10**12])
def test_max_tokens_scores_the_first_targets(max_tokens: int) -> None:
    model, stream = network(), stream_of()
    result = score(model, stream, 12, "concat", EOT, max_tokens)
    scored = min(max_tokens, 60)
    assert result.tokens == scored == scored_targets(61, max_tokens)
    assert result.nats == pytest.approx(
        sum(one_by_one(model, stream.read(0, 61).tolist(), 12, "concat", scored)), rel=1e-6
    )


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
@pytest.mark.parametrize("max_tokens", [1, 9, 10, 11, 13, 35, 59, 60, 10**12])
def test_rows_of_documents_score_the_same_first_targets(max_tokens: int, packing: str) -> None:
    """A border of a document at 10, 11 and 31; a limit inside one cuts it."""
    model, stream = network(), stream_of()
    result = score(model, stream, 12, packing, EOT, max_tokens)
    scored = min(max_tokens, 60)
    expected = one_by_one(model, stream.read(0, 61).tolist(), 12, packing, scored)
    assert result.tokens == scored
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)


@pytest.mark.parametrize("dropped", ["the short last window", "a target at each border"])
def test_the_comparison_with_single_targets_bites(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stream = network(), stream_of()
    whole = scoring._windows

    def faulty(stream: TokenStream, seq_len: int, total: int, rows: int) -> Iterator[np.ndarray]:
        for windows in whole(stream, seq_len, total, rows):
            if dropped == "a target at each border":
                yield windows[:, :-1]
            elif windows.shape[1] == seq_len + 1:
                yield windows

    monkeypatch.setattr(scoring, "_windows", faulty)
    result = score(model, stream, 7, "concat", EOT)
    assert result.tokens < 60
    assert result.nats != pytest.approx(sum(one_by_one(model, stream.read(0, 61).tolist(), 7, "concat", 60)), rel=1e-3)


@pytest.mark.parametrize("at_once", [1, 13, 24, 10**6])
def test_how_many_windows_go_through_at_once_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score(network(), stream_of(), 12, "document", EOT)
    monkeypatch.setattr(scoring, "SCORED_AT_ONCE", {"cpu": at_once})
    assert score(network(), stream_of(), 12, "document", EOT).nats == pytest.approx(expected.nats, rel=1e-6)


def test_the_vocabularys_padding_gets_no_probability() -> None:
    padded, exact = network(), network(vocab_multiple=1)
    with torch.no_grad():
        for parameter, other in zip(exact.parameters(), padded.parameters(), strict=True):
            parameter.copy_(other[: len(parameter)])
    assert padded.head_weight.shape[0] == 64
    assert score(padded, stream_of(), 12, "concat", EOT).nats == pytest.approx(
        score(exact, stream_of(), 12, "concat", EOT).nats, rel=1e-6
    )


@pytest.mark.parametrize("n", [0, 1])
def test_a_split_without_a_target_is_an_error(n: int) -> None:
    with pytest.raises(DataError, match=f"{n} ids"):
        score(network(), TokenStream([np.zeros(n, np.uint16)]), 8, "concat", EOT)


def test_a_split_of_two_ids_has_one_target() -> None:
    stream = TokenStream([np.array([EOT, 3], np.uint16)])
    assert score(network(), stream, 8, "concat", EOT).nats == pytest.approx(
        one_by_one(network(), [EOT, 3], 8, "concat", 1)[0]
    )


def test_a_pass_that_is_told_to_stop_says_that_it_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORED_AT_ONCE", {"cpu": 12})
    answers = iter([False, False, True])
    model = network().train()
    assert not score(model, stream_of(), 12, "concat", EOT, should_stop=lambda: next(answers)).complete
    assert model.training


# What a score must leave alone


@pytest.mark.parametrize("training", [True, False])
def test_scores_repeat_to_the_bit_and_touch_neither_generators_nor_mode(training: bool) -> None:
    expected = score(network(), stream_of(), 12, "concat", EOT).nats.hex()
    model = network(dropout=0.5).train(training)
    before = torch.get_rng_state(), random.getstate()
    scores = {score(model, stream_of(), 12, "concat", EOT).nats.hex() for _ in range(3)}
    assert scores == {expected}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert {module.training for module in model.modules()} == {training}
    assert all(parameter.grad is None for parameter in model.parameters())


# Over a store


def test_evaluate_scores_the_whole_split_and_says_what_it_depends_on(sonnets: TokenStore) -> None:
    """Both splits: seven documents with eots between them, and one."""
    model = network(sonnets.vocab_size, 16)
    for split in ("val", "train"):
        stream, facts = sonnets.split(split), sonnets.facts["splits"][split]
        found = evaluate(model, sonnets, split)
        expected = score(model, stream, 16, "concat", sonnets.eot)
        assert found["tokens"] == facts["tokens"] - 1 == len(stream) - 1
        assert found["loss"] == expected.loss
        assert found["perplexity"] == pytest.approx(math.exp(expected.loss))
        assert found["bytes"] == facts["bytes"]
        assert found["bits_per_byte"] == pytest.approx(bits_of(expected.nats) / facts["bytes"])
        assert (found["split"], found["seq_len"], found["packing"]) == (split, 16, "concat")
        assert (found["fingerprint"], found["precision"]) == (sonnets.fingerprint, "fp32")
        assert evaluate(model, sonnets, split) == found


@pytest.fixture(scope="module")
def bytes_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Documents with characters of one to four bytes; the second and fourth held out."""
    folder = tmp_path_factory.mktemp("bytes")
    for number, text in enumerate(["plain text to train on " * 9, "naïve €5 😀", "more to train on", "日本語"]):
        (folder / f"{number}.txt").write_text(text)
    prepare([str(folder)], folder / "store", PrepareConfig(tokenizer="bytes", val_docs=(1, 3)))
    return TokenStore(folder / "store")


def test_the_bytes_of_a_whole_split_are_those_of_its_scored_targets(
    bytes_store: TokenStore, sonnets: TokenStore
) -> None:
    for store in (bytes_store, sonnets):
        for split in ("train", "val"):
            stream = store.split(split)
            lengths = store.tokenizer.token_lengths()
            assert store.facts["splits"][split]["bytes"] == lengths[stream.read(1, len(stream))].sum()
    text = "naïve €5 😀" + "日本語"
    found = evaluate(network(257), bytes_store)
    assert found["bytes"] == len(text.encode())
    assert found["tokens"] == len(text.encode()) + 2  # the nats of the eots behind the two texts count


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 17, 18, 27])
def test_the_bytes_of_a_part_are_those_of_exactly_its_targets(bytes_store: TokenStore, max_tokens: int) -> None:
    model = network(257)
    found = evaluate(model, bytes_store, seq_len=5, max_tokens=max_tokens)
    ids = bytes_store.val.read(1, max_tokens + 1)
    assert found["bytes"] == int((ids != bytes_store.eot).sum())
    nats = sum(one_by_one(model, bytes_store.val.read(0, len(bytes_store.val)).tolist(), 5, "concat", max_tokens))
    assert found["bits_per_byte"] == pytest.approx(bits_of(nats) / found["bytes"], rel=1e-6)


def test_without_a_byte_table_a_part_has_no_bits_per_byte_and_the_whole_has(
    bytes_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytes_store.tokenizer, "token_lengths", lambda: None)
    part, whole = (evaluate(network(257), bytes_store, max_tokens=count) for count in (5, None))
    assert (part["bits_per_byte"], part["bytes"]) == (None, None)
    assert whole["bits_per_byte"] > 0


def test_packing_and_seq_len_are_taken_and_told(sonnets: TokenStore) -> None:
    model = network(sonnets.vocab_size, 16)
    found = evaluate(model, sonnets, "train", seq_len=11, packing="document")
    assert (found["seq_len"], found["packing"]) == (11, "document")
    assert found["loss"] == score(model, sonnets.train, 11, "document", sonnets.eot).loss
    assert found["loss"] != evaluate(model, sonnets, "train", seq_len=11)["loss"]


def test_bf16_is_near_and_said(sonnets: TokenStore) -> None:
    model = network(sonnets.vocab_size, 16)
    exact, rounded = (evaluate(model, sonnets, precision=precision) for precision in ("fp32", "bf16"))
    assert rounded["precision"] == "bf16"
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=2e-2)


# The hash of what was scored


def test_the_hash_is_that_of_the_ids_which_a_pass_reads() -> None:
    ids = stream_of().read(0, 61)
    for max_tokens, read in [(None, 61), (60, 61), (1000, 61), (12, 13), (1, 2)]:
        assert data_hash(stream_of(), max_tokens) == hashlib.sha256(ids[:read].astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_the_hash_depends_on_the_ids_alone_not_on_shards_or_their_width(dtype: type) -> None:
    ids = np.random.default_rng(1).integers(0, 60_000, (1 << 20) + 1000)
    whole = data_hash(TokenStream([ids.astype(dtype)]), None)
    assert whole == data_hash(TokenStream(np.array_split(ids.astype(np.uint16), 7)), None)
    assert whole == hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
    ids[-1] ^= 1
    assert whole != data_hash(TokenStream([ids.astype(dtype)]), None)
    assert data_hash(TokenStream([ids]), 100) == data_hash(TokenStream([ids[:101]]), None)


# Windows that overlap, and what longer context buys


@torch.no_grad()
def strided_one_by_one(model: GPT, ids: list[int], seq_len: int, stride: int, total: int) -> list[float]:
    """The loss of each target, from a forward over the window in which it is new."""
    found = []
    for target in range(1, total + 1):
        beyond = max(0, target - seq_len)
        end = min(total, seq_len + -(-beyond // stride) * stride)
        start = max(0, end - seq_len)
        logits = model(torch.tensor([ids[start:target]]))[0, -1].double()
        found.append(float(logits.logsumexp(0) - logits[ids[target]]))
    return found


@pytest.mark.parametrize(("seq_len", "stride"), [(12, 1), (12, 5), (12, 12), (7, 3), (60, 9), (64, 9), (1, 1)])
@pytest.mark.parametrize("total", [60, 37])
def test_a_stride_scores_every_target_once_with_the_context_that_it_promises(
    seq_len: int, stride: int, total: int
) -> None:
    model, stream = network(), stream_of()
    result = score(model, stream, seq_len, "concat", EOT, total, stride=stride)
    expected = strided_one_by_one(model, stream.read(0, 61).tolist(), seq_len, stride, total)
    assert result.tokens == total
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)


def test_case_50_the_context_stands_beside_the_number_and_changes_it(sonnets: TokenStore) -> None:
    model = network(sonnets.vocab_size, 16)
    found = [
        evaluate(model, sonnets, seq_len=seq_len, stride=stride) for seq_len, stride in [(16, None), (8, None), (16, 4)]
    ]
    assert [(row["seq_len"], row["stride"]) for row in found] == [(16, None), (8, None), (16, 4)]
    assert len({row["loss"] for row in found}) == len({row["method"] for row in found}) == 3
    assert "windows of 16 ids that overlap, the last 4 targets of each scored" in found[2]["method"]


@pytest.mark.parametrize(("stride", "packing"), [(0, "concat"), (13, "concat"), (4, "document"), (4, "pad")])
def test_a_stride_that_cannot_be_is_refused(stride: int, packing: str) -> None:
    with pytest.raises(ConfigError, match=f"stride is {stride}"):
        score(network(), stream_of(), 12, packing, EOT, stride=stride)


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_the_loss_by_position_is_that_of_the_targets_with_so_much_before_them(packing: str) -> None:
    model, stream = network(), stream_of()
    ids = stream.read(0, 61).tolist()
    losses = one_by_one(model, ids, 12, packing, 60)
    before = []
    for target in range(1, 61):
        start = (target - 1) // 12 * 12
        if packing == "document":
            start = max([start, *(place for place in range(start, target) if ids[place] == EOT)])
        before.append(target - start)
    rows = score(model, stream, 12, packing, EOT).by_position()
    assert [row["context_from"] for row in rows] == [1, 2, 4, 8]
    assert sum(row["tokens"] for row in rows) == 60
    for row in rows:
        among = [loss for loss, n in zip(losses, before, strict=True) if row["context_from"] <= n <= row["context_to"]]
        assert row["tokens"] == len(among)
        assert row["loss"] == pytest.approx(np.mean(among), rel=1e-6)


def test_the_standard_error_is_that_of_rows_and_that_of_a_mean_where_rows_hold_one_target() -> None:
    model, stream = network(), stream_of()
    single = score(model, stream, 1, "concat", EOT)
    losses = np.array(one_by_one(model, stream.read(0, 61).tolist(), 1, "concat", 60))
    assert single.standard_error == pytest.approx(losses.std(ddof=1) / math.sqrt(60), rel=1e-5)
    rows = np.array(one_by_one(model, stream.read(0, 61).tolist(), 12, "concat", 60)).reshape(5, 12).mean(axis=1)
    assert score(model, stream, 12, "concat", EOT).standard_error == pytest.approx(
        rows.std(ddof=1) / math.sqrt(5), rel=1e-5
    )
    assert score(model, stream, 60, "concat", EOT).standard_error is None


def test_a_standard_error_covers_the_truth_as_often_as_it_says() -> None:
    """Rows with a mean of their own: 95 % intervals from rows hold the truth, those from single targets do not."""
    from quatrain.inference.tally import Tally

    generator = np.random.default_rng(0)
    covered, naive = 0, 0
    for _ in range(200):
        losses = 3 + generator.normal(0, 1, (40, 1)) + generator.normal(0, 1, (40, 16))
        tally = Tally(1)
        tally.add(losses.sum(axis=1, keepdims=True), np.full((40, 1), 16.0))
        away = abs(tally.loss(0) - 3)
        covered += away < 1.96 * tally.standard_error(0)
        naive += away < 1.96 * losses.std() / math.sqrt(losses.size)
    assert 180 <= covered <= 198
    assert naive < 140


# Any text file


def test_a_text_file_is_scored_as_the_split_of_its_documents_is(sonnets: TokenStore, tmp_path: Path) -> None:
    from quatrain.text.reading import read_texts
    from quatrain.text.sources import find_sources

    texts = [text.decode() for text in read_texts(find_sources(["corpus:sonnets"])[0][0])]
    model = network(sonnets.vocab_size, 16)
    (tmp_path / "eighth.txt").write_text(texts[7], encoding="utf-8")
    found, split = evaluate_text(model, sonnets.tokenizer, tmp_path / "eighth.txt"), evaluate(model, sonnets)
    assert (found["text"], found["split"], found["fingerprint"]) == ("eighth.txt", None, None)
    for key in (
        "loss",
        "perplexity",
        "bits_per_byte",
        "tokens",
        "bytes",
        "data_hash",
        "standard_errors",
        "by_position",
    ):
        assert found[key] == split[key], key


def test_a_text_that_the_tokenizer_cannot_spell_names_file_and_character(sonnets: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "foreign.txt").write_text("日本", encoding="utf-8")
    with pytest.raises(DataError, match=r"foreign\.txt: character '日'"):
        evaluate_text(network(sonnets.vocab_size, 16), sonnets.tokenizer, tmp_path / "foreign.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no document with text"):
        evaluate_text(network(sonnets.vocab_size, 16), sonnets.tokenizer, tmp_path / "empty.txt")


def test_case_47_the_loss_of_named_validation_data_does_not_depend_on_what_else_was_prepared(tmp_path: Path) -> None:
    """Three files to train on or four; where the validation set is another one, its hash says so."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"word{number * 1000 + place}" for place in range(60)))
    (tmp_path / "val.txt").write_text("validation text that never changes " * 5)
    found = []
    for count in (3, 4):
        sources = [str(tmp_path / f"{number}.txt") for number in range(count)]
        config = PrepareConfig(tokenizer="bytes", val=(str(tmp_path / "val.txt"),))
        prepare(sources, tmp_path / f"store{count}", config)
        found.append(evaluate(network(257), TokenStore(tmp_path / f"store{count}")))
    three, four = found
    assert (three["loss"], three["data_hash"]) == (four["loss"], four["data_hash"])
    assert three["fingerprint"] != four["fingerprint"]
    prepare(
        [str(tmp_path / f"{n}.txt") for n in range(4)],
        tmp_path / "last",
        PrepareConfig(tokenizer="bytes", val_docs=(3,)),
    )
    assert evaluate(network(257), TokenStore(tmp_path / "last"))["data_hash"] != four["data_hash"]
