"""How well a model predicts ids: every target scored once, in windows, rows of documents, or windows that overlap."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quatrain.errors import ConfigError, DataError, UsageError
from quatrain.inference.forward import Forward
from quatrain.inference.predictions import predictions
from quatrain.inference.ranks import ALONE, Ranks
from quatrain.inference.tally import Tally
from quatrain.model.device import Precision
from quatrain.model.gpt import GPT
from quatrain.text.reading import read_texts
from quatrain.text.sources import find_sources
from quatrain.text.tokenizers import Tokenizer
from quatrain.tokens.config import Packing
from quatrain.tokens.loader import Batch, batch_of, batch_of_rows
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.rows import has_table, row_table
from quatrain.tokens.store import SplitName, TokenStore, TokenStream

SCORED_AT_ONCE = {"cpu": 1 << 10}  # targets in one forward: a CPU's caches hold their activations; elsewhere 2^13


@dataclass(frozen=True)
class Score:
    """Nats and targets of a pass. `complete` is False if it was told to stop early."""

    nats: float
    tokens: int
    complete: bool = True
    tally: Tally = field(default_factory=lambda: Tally(1), compare=False)  # by length of context, and all

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.tokens

    @property
    def standard_error(self) -> float | None:
        """Of the loss; its units are rows."""
        return self.tally.standard_error(-1)

    def by_position(self) -> list[dict[str, Any]]:
        """The loss of targets by the ids that they have before them in their row (at most): 1, 2-3, 4-7, ..."""
        return [
            {
                "context_from": 2**group,
                "context_to": 2 ** (group + 1) - 1,
                "loss": self.tally.loss(group),
                "standard_error": self.tally.standard_error(group),
                "tokens": int(self.tally.targets[group]),
            }
            for group in range(len(self.tally.targets) - 1)
            if self.tally.targets[group]
        ]


def score(
    model: GPT,
    stream: TokenStream,
    seq_len: int,
    packing: Packing,
    eot: int,
    max_tokens: int | None = None,
    precision: Precision = "fp32",
    should_stop: Callable[[], bool] = lambda: False,
    stride: int | None = None,
    ranks: Ranks = ALONE,
) -> Score:
    """Nats of the first targets of a stream (all n-1, or `max_tokens`), each once, the short last window included.

    With a `stride` windows overlap and each scores its last `stride` targets, so that all but the first have at
    least seq_len - stride + 1 ids before them. Deterministic: draws nothing, and leaves the model's
    mode alone. Ranks share the batches, and all have all sums.
    """
    total = scored_targets(len(stream), max_tokens)
    if stride is not None and (packing != "concat" or not 1 <= stride <= seq_len):
        raise ConfigError([f"stride is {stride}: it must be in 1 .. seq_len {seq_len}, and packing concat"])
    forward = Forward(model, precision)
    tally = Tally(seq_len.bit_length() + 1)
    for number, batch in enumerate(_batches(stream, seq_len, packing, eot, total, model.device, stride)):
        if should_stop():
            return Score(float(tally.nats[-1]), max(int(tally.targets[-1]), 1), complete=False)
        if ranks.has(number):
            _add(tally, forward, batch)
    tally.share(ranks)
    return Score(float(tally.nats[-1]), int(tally.targets[-1]), tally=tally)


@torch.inference_mode()
def _add(tally: Tally, forward: Forward, batch: Batch) -> None:
    """Score the batch's valid targets and add them to the groups of their contexts, and to the last one of all."""
    hidden = forward.hidden(batch.inputs, batch.positions, documents=batch.documents)  # (B T, C)
    places = (batch.targets.flatten() != IGNORED).nonzero().flatten()  # (valid,)
    losses = predictions(forward, hidden[places], batch.targets.flatten()[places]).losses
    B, T = batch.targets.shape
    positions = torch.arange(T, device=places.device).expand(B, T) if batch.positions is None else batch.positions
    contexts = positions.flatten()[places].cpu().numpy() + 1
    groups = len(tally.targets)
    # Exact below 2^53: frexp gives the number of binary digits.
    cells = (places.cpu().numpy() // T) * groups + np.frexp(contexts)[1] - 1
    nats, targets = (
        np.bincount(cells, weights, minlength=B * groups).reshape(B, groups).astype(np.float64)
        for weights in (losses.cpu().numpy().astype(np.float64), None)
    )
    nats[:, -1], targets[:, -1] = nats.sum(axis=1), targets.sum(axis=1)
    tally.add(nats, targets)


def scored_targets(n: int, max_tokens: int | None) -> int:
    """How many targets a pass over n ids scores; raises `DataError` where there is none."""
    if n < 2:
        raise DataError(f"a split of {n} ids has no target to score; expected at least 2")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, it must be at least 1")
    return n - 1 if max_tokens is None else min(n - 1, max_tokens)


def data_hash(stream: TokenStream, max_tokens: int | None) -> str:
    """sha256 of the ids that a pass reads, as little-endian int64: two equal numbers were measured on the same text."""
    digest = hashlib.sha256()
    end = scored_targets(len(stream), max_tokens) + 1
    for start in range(0, end, 1 << 20):
        digest.update(stream.read(start, min(end, start + (1 << 20))).astype("<i8").tobytes())
    return digest.hexdigest()


def evaluate(
    model: GPT,
    store: TokenStore,
    split: SplitName = "val",
    seq_len: int | None = None,
    packing: Packing = "concat",
    max_tokens: int | None = None,
    precision: Precision = "fp32",
    stride: int | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a split, with all that the numbers depend on beside them.

    `bits_per_byte` divides the nats of all scored targets, eots included, by ln 2 and by the bytes of
    text that these targets stand for (an eot stands for none). It is None where a part of a split is
    scored and the tokenizer's ids do not each stand for fixed bytes.
    """
    seq_len = seq_len or model.config.block_size
    stream = store.split(split)
    result = score(model, stream, seq_len, packing, store.eot, max_tokens, precision, stride=stride, ranks=ranks)
    # The stream's first id, an eot, is no target: all bytes of the split's text are.
    whole: int | None = store.facts["splits"][split]["bytes"]  # None in an adopted store without a byte table
    text_bytes = _scored_bytes(stream, store.tokenizer, whole, result.tokens)
    where = {"split": split, "fingerprint": store.fingerprint}
    return _facts(result, stream, text_bytes, seq_len, packing, precision, stride) | where


def evaluate_text(
    model: GPT,
    tokenizer: Tokenizer,
    path: Path,
    seq_len: int | None = None,
    packing: Packing = "concat",
    max_tokens: int | None = None,
    precision: Precision = "fp32",
    stride: int | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """The same of the documents of any text file (or folder, as `prepare` reads them), between eots.

    `fingerprint` is None, for there is no store. Raises `DataError` for what the tokenizer cannot spell.
    """
    seq_len = seq_len or model.config.block_size
    stream, whole = _stream_of(path, tokenizer)
    result = score(model, stream, seq_len, packing, tokenizer.eot, max_tokens, precision, stride=stride, ranks=ranks)
    text_bytes = _scored_bytes(stream, tokenizer, whole, result.tokens)
    where = {"split": None, "fingerprint": None, "text": path.name}
    return _facts(result, stream, text_bytes, seq_len, packing, precision, stride) | where


def _stream_of(path: Path, tokenizer: Tokenizer) -> tuple[TokenStream, int]:
    """The ids of a file's documents as a split holds them, and the bytes of their text."""
    eot = np.array([tokenizer.eot], dtype=np.uint32)
    pieces, starts, text_bytes, length = [], [], 0, 0
    for source in find_sources([str(path)])[0]:
        for text in read_texts(source):
            if text:
                try:
                    ids = tokenizer.encode(text.decode())
                except DataError as error:
                    raise DataError(f"{source.name}: {error}") from error
                pieces += [eot, ids]
                starts.append(length)
                length += 1 + len(ids)
                text_bytes += len(text)
    if not starts:
        raise DataError(f"{path}: no document with text in it; expected text to score")
    return TokenStream([np.concatenate([*pieces, eot])], np.array(starts, dtype=np.uint64), path.name), text_bytes


def _facts(
    result: Score,
    stream: TokenStream,
    text_bytes: int | None,
    seq_len: int,
    packing: Packing,
    precision: Precision,
    stride: int | None,
) -> dict[str, Any]:
    perplexity = math.exp(min(result.loss, 700.0))
    bits_of = None if not text_bytes else result.tokens / math.log(2) / text_bytes  # bits per byte of a loss of 1
    error = result.standard_error
    return {
        "loss": result.loss,
        "perplexity": perplexity,
        "bits_per_byte": None if bits_of is None else result.loss * bits_of,
        "standard_errors": {
            "loss": error,
            "perplexity": None if error is None else perplexity * error,
            "bits_per_byte": None if error is None or bits_of is None else error * bits_of,
        },
        "tokens": result.tokens,
        "bytes": text_bytes,
        "seq_len": seq_len,
        "packing": packing,
        "stride": stride,
        "method": method(seq_len, packing, stride),
        "precision": precision,
        "data_hash": data_hash(stream, result.tokens),
        "by_position": result.by_position(),
    }


def method(seq_len: int, packing: Packing, stride: int | None) -> str:
    """How the targets were scored, in words."""
    if stride is not None:
        return f"windows of {seq_len} ids that overlap, the last {stride} targets of each scored"
    if packing == "concat":
        return f"windows of {seq_len} ids that follow each other"
    if packing == "document":
        return f"windows of {seq_len} ids that follow each other, each document seen alone"
    return f"rows of {seq_len} ids of whole documents ({packing})"


def _scored_bytes(stream: TokenStream, tokenizer: Tokenizer, whole: int | None, tokens: int) -> int | None:
    if tokens == len(stream) - 1:
        return whole
    lengths = tokenizer.token_lengths()
    return None if lengths is None else int(lengths[stream.read(1, tokens + 1)].sum())


def _batches(
    stream: TokenStream,
    seq_len: int,
    packing: Packing,
    eot: int,
    total: int,
    device: torch.device,
    stride: int | None = None,
) -> Iterator[Batch]:
    """Batches that cover targets 1 .. total: windows that follow each other, or rows of documents in their order."""
    rows = max(1, SCORED_AT_ONCE.get(device.type, 1 << 13) // seq_len)
    if stride is not None and total > seq_len:
        yield from _strided(stream, seq_len, eot, total, device, stride, rows)
        return
    if not has_table(packing):
        for windows in _windows(stream, seq_len, total, rows):
            yield batch_of(windows, packing, eot, device)
        return
    table = row_table(stream, seq_len, packing, total)
    for first in range(0, table.rows, rows):
        numbers = np.arange(first, min(first + rows, table.rows), dtype=np.int64)
        yield batch_of_rows(table.read(stream, numbers, eot), device)


def _strided(
    stream: TokenStream, seq_len: int, eot: int, total: int, device: torch.device, stride: int, rows: int
) -> Iterator[Batch]:
    """Windows that end at seq_len, then every `stride` targets, then at the last; each scores what is new in it."""
    ends = np.array([*range(seq_len, total, stride), total], dtype=np.int64)
    fresh = np.array([seq_len, *(end - before for before, end in pairwise(ends.tolist()))], dtype=np.int64)
    for first in range(0, len(ends), rows):
        part = slice(first, first + rows)
        batch = batch_of(stream.gather(ends[part] - seq_len, seq_len + 1), "concat", eot, device)
        old = torch.arange(seq_len) < torch.from_numpy(seq_len - fresh[part])[:, None]  # (rows, T)
        targets = batch.targets.masked_fill(old.to(device), IGNORED)
        yield replace(batch, targets=targets, valid=int(fresh[part].sum()))


def _windows(stream: TokenStream, seq_len: int, total: int, rows: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Windows of seq_len + 1 ids, `rows` at once, then the short last one; they cover targets 1 .. total."""
    whole = total // seq_len
    for first in range(0, whole, rows):
        starts = np.arange(first, min(first + rows, whole), dtype=np.int64) * seq_len
        yield stream.gather(starts, seq_len + 1)
    if total % seq_len:
        yield stream.gather(np.array([whole * seq_len]), total % seq_len + 1)
