"""quatrain adopt: shards of other programs to a token store, without copying them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError
from quatrain.interop.config import AdoptConfig

DEFAULTS = AdoptConfig()


def adopt(
    folder: str,
    /,
    *,
    out: Path,
    tokenizer: str | None = None,
    eot: str = DEFAULTS.eot,
    chars_from: Path | None = None,
    dtype: Literal["uint16", "uint32"] | None = None,
    files: str = DEFAULTS.files,
    val_files: str | None = None,
    name: str | None = None,
    overlap: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Make a token store over the shards of nanoGPT, build-nanogpt, llm.c, modded-nanogpt, Megatron or datatrove.

    Parameters
    ----------
    folder
        A folder of .bin, .npy or .ds shards, or hub:OWNER/NAME for a data set of them.
    out
        Folder of the store: absent, empty, or our own.
    tokenizer
        gpt2, bytes, char, or the path to a tokenizer.json. Default: the folder's tokenizer.json.
    eot
        The special token of a tokenizer.json that separates documents.
    chars_from
        The text whose characters, sorted, are the ids (nanoGPT's input.txt).
    dtype
        uint16 or uint32: of .bin files without a header. Default: uint16 if the vocabulary fits.
    files
        Which files are taken, by a pattern of their names such as 'fineweb_*'.
    val_files
        Which of them are validation, whatever their names say.
    name
        First part of the names of what is written. Default: the folder's name.
    overlap
        Compute the share of validation that stands word for word in train.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    try:
        config = AdoptConfig(
            tokenizer=tokenizer or "",
            eot=eot,
            chars_from=str(chars_from or ""),
            dtype=dtype or "",
            files=files,
            val_files=val_files or "",
            name=name or "",
            overlap=overlap,
        )
    except ConfigError as error:
        raise error.as_flags() from None
    from quatrain.interop.adoption import adopt as adopt_shards

    done = adopt_shards(folder, out, config, say)
    say(
        f"{out}: {done['shards']:,} shards ({done['format']}) adopted where they lie: {done['documents']:,} documents, "
        f"{done['train_tokens']:,} train and {done['val_tokens']:,} val ids (every eot counted) "
        f"in {done['seconds']:.1f} s"
    )
    say(f"eot {_where(done['eot_style'])}; {done['eots_supplied']:,} supplied that no file holds")
    if done["share_in_train"] is not None:
        say(f"{done['share_in_train']:.2%} of sampled 32-token validation spans stand in train")
    return done


def _where(style: str) -> str:
    return {
        "before": "before each document",
        "after": "after each document",
        "none": "nowhere in the files",
    }[style]
