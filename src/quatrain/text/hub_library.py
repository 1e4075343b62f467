"""`datasets` and `huggingface_hub`, imported when a hub source is read, kept quiet, and their cache of whole copies."""

import contextlib
import importlib
import logging
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quatrain.errors import DataError
from quatrain.text.hub_address import HubAddress
from quatrain.text.patience import Report

RETRIES = ("STREAMING_READ_", "STREAMING_OPEN_")  # how often and how long `datasets` itself would try again


def library(name: str) -> Any:
    """The module, or a `DataError` that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"a hub source needs the package {name} ({error}); install it with: pip install 'quatrain[hub]'"
        ) from error


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` (or `HF_DATASETS_OFFLINE`) forbids the network."""
    return bool(library("datasets").config.HF_HUB_OFFLINE or library("huggingface_hub").constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    """Where the Hub is: `HF_ENDPOINT`, or its public address."""
    return str(library("huggingface_hub").constants.ENDPOINT)


@contextlib.contextmanager
def quietly(report: Report) -> Iterator[None]:
    """While `datasets` works: no loops of retries and no bars of its own; what the Hub's client logs is reported."""
    datasets = library("datasets")
    limits = {name: int(name.endswith("RETRIES")) for name in vars(datasets.config) if name.startswith(RETRIES)}
    before = {name: getattr(datasets.config, name) for name in limits}
    bars = not datasets.are_progress_bars_disabled()
    try:
        vars(datasets.config).update(limits)
        datasets.disable_progress_bars()
        with _logging_to("datasets", lambda message: None), _logging_to("huggingface_hub", report):
            yield
    finally:
        vars(datasets.config).update(before)
        if bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _logging_to(name: str, report: Report) -> Iterator[None]:
    class Reporter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report(record.getMessage())

    logger = logging.getLogger(name)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Reporter()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


def find_copy(address: HubAddress) -> Path | None:
    """The folder in the Hub's cache that holds this revision, perhaps not all of its files; None without one."""
    hub = library("huggingface_hub")
    try:
        folder = hub.snapshot_download(
            address.repo, repo_type="dataset", revision=address.revision or None, local_files_only=True
        )
    except hub.errors.LocalEntryNotFoundError as error:  # raised for a copy that lacks files, too
        folder = getattr(error, "snapshot_path", None)
    return Path(folder) if folder else None


def offline_copy(address: HubAddress) -> Path:
    """The folder in the Hub's cache; raises `DataError` without one."""
    copy = find_copy(address)
    if copy is None:
        raise DataError(
            f"{address}: HF_HUB_OFFLINE is set, and there is no copy in the cache; unset it, or download the data set "
            f"first: {address.download}"
        )
    return copy


def check_complete(address: HubAddress, read: list[str]) -> None:
    """Raise `DataError` if the copy in the cache is known to lack a file beside those that would be read."""
    hub = library("huggingface_hub")
    try:
        tree = hub.get_cached_repo_tree(address.repo, repo_type="dataset", revision=address.revision)
    except (hub.errors.CachedRepoTreeNotFoundError, hub.errors.LocalEntryNotFoundError):
        return  # the copy came without a list of the files
    kinds = {_kind(name) for name in read}
    alike = [file.path for file in tree if _kind(file.path) in kinds]
    copy = offline_copy(address)
    missing = [name for name in alike if not (copy / name).exists()]
    if missing:
        raise DataError(
            f"{address}: the copy in the cache lacks {len(missing)} of {len(alike)} files, such as {missing[0]}; "
            f"complete it with: {address.download}"
        )


def _kind(name: str) -> tuple[str, str]:
    return posixpath.dirname(name), posixpath.splitext(name)[1]
