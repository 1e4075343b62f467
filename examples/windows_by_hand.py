"""What a model is trained on: one stream of ids, cut into windows. Run: python examples/windows_by_hand.py"""

import tempfile

import numpy as np

from quatrain import TokenStore, coverage, packed_mask, padding_waste, prepare, sample_batch, sequential_batches
from quatrain.tokens.config import PrepareConfig

with tempfile.TemporaryDirectory() as folder:
    prepare(["corpus:sonnets"], f"{folder}/store", PrepareConfig(tokenizer="char", val_docs=(7,)))
    store = TokenStore(f"{folder}/store")
    decode = store.tokenizer.decode

    print(f"{len(store.train)} ids; the stream begins with {decode(store.train[:20])!r}")

    x, y = sample_batch(store.train, B=2, T=16, rng=np.random.default_rng(0))
    for inputs, targets in zip(x, y, strict=True):
        print(f"random crop: {decode(inputs)!r} -> {decode(targets)!r}")

    batches = list(sequential_batches(store.train, B=4, T=64))
    same = batches[0][1].ravel()[-1] == batches[1][0].ravel()[0]
    print(f"{len(batches)} sequential batches; the last target of one is the first input of the next: {same}")

    times = coverage(len(store.train), T=64)
    print(f"target 1 lies in {times[1]} window, target 100 in {times[100]}, the last in {times[-1]}")

    starts = store.document_starts("train").astype(np.int64)
    row = store.train[int(starts[1]) - 3 : int(starts[1]) + 3]  # three ids of one sonnet, then the next one's eot
    mask, positions = packed_mask(row, store.eot)
    print(f"a row over a border, positions {positions.tolist()}:")
    print(mask.astype(int))

    lengths = np.diff([*starts, len(store.train) - 1])
    rows, wasted = padding_waste(lengths, T=64)
    print(f"padding each sonnet to rows of 64 would take {rows} rows and waste {wasted} positions")
