"""What one device holds while it trains, in bytes, from the settings alone.

The formula counts what autograd keeps of each block in eager mode, storage by storage; a test counts the same in real
forwards. A compiled step computes some of it again instead of keeping it, so that its figure is an upper bound.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quatrain.model.config import ModelConfig
from quatrain.model.gpt import is_block_matrix
from quatrain.model.loss import BLOCK, CHUNK
from quatrain.tokens.config import Packing

FP32 = 4  # bytes: the residual stream, statistics, weights, gradients, moments
HEAP = 0.12  # what a CPU process holds beyond its tensors, as a share of them: measured (docs/plan.md)


@dataclass(frozen=True)
class Run:
    """The settings that decide how much memory a step takes."""

    model: ModelConfig  # with its vocab_size
    rows: int  # sequences in one forward
    seq_len: int
    itemsize: int  # bytes of a number in matrix products: 4 in fp32, 2 in bf16 and fp16
    muon: bool = False
    accumulates: bool = False  # several micro-steps a step: gradients stay between them
    packing: Packing = "concat"
    cpu: bool = True
    threads: int = 1

    @property
    def tokens(self) -> int:
        """Positions in one forward."""
        return self.rows * self.seq_len


@dataclass(frozen=True)
class Memory:
    """Bytes by part. Not all parts are held at once: `peak` is the most that is."""

    weights: int
    gradients: int
    moments: int
    casts: int  # the weights in autocast's precision
    activations: int
    activations_checkpointed: int  # as it would be if blocks were computed again; the trainer does not do that yet
    logits: int  # of one chunk, with what its softmax takes
    loss: int  # gradients of the last hidden state and of the head, made in forward
    scratch: int  # gradients of activations within one block
    heap: int  # of a CPU process: blocks of the C library's heap that no tensor fits into
    tables: int  # further gradients of the token embedding at the end of backward, before they are added up
    peak: int
    peak_checkpointed: int


def memory_of(run: Run, shapes: Mapping[str, tuple[int, ...]]) -> Memory:
    """Memory of a run whose parameters have these names and shapes, padding included."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    in_blocks = sum(size for name, size in sizes.items() if is_block_matrix(name, shapes[name]))
    config = run.model
    weights = FP32 * sum(sizes.values())
    head = config.padded_vocab_size * config.n_embd
    parts = {
        "weights": weights,
        "gradients": weights,
        "moments": 2 * weights - (FP32 * in_blocks if run.muon else 0),
        "casts": 0 if run.itemsize == FP32 else run.itemsize * (in_blocks + head),
        "activations": run.tokens * kept_by_token(run),
        "activations_checkpointed": run.tokens * kept_by_token(run, checkpointed=True),
        "logits": _logits(run),
        "loss": run.itemsize * (run.tokens * config.n_embd + head) + _added_head(run, head),
        "scratch": run.tokens * (2 * run.itemsize * config.mlp_width + 2 * FP32 * config.n_embd),
        "tables": FP32 * head * (config.tied + run.accumulates),
    }
    held = {name: _peak(run, parts, name) for name in ("activations", "activations_checkpointed")}
    heap = {name: int(HEAP * size) if run.cpu else 0 for name, size in held.items()}
    return Memory(
        **parts,
        heap=heap["activations"],
        peak=held["activations"] + heap["activations"],
        peak_checkpointed=held["activations_checkpointed"] + heap["activations_checkpointed"],
    )


def _peak(run: Run, parts: dict[str, int], activations: str) -> int:
    """The most of three moments: the loss, the start of backward, and its end."""
    earlier = parts["gradients"] if run.accumulates else 0
    forward = parts["casts"] + parts[activations] + parts["loss"] + earlier
    head = FP32 * run.model.padded_vocab_size * run.model.n_embd
    moments = (
        forward + parts["logits"],
        forward + parts["scratch"] + (0 if run.itemsize == FP32 else head),
        parts["gradients"] + parts["tables"],
    )
    return parts["weights"] + parts["moments"] + max(moments)


def kept_by_token(run: Run, checkpointed: bool = False) -> int:
    """Bytes of activations that backward needs, for each position; checkpointed, the inputs of blocks and one block."""
    config, blocks = run.model, run.model.n_layer
    block = sum(kept_by_block(run).values())
    if checkpointed:
        shared = run.itemsize * _kv(config) if config.value_residual else 0
        return FP32 * config.n_embd * blocks + block + shared + _kept_outside(run)
    return blocks * block + _kept_outside(run)


def kept_by_block(run: Run) -> dict[str, int]:
    """What one block keeps for each position, in bytes."""
    C, F, s = run.model.n_embd, run.model.mlp_width, run.itemsize
    matrices = {"gelu_tanh": 2, "relu2": 2, "swiglu": 4}[run.model.mlp]
    twice = s < FP32 and run.model.mlp == "swiglu"  # autocast casts the input of c_gate and of c_fc
    return {
        "shortcut": FP32 * C * run.model.embedding_shortcut,
        "norms": 2 * _norm(run, C),
        "inputs": s * C * (3 if twice else 2),
        "attention": _attention(run),
        "dropout": 2 * C * _mask_bytes(run, s),
        "mlp": s * F * matrices,
    }


def _attention(run: Run) -> int:
    """Queries, keys, values (with the storage that these are views of), the output, and the softmax's sums."""
    config, s = run.model, run.itemsize
    C, K, H = config.n_embd, _kv(config), config.n_head
    fused = s * (C + 2 * K)
    kept = s * C  # the output, which the projection reads
    if config.qk_norm:
        copies = (s < FP32) + run.cpu  # the input in fp32; a CPU also keeps what is not yet scaled
        kept += FP32 * (copies * (C + K) + H + config.kv_heads)
    # Products with learned weights keep the values, and RMSNorm in fp32 its input: both are views of one storage.
    viewed = config.value_residual or (config.qk_norm and s == FP32)
    if run.cpu and config.dropout:  # no fused kernel: scores, mask and product in fp32 for every pair of positions
        mixed = s * K if config.value_residual else 0
        return kept + mixed + FP32 * (3 * C + 3 * H * run.seq_len) + (fused if viewed else 0)
    if run.cpu and s < FP32:  # `model.blocked` keeps contiguous copies, and no sums
        return kept + fused + (fused if viewed else 0)
    if config.value_residual:
        kept += s * K
    if config.position == "rope" or config.qk_norm:
        kept += s * (C + K)
    if config.position == "rope" or run.packing != "concat":
        kept += s * C  # laid out like queries by head, or a document at a time, and put in order
    return kept + fused + FP32 * H


def _kept_outside(run: Run) -> int:
    """Ids, the mask behind the embedding, and the last norm."""
    C = run.model.n_embd
    return 8 + C * _mask_bytes(run, FP32) + _norm(run, C)


def _norm(run: Run, width: int) -> int:
    """The fp32 input and the statistics; a CPU's RMSNorm also keeps what is not yet scaled."""
    if run.model.norm == "layernorm":
        return FP32 * (width + 2)
    return FP32 * ((2 if run.cpu else 1) * width + 1)


def _mask_bytes(run: Run, itemsize: int) -> int:
    """Bytes of dropout's mask for each number: on a CPU it has the number's own type."""
    return (itemsize if run.cpu else 1) if run.model.dropout else 0


def _logits(run: Run) -> int:
    """One chunk of logits, and what its softmax needs beside it."""
    V = run.model.padded_vocab_size
    chunk = min(run.tokens, max(1, CHUNK // V))
    at_once = min(chunk, max(run.threads, run.threads * BLOCK // V)) if run.cpu else chunk
    copies = (1 if run.itemsize == FP32 else 2) + (3 if run.model.logit_softcap else 0)
    return V * (run.itemsize * chunk + FP32 * at_once * copies)


def _added_head(run: Run, head: int) -> int:
    """Where logits take several chunks, the head's gradient is summed in fp32."""
    several = run.tokens > max(1, CHUNK // run.model.padded_vocab_size)
    return 2 * FP32 * head if several else 0


def _kv(config: ModelConfig) -> int:
    return config.kv_heads * config.head_dim
