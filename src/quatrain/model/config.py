"""The shape of a GPT and its switches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quatrain.settings import Settings, option

Position = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu_tanh", "swiglu", "relu2"]


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The `[model]` section of a recipe; the defaults are GPT-2 124M (Radford et al. 2019)."""

    n_layer: int = option(12, "blocks")
    n_head: int = option(12, "query heads in each block")
    n_kv_head: int = option(0, "key and value heads; 0: as many as query heads (Ainslie et al. 2023)")
    n_embd: int = option(768, "width of the residual stream", "channels")
    block_size: int = option(1024, "the most positions that the model can see", "tokens")
    vocab_size: int = option(0, "true vocabulary, eot included; 0: the store's", "ids")
    vocab_multiple: int = option(
        64, "embedding rows in memory are padded to a multiple of this; files never are", "ids"
    )
    position: Position = option("learned", "learned embeddings, or rope: half-split rotation (Su et al. 2021)")
    norm: Norm = option("layernorm", "layernorm (eps 1e-5) or rmsnorm (eps 1e-6; Zhang and Sennrich 2019)")
    mlp: Mlp = option("gelu_tanh", "gelu_tanh, swiglu (Shazeer 2020) or relu2 (So et al. 2021)")
    bias: bool = option(True, "biases in linear layers and layernorms; the head has none")
    qk_norm: bool = option(False, "rmsnorm over each head's queries and keys before the rotation (Henry et al. 2020)")
    tied: bool = option(True, "the output weights are the token embedding (Press and Wolf 2017)")
    zero_init: bool = option(False, "the projections back into the residual stream start at zero (Zhang et al. 2019)")
    logit_softcap: float = option(0.0, "logits are squashed to +-this by a tanh (Gemma Team 2024); 0: off")
    value_residual: bool = option(
        False, "each block mixes the first block's values into its own, with learned weights (Zhou et al. 2024)"
    )
    embedding_shortcut: bool = option(
        False, "each block sees the residual stream and the embedding, with learned weights (modded-nanogpt)"
    )
    dropout: float = option(0.0, "probability of dropping embeddings, attention weights and block outputs")
    rope_theta: float = option(10000.0, "base of the rotation's wavelengths")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """Hidden channels of a block's MLP: 4 C, or for swiglu 8/3 C rounded up to a multiple of 64."""
        return -(-8 * self.n_embd // (3 * 64)) * 64 if self.mlp == "swiglu" else 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in memory."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def mistakes(self) -> Iterator[str]:
        """Sentences about shapes that cannot be built."""
        sizes = ["n_layer", "n_head", "n_embd", "block_size", "vocab_multiple"]
        too_small = list(self.at_least(1, sizes)) + list(self.at_least(0, ["n_kv_head", "vocab_size"]))
        yield from too_small or self._heads_that_do_not_fit()
        if not 0 <= self.dropout < 1:
            yield f"dropout is {self.dropout}, it must be at least 0 and below 1"
        if not self.logit_softcap >= 0:
            yield f"logit_softcap is {self.logit_softcap}, it must be above 0, or 0 for none"
        if not self.rope_theta > 0:
            yield f"rope_theta is {self.rope_theta}, it must be above 0"

    def _heads_that_do_not_fit(self) -> Iterator[str]:
        if self.n_embd % self.n_head:
            near = self.n_head * max(1, round(self.n_embd / self.n_head))
            yield f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}; nearest: {near}"
        elif self.position == "rope" and self.head_dim % 2:
            yield f"n_embd / n_head is {self.head_dim}; rope turns pairs of channels, so it must be even"
        if self.n_head % self.kv_heads:
            yield f"n_head {self.n_head} is not a multiple of n_kv_head {self.kv_heads}"
