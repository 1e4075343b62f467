"""Several documents in one row: which belong together, and what the other ways to fill a row would waste."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quatrain.tokens.pieces import IntArray

IGNORED = -100  # a target that no loss counts


def document_ids(inputs: IntArray, eot: int) -> npt.NDArray[np.int64]:
    """The number of each position's document within its row: it grows at every eot. Shape of inputs, (..., T)."""
    return np.cumsum(inputs == eot, axis=-1, dtype=np.int64)


def positions(inputs: IntArray, eot: int) -> npt.NDArray[np.int64]:
    """Positions that restart at 0 at each eot; a row that begins mid-document starts at 0. Shape of inputs."""
    index = np.broadcast_to(np.arange(inputs.shape[-1], dtype=np.int64), inputs.shape)
    begins = np.where(inputs == eot, index, 0)
    return index - np.maximum.accumulate(begins, axis=-1)


def packed_mask(x: IntArray, eot: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Attention mask and positions of one row of T ids: `(mask, pos)`, bool (T, T) and int64 (T,).

    `mask[i, j]` is True where position i may attend to j: j is not later, and of the same document.
    A document begins at its eot.

    >>> mask, pos = packed_mask(np.array([5, 9, 3, 9]), eot=9)
    >>> mask.astype(int).tolist(), pos.tolist()
    ([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], [0, 0, 1, 0])
    """
    x = np.asarray(x)
    documents = document_ids(x, eot)
    same = documents[:, None] == documents[None, :]  # (T, T)
    causal = np.tri(len(x), dtype=np.bool_)
    return same & causal, positions(x, eot)


def padding_waste(lengths: Iterable[int], T: int) -> tuple[int, int]:
    """Rows and wasted positions if each document of l targets were padded to whole rows of T.

    A document takes ceil(l/T) rows and wastes T ceil(l/T) - l positions.

    >>> padding_waste([3, 4, 5], T=4)
    (4, 4)
    """
    targets = np.fromiter(lengths, dtype=np.int64)
    rows = -(-targets // T)
    return int(rows.sum()), int((T * rows - targets).sum())
