"""Whole files of a data set on the Hub, fetched once into its cache."""

from pathlib import Path

from quatrain.console import say
from quatrain.errors import DataError
from quatrain.text.hub import AT_START, attempts
from quatrain.text.hub_address import HubAddress
from quatrain.text.hub_library import library, offline, offline_copy, quietly
from quatrain.text.patience import Patience, Report


def fetch(
    address: HubAddress, pattern: str, report: Report = say, patience: Patience = AT_START
) -> tuple[Path, list[Path]]:
    """The folder of a commit in the cache, and its files that match. Raises `DataError`, with what to do.

    Connections that break and HTTP 429 and 5xx are tried again; a copy in the cache needs no network.
    """

    def download() -> str:
        with quietly(report):
            hub = library("huggingface_hub")
            folder: str = hub.snapshot_download(
                address.repo, repo_type="dataset", revision=address.revision, allow_patterns=[pattern]
            )
            return folder

    folder = offline_copy(address) if offline() else Path(attempts(address, patience, report).run(download))
    files = sorted(folder.glob(pattern))
    if not files:
        raise DataError(f"{address}: no file {pattern} in the copy in the cache; fetch it with: {address.download}")
    return folder, files
