"""What a word like `hub:OWNER/NAME?name=CONFIG&split=SPLIT` names: a data set on the Hugging Face Hub."""

import re
import urllib.parse
from dataclasses import dataclass

from quatrain.errors import DataError, did_you_mean

FORM = "hub:OWNER/NAME?name=CONFIG&split=SPLIT&revision=REVISION"
FIELDS = {"name": "config", "split": "split", "revision": "revision", "data_files": "data_files"}  # by key of the word
READERS = ("parquet", "json")  # in the place of OWNER/NAME: `datasets` reads local data_files
STEMS = {"HuggingFaceFW/fineweb-edu": "edufineweb"}

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the longer one: `pin`'s hash of local files


@dataclass(frozen=True)
class HubAddress:
    """A split of a data set; a part that is not given is empty."""

    repo: str
    config: str = ""
    split: str = "train"
    revision: str = ""  # a branch, tag or commit; after `pin` the commit
    data_files: str = ""  # a glob inside the data set, instead of the files that its card names

    @property
    def local(self) -> bool:
        """Whether the data files lie on this machine (`hub:parquet?data_files=GLOB`), read in the same way."""
        return self.repo in READERS

    @property
    def pinned(self) -> bool:
        """Whether the revision can mean only one content."""
        return bool(_COMMIT.fullmatch(self.revision))

    @property
    def stem(self) -> str:
        """The name that a store gets from this source."""
        return STEMS.get(self.repo, self.repo.rpartition("/")[2])

    @property
    def download(self) -> str:
        """The command that puts a copy into the Hub's cache."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repo} --repo-type dataset{revision}"

    def __str__(self) -> str:
        given = {key: getattr(self, field) for key, field in FIELDS.items()}
        query = "&".join(f"{key}={urllib.parse.quote(value, safe='/*')}" for key, value in given.items() if value)
        return f"hub:{self.repo}?{query}"


def parse(word: str) -> HubAddress:
    """The address that a source's word names; raises `DataError` for one that cannot be.

    >>> parse("hub:HuggingFaceFW/fineweb-edu?name=sample-10BT").config
    'sample-10BT'
    """
    repo, _, query = word.removeprefix("hub:").partition("?")
    given: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, _, value = pair.partition("=")
        if key not in FIELDS:
            raise DataError(f"{word}: unknown key '{key}'{did_you_mean(key, FIELDS)}; there is {', '.join(FIELDS)}")
        if FIELDS[key] in given or not value:
            raise DataError(f"{word}: '{key}' {'is given twice' if value else 'has no value'}; expected {FORM}")
        given[FIELDS[key]] = urllib.parse.unquote(value)
    address = HubAddress(repo, **given)
    if address.local:
        if not address.data_files or address.config or address.revision:
            raise DataError(f"{word}: '{repo}' reads local files; expected hub:{repo}?data_files=GLOB")
    elif not _REPO.fullmatch(repo):
        raise DataError(f"{word}: '{repo}' is not the name of a data set; expected {FORM}")
    return address
