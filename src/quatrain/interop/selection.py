"""What a user asks to adopt: which files of which folder, which of them are validation, and whose ids they hold."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.errors import DataError, UsageError
from quatrain.interop import hub
from quatrain.interop.config import AdoptConfig
from quatrain.interop.scan import Report
from quatrain.interop.shards import COMPANIONS, ENDINGS, PeerShard, find_shards, matches, read_shard, split_of
from quatrain.text.tokenizers import CharTokenizer, Tokenizer, load_tokenizer, named_tokenizer
from quatrain.tokens.store import SPLITS, SplitName

PICKLES = (".pkl", ".pickle", ".pt", ".pth")
NAMED = 5  # files passed over that are told by name

Splits = dict[SplitName, list[PeerShard]]


class Folder(NamedTuple):
    """Where the shards lie, and what store.json says of where they came from."""

    path: Path
    origin: dict[str, Any]


def find_folder(word: str, config: AdoptConfig) -> Folder:
    """The folder that a word names: a path, or `hub:OWNER/NAME`, whose shards are fetched."""
    if word.startswith(hub.PREFIX):
        companions = [f"*{ending}" for ending in COMPANIONS if ending != ".loss"]
        shards = [f"*{ending}" for ending in ENDINGS] if config.files == "*" else [config.files, f"*/{config.files}"]
        snapshot = hub.fetch(word, [*shards, *companions, "*tokenizer.json"])
        return Folder(snapshot.folder, {"name": snapshot.name, "revision": snapshot.revision})
    path = Path(word)
    if not path.is_dir():
        found = "a file" if path.exists() else "no such folder"
        raise UsageError(f"{path}: {found}; expected a folder of shards, or hub:OWNER/NAME")
    if (path / "store.json").exists():
        raise UsageError(f"{path}: a token store already; give it to: quatrain train RECIPE --data {path}")
    return Folder(path, {"name": path.resolve().name})


def select_shards(folder: Path, config: AdoptConfig, tokenizer: Tokenizer, report: Report) -> Splits:
    """The shards of each split, in order, of one format. Raises `UsageError` where a split would have none."""
    paths, passed_over = find_shards(folder, config.files)
    if not paths:
        raise DataError(
            f"{folder}: no shards ({', '.join(ENDINGS)}) under names that match '{config.files}', "
            f"{len(passed_over):,} other files"
        )
    if passed_over:
        names = [str(path.relative_to(folder)) for path in passed_over]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        report(f"passed over {', '.join(names[:NAMED])}{more}")
    splits = _split(paths, folder, config.val_files)
    for path in splits["train"]:
        if "test" in re.findall(r"[a-z]+", path.stem.lower()):
            report(f"warning: {path.name} goes into train, whatever 'test' means; leave it out with --files")
    shards: Splits = {}
    for split in SPLITS:
        read = [read_shard(path, config.dtype, tokenizer.vocab_size) for path in splits[split]]
        shards[split] = [shard for shard in read if shard.tokens]
        if not shards[split]:
            raise DataError(f"{read[0].path}: empty, and no other file of the {split} split holds an id")
    _check_one_format([*shards["train"], *shards["val"]])
    return shards


def choose_tokenizer(folder: Path, config: AdoptConfig, report: Report) -> Tokenizer:
    """The tokenizer that the user names, else the folder's tokenizer.json; never one that is guessed or unpickled."""
    if config.chars_from:
        return CharTokenizer(_characters(Path(config.chars_from)))
    if config.tokenizer and Path(config.tokenizer).suffix not in PICKLES:
        return named_tokenizer(config.tokenizer, lambda: (), config.eot)
    own = folder / "tokenizer.json"
    if not config.tokenizer and own.is_file():
        report(f"tokenizer: {own}")
        return load_tokenizer(own, config.eot)
    pickles = [path for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
    if config.tokenizer or pickles:
        raise UsageError(
            f"{config.tokenizer or pickles[0]}: a pickle, which runs whatever code is in it: quatrain opens none. "
            f"For a character set name the text that its ids were made from (--chars-from input.txt); else give "
            f"--tokenizer gpt2, bytes, or the path to a tokenizer.json"
        )
    raise UsageError(
        f"{folder}: which tokenizer made these ids? Give --tokenizer gpt2 (nanoGPT, build-nanogpt, llm.c, "
        f"modded-nanogpt), bytes, the path to a tokenizer.json, or --chars-from TEXT for a character set"
    )


def _split(paths: list[Path], folder: Path, val_files: str) -> dict[SplitName, list[Path]]:
    """The files of each split, by their names and the user's pattern."""
    moved = {path for path in paths if val_files and matches(path, folder, val_files)}
    splits: dict[SplitName, list[Path]] = {"train": [], "val": []}
    for path in paths:
        splits["val" if path in moved else split_of(path, folder)].append(path)
    example = paths[0].name
    if val_files and not moved:
        raise UsageError(f"--val-files '{val_files}' matches none of the {len(paths):,} files, such as {example}")
    if not splits["val"]:
        alone = "; this is the only file: add another, for ids are not split by position" if len(paths) == 1 else ""
        raise UsageError(
            f"{folder}: no validation among its {len(paths):,} files ('val' in a name makes one); move some there with "
            f"--val-files PATTERN, such as --val-files {example}{alone}"
        )
    if not splits["train"]:
        raise UsageError(
            f"{folder}: its {len(paths):,} files are all validation, such as {example}; nothing is left to train on: "
            f"add files of train, or prepare the text again with quatrain prepare"
        )
    return splits


def _characters(path: Path) -> set[str]:
    """The distinct characters of a text, line ends made one as nanoGPT's prepare.py reads it."""
    characters: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            while text := file.read(1 << 20):
                characters.update(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({getattr(error, 'strerror', None) or error})") from error
    return characters


def _check_one_format(shards: list[PeerShard]) -> None:
    first = shards[0]
    other = next((shard for shard in shards if shard.format != first.format), None)
    if other is not None:
        raise DataError(
            f"{first.path} is of format {first.format}, {other.path} of format {other.format}: the same ids twice? "
            f"Choose one kind with --files, such as --files '*{other.path.suffix}'"
        )
