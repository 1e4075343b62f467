"""The network as functions over weights in the layout of fast kernels: what the engine and every score compute with.

The same steps as `GPT.hidden`, without modules, gradients and dropout, on the residual stream as (B T, C) in fp32; the
tests hold the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.inference.products import FLOATS, Dtype, Product, product_of, resolved
from quatrain.model.attention import RMS_EPS, rotate
from quatrain.model.gpt import GPT, LAYERNORM_EPS, Block
from quatrain.model.masks import Mask, plan

Norm = Callable[[Tensor], Tensor]
Attending = Callable[
    [int, Tensor, Tensor, Tensor], Tensor
]  # layer, q (B, H, T, D), k and v (B, H_kv, T, D) to q's shape
Mix = tuple[float, float] | None


class Forward:
    """A model's weights as they are now, in a dtype (int8 where it runs, else bf16; the resolved one is `dtype`).

    They are a copy, except on a GPU in their own dtype.
    """

    def __init__(self, model: GPT, dtype: Dtype = "fp32") -> None:
        self.config = model.config
        self.device = model.device
        self.dtype = resolved(dtype, self.device)
        self.floats = FLOATS.get(self.dtype, torch.float32)  # what products give
        parts = model.transformer
        self._wte = cast(Tensor, parts["wte"].weight).detach()
        self._wpe = cast(Tensor, parts["wpe"].weight).detach() if self.config.position == "learned" else None
        tables = (cast(Tensor, model.cos), cast(Tensor, model.sin)) if self.config.position == "rope" else None
        self._rotation = tables  # fp32 (block_size, D/2)
        self._blocks = [_Weights.of(cast(Block, block), self.dtype) for block in cast(nn.ModuleList, parts["h"])]
        self._ln_f = _norm_of(parts["ln_f"])
        self._head = product_of(model.head_weight, None, self.dtype)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The residual stream behind the final norm, (B T, C), for ids (B, T); the rest as for `GPT.hidden`."""
        if mask is None and ids.shape[1] > self.config.block_size:
            raise ValueError(f"{ids.shape[1]} ids in a row, the model sees at most block_size {self.config.block_size}")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        seen = plan(documents, self.floats, self.config.head_dim, 0.0) if mask is None else mask
        return self.stream(ids, positions, lambda layer, q, k, v: seen.attend(q.to(v.dtype), k.to(v.dtype), v))

    def stream(self, ids: Tensor, positions: Tensor, attend: Attending) -> Tensor:
        """The same for positions (B, T), attention left to the caller."""
        B, T = ids.shape
        H, groups, D = self.config.n_head, self.config.kv_heads, self.config.head_dim
        x = F.embedding(ids, self._wte).float()  # (B, T, C)
        if self._wpe is not None:
            x = x + F.embedding(positions, self._wpe)
        x = embedded = x.flatten(0, 1)  # (B T, C)
        turned = None if self._rotation is None else [table[positions].unsqueeze(1) for table in self._rotation]
        first_values = None
        for layer, block in enumerate(self._blocks):
            if block.x_mix:
                x = block.x_mix[0] * x + block.x_mix[1] * embedded
            qkv = block.c_attn(block.ln_1(x)).view(B, T, H + 2 * groups, D)
            q, k, v = torch.split(qkv, [H, groups, groups], dim=2)  # (B, T, heads, D)
            if block.q_norm and block.k_norm:
                q, k = block.q_norm(q), block.k_norm(k)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
            first_values = v if first_values is None else first_values
            if block.v_mix:
                v = block.v_mix[0] * v + block.v_mix[1] * first_values
            if turned is not None:
                q, k = rotate(q, *turned), rotate(k, *turned)
            y = attend(layer, q, k, v)  # (B, H, T, D)
            x = x + block.c_proj(y.transpose(1, 2).reshape(B * T, H * D))
            x = x + block.mlp(block.ln_2(x))
        return self._ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Of hidden states (rows, C) over the true vocabulary, fp32 (rows, V): ids of the padding do not exist here."""
        logits = self._head(x)[:, : self.config.vocab_size].float()
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits


@dataclass(frozen=True)
class _Weights:
    """One block as functions."""

    ln_1: Norm
    c_attn: Product
    q_norm: Norm | None
    k_norm: Norm | None
    c_proj: Product
    ln_2: Norm
    mlp: Product
    x_mix: Mix
    v_mix: Mix

    @classmethod
    def of(cls, block: Block, dtype: Dtype) -> "_Weights":
        attn, qk_norm = block.attn, isinstance(block.attn.q_norm, nn.RMSNorm)
        return cls(
            ln_1=_norm_of(block.ln_1),
            c_attn=product_of(attn.c_attn.weight, attn.c_attn.bias, dtype),
            q_norm=_norm_of(attn.q_norm) if qk_norm else None,
            k_norm=_norm_of(attn.k_norm) if qk_norm else None,
            c_proj=product_of(attn.c_proj.weight, attn.c_proj.bias, dtype),
            ln_2=_norm_of(block.ln_2),
            mlp=_mlp_of(block.mlp, dtype),
            x_mix=_mix_of(block.x_mix),
            v_mix=_mix_of(attn.v_mix),
        )


def _mlp_of(mlp: nn.Module, dtype: Dtype) -> Product:
    linear = {name: product_of(part.weight, part.bias, dtype) for name, part in mlp.named_children()}  # type: ignore[arg-type]
    c_fc, c_proj, c_gate = linear["c_fc"], linear["c_proj"], linear.get("c_gate")
    activation: Callable[[Tensor], Tensor] = mlp.activation  # type: ignore[assignment]
    if c_gate:
        return lambda x: c_proj(F.silu(c_gate(x)) * c_fc(x))
    return lambda x: c_proj(activation(c_fc(x)))


def _norm_of(norm: object) -> Norm:
    """A norm of the blocks or of heads as a function of fp32 (or what becomes it)."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    weight, shape = norm.weight.detach().float(), norm.weight.shape
    if isinstance(norm, nn.RMSNorm):
        return lambda x: F.rms_norm(x.float(), shape, weight, RMS_EPS)
    bias = None if norm.bias is None else norm.bias.detach().float()
    return lambda x: F.layer_norm(x, shape, weight, bias, LAYERNORM_EPS)


def _mix_of(pair: Tensor | None) -> Mix:
    if pair is None:
        return None
    own, other = pair.tolist()
    return own, other
