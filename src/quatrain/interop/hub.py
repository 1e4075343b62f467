"""A data set of shards on the Hugging Face hub, as a folder on this machine."""

import re
from pathlib import Path
from typing import NamedTuple

from quatrain.errors import QuatrainError, UsageError

PREFIX = "hub:"


class Snapshot(NamedTuple):
    """One revision of a data set; `revision` is the commit."""

    folder: Path
    name: str
    revision: str


def fetch(word: str, patterns: list[str]) -> Snapshot:
    """The files of `hub:OWNER/NAME`, at its `?revision=` if given, that match a pattern; from the cache if there.

    `huggingface_hub` reads its own variables (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN). Raises `UsageError` without
    the library or the data set, `QuatrainError` where the network or the cache fails.
    """
    named = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:(?:@|\?revision=)([\w./-]+))?", word)
    if named is None:
        raise UsageError(f"{word}: expected hub:OWNER/NAME, or hub:OWNER/NAME?revision=REVISION")
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise UsageError(f"{word}: needs the library 'huggingface_hub': pip install quatrain[hub]") from error
    try:
        folder = huggingface_hub.snapshot_download(
            named[1], repo_type="dataset", revision=named[2], allow_patterns=patterns
        )
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UsageError(f"{word}: {_first_line(error)}") from error
    except OSError as error:  # also what the library raises offline, for a data set that is not in the cache
        raise QuatrainError(f"{word}: cannot be fetched ({_first_line(error)}); give the same command again") from error
    return Snapshot(Path(folder), named[1], Path(folder).name)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
