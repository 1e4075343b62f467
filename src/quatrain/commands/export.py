"""quatrain export: a token store to shards that other programs read."""

from pathlib import Path
from typing import Annotated, Any, cast, get_args

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, UsageError, did_you_mean
from quatrain.interop.config import ShardFormat, ShardsConfig

FORMATS = get_args(ShardFormat)


def export(
    store: Path,
    /,
    *,
    to: str,
    out: Path,
    shard_size: int | None = None,
    name: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Write a token store as shards for llm.c, build-nanogpt (.npy) or Megatron.

    Parameters
    ----------
    store
        A token store, as prepare or adopt wrote it.
    to
        llmc, npy or megatron.
    out
        Folder of the shards: absent, empty, or our own.
    shard_size
        Ids in one file (llmc, npy). Default: 100,000,000.
    name
        First part of the files' names. Default: the store's.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    if not (store / "store.json").is_file() and _is_run(store):
        raise UsageError(f"{store}: a run, and this version exports token stores alone (--to {', '.join(FORMATS)})")
    if to not in FORMATS:
        raise UsageError(f"--to is {to}{did_you_mean(to, FORMATS)}; a token store goes to {', '.join(FORMATS)}")
    if to == "megatron" and shard_size is not None:
        raise UsageError("--shard-size has no meaning with --to megatron, which has one .bin and .idx a split")
    size = ShardsConfig().shard_size if shard_size is None else shard_size
    try:
        config = ShardsConfig(to=cast(ShardFormat, to), shard_size=size, name=name or "")
    except ConfigError as error:
        raise error.as_flags() from None
    from quatrain.interop.exporting import export_store
    from quatrain.tokens.store import TokenStore

    done = export_store(TokenStore(store), out, config, say)
    say(
        f"{out}: {len(done['files']):,} files for {to}: {done['documents']:,} documents, "
        f"{done['train_tokens']:,} train and {done['val_tokens']:,} val ids in {done['seconds']:.1f} s"
    )
    return done


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("recipe.toml", "config.json", "checkpoints"))
