"""A failure that passes is waited for, longer each time, and no other one is."""

import errno
import zlib
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError, QuatrainError
from quatrain.text.patience import Attempts, GaveUp, Patience, cause_of


class Answered(OSError):
    """What an HTTP library raises for a status."""

    def __init__(self, status: int, retry_after: str = "") -> None:
        super().__init__(f"{status} for some address")
        self.response = SimpleNamespace(status_code=status, headers={"Retry-After": retry_after} if retry_after else {})


def chained(outer: Exception, cause: Exception, hidden: bool = False) -> Exception:
    """`outer` as if raised while `cause` was handled, or from it."""
    try:
        try:
            raise cause
        except Exception as error:
            if hidden:
                raise outer from None
            raise outer from error
    except Exception as error:
        return error


@given(failures=st.integers(1, 200), chance=st.floats(0, 1))
def test_waiting_doubles_up_to_a_limit_and_half_of_it_is_chance(failures, chance):
    patience = Patience(first=1.0, longest=60.0, chance=lambda: chance)
    planned = min(60.0, 2.0 ** (failures - 1))
    assert planned / 2 <= patience.wait(failures, None) <= planned
    assert patience.wait(failures, 120.0) == 120.0
    assert patience.wait(failures, 1e9) == 600.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((Answered(status), "network") for status in (408, 429, 500, 502, 503, 504)),
        *((Answered(status), "refused") for status in (400, 401, 403, 404, 416)),
        (ConnectionResetError("reset"), "network"),
        (TimeoutError(), "network"),
        (OSError(errno.ENETUNREACH, "no network"), "network"),
        (OSError(errno.ENOSPC, "disk full"), "other"),
        (OSError("Unexpected end of stream"), "damage"),
        (pa.ArrowInvalid("no magic bytes"), "damage"),
        (EOFError(), "damage"),
        (zlib.error(), "damage"),
        (KeyError("text"), "other"),
        (FileNotFoundError("no such file"), "other"),
        (chained(FileNotFoundError("not cached"), Answered(503), hidden=True), "network"),
        (chained(FileNotFoundError("not there"), Answered(404)), "refused"),
        (chained(ConnectionError("Server Disconnected"), Answered(429, "7")), "network"),
    ],
)
def test_the_outermost_exception_that_tells_decides(error, kind):
    assert cause_of(error).kind == kind


def test_what_the_server_asks_for_is_found_behind_a_wrapping():
    cause = cause_of(chained(ConnectionError("Server Disconnected"), Answered(429, "7")))
    assert (cause.status, cause.retry_after, str(cause)) == (429, 7.0, "HTTP status 429")
    assert cause_of(Answered(429, "Wed, 21 Oct 2026 07:28:00 GMT")).retry_after is None


def attempts(patience: Patience, told: list[str]) -> Attempts:
    return Attempts("job", cause_of, patience, told.append)


def test_a_job_is_tried_until_it_succeeds_and_every_wait_is_told():
    failures = [TimeoutError("slow"), Answered(503), Answered(429, "9")]
    waited: list[float] = []
    told: list[str] = []

    def job() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    patience = Patience(attempts=4, chance=lambda: 1.0, sleep=waited.append)
    assert attempts(patience, told).run(job) == "done"
    assert waited == [1.0, 2.0, 9.0]
    assert told == [
        "job: TimeoutError: slow; attempt 2 of 4 in 1 s",
        "job: HTTP status 503; attempt 3 of 4 in 2 s",
        "job: HTTP status 429; attempt 4 of 4 in 9 s",
    ]


@pytest.mark.parametrize(
    ("error", "kind", "code", "says"),
    [
        (Answered(503), GaveUp, 1, "job: HTTP status 503; gave up after 5 attempts and 15 s of waiting; .* continues"),
        (pa.ArrowInvalid("bad"), DataError, 2, "ArrowInvalid: bad, 3 times at the same place; the file is damaged"),
    ],
)
def test_after_the_last_attempt_the_message_says_how_many_and_what_to_do(error, kind, code, says):
    def job() -> None:
        raise error

    patience = Patience(attempts=5, chance=lambda: 1.0, sleep=lambda seconds: None)
    with pytest.raises(kind, match=says) as raised:
        attempts(patience, []).run(job)
    assert raised.value.exit_code == code


def test_what_is_already_a_message_is_not_tried_again():
    def job() -> None:
        raise QuatrainError("said")

    with pytest.raises(QuatrainError, match=r"^said$"):
        attempts(Patience(), []).run(job)
