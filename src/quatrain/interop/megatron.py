r"""Megatron's index of a `.bin` of ids (MMIDIDX, version 1): its sequences, and which of them make a document.

    9 bytes   MMIDIDX\0\0          u64  version, 1          u8   code of the ids' type
    u64       number of sequences   u64  number of document indices (documents + 1)
    i32 [sequences]   ids of each    i64 [sequences]  byte offset of each in the .bin
    i64 [documents + 1]   the sequence at which each document begins, and the number of sequences

As Megatron-LM's indexed_dataset.py writes it; datatrove and NeMo write the same.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
FIELDS = struct.Struct("<QBQQ")  # version, code, sequences, document indices
HEAD = len(MAGIC) + FIELDS.size
# Signed ids are read as unsigned: the same bytes, and a negative one lies beyond every vocabulary.
DTYPES = {1: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
OTHER_TYPES = {2: "int8", 6: "float64", 7: "float32"}
CODE_UINT16, CODE_INT32 = 8, 4


class Index(NamedTuple):
    """What an index says of its `.bin`."""

    dtype: np.dtype[Any]
    tokens: int
    ends: npt.NDArray[np.int64]  # of each document, in ids, ascending


def read_index(path: Path) -> Index:
    """The index in a file; raises `DataError` for what is none, is cut short, or leaves ids out of every document."""
    data = path.read_bytes()
    if data[:6] == b"TNTIDX":
        raise DataError(
            f"{path}: an index of the old TNTIDX kind; expected MMIDIDX (preprocess with --dataset-impl mmap)"
        )
    if not data.startswith(MAGIC) or len(data) < HEAD:
        raise DataError(f"{path}: no Megatron index (expected it to begin with MMIDIDX), and it stands beside its .bin")
    version, code, sequences, documents = FIELDS.unpack_from(data, len(MAGIC))
    if version != 1:
        raise DataError(f"{path}: version {version} of the index, expected 1")
    if code not in DTYPES:
        raise DataError(f"{path}: its ids are of type {OTHER_TYPES.get(code, code)}; expected whole numbers from 0")
    expected = HEAD + sequences * 12 + documents * 8
    if len(data) != expected:
        raise DataError(
            f"{path}: {len(data):,} bytes, its {sequences:,} sequences and {documents:,} document indices need "
            f"{expected:,}; copied in part, or multimodal, which is not read"
        )
    dtype = np.dtype(DTYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, HEAD).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", sequences, HEAD + sequences * 4)
    borders = np.frombuffer(data, "<i8", documents, HEAD + sequences * 12)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    if (lengths < 0).any() or (offsets != bounds[:-1] * dtype.itemsize).any():
        raise DataError(f"{path}: its sequences do not lie one behind the other in the .bin, as adopt needs them")
    if not documents or borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise DataError(f"{path}: its document indices do not cover its {sequences:,} sequences")
    return Index(dtype, int(bounds[-1]), bounds[borders[1:]])


def index_bytes(lengths: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> bytes:
    """The index of documents of one sequence each, with so many ids of uint16 or int32."""
    documents = len(lengths)
    code = CODE_UINT16 if dtype.itemsize == 2 else CODE_INT32
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return b"".join(
        [
            MAGIC,
            FIELDS.pack(1, code, documents, documents + 1),
            lengths.astype("<i4").tobytes(),
            (bounds[:-1] * dtype.itemsize).astype("<i8").tobytes(),
            np.arange(documents + 1, dtype="<i8").tobytes(),
        ]
    )
