"""What a terminal gets: every fact in words, and nothing of a corpus that a terminal would obey."""

import io
import json
import re
from dataclasses import replace

import pytest

from quatrain import console
from quatrain.tokens import view
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.facts import StoreFacts, store_facts
from quatrain.tokens.store import TokenStore
from quatrain.tokens.view import show_store
from quatrain.tokens.writer import prepare

EVIL = (
    "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe\r\b\x9b31m\x00 [bold]markup[/bold] :smile:\n"
    "── document 9 of 9 ──────────\nlast line\t."
)


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> TokenStore:
    folder = tmp_path_factory.mktemp("view")
    texts = [EVIL + str(number) for number in range(4)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "texts.jsonl"], folder / "store", PrepareConfig("bytes", val_docs=(0,), cross_dedup=False))
    return TokenStore(folder / "store")


def shown(facts: StoreFacts, capsys) -> str:
    show_store(facts)
    return capsys.readouterr().out


def test_no_control_character_of_a_corpus_or_a_store_reaches_the_terminal(evil, capsys):
    facts = store_facts(evil, 1024, 3)
    changed = facts.store | {
        "examples": [{"kind": "skipped", "place": EVIL, "like": EVIL, "jaccard": 0.5, "text": EVIL}] * 8,
        "skipped": {EVIL: 3},
        "counts": {"skipped": 3, EVIL: 1},
        "sources": [{"name": EVIL, "size": 3, "rows": 2, "etag": EVIL}] * 15,
        "split": {"rule": EVIL},
        "fingerprint": EVIL,
    }
    told = shown(replace(facts, folder=EVIL, store=changed), capsys)
    assert all(character.isprintable() or character == "\n" for character in told)
    for piece in (r"\x1b[2J\x1b]0;owned\x07", r"\u202egnp.exe\r\x08\x9b31m\x00", "[bold]markup[/bold] :smile:"):
        assert piece in told
    assert "… 3 more sources" in told
    assert "… 2 more examples" in told


def test_a_text_cannot_look_like_a_border(evil, capsys):
    told = shown(store_facts(evil, 1024, 1), capsys)
    borders = [line for line in told.splitlines() if line.startswith("  ── document")]
    assert borders == [f"  ── document {number} of 3 ────────" for number in (1, 2, 3)]
    assert told.count("  │ ── document 9 of 9 ──") == 3


def test_a_window_is_cut_around_its_first_border(sonnets, capsys):
    told = shown(store_facts(sonnets, 1024, 3), capsys)
    windows = told.split("\nWindow  train ")[1:]
    assert len(windows) == 3
    for window in windows:
        lines = window.splitlines()[1:]
        assert sum(line.startswith("  │ ") or line.startswith("  ──") for line in lines) == view.LINES_SHOWN
        assert re.search(r"^  ── document \d of 7 ─+$", window, re.MULTILINE)
        assert re.search(r"^  … \d+ more lines? (above|below)$", window, re.MULTILINE)


@pytest.mark.parametrize("columns", ["20", "80", "100", "500"])
def test_numbers_are_whole_at_every_width(sonnets, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    told = shown(store_facts(sonnets, 1024, 3), capsys)
    for row in (
        "train 7 4,378 4,370 1.000",
        "val 1 587 585 1.000",
        "both 8 4,965 4,955 1.000",
        "sonnets_train_000000.bin 4,378 uint16 0 8,756 " + sonnets.facts["splits"]["train"]["shards"][0]["sha256"][:12],
        "train 624.3 613 613 620 642 642",
        "train padded, by formula 7 7 2,791 38.9%",
        "best fit 7 7 2,791 38.9%",
        "packed 7 4 0 0.0%",
        "train 4,377 4,377 55 1 6",
    ):
        assert row in "\n".join(" ".join(line.split()) for line in told.splitlines())
    assert max(map(len, told.splitlines())) <= min(max(int(columns), view.NARROWEST), view.WIDEST)


def test_bars_are_as_long_as_their_numbers(sonnets, capsys):
    told = shown(store_facts(sonnets, 1024, 0), capsys)
    row = next(line for line in told.splitlines() if line.strip().startswith("609–724"))
    assert row.count("█") == view.BAR
    row = next(line for line in told.splitlines() if "' '" in line)
    half = next(line for line in told.splitlines() if "'e'" in line)
    assert (row.count("█"), half.count("█")) == (view.BAR, round(view.BAR * 416 / 716))


def test_many_shards_are_cut_and_a_sample_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quatrain.tokens.survey.SAMPLE", 2048)
    prepare(["corpus:sonnets"], tmp_path / "s", PrepareConfig(tokenizer="char", val_docs=(7,), shard_size=200))
    told = shown(store_facts(TokenStore(tmp_path / "s"), 64, 0, verify=True), capsys)
    assert "… 10 more shards of train (--html and --json have all)" in told
    assert "a sample was counted" in told
    assert "every file has the hash that store.json says (28 files, " in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_told_on_standard_error_and_only_to_a_terminal(sonnets, capsys, monkeypatch):
    store_facts(sonnets, 64, 0, verify=True)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    store_facts(sonnets, 64, 0, verify=True)
    for what in ("train index", "comparing hashes", "val"):
        assert what in terminal.getvalue()
    with console.progress("[bold]counting", 4) as advance:
        advance(4)
    assert "[bold]counting" in terminal.getvalue()
