"""A preparation on Ray is that of one process, byte for byte, and its errors are the same."""

import json
import sys
from pathlib import Path

import pytest

from quatrain import prepare
from quatrain.errors import DataError, UsageError
from quatrain.interop.ray_tasks import prepare_on_ray
from quatrain.tokens.config import PrepareConfig

CONFIG = PrepareConfig(tokenizer="bytes", val_fraction=0.1)


def sources(folder: Path) -> list[str]:
    words = []
    for number in range(6):
        path = folder / f"{number}.jsonl"
        texts = [f"file {number}, document {line}: {'word ' * line}" for line in range(40)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        words.append(str(path))
    return words


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--engine ray needs the library 'ray': pip install 'quatrain\[ray\]'"):
        prepare_on_ray(sources(tmp_path), tmp_path / "store", CONFIG)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_on_this_machine_gives_the_store_of_one_process(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="no optional library: ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    said: list[str] = []
    prepare(sources(tmp_path), tmp_path / "one", CONFIG)
    prepare_on_ray(sources(tmp_path), tmp_path / "many", CONFIG, 2, said.append)
    assert files(tmp_path / "one") == files(tmp_path / "many")
    assert said[0].startswith("2 tasks on ")
    (tmp_path / "bad.jsonl").write_text("not JSON\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:1: not a line of JSON"):
        prepare_on_ray([*sources(tmp_path), str(tmp_path / "bad.jsonl")], tmp_path / "bad", CONFIG, 2)
