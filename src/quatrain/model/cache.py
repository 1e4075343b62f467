"""Keys and values of the positions that have been computed, so that each is computed once."""

from typing import NamedTuple

import torch
from torch import Tensor

from quatrain.model.config import ModelConfig


class Place(NamedTuple):
    """Where the keys and values of a forward go, and how many positions its queries may look back over.

    `slots` are the rows of the cache, a slice or int64 (B,); `at` are positions: the first one where all rows
    agree, which then costs no index, or int64 (B, T).
    """

    slots: slice | Tensor
    at: int | Tensor
    extent: int


class Cache:
    """Memory for the keys and values of some slots, each a sequence of its own; it holds no lengths and no masks.

    What lies behind a slot's length is never looked at, so a slot is free as soon as nobody counts its positions.
    There is one position more than the model can see: rows that take no part in a step write there.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layer, 2, slots, config.kv_heads, config.block_size + 1, config.head_dim)
        # Zeros, not empty: nan times a weight of zero would still be nan.
        self.layers = list(torch.zeros(shape, dtype=dtype, device=device).unbind())  # each (2, slots, H_kv, S, D)
        self.dtype = dtype

    def update(self, layer: int, k: Tensor, v: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Keep `k` and `v` (B, H_kv, T, D); returns those of the first `extent` positions, (B, H_kv, extent, D)."""
        keys, values = self.layers[layer].unbind()  # (slots, H_kv, S, D)
        slots, at = place.slots, place.at
        if isinstance(at, int):
            end = at + k.shape[2]
            keys[slots, :, at:end] = k.to(self.dtype)
            values[slots, :, at:end] = v.to(self.dtype)
        else:
            rows = slots if isinstance(slots, Tensor) else torch.arange(slots.start, slots.stop, device=at.device)
            keys[rows[:, None], :, at] = k.transpose(1, 2).to(self.dtype)  # indexed: (B, T, H_kv, D)
            values[rows[:, None], :, at] = v.transpose(1, 2).to(self.dtype)
        return keys[slots, :, : place.extent], values[slots, :, : place.extent]
