"""Which positions attend to which: a mask is made once a forward, and every block attends through it.

Within documents there are four ways, to the same result; `plan` takes the fastest that the device, the dtype and
dropout allow, and the dense mask wherever none of the others can be used. Nothing ever drops the mask. A document is
a run of equal numbers in a row, so padding that has a number of its own is a document like any other.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from quatrain.model.blocked import BlockedAttention

# In bf16 short documents lose more on a CPU than the casts to fp32 cost: at 8 ids 2.7 to 3.8 times, at 64 none is won.
SHORT = 48  # ids of the mean document
FLEX_LEAST_HEAD = 16  # channels; what Triton's matrix products need


class Causal(NamedTuple):
    """Each position attends to itself and to all before it. Queries are the last of the keys' positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """`q` is (B, H, new, D), `k` and `v` are (B, H_kv, T, D); returns (B, H, new, D), as all masks do."""
        new, T = q.shape[-2], k.shape[-2]
        if new == T:
            return _sdpa(q, k, v, dropout)
        # is_causal would align the first query with the first key: one new query would see that key alone.
        return _sdpa(q, k, v, dropout, torch.ones(new, T, dtype=torch.bool, device=q.device).tril(T - new))


class Dense(NamedTuple):
    """Every pair of positions, spelled out: for any device, dtype and dropout, and for a compiled step on a CPU."""

    allowed: Tensor  # bool (B, 1, T, T)

    @classmethod
    def over(cls, documents: Tensor) -> "Dense":
        """From numbers (B, T), as the other ways."""
        T = documents.shape[1]
        runs = _begins(documents).cumsum(dim=1)  # (B, T)
        same = runs[:, :, None] == runs[:, None, :]  # (B, T, T)
        causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
        return cls((same & causal).unsqueeze(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        return _sdpa(q, k, v, dropout, self.allowed)


class Segments(NamedTuple):
    """One causal attention a document, on a CPU: what lies between documents is never computed."""

    rows: list[list[int]]  # lengths of each row's documents

    @classmethod
    def over(cls, documents: Tensor) -> "Segments | Causal":
        B, T = documents.shape
        starts = _begins(documents).flatten().nonzero().flatten().tolist()
        if len(starts) == B:
            return Causal()
        rows: list[list[int]] = [[] for _ in range(B)]
        for start, end in pairwise([*starts, B * T]):
            rows[start // T].append(end - start)
        return cls(rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        dtype = v.dtype
        documents = sum(map(len, self.rows))
        if dtype.itemsize < 4 and q.shape[0] * q.shape[2] < SHORT * documents:
            q, k, v = q.float(), k.float(), v.float()
        # split, not slices: a slice's gradient is as large as the row it was cut from.
        batch = zip(self.rows, torch.split(q, 1), torch.split(k, 1), torch.split(v, 1), strict=True)
        return torch.cat([_row(*row, dropout) for row in batch]).to(dtype)


class Flex(NamedTuple):
    """FlexAttention: skips the blocks between documents. Inside of torch.compile alone, and without dropout.

    Its shapes are those of B and T, whatever the borders: nothing is compiled again, nothing waits for the device.
    """

    blocks: BlockMask

    @classmethod
    def over(cls, documents: Tensor) -> "Flex":
        B, T = documents.shape
        runs = _begins(documents).cumsum(dim=1)

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (runs[b, key] == runs[b, query])

        return cls(create_block_mask(allowed, B, None, T, T, device=documents.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        assert not dropout
        return flex_attention(q, k, v, block_mask=self.blocks, enable_gqa=q.shape[1] != k.shape[1])


class Varlen(NamedTuple):
    """FlashAttention over documents behind each other: CUDA, bf16 or fp16, without dropout and not compiled."""

    borders: Tensor  # int32 (documents + 1,), positions in the flattened (B T)
    longest: int

    @classmethod
    def over(cls, documents: Tensor) -> "Varlen":
        starts = _begins(documents).flatten().nonzero().flatten()  # waits for the device, once a forward
        borders = F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)
        return cls(borders, int(borders.diff().max()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        assert not dropout
        from torch.nn.attention import varlen

        kernel: Callable[..., Any] = varlen.varlen_attn
        options, repeats = _varlen_options(kernel), q.shape[1] // k.shape[1]
        if repeats > 1 and "enable_gqa" not in options:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, H, D)
        y: Tensor = kernel(*packed, self.borders, self.borders, self.longest, self.longest, **options)
        return y.reshape(q.shape[0], q.shape[2], *y.shape[1:]).transpose(1, 2)  # (B, H, T, D)


Mask = Causal | Dense | Segments | Flex | Varlen
Way = Literal["dense", "segments", "flex", "varlen"]
WAYS: dict[Way, Callable[[Tensor], Mask]] = {
    "dense": Dense.over,
    "segments": Segments.over,
    "flex": Flex.over,
    "varlen": Varlen.over,
}


def plan(documents: Tensor | None, dtype: torch.dtype, head_dim: int, dropout: float) -> Mask:
    """The mask of a forward: causal, and within documents where their numbers (B, T) are given.

    `dtype` is that of the residual stream; under autocast attention has another one.
    """
    if documents is None:
        return Causal()
    return WAYS[fastest_way(documents.device, dtype, head_dim, dropout)](documents)


def fastest_way(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> Way:
    """The way to attend within documents, decided by what is known before the documents are."""
    compiling = torch.compiler.is_compiling()
    if device.type == "cpu" and not compiling:
        return "segments"
    if device.type == "cuda" and not dropout:
        if compiling and head_dim >= FLEX_LEAST_HEAD:
            return "flex"
        if not compiling and _has_varlen(device, dtype, head_dim):
            return "varlen"
    return "dense"  # on a compiled CPU step too: FlexAttention has no backward there, and loops are compiled anew


def _has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention takes it: compute capability 8.0, 16-bit numbers, heads of 8, 16, ... 256 channels."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return fits and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def _varlen_options(kernel: Callable[..., Any]) -> dict[str, Any]:
    """How this torch says causal and grouped heads: 2.10 had is_causal; enable_gqa came after 2.11."""
    known = inspect.signature(kernel).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


def _begins(documents: Tensor) -> Tensor:
    """Where a document begins: bool (B, T), true at the first position of every row."""
    changes = documents[:, 1:] != documents[:, :-1]  # (B, T-1)
    return torch.cat([torch.ones_like(documents[:, :1], dtype=torch.bool), changes], dim=1)


def _row(lengths: list[int], q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention within documents of these lengths, behind each other in one row (1, H, T, D)."""
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(q, k, v, dropout) for q, k, v in parts], dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, allowed: Tensor | None = None) -> Tensor:
    if allowed is None and not dropout and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        blocked: Tensor = BlockedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch has no types here
        return blocked
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=allowed,
        is_causal=allowed is None,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )
