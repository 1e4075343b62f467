import errno
import os
from pathlib import Path

import pytest

from quatrain.errors import QuatrainError
from quatrain.files import replace_file, sync_folder, writing


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_replace_file_leaves_the_new_content_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    for content in (b"first", b"", b"third"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("where", "name"), [(os, "fsync"), (Path, "open"), (Path, "replace")])
def test_a_failed_write_keeps_the_old_content_and_says_path_bytes_and_reason(tmp_path, monkeypatch, where, name):
    path = tmp_path / "store.json"
    replace_file(path, b"old")
    monkeypatch.setattr(where, name, full)
    with pytest.raises(QuatrainError, match=r"store\.json: cannot write 2,000 bytes: No space left") as caught:
        replace_file(path, b"n" * 2000)
    monkeypatch.undo()
    assert caught.value.exit_code == 1
    assert path.read_bytes() == b"old"


def test_a_file_never_appears_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QuatrainError, match="cannot write"):
        replace_file(tmp_path / "store.json", b"new")
    assert not (tmp_path / "store.json").exists()


def test_the_content_is_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []

    def fsync(descriptor: int) -> None:
        seen.append(path.exists())

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(path, b"new")
    assert seen == [False, True]  # the content, then the folder that holds the name


def test_writing_into_a_folder_that_is_not_there_is_one_message(tmp_path):
    with pytest.raises(QuatrainError, match=r"missing/file: cannot write 3 bytes: No such file"):
        replace_file(tmp_path / "missing" / "file", b"new")


def test_writing_passes_other_errors_on(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("step")


def test_sync_folder_closes_what_it_opens(tmp_path):
    before = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    for _ in range(3):
        sync_folder(tmp_path)
    assert (len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0) == before
