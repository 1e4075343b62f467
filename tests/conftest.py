"""Shared by all tests: where the data lie, small corpora, and the rule about skips."""

import os
import re
import signal
from pathlib import Path

# One thread each: tiny models gain nothing from more, and the workers of pytest-xdist would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare

settings.register_profile("quick", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("soak", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell ignores signals for what it starts in the background, and children inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(_number, _handler)

SHARED = Path(os.environ.get("QUATRAIN_SHARED", Path(__file__).parents[1] / ".." / "shared" / "data")).resolve()

# The only reasons for which a test may be skipped; any other skip fails the run.
ALLOWED_SKIPS = re.compile(r"^(no network|no GPU|no namespaces|no browser|no optional library|no shared data)\b")


def shared_file(name: str) -> Path:
    """A file of the shared data, or a skip that says it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no shared data: {path}")
    return path


_skips: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, reason in _skips:
        verdict = "" if ALLOWED_SKIPS.match(reason) else "  <- not an allowed reason"
        terminalreporter.write_line(f"skipped {test}: {reason}{verdict}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if any(not ALLOWED_SKIPS.match(reason) for _, reason in _skips):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def sonnets(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The store of the eight sonnets: char, the eighth held out."""
    folder = tmp_path_factory.mktemp("sonnets") / "store"
    prepare(["corpus:sonnets"], folder, PrepareConfig(tokenizer="char", val_docs=(7,)))
    return TokenStore(folder)
