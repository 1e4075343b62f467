"""Shards as other programs write them, by their published formats: independent of what `quatrain.interop` does."""

import itertools
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]


def flat(documents: Iterable[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def stream(documents: Documents, eot: int) -> list[int]:
    """The stream of a split as quatrain has it: eot before every document, and one more at the end."""
    return [*flat([eot, *document] for document in documents), eot]


def starts(documents: Documents) -> list[int]:
    """Where the documents of that stream begin."""
    places, place = [], 0
    for document in documents:
        places.append(place)
        place += len(document) + 1
    return places


def raw(path: Path, ids: Sequence[int], kind: str = "H") -> Path:
    """nanoGPT's train.bin: ids and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f"<{len(ids)}{kind}", *ids))
    return path


def llmc(path: Path, ids: Sequence[int], magic=20240520, version=1, count=None, kind="H") -> Path:
    """llm.c's and modded-nanogpt's shard: 256 int32 of header, then the ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = [magic, version, len(ids) if count is None else count, *[0] * 253]
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(ids)}{kind}", *ids))
    return path


def npy(path: Path, ids: Sequence[int], dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.array(ids, dtype=dtype))
    return path


def build_nanogpt(folder: Path, ids: Sequence[int], size: int) -> None:
    """One stream cut every `size` ids, whatever stands there; the first shard is validation."""
    for number, start in enumerate(range(0, len(ids), size)):
        split = "train" if number else "val"
        npy(folder / f"edufineweb_{split}_{number:06d}.npy", ids[start : start + size])


def megatron(prefix: Path, documents: Documents, code: int = 8, sentences: int = 1) -> None:
    """A .bin and .idx as Megatron-LM's IndexedDatasetBuilder writes them, each document in so many sequences."""
    kind = {1: "B", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths, indices, ids = [], [0], flat(documents)
    for document in documents:
        cut = [len(document) * part // sentences for part in range(sentences + 1)]
        lengths += [stop - start for start, stop in itertools.pairwise(cut)]
        indices.append(len(lengths))
    pointers, pointer = [], 0
    for length in lengths:
        pointers.append(pointer)
        pointer += length * struct.calcsize(kind)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}{kind}", *ids))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(indices))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(indices)}q", *indices)
    )


def read_megatron(prefix: Path) -> list[list[int]]:
    """The documents of a .bin and .idx, as Megatron-LM's reader finds them."""
    data = prefix.with_suffix(".idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1
    place = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", data, place)
    pointers = struct.unpack_from(f"<{sequences}q", data, place + 4 * sequences)
    indices = struct.unpack_from(f"<{documents}q", data, place + 12 * sequences)
    assert len(data) == place + 12 * sequences + 8 * documents
    ids = prefix.with_suffix(".bin").read_bytes()
    kind = {4: "i", 8: "H"}[code]
    read = [list(struct.unpack_from(f"<{n}{kind}", ids, at)) for n, at in zip(lengths, pointers, strict=True)]
    return [flat(read[first:after]) for first, after in itertools.pairwise(indices)]


def datatrove(path: Path, documents: Documents, kind: str = "H", index: bool = True, metadata: str = "") -> None:
    """datatrove's .ds, with the ends of its documents beside it."""
    raw(path, flat(documents), kind)
    ends = np.cumsum([len(document) for document in documents]).tolist()
    if index:
        path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        path.with_name(path.name + ".metadata").write_text(metadata)
