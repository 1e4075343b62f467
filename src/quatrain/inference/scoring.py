"""How well a model predicts a split: every target scored once, in windows that follow each other."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quatrain.errors import DataError, UsageError
from quatrain.model.device import Precision, autocast
from quatrain.model.gpt import GPT
from quatrain.model.loss import summed_loss
from quatrain.tokens.config import Packing
from quatrain.tokens.loader import Batch, batch_of, batch_of_rows
from quatrain.tokens.rows import has_table, row_table
from quatrain.tokens.store import SplitName, TokenStore, TokenStream

SCORED_AT_ONCE = 8192  # targets in one forward: bounds the memory of the logits


@dataclass(frozen=True)
class Score:
    """Nats and targets of a pass. `complete` is False if it was told to stop early."""

    nats: float
    tokens: int
    complete: bool = True

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.tokens


def score(
    model: GPT,
    stream: TokenStream,
    seq_len: int,
    packing: Packing,
    eot: int,
    max_tokens: int | None = None,
    precision: Precision = "fp32",
    should_stop: Callable[[], bool] = lambda: False,
) -> Score:
    """Nats of the first targets of a stream (all n-1, or `max_tokens`), each once, the short last window included.

    Deterministic: draws nothing, and puts the model's mode back.
    """
    total = scored_targets(len(stream), max_tokens)
    was_training = model.training
    model.eval()
    nats, done = 0.0, 0
    try:
        with torch.no_grad(), autocast(model.device, precision):
            for batch in _batches(stream, seq_len, packing, eot, total, model.device):
                if should_stop():
                    return Score(nats, max(done, 1), complete=False)
                nats += float(summed_loss(model, batch))
                done += batch.valid
    finally:
        model.train(was_training)
    return Score(nats, done)


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
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a split, with all that the numbers depend on beside them.

    `bits_per_byte` divides the nats of all scored targets, eots included, by ln 2 and by the bytes of
    text that these targets stand for (an eot stands for none). It is None where a part of a split is
    scored and the tokenizer's ids do not each stand for fixed bytes.
    """
    seq_len = seq_len or model.config.block_size
    stream = store.split(split)
    result = score(model, stream, seq_len, packing, store.eot, max_tokens, precision)
    text_bytes = _scored_bytes(store, split, result.tokens)
    return {
        "loss": result.loss,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": None if text_bytes is None else result.nats / math.log(2) / text_bytes,
        "tokens": result.tokens,
        "bytes": text_bytes,
        "split": split,
        "seq_len": seq_len,
        "packing": packing,
        "precision": precision,
        "fingerprint": store.fingerprint,
    }


def _scored_bytes(store: TokenStore, split: SplitName, tokens: int) -> int | None:
    stream = store.split(split)
    if tokens == len(stream) - 1:
        # The stream's first id, an eot, is no target: all bytes of the split's text are.
        known: int | None = store.facts["splits"][split]["bytes"]  # None in an adopted store without a byte table
        return known
    lengths = store.tokenizer.token_lengths()
    return None if lengths is None else int(lengths[stream.read(1, tokens + 1)].sum())


def _batches(
    stream: TokenStream, seq_len: int, packing: Packing, eot: int, total: int, device: torch.device
) -> Iterator[Batch]:
    """Batches that cover targets 1 .. total: windows that follow each other, or rows of documents in their order."""
    if not has_table(packing):
        for windows in _windows(stream, seq_len, total):
            yield batch_of(windows, packing, eot, device)
        return
    table = row_table(stream, seq_len, packing, total)
    rows = max(1, SCORED_AT_ONCE // seq_len)
    for first in range(0, table.rows, rows):
        numbers = np.arange(first, min(first + rows, table.rows), dtype=np.int64)
        yield batch_of_rows(table.read(stream, numbers, eot), device)


def _windows(stream: TokenStream, seq_len: int, total: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Windows of seq_len + 1 ids, several at once, then the short last one; they cover targets 1 .. total."""
    rows = max(1, SCORED_AT_ONCE // seq_len)
    whole = total // seq_len
    for first in range(0, whole, rows):
        starts = np.arange(first, min(first + rows, whole), dtype=np.int64) * seq_len
        yield stream.gather(starts, seq_len + 1)
    if total % seq_len:
        yield stream.gather(np.array([whole * seq_len]), total % seq_len + 1)
