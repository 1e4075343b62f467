"""Near-duplicates and contamination: what they cost, and our MinHash pipeline against datasketch's at equal recall.

20,000 documents of the shared data, as GPT-2 ids; 2,000 of them are edits of earlier ones, of Jaccard similarity 0.5
to 1. What should be found is known without MinHash, from `ValidationIndex` of all documents against themselves. The
ways: `quatrain.text.near`; datasketch (MinHash of 256 permutations, MinHashLSH of 64 bands of 4 rows) over the bytes
of the same 5-grams; and datasketch given our hashes of them. All three verify their candidates with the same code, on
one thread; each run is a process of its own, timed from ids in memory to the documents removed, and the ways take
turns. All seconds are CPU seconds, which others on the machine disturb least.

Then `ValidationIndex` with 0.5 % of the documents as validation, and `Benchmark` of HellaSwag over the books.

Run: python bench/dedup.py [--rounds 3] [--documents 20000]
The peer, which is no dependency: pip install --target PEER --no-deps datasketch scipy; then PYTHONPATH=PEER ...
"""

import argparse
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prepare import SHARED, documents_of_shared
from quatrain.text.contamination import Benchmark
from quatrain.text.grams import gram_set
from quatrain.text.near import BANDS, ROWS, NearDuplicates, Similarity, band_hashes, near_duplicates, repeats
from quatrain.text.similar import ValidationIndex
from quatrain.text.tokenizers import gpt2

THRESHOLD = 0.6
BLOCK = 1 << 20  # ids
WAYS = {"quatrain": "quatrain.text.near", "datasketch": "datasketch", "given": "datasketch, given our hashes"}

Corpus = tuple[np.ndarray, np.ndarray]


def make_corpus(count: int, copies: int) -> Corpus:
    """Real documents, and edits of earlier ones at random places among them."""
    rng = random.Random(1)
    texts = [text.encode() for text in islice(documents_of_shared(), count - copies)]
    ids, offsets = gpt2().encode_batch(texts)
    documents = np.split(ids.astype(np.uint16), offsets[1:-1])
    for place in sorted(rng.sample(range(count // 10, count), copies)):
        documents.insert(place, edited(rng, documents[rng.randrange(place)], rng.uniform(0.5, 1)))
    return np.concatenate(documents), np.cumsum([0, *map(len, documents)])


def edited(rng: random.Random, document: np.ndarray, similarity: float) -> np.ndarray:
    """A copy with ids replaced, put in and left out: an edit makes five grams new on either side."""
    copy = document.tolist()
    for _ in range(round(len(copy) * (1 - similarity) / (1 + similarity) / 5)):
        place = rng.randrange(len(copy))
        copy[place : place + 1] = [[], [rng.randrange(50_000)], [copy[place], rng.randrange(50_000)]][rng.randrange(3)]
    return np.array(copy, dtype=np.uint16)


def blocks(ids: np.ndarray, offsets: np.ndarray) -> list[Corpus]:
    cuts = np.unique(np.append(np.searchsorted(offsets, np.arange(0, len(ids), BLOCK)), len(offsets) - 1))
    return [
        (ids[offsets[start] : offsets[end]], offsets[start : end + 1] - offsets[start]) for start, end in pairwise(cuts)
    ]


def ours(ids: np.ndarray, offsets: np.ndarray) -> NearDuplicates:
    bands = np.concatenate([band_hashes(*block) for block in blocks(ids, offsets)])
    return near_duplicates(lambda band: bands[:, band], document_of(ids, offsets), len(bands), THRESHOLD)


def datasketch(ids: np.ndarray, offsets: np.ndarray, given: bool) -> NearDuplicates:
    """The README's way: a MinHash a document, queried and then inserted."""
    from datasketch import MinHash, MinHashLSH

    document, count = document_of(ids, offsets), len(offsets) - 1
    if given:
        sets = ((gram_set(document(number)) & np.uint64(2**32 - 1)).tolist() for number in range(count))
        hashes = MinHash.generator(sets, num_perm=BANDS * ROWS, hashfunc=int)
    else:
        hashes = MinHash.generator(map(gram_bytes, map(document, range(count))), num_perm=BANDS * ROWS)
    lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    pairs = []
    for number, minhash in enumerate(hashes):
        pairs += [(earlier, number) for earlier in sorted(lsh.query(minhash))]
        lsh.insert(number, minhash, check_duplication=False)
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return repeats(found, np.full(len(found), np.nan), Similarity(document, THRESHOLD), count)


def gram_bytes(ids: np.ndarray) -> set[bytes]:
    data = ids.tobytes()
    return {data[place : place + 10] for place in range(0, len(data) - 9, 2)}


def document_of(ids: np.ndarray, offsets: np.ndarray) -> Callable[[int], np.ndarray]:
    return lambda number: ids[offsets[number] : offsets[number + 1]]


def work(way: str, file: str) -> None:
    """In a process of its own: prints seconds, peak MB, and what each document repeats."""
    with np.load(file) as corpus:
        ids, offsets = corpus["ids"], corpus["offsets"]
    if way != "quatrain":
        import datasketch as _  # noqa: F401
    started = time.process_time()
    result = ours(ids, offsets) if way == "quatrain" else datasketch(ids, offsets, way == "given")
    seconds = time.process_time() - started
    # Not ru_maxrss, which counts the parent before exec too.
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()) if sys.platform == "linux" else None
    print(json.dumps({"seconds": seconds, "peak": int(peak[1]) / 1e3 if peak else 0, "like": result.like.tolist()}))


def truth(ids: np.ndarray, offsets: np.ndarray) -> set[tuple[int, int]]:
    """Every pair of similar documents, earlier and later."""
    later, earlier, _ = ValidationIndex(ids, offsets, THRESHOLD).similar(ids, offsets)
    return {(one, two) for one, two in zip(earlier.tolist(), later.tolist(), strict=True) if one < two}


def compare(corpus: Corpus, rounds: int) -> None:
    similar = truth(*corpus)
    pairs = np.array(sorted(similar))
    expected = repeats(pairs, np.ones(len(pairs)), lambda one, other: 1.0, len(corpus[1]) - 1).removed
    ways = ["quatrain", "datasketch", "given"] if importlib.util.find_spec("datasketch") else ["quatrain"]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "corpus.npz"
        np.savez(file, ids=corpus[0], offsets=corpus[1])
        environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for _ in range(rounds):
            for way in ways:
                words = [sys.executable, __file__, "--work", way, str(file)]
                answer = subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout
                runs[way].append(json.loads(answer))
    seconds = {way: statistics.median(run["seconds"] for run in runs[way]) for way in ways}
    print(
        f"{len(expected):,} documents, {len(corpus[0]):,} ids, {len(similar):,} pairs of J >= {THRESHOLD}; "
        f"{expected.sum():,} documents to remove; one thread, median of {rounds}"
    )
    for way in ways:
        like = np.array(runs[way][0]["like"])
        removed = like >= 0
        recall = (removed & expected).sum() / expected.sum()
        precision = np.mean([(int(like[later]), int(later)) in similar for later in np.flatnonzero(removed)])
        print(
            f"{WAYS[way]:<30}{seconds[way]:8.2f} s {seconds[way] / seconds['quatrain']:6.1f}x   recall {recall:.4f}   "
            f"precision {precision:.4f}   peak {runs[way][0]['peak']:.0f} MB"
        )
    if len(ways) == 1:
        print("datasketch is not here: pip install --target PEER --no-deps datasketch scipy, then PYTHONPATH=PEER")


def best(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def scans(ids: np.ndarray, offsets: np.ndarray) -> None:
    """The two that read every document, over text that they find nothing in; the best of five."""
    validation = np.random.default_rng(0).random(len(offsets) - 1) < 0.005
    of_validation = np.repeat(validation, np.diff(offsets))
    sides = [
        (ids[of_side], np.cumsum([0, *np.diff(offsets)[side].tolist()]))
        for side, of_side in ((validation, of_validation), (~validation, ~of_validation))
    ]
    index = ValidationIndex(*sides[0], THRESHOLD)
    batches = blocks(*sides[1])
    took = best(lambda: [index.similar(*batch) for batch in batches])
    print(f"ValidationIndex of {validation.sum()} documents: {took / len(sides[1][0]) * 1e9:.2f} ns an id")
    benchmark = Benchmark([str(SHARED / "hellaswag_val.jsonl.gz")])
    texts = [text.encode() for text in islice(documents_of_shared(), 5000, 15_000)]
    took = best(lambda: [benchmark.found_in(texts[start : start + 256]) for start in range(0, len(texts), 256)])
    grams = benchmark.describe()[0]["grams"]
    print(f"Benchmark of {grams:,} 13-grams: {sum(map(len, texts)) / took / 1e6:.0f} MB/s of text")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--work", nargs=2)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
    elif (SHARED / "gutenberg_100mb.jsonl.zst").is_file():
        scans(*make_corpus(arguments.documents, 0))
        compare(make_corpus(arguments.documents, arguments.documents // 10), arguments.rounds)
    else:
        print(f"bench/dedup.py: no shared data in {SHARED}")
