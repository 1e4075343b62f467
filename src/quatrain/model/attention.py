"""Causal self-attention, with the rotation of positions; masks are in `masks`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.model.config import ModelConfig
from quatrain.model.masks import Mask

RMS_EPS = 1e-6


class Attention(nn.Module):
    """Multi-head attention with fused queries, keys and values: rows q, k, v of `c_attn`.

    The `first` block's has no values to mix its own with, and so no mixture: a parameter without a gradient would
    have no moments to save.
    """

    def __init__(self, config: ModelConfig, first: bool = False) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.n_head = config.n_head
        self.n_kv_head = config.kv_heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(C, C + 2 * self.n_kv_head * D, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.q_norm = RMSNorm(D) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D) if config.qk_norm else nn.Identity()
        self.v_mix = nn.Parameter(torch.empty(2)) if config.value_residual and not first else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`x` is (B, T, C); `rotation` holds cos and sin.

        Returns the output (B, T, C) and the values (B, H_kv, T, D) as projected: those of the first block
        are `first_values` of the others, which use them with `value_residual`.
        """
        B, T, C = x.shape
        D = C // self.n_head
        q, k, v = self.c_attn(x).split([C, self.n_kv_head * D, self.n_kv_head * D], dim=-1)
        q = self.q_norm(q.view(B, T, self.n_head, D)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(k.view(B, T, self.n_kv_head, D)).transpose(1, 2)  # (B, H_kv, T, D)
        v = v.view(B, T, self.n_kv_head, D).transpose(1, 2)  # (B, H_kv, T, D)
        projected = v
        if self.v_mix is not None and first_values is not None:
            own, first = self.v_mix.to(v.dtype)
            v = own * v + first * first_values
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        dropout = self.dropout if self.training else 0.0
        y = mask.attend(q.to(v.dtype), k.to(v.dtype), v, dropout)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training), projected


class RMSNorm(nn.RMSNorm):
    """Zhang and Sennrich 2019, computed in fp32 at least; the output has the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=RMS_EPS)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).type_as(x)


def rotation_table(block_size: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, fp32, shape (block_size, D/2).

    They stay fp32 under autocast: bf16 tells only 513 of 1,024 positions apart.
    """
    # In this order of operations the frequencies are those of transformers, bit for bit.
    inverse_wavelengths = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(block_size, dtype=torch.float32), inverse_wavelengths)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i of the first half with channel i of the second (RoPE, Su et al. 2021; the split of Llama).

    `x` is (B, H, T, D); `cos` and `sin` are fp32, (T, D/2) or (B, 1, T, D/2). Returns fp32.
    """
    first, second = x.float().chunk(2, dim=-1)  # (B, H, T, D/2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
