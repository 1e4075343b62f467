"""quatrain evaluate: loss, perplexity and bits per byte of a run."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, DataError, UsageError


def evaluate(
    run: Path,
    *,
    data: Path | None = None,
    split: Literal["val", "train"] = "val",
    max_tokens: int | None = None,
    seq_len: int | None = None,
    packing: Literal["concat", "document", "pad", "best_fit"] | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: str = "auto",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Score a whole split of a store: every target once, in windows that follow each other or in rows of documents.

    Parameters
    ----------
    run
        A run folder (its newest whole checkpoint is taken) or one checkpoint folder.
    data
        Folder of the token store. Default: the one that the run was trained on.
    split
        val or train.
    max_tokens
        Score only the first targets of the split.
    seq_len
        Ids in the inputs of one window. Default: the run's data.seq_len.
    packing
        concat; document: attention and positions restart at each document; pad, best_fit: the same in rows of
        whole documents. Default: the run's.
    precision
        fp32 or bf16.
    device
        auto, cpu, cuda, cuda:N or mps.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    from quatrain.inference.scoring import evaluate as score
    from quatrain.model.device import pick_device
    from quatrain.model.pretrained import load_folder_tokenizer, load_model
    from quatrain.recipes.resolve import resolve
    from quatrain.tokens.store import TokenStore
    from quatrain.training.checkpoint import find_checkpoint, read_state, run_of

    checkpoint = find_checkpoint(run, say)
    trained_in = run_of(checkpoint)
    trained = resolve(str(trained_in / "recipe.toml"))[0] if trained_in else None
    folder = str(data or (trained.data.store if trained else ""))
    if not folder:
        raise UsageError(f"{run} is not part of a run of ours, so its data are unknown; name a store with --data")
    store = TokenStore(folder)
    if load_folder_tokenizer(checkpoint).sha256 != store.tokenizer.sha256:
        raise DataError(
            f"{store.folder} was made with another tokenizer than {checkpoint}; prepare the text with that one"
        )
    model = load_model(checkpoint, pick_device(device))
    usual = trained.data.seq_len if trained else model.config.block_size
    length = usual if seq_len is None else seq_len
    if not 1 <= length <= model.config.block_size:
        raise ConfigError([f"--seq-len is {length}, it must be in 1 .. block_size {model.config.block_size}"])
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError([f"--max-tokens is {max_tokens}, it must be at least 1"])
    packed = packing or (trained.data.packing if trained else "concat")
    result = score(model, store, split, length, packed, max_tokens, precision)
    say(_told(result, checkpoint, max_tokens))
    if trained_in and read_state(checkpoint).data_fingerprint != store.fingerprint:
        say("  these data are not the store that the run was trained on")
    return result | {"checkpoint": str(checkpoint)}


def _told(result: dict[str, Any], checkpoint: Path, max_tokens: int | None) -> str:
    whole = "the whole split" if max_tokens is None else f"at most {max_tokens:,} asked for"
    per_byte = (
        "n/a (the tokenizer's ids do not each stand for fixed bytes; score the whole split)"
        if result["bits_per_byte"] is None
        else f"{result['bits_per_byte']:.4f}  (the nats of the eots counted, over {result['bytes']:,} bytes of text)"
    )
    return (
        f"{checkpoint}\n"
        f"  loss           {result['loss']:.4f} nats per token\n"
        f"  perplexity     {result['perplexity']:.2f}\n"
        f"  bits per byte  {per_byte}\n"
        f"  scored         {result['tokens']:,} targets of {result['split']} ({whole}), "
        f"rows of {result['seq_len']}, {result['packing']}, {result['precision']}\n"
        f"  data           {result['fingerprint'][:16]}"
    )
