"""The network: token embedding, pre-norm blocks, head. Parameter names are GPT-2's.

In memory every linear weight is (out, in); `pretrained` knows how files store them.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.errors import ConfigError
from quatrain.model.attention import Attention, RMSNorm, rotation_table
from quatrain.model.config import ModelConfig
from quatrain.model.masks import Mask, plan

LAYERNORM_EPS = 1e-5
INIT_STD = 0.02
MIXTURES = ("attn.v_mix", "x_mix")  # learned pairs of weights of `value_residual` and `embedding_shortcut`
VOCABULARY_TABLES = ("transformer.wte.weight", "lm_head.weight")  # a row for each id of the padded vocabulary


class GPT(nn.Module):
    """A decoder-only Transformer built from a `ModelConfig` whose vocab_size is set.

    Initialisation draws from `generator` (torch's global one if None): normal with std 0.02,
    embeddings too; residual projections by 1/sqrt(2 n_layer) less (Radford et al. 2019, section 2.3), or
    zero with `zero_init`; biases zero, norms one; the learned mixtures of `value_residual` and
    `embedding_shortcut` half and half, and the stream alone. Rows of the embedding beyond the true vocabulary
    are zero and stay so.
    """

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not config.vocab_size:
            raise ConfigError(["vocab_size is not set; take it from the tokenizer, eot included"])
        self.config = config
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
            | ({"wpe": nn.Embedding(config.block_size, config.n_embd)} if config.position == "learned" else {})
            | {"h": nn.ModuleList(Block(config, first=i == 0) for i in range(config.n_layer)), "ln_f": norm(config)}
        )
        self.lm_head = None if config.tied else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self._initialise(generator)
        self._build_rotation()

    def forward(self, ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) over the true vocabulary, for ids int64 (B, T).

        With `documents` (B, T) attention stays within runs of equal numbers; with `positions` (B, T) they
        replace 0..T-1. Raises `ValueError` for more than block_size ids.
        """
        return self.head(self.hidden(ids, documents, positions))

    def hidden(
        self,
        ids: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """The residual stream behind the final norm, (B, T, C).

        A `mask` takes the place of `documents`; under it rows may be of any length, positions may not.
        """
        T = ids.shape[1]
        if mask is None and self.config.block_size < T:
            raise ValueError(f"{T} ids in a row, the model sees at most block_size {self.config.block_size}")
        if positions is None:
            positions = torch.arange(T, device=ids.device)  # (T,)
        x = self.transformer["wte"](ids)  # (B, T, C)
        if self.config.position == "learned":
            x = x + self.transformer["wpe"](positions)
        x = F.dropout(x, self.config.dropout, self.training)
        rotation = self._rotation(positions)
        if mask is None:
            mask = plan(documents, x.dtype, self.config.head_dim, self.config.dropout if self.training else 0.0)
        embedded, first_values = x, None
        for block in cast(nn.ModuleList, self.transformer["h"]):
            x, values = block(x, rotation, mask, embedded, first_values)
            first_values = values if first_values is None else first_values
        return cast(Tensor, self.transformer["ln_f"](x))

    def head(self, x: Tensor) -> Tensor:
        """Logits over the true vocabulary, (..., V), from the hidden state (..., C)."""
        return self.capped(F.linear(x, self.head_weight)[..., : self.config.vocab_size])

    def capped(self, logits: Tensor) -> Tensor:
        """The logits within +-logit_softcap, where there is one."""
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @property
    def head_weight(self) -> Tensor:
        """Output weights (padded V, C): the token embedding itself when tied."""
        return cast(Tensor, self.transformer["wte"].weight if self.lm_head is None else self.lm_head.weight)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.head_weight.device

    def _build_rotation(self) -> None:
        if self.config.position == "rope":
            cos, sin = rotation_table(self.config.block_size, self.config.head_dim, self.config.rope_theta)
            self.register_buffer("cos", cos.to(self.device), persistent=False)  # (block_size, D/2)
            self.register_buffer("sin", sin.to(self.device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT":
        """What `.to`, `.half` and their kin call: the rotation is built again, fp32, rather than converted."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        self._build_rotation()
        return self

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.position != "rope":
            return None
        cos, sin = cast(Tensor, self.cos)[positions], cast(Tensor, self.sin)[positions]  # (T, D/2) or (B, T, D/2)
        return (cos.unsqueeze(1), sin.unsqueeze(1)) if positions.dim() == 2 else (cos, sin)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None) -> None:
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or (self.config.zero_init and name.endswith("c_proj.weight")):
                parameter.zero_()
            elif name.endswith(MIXTURES):
                parameter.copy_(torch.tensor([0.5, 0.5] if name.endswith("v_mix") else [1.0, 0.0]))
            elif name in VOCABULARY_TABLES:
                parameter[: self.config.vocab_size].normal_(std=INIT_STD, generator=generator)
                parameter[self.config.vocab_size :] = 0
            elif parameter.dim() >= 2:
                std = residual_std if name.endswith("c_proj.weight") else INIT_STD
                parameter.normal_(std=std, generator=generator)


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside of a block: autocast casts those, and Muon updates them."""
    return len(shape) == 2 and name.startswith("transformer.h.")


class Block(nn.Module):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)); with `embedding_shortcut` x is mixed with the embedding before."""

    def __init__(self, config: ModelConfig, first: bool = False) -> None:
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config, first)
        self.ln_2 = norm(config)
        self.mlp = MLPS[config.mlp](config)
        self.x_mix = nn.Parameter(torch.empty(2)) if config.embedding_shortcut else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask,
        embedded: Tensor | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream behind the block, (B, T, C), and its attention's values; `embedded` is the stream at the start."""
        if self.x_mix is not None and embedded is not None:
            x = self.x_mix[0] * x + self.x_mix[1] * embedded
        y, values = self.attn(self.ln_1(x), rotation, mask, first_values)
        x = x + y
        return x + self.mlp(self.ln_2(x)), values


class GeluMlp(nn.Module):
    """GPT-2's MLP, with the tanh approximation of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(self.activation(self.c_fc(x))), self.dropout, self.training)

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Relu2Mlp(GeluMlp):
    """The same with a squared ReLU (So et al. 2021, Primer)."""

    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SwigluMlp(GeluMlp):
    """The same with a gate: c_proj(silu(c_gate x) * c_fc x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.c_gate = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x)), self.dropout, self.training)


MLPS: dict[str, type[GeluMlp]] = {"gelu_tanh": GeluMlp, "relu2": Relu2Mlp, "swiglu": SwigluMlp}


def norm(config: ModelConfig) -> nn.Module:
    """The norm of a block, over the residual stream's C channels."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd)
    return nn.LayerNorm(config.n_embd, eps=LAYERNORM_EPS, bias=config.bias)
