"""Who may write into a folder at once, and what is left in it when they stop."""

from pathlib import Path

import filelock
import pytest

from quatrain.errors import DataError, QuatrainError
from quatrain.tokens import claim as claim_module
from quatrain.tokens.claim import Claim, Unfinished


def claim(folder: Path, task: tuple[int, int] | None = None) -> Claim:
    return Claim(folder, "a", "plan", task)


def stopped(ours: Claim, error: BaseException) -> None:
    """Stop after the first part."""
    with ours:
        (ours.parts / "000000_000000.part").touch()
        raise error


BUSY = "S: another prepare is writing into it; wait for it, or stop it"


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(claim_module, "OTHER_TASK_STARTS", 0.1)
    return tmp_path / "S"


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ((0, 3), (1, 3), True),
        ((0, 3), (0, 3), False),
        ((0, 3), (1, 4), False),  # they share units
        ((0, 3), None, False),
        (None, (0, 3), False),
        (None, None, False),
    ],
)
def test_tasks_of_one_division_run_together_and_nothing_else_does(out, one, other, together):
    with claim(out, one):
        if together:
            with claim(out, other):
                pass
        else:
            with pytest.raises(DataError, match=BUSY):
                claim(out, other).__enter__()
    with claim(out, other):  # one after the other they may
        pass


@pytest.mark.parametrize(
    ("error", "made", "kept"),
    [
        (DataError("wrong"), True, False),
        (DataError("wrong"), False, False),
        (Unfinished("early"), False, True),
        (Unfinished("early"), True, False),
        (QuatrainError("full"), True, True),
        (KeyboardInterrupt(), True, True),
    ],
)
def test_what_an_error_leaves(out, error, made, kept):
    if not made:
        with claim(out, (0, 2)):
            pass
    with pytest.raises(type(error)):
        stopped(claim(out), error)
    assert (out / "parts" / "000000_000000.part").exists() == kept
    assert not (out / "prepare.lock").exists()
    if not kept:
        assert not out.exists() or list(out.iterdir()) == []


def test_a_task_takes_nothing_back(out):
    with pytest.raises(DataError):
        stopped(claim(out, (0, 2)), DataError("wrong"))
    assert (out / "parts" / "000000_000000.part").exists()


def test_a_file_system_without_locks_is_one_message(out, monkeypatch):
    def acquire(self, *rest: object, **named: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with pytest.raises(QuatrainError, match=r"S/prepare\.lock: this file system has no locks; choose another place"):
        claim(out).__enter__()


def test_a_lock_that_cannot_be_made_is_one_message(out, monkeypatch):
    def acquire(self, *rest: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with pytest.raises(QuatrainError, match=r"S/prepare\.lock: cannot write: No space left on device; make room"):
        claim(out).__enter__()
