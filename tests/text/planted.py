"""Documents as lists of ids with copies that were edited, and their similarity by plain Python sets."""

import random
from collections import Counter, defaultdict

import numpy as np

GRAM = 5


def flat(documents: list[list[int]], dtype: type = np.uint16) -> tuple[np.ndarray, np.ndarray]:
    """Documents end to end, and the offsets between them."""
    ids = np.array([number for document in documents for number in document], dtype=dtype)
    return ids, np.cumsum([0, *map(len, documents)], dtype=np.int64)


def grams(document: list[int]) -> set[tuple[int, ...]]:
    return {tuple(document[place : place + GRAM]) for place in range(len(document) - GRAM + 1)}


def jaccard(one: set, other: set) -> float:
    return len(one & other) / len(one | other) if one and other else 0.0


def similar_pairs(documents: list[list[int]], others: list[list[int]], threshold: float) -> dict:
    """Every (document, other) of similarity >= threshold, found by counting the grams that they share."""
    holders = defaultdict(list)
    sizes = []
    for number, other in enumerate(others):
        held = grams(other)
        sizes.append(len(held))
        for gram in held:
            holders[gram].append(number)
    found = {}
    for number, document in enumerate(documents):
        own = grams(document)
        for other, shared in Counter(one for gram in own for one in holders.get(gram, ())).items():
            similarity = shared / (len(own) + sizes[other] - shared)
            if similarity >= threshold:
                found[number, other] = similarity
    return found


def prose(rng: random.Random, length: int, vocabulary: int = 3000) -> list[int]:
    """Ids that are common and rare as words are (Zipf)."""
    return [int(vocabulary ** rng.random()) - 1 for _ in range(length)]


def edited(rng: random.Random, document: list[int], similarity: float) -> list[int]:
    """A copy with ids replaced, put in and left out, of about that similarity."""
    copy = list(document)
    # Each edit makes five grams of one document new and five of the other.
    for _ in range(max(1, round(len(document) * (1 - similarity) / (1 + similarity) / GRAM))):
        place = rng.randrange(len(copy))
        new = [[], [rng.randrange(3000)], [copy[place], rng.randrange(3000)]][rng.randrange(3)]
        copy[place : place + 1] = new
    return copy


def planted(seed: int, count: int, copies: int, lengths: tuple[int, int]) -> tuple[list[list[int]], list[tuple]]:
    """Documents of which `copies` are edits of earlier ones, and the (original, copy) pairs."""
    rng = random.Random(seed)
    documents = [prose(rng, rng.randint(*lengths)) for _ in range(count - copies)]
    places = sorted(rng.sample(range(count // 10, count), copies))
    pairs = []
    for place in places:
        original = rng.randrange(place)
        documents.insert(place, edited(rng, documents[original], rng.uniform(0.5, 1)))
        pairs.append((original, place))
    return documents, pairs
