"""One column of a data set on the Hugging Face Hub, streamed, with a state behind every batch.

The library `datasets` finds the files and reads them; how often a failure is met with another try, and what is
said about it, is decided here.
"""

import glob
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quatrain.console import say
from quatrain.errors import DataError, did_you_mean
from quatrain.text.hub_address import HubAddress, parse
from quatrain.text.hub_library import check_complete, endpoint, find_copy, library, offline, offline_copy, quietly
from quatrain.text.hub_rows import BLOCK, ParquetFiles, Shards, Streamed
from quatrain.text.patience import Attempts, Cause, GaveUp, Patience, Report, cause_of, chain

__all__ = ["HubAddress", "parse", "pin", "read"]

LISTED = 20  # names in a message

AT_START = Patience(attempts=4)  # someone may be waiting
ON_THE_WAY = Patience()  # a broken network of ten minutes ends no night's work

Batch = tuple[list[Any], dict[str, Any]]


def pin(address: HubAddress, report: Report = say, patience: Patience = AT_START) -> HubAddress:
    """The address with its revision as a commit hash (of local files: a hash of their contents).

    A commit hash stays as it is. Offline, or where the Hub does not answer, it is the commit of the copy in the
    cache. Raises `DataError` without one, and for a data set or revision that cannot be read.
    """
    if address.local:
        return replace(address, revision=_content_hash(address.data_files))
    if address.pinned:
        return address
    if offline():
        return replace(address, revision=offline_copy(address).name)
    try:
        return replace(address, revision=attempts(address, patience, report).run(lambda: _commit(address, report)))
    except GaveUp as error:
        copy = find_copy(address)
        if copy is not None:
            report(f"{address}: {error.cause}; taking the commit of the copy in the cache, {copy.name}")
            return replace(address, revision=copy.name)
        if error.cause.status is not None:
            raise
        raise DataError(
            f"{address}: no answer from {endpoint()} ({error.cause}), and no copy in the cache; check the network and "
            f"HF_ENDPOINT, or download the data set where there is a network: {address.download}"
        ) from error


def _commit(address: HubAddress, report: Report) -> str:
    with quietly(report):
        api = library("huggingface_hub").HfApi()
        return str(api.dataset_info(address.repo, revision=address.revision or None, timeout=30.0).sha)


def read(
    address: HubAddress,
    column: str,
    state: dict[str, Any] | None = None,
    report: Report = say,
    patience: Patience = ON_THE_WAY,
) -> Iterator[Batch]:
    """Batches of the column's values, each with the state behind it, from which a later `read` continues.

    A state is a dictionary that JSON can hold: `rows` are the rows so far, the rest is for this function. A string
    that is not UTF-8 comes as its bytes. Connections that break, HTTP 429 and 5xx are tried again from the last
    state; after the last try this raises `QuatrainError`, and `DataError` for what another try would not change.
    """
    reader = _Reader(pin(address, report, patience), column, state, report)
    trying = attempts(address, patience, report)
    while (batch := trying.run(reader.next)) is not None:
        yield batch


class _Reader:
    """The opened data set, and the state behind the last batch: any call of `next` may fail and be made again."""

    def __init__(self, address: HubAddress, column: str, state: dict[str, Any] | None, report: Report) -> None:
        self._address, self._column, self._state, self._report = address, column, state, report
        self._shards: Shards | None = None
        self._files = ""  # which files, in which order: what a state counts in
        self._batches: Iterator[Batch] | None = None

    def next(self) -> Batch | None:
        """The next batch, or None after the last."""
        with quietly(self._report):
            batches, self._batches = self._batches or self._continued(), None  # after a failure none is left
            batch = next(batches, None)
        if batch is not None:
            self._batches, self._state = batches, batch[1]
        return batch

    def _continued(self) -> Iterator[Batch]:
        if self._shards is None:
            self._shards = self._open()
        state = self._state or {"rows": 0, "file": 0, "row": 0}
        rows = state["rows"]
        for index in range(state["file"], len(self._shards)):
            row = state["row"] if index == state["file"] else 0
            for values in self._shards.batches(index, row):
                rows, row = rows + len(values), row + len(values)
                yield values, {"rows": rows, "files": self._files, "file": index, "row": row}

    def _open(self) -> Shards:
        builder = _builder(self._address)
        splits = {str(split): list(files) for split, files in builder.config.data_files.items()}
        if self._address.split not in splits:
            raise DataError(_no_such(self._address, "split", self._address.split, list(splits)))
        files = splits[self._address.split]
        self._check_files(files)
        if builder.name == "parquet" and not any("::" in file for file in files):
            return ParquetFiles(files, self._column)
        return Streamed(builder, self._address.split, self._column, str(self._address))

    def _check_files(self, files: list[str]) -> None:
        # Where they lie inside the data set: the same in a copy, whose folder bears the commit's name.
        inside = f"{self._address.revision}/"
        names = [file.partition(inside)[2] or file for file in files]
        if offline() and not self._address.local:
            check_complete(self._address, names)
        self._files = hashlib.sha256("\n".join(names).encode()).hexdigest()
        if self._state is not None and self._state["files"] != self._files:
            raise DataError(
                f"{self._address}: its {len(names)} files are not those whose reading was interrupted; complete the "
                f"copy in the cache ({self._address.download}), or begin anew with another --out"
            )


def _builder(address: HubAddress) -> Any:
    """The library's reader of the data set's files; its own cache of prepared data, of any commit, is left out."""
    datasets = library("datasets")
    where = {"path": address.repo} if address.local else {"path": address.repo, "revision": address.revision}
    if offline() and not address.local:
        where = {"path": str(offline_copy(address))}
    chosen = {address.split: address.data_files} if address.data_files else None
    name = address.config or None
    with tempfile.TemporaryDirectory() as nothing:
        block = {"hf": {"block_size": BLOCK}}
        try:
            return datasets.load_dataset_builder(
                name=name, data_files=chosen, cache_dir=nothing, storage_options=block, **where
            )
        except ValueError as error:
            if address.local or cause_of(error).kind != "other":
                raise
            raise _wrong_config(address, datasets.get_dataset_config_names(**where), error) from error


def _content_hash(pattern: str) -> str:
    found = hashlib.sha256()
    for path in sorted(glob.glob(pattern, recursive=True)):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def attempts(address: HubAddress, patience: Patience, report: Report) -> Attempts:
    """Tries of anything asked of the Hub: what another try may change is tried again, the rest is a `DataError`."""

    def judge(error: Exception) -> Cause:
        cause = cause_of(error)
        if cause.kind in ("network", "damage") and not (address.local or offline()):
            return cause
        raise DataError(f"{address}: {_advice(address, cause, error)}") from error

    return Attempts(str(address), judge, patience, report)


def _advice(address: HubAddress, cause: Cause, error: Exception) -> str:
    page = f"{endpoint()}/datasets/{address.repo}"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    kinds = {kind.__name__ for link in chain(error) for kind in type(link).__mro__}
    said = str(error)
    if "GatedRepoError" in kinds or "is a gated dataset" in said:
        return f"the data set is gated: accept its terms on {page}, then {login}"
    if "RevisionNotFoundError" in kinds or said.startswith("Revision "):
        return f"no revision '{address.revision}'; choose a branch, tag or commit of {page}"
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"} or cause.status == 401:
        return f"no such data set, or a private one: check the name on {page}, or {login}"
    if cause.status == 403:
        return f"the Hub refuses access ({cause}): {login} with a token that may read {page}"
    if isinstance(error, FileNotFoundError):
        asked = f"file that matches data_files={address.data_files}" if address.data_files else "data file"
        return f"found no {asked} ({_first_line(error)})"
    return f"cannot be read ({cause})"


def _wrong_config(address: HubAddress, known: list[str], error: ValueError) -> DataError:
    if address.config and address.config not in known:
        return DataError(_no_such(address, "config", address.config, known))
    if not address.config and len(known) > 1:
        return DataError(f"{address}: it has {len(known)} configs; choose one with name=: {_listed(known)}")
    return DataError(f"{address}: cannot be read ({_first_line(error)})")


def _no_such(address: HubAddress, what: str, name: str, known: list[str]) -> str:
    key = {"config": "name", "split": "split"}[what]
    return f"{address}: no {what} '{name}'{did_you_mean(name, known)}; choose with {key}=: {_listed(known)}"


def _listed(names: list[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
