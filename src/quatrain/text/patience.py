"""Trying again: which failures of a network pass by themselves, and how long to wait for that."""

import errno
import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa
import zstandard

from quatrain.errors import DataError, QuatrainError

HTTP_LIBRARIES = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
PASSING = {408, 425, 429, *range(500, 600)}  # HTTP statuses that another try may not meet
DAMAGE = (pa.ArrowInvalid, EOFError, zlib.error, zstandard.ZstdError)  # bytes that are no file: cut on the way, or bad
DAMAGE_ATTEMPTS = 3  # bytes that are bad at their source stay bad
LOCAL = {errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}  # of this machine's disk
LONGEST_ASKED = 600.0  # seconds of a Retry-After that are waited at most

Report = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Cause:
    """What lies behind an exception: `network` and `damage` may pass, `refused` and `other` do not."""

    kind: Literal["network", "damage", "refused", "other"]
    error: BaseException  # the link of the chain that says so
    status: int | None = None  # HTTP status, where there was an answer
    retry_after: float | None = None  # seconds the server asked for

    def __str__(self) -> str:
        if self.status is not None:
            return f"HTTP status {self.status}"
        first = next((line.strip() for line in str(self.error).splitlines() if line.strip()), "")
        return f"{type(self.error).__name__}: {first[:200]}" if first else type(self.error).__name__


@dataclass(frozen=True)
class Patience:
    """How often a failure is met with another try, and the seconds between them."""

    attempts: int = 10  # without any progress between them
    first: float = 1.0  # doubled after every failure ...
    longest: float = 120.0  # ... up to this
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    def wait(self, failures: int, retry_after: float | None) -> float:
        """Seconds after so many failures: half of them by chance, so that many readers do not return together."""
        planned = min(self.longest, self.first * 2.0 ** (failures - 1)) * (0.5 + 0.5 * self.chance())
        return max(planned, min(retry_after or 0.0, LONGEST_ASKED))


class GaveUp(QuatrainError):
    """The last attempt failed, too; `cause` says how."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


class Attempts:
    """A job that is tried again; `judge` turns a failure into its cause, or raises what ends the job at once."""

    def __init__(self, name: str, judge: Callable[[Exception], Cause], patience: Patience, report: Report) -> None:
        self._name, self._judge, self._patience, self._report = name, judge, patience, report

    def run(self, job: Callable[[], Result]) -> Result:
        """What the job returns; raises `GaveUp` after the last attempt, and `DataError` for bytes that stay damaged."""
        waited = 0.0
        for number in itertools.count(1):
            try:
                return job()
            except QuatrainError:
                raise
            except Exception as error:
                cause = self._judge(error)
            last = min(self._patience.attempts, DAMAGE_ATTEMPTS) if cause.kind == "damage" else self._patience.attempts
            if number >= last:
                raise self._end(cause, number, waited) from cause.error
            seconds = self._patience.wait(number, cause.retry_after)
            self._report(f"{self._name}: {cause}; attempt {number + 1} of {last} in {seconds:.0f} s")
            self._patience.sleep(seconds)
            waited += seconds
        raise AssertionError  # count() never ends

    def _end(self, cause: Cause, number: int, waited: float) -> QuatrainError:
        if cause.kind == "damage":
            return DataError(
                f"{self._name}: {cause}, {number} times at the same place; the file is damaged where it lies, or is "
                f"cut on the way; choose another revision, or give the same command again to continue"
            )
        return GaveUp(
            f"{self._name}: {cause}; gave up after {number} attempts and {waited:.0f} s of waiting; what is complete "
            f"stays complete, and the same command continues from there",
            cause,
        )


def cause_of(error: BaseException) -> Cause:
    """The first exception, from the outermost inwards, that tells what happened."""
    for link in chain(error):
        response = getattr(link, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(status, int):
            kind: Literal["network", "refused"] = "network" if status in PASSING else "refused"
            return Cause(kind, link, status, _retry_after(response))
        if isinstance(link, DAMAGE) or (type(link) is OSError and link.errno is None):  # Arrow's own OSError
            return Cause("damage", link)
        if _is_network(link):
            return Cause("network", link)
    return Cause("other", error)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those it was raised from, and those that were being handled: the nearest first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop(0)
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def _is_network(error: BaseException) -> bool:
    if type(error) is ConnectionError and error.__cause__ is not None:
        return False  # a wrapping of `datasets`: what it was raised from says more
    if type(error).__module__.partition(".")[0] in HTTP_LIBRARIES:
        return True
    return isinstance(error, OSError) and error.errno not in LOCAL and not isinstance(error, FileNotFoundError)


def _retry_after(response: object) -> float | None:
    value = getattr(response, "headers", {}).get("Retry-After", "")
    return float(value) if value.isdecimal() else None  # the other form, a date, is left to the doubling
