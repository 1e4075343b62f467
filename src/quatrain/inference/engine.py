"""A model ready to write: weights in the layout of fast kernels, a cache, and slots that are read and written into.

Slots are independent: they can be freed and filled while others decode.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.inference.forward import Forward
from quatrain.inference.graphs import Graphs
from quatrain.inference.products import Dtype
from quatrain.model.cache import Cache, Place
from quatrain.model.gpt import GPT
from quatrain.model.masks import Causal

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (B, H, T, D), k and v (B, H_kv, extent, D) to (B, H, T, D)


class Engine:
    """Prefill and decode over `slots` sequences.

    `dtype` is that of the weights (int8 where it runs, else bf16; the resolved one is the attribute); `restart` is
    the id at which a document begins anew, for models trained with attention within documents. The weights are a
    copy, made now, except on a GPU in their own dtype. On CUDA a decode step is one graph (`compiled`).
    """

    def __init__(
        self,
        model: GPT,
        slots: int = 1,
        dtype: Dtype = "fp32",
        restart: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.config = model.config
        self.device = model.device
        self.slots = slots
        self._forward = Forward(model, dtype)
        self.dtype = self._forward.dtype
        self.restart = restart
        self.lengths = [0] * slots  # positions that each slot holds
        # On CPUs attention over few queries is fastest in fp32.
        kept = torch.float32 if self.device.type == "cpu" or self.dtype == "int8" else self._forward.floats
        self._cache = Cache(self.config, slots, kept, self.device)
        with_graphs = self.device.type == "cuda" if compiled is None else compiled
        self._graphs = Graphs(self._step, slots, self.config.block_size, self.device) if with_graphs else None

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """Append rows of ids, of any lengths, to some slots; logits (len(rows), V) behind the last id of each, fp32.

        Raises `ValueError` for an empty row and for more positions than the model sees.
        """
        rows = [self._last_document(slot, row) for slot, row in zip(slots, rows, strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        x = self._append(slots, ids, [len(row) for row in rows])  # (B, T, C)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        return self._forward.logits(x[torch.arange(len(rows), device=self.device), last])

    @torch.inference_mode()
    def read(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Append ids to a slot as `prefill` does; the logits behind each of them, (T, V), fp32."""
        borders = [place for place, token in enumerate(ids) if token == self.restart and place] + [len(ids)]
        logits, start = [], 0
        for end in borders:
            row = self._last_document(slot, ids[start:end])
            x = self._append([slot], torch.tensor([row], device=self.device), [len(row)])
            logits.append(self._forward.logits(x[0]))
            start = end
        return torch.cat(logits)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Append one id to each of some slots; logits (len(slots), V), fp32, in their order."""
        for slot, token in zip(slots, ids, strict=True):
            self._last_document(slot, [token])
        count = self.slots if self._graphs else max(slots) + 1
        tokens, lengths = [0] * count, [-1] * count  # -1: takes no part
        for slot, token in zip(slots, ids, strict=True):
            tokens[slot], lengths[slot] = token, self.lengths[slot]
        logits = self._decoded(tokens, lengths)
        for slot in slots:
            self.lengths[slot] += 1
        return logits if list(slots) == list(range(count)) else logits[list(slots)]

    @torch.inference_mode()
    def fork(self, slot: int, to: Sequence[int]) -> None:
        """Let other slots hold what one holds, without computing it again."""
        length = self.lengths[slot]
        for other in to:
            for layer, kept in enumerate(self._cache.layers):
                k, v = kept[:, slot : slot + 1, :, :length]
                self._cache.update(layer, k, v, Place(slice(other, other + 1), 0, length))
            self.lengths[other] = length

    def free(self, slot: int) -> None:
        """Forget what a slot holds."""
        self.lengths[slot] = 0

    def _last_document(self, slot: int, row: Sequence[int]) -> Sequence[int]:
        """The ids that those behind the row can see, after what the slot holds; checked for room."""
        if not row:
            raise ValueError("a row without ids")
        if self.restart is not None and self.restart in row:
            self.free(slot)
            row = row[len(row) - 1 - list(reversed(row)).index(self.restart) :]
        if self.lengths[slot] + len(row) > self.config.block_size:
            raise ValueError(
                f"{self.lengths[slot]} positions and {len(row)} more in slot {slot}; "
                f"the model sees at most block_size {self.config.block_size}"
            )
        return row

    def _append(self, slots: Sequence[int], ids: Tensor, counts: list[int]) -> Tensor:
        """The stream (B, T, C) of ids (B, T), of which the first `counts` of each row are real."""
        B, T = ids.shape
        before = [self.lengths[slot] for slot in slots]
        where = _as_slice(slots) or torch.tensor(slots, device=self.device)
        steps = torch.arange(T, device=self.device)
        attend: Attend
        if not any(before):
            positions, place, attend = steps.expand(B, T), Place(where, 0, T), Causal().attend
        else:
            positions = torch.tensor(before, device=self.device)[:, None] + steps  # (B, T)
            # What is no id of the row goes to the spare position.
            real = steps < torch.tensor(counts, device=self.device)[:, None]
            at = positions.where(real, self.config.block_size)
            positions = positions.clamp(max=self.config.block_size - 1)
            extent = max(start + count for start, count in zip(before, counts, strict=True))
            place, attend = Place(where, at, extent), _seen_up_to(positions, extent)
        x = self._stream(ids, positions, place, attend)
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        return x.view(B, T, -1)

    def _decoded(self, tokens: list[int], lengths: list[int]) -> Tensor:
        """Logits (count, V) behind a step of the first slots, given their lengths or -1."""
        if self._graphs:
            return self._graphs(tokens, lengths)
        longest = max(lengths)
        if min(lengths) == longest:  # all slots are equally long: no index, no mask
            ids, positions = torch.tensor([tokens, lengths]).to(self.device).unsqueeze(-1)
            place = Place(slice(0, len(tokens)), longest, longest + 1)
            return self._forward.logits(self._stream(ids, positions, place, _all_seen))
        return self._step(
            torch.tensor(tokens, device=self.device), torch.tensor(lengths, device=self.device), longest + 1
        )

    def _step(self, tokens: Tensor, lengths: Tensor, extent: int) -> Tensor:
        """The same with ids and lengths as int64 (count,): shapes depend on `extent` alone."""
        positions = lengths.clamp(min=0)[:, None]  # (count, 1)
        at = lengths.where(lengths >= 0, self.config.block_size)[:, None]
        place = Place(slice(0, len(tokens)), at, extent)
        return self._forward.logits(self._stream(tokens[:, None], positions, place, _seen_up_to(positions, extent)))

    def _stream(self, ids: Tensor, positions: Tensor, place: Place, attend: Attend) -> Tensor:
        """The residual stream (B T, C) of ids and positions (B, T), which attend to what the cache holds with them."""

        def cached(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.update(layer, k, v, place)
            return attend(q.to(keys.dtype), keys, values)

        return self._forward.stream(ids, positions, cached)


def _as_slice(slots: Sequence[int]) -> slice | None:
    """The slots as a slice where they follow each other: the cache is then looked at, not copied."""
    first, end = slots[0], slots[0] + len(slots)
    return slice(first, end) if list(slots) == list(range(first, end)) else None


def _all_seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One new query sees every key."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _seen_up_to(positions: Tensor, extent: int) -> Attend:
    """Queries at positions (B, T) see keys up to their own; the keys' positions are 0 .. extent - 1."""
    keys = torch.arange(extent, device=positions.device)
    allowed = (keys <= positions[:, :, None]).unsqueeze(1)  # (B, 1, T, extent)
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, enable_gqa=q.shape[1] != k.shape[1]
    )
