"""A data set comes from the Hub exactly once and in order, whatever breaks; what cannot be read says what to do."""

import io
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub_server import Hub, Repo, serving
from quatrain.errors import DataError, QuatrainError
from quatrain.text import hub_rows
from quatrain.text.hub import HubAddress, parse, pin, read
from quatrain.text.patience import Patience

RANDOM = random.Random(0)  # what does not compress takes many requests
ROWS = [f"row {number} {RANDOM.randbytes(number % 200).hex()}" for number in range(1500)]
QUICK = Patience(sleep=lambda seconds: None)
CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: small
  data_files: small/*
---
"""


def parquet(texts: list[str | None], rows: int = 300) -> bytes:
    file = io.BytesIO()
    columns = {"url": pa.array([f"u{row}" * 9 for row in range(len(texts))], pa.string())}
    columns["text"] = pa.array(texts, pa.string())
    pq.write_table(pa.table(columns), file, row_group_size=rows, write_page_checksum=True)
    return file.getvalue()


FILES = {
    "README.md": CARD,
    "data/train-00000-of-00003.parquet": parquet(ROWS[:700], rows=60),
    "data/train-00001-of-00003.parquet": parquet([]),
    "data/train-00002-of-00003.parquet": parquet(ROWS[700:], rows=170),
    "data/test-00000-of-00001.parquet": parquet(["test"]),
    "small/only.parquet": parquet(["small", None]),
}
LINES = {"a.jsonl": b'{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n', "b.jsonl": b'{"text": "three", "id": 3}\n'}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("datasets", reason="no optional library: datasets")
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch, tmp_path) -> Hub:
    """The Hub that the libraries know, with nothing broken and nothing cached; nobody waits."""
    import datasets
    import huggingface_hub

    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hub_rows, "ROWS", 50)
    monkeypatch.setattr(hub_rows, "BLOCK", 1024)
    server.__dict__.update(
        repos={"me/web": Repo(FILES), "me/lines": Repo(LINES)}, orders=[], rate=0.0, asked=[], bytes=0
    )
    return server


@pytest.fixture
def offline(hub, monkeypatch):
    """A switch that takes the network away, as HF_HUB_OFFLINE does."""
    import datasets
    import huggingface_hub

    def switch() -> None:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        hub.repos.clear()

    return switch


def rows(address: HubAddress, state: dict | None = None, **how) -> list:
    """All rows, by states that went through JSON."""
    return [
        value
        for values, _ in read(address, "text", state, **{"report": print, "patience": QUICK, **how})
        for value in values
    ]


def message(word: str, column: str = "text") -> str:
    with pytest.raises(DataError) as error:
        list(read(pin(parse(word)), column, patience=QUICK))
    return str(error.value)


def test_a_word_names_repo_config_split_and_revision():
    assert parse("hub:HuggingFaceFW/fineweb-edu?name=sample-10BT&split=train") == HubAddress(
        "HuggingFaceFW/fineweb-edu", config="sample-10BT", split="train"
    )
    assert parse("hub:a/b-c_d.e") == HubAddress("a/b-c_d.e")
    assert parse("hub:a/b?revision=refs%2Fpr%2F1&data_files=x/*.parquet") == HubAddress(
        "a/b", revision="refs/pr/1", data_files="x/*.parquet"
    )


@pytest.mark.parametrize("address", [HubAddress("a/b"), HubAddress("a/b", "c d", "test", "v&1", "x/**?[0-9].jsonl")])
def test_an_address_reads_back_from_its_own_words(address):
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("hub:", "'' is not the name of a data set; expected hub:OWNER/NAME"),
        ("hub:fineweb", "'fineweb' is not the name of a data set"),
        ("hub:a/b/c", "'a/b/c' is not the name of a data set"),
        (
            "hub:a/b?splt=train",
            r"unknown key 'splt' \(did you mean 'split'\?\); there is name, split, revision, data_files",
        ),
        ("hub:a/b?split=", "'split' has no value"),
        ("hub:a/b?split=x&split=y", "'split' is given twice"),
        ("hub:parquet", r"reads local files; expected hub:parquet\?data_files=GLOB"),
    ],
)
def test_a_word_that_names_nothing_says_what_was_expected(word, says):
    with pytest.raises(DataError, match=says):
        parse(word)


def test_the_store_gets_its_name_from_the_data_set():
    assert parse("hub:HuggingFaceFW/fineweb-edu").stem == "edufineweb"
    assert parse("hub:allenai/c4").stem == "c4"


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets .*pip install 'quatrain\[hub\]'"):
        pin(HubAddress("a/b"))


def test_rows_come_once_and_in_order(hub):
    address = pin(parse("hub:me/web"))
    assert address.revision == hub.repos["me/web"].commit
    assert rows(address) == ROWS
    assert rows(pin(parse("hub:me/web?split=test"))) == ["test"]
    assert rows(pin(parse("hub:me/web?name=small"))) == ["small", None]
    assert rows(pin(parse("hub:me/web?split=test&data_files=small/*.parquet"))) == ["small", None]


def test_other_columns_are_not_downloaded(hub):
    file = io.BytesIO()
    big = [RANDOM.randbytes(20_000) for _ in range(100)]
    pq.write_table(pa.table({"image": big, "text": ROWS[:100]}), file, row_group_size=10)
    hub.repos["me/web"] = Repo({"train.parquet": file.getvalue()})
    assert rows(pin(parse("hub:me/web"))) == ROWS[:100]
    assert hub.bytes < len(file.getvalue()) / 4


def test_json_lines_are_read_in_the_same_way(hub):
    address = pin(parse("hub:me/lines"))
    assert rows(address) == ["one", "two", "three"]
    hub.fail("/a.jsonl", *[503] * 13)
    hub.fail("/b.jsonl", *["cut"] * 9)
    assert rows(address) == ["one", "two", "three"]
    said = message("hub:me/lines", "txt")
    assert said.startswith("hub:me/lines?")
    assert "no column 'txt' (did you mean 'text'?); found: text, id" in said


def test_a_commit_is_pinned_without_asking(hub):
    address = HubAddress("me/web", revision="0" * 40)
    assert pin(address) == address
    assert hub.asked == []


def test_every_state_continues_where_it_was_taken(hub):
    address = pin(parse("hub:me/web"))
    whole = list(read(address, "text"))
    seen = 0
    for values, state in whole[:: len(whole) // 2]:
        seen = state["rows"]
        assert len(values) <= 50
        assert rows(address, json.loads(json.dumps(state))) == ROWS[seen:]
    assert rows(address, whole[-1][1]) == []


@settings(max_examples=10)
@given(data=st.data())
def test_interrupted_however_often_it_is_the_undisturbed_sequence(tmp_path_factory, data):
    pytest.importorskip("datasets", reason="no optional library: datasets")
    folder = tmp_path_factory.mktemp("local")
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    texts = [[f"{number}:{row}" for row in range(size)] for number, size in enumerate(sizes)]
    for number, part in enumerate(texts):
        (folder / f"{number}.parquet").write_bytes(parquet(part, rows=data.draw(st.integers(1, 20))))
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    kind = data.draw(st.sampled_from(["parquet", "json"])) if sum(sizes) else "parquet"
    address = pin(parse(f"hub:{kind}?data_files={folder}/*.{kind}{'l' if kind == 'json' else ''}"))
    found: list[str] = []
    state = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_rows, "ROWS", data.draw(st.integers(1, 20)))
        while True:
            stop = data.draw(st.integers(1, 6))
            batches = read(address, "text", state)
            for _, (values, state) in zip(range(stop), batches, strict=False):
                found += values
                state = json.loads(json.dumps(state))
            if next(batches, None) is None:
                break
    assert found == [text for part in texts for text in part]


@pytest.mark.parametrize("seed", range(3))
def test_failures_at_random_change_nothing(hub, seed):
    hub.rate, hub.random = 0.4, random.Random(seed)
    told: list[str] = []
    assert rows(pin(parse("hub:me/web"), patience=QUICK), report=told.append) == ROWS
    assert any("Retry" in line or "; attempt " in line for line in told)


@pytest.mark.parametrize("failure", [500, 503, 429, "cut", "short"])
def test_an_outage_beyond_the_libraries_patience_costs_no_row(hub, failure):
    address = pin(parse("hub:me/web"))
    told: list[str] = []
    found: list[str] = []
    outages = [300, 1100]
    for values, state in read(address, "text", report=told.append, patience=QUICK):
        found += values
        assert state["rows"] == len(found)
        if outages and len(found) >= outages[0]:
            del outages[0]
            hub.fail("train-0000", *[failure] * (2 if failure == "short" else 9))
    assert found == ROWS
    assert failure == "short" or sum("; attempt 2 of 10" in line for line in told) == 2


def test_an_outage_while_the_data_set_is_opened_is_waited_for(hub):
    address = pin(parse("hub:me/web"))
    hub.fail("README.md", 500, 500, "cut")
    hub.fail("/tree/", *[502] * 3)
    hub.fail("/revision/", 503)
    assert rows(address) == ROWS


def test_the_servers_wish_for_a_pause_is_heard(hub):
    waited: list[float] = []
    hub.fail("/api/datasets", 429)
    pin(parse("hub:me/web"), patience=Patience(attempts=2, chance=lambda: 0.0, sleep=waited.append))
    assert waited == [0.5]  # Retry-After: 0 shortens nothing


def test_after_the_last_attempt_the_same_command_continues(hub):
    address = pin(parse("hub:me/web"))
    taken: list = []
    batches = read(address, "text", patience=replace(QUICK, attempts=2))
    taken.append(next(batches))
    hub.fail("train-00002", *[503] * 12)
    with pytest.raises(QuatrainError, match=r"status 503; gave up after 2 attempts .* same command continues") as error:
        taken.extend(batches)
    assert error.value.exit_code == 1
    found = [value for values, _ in taken for value in values]
    assert 0 < len(found) < len(ROWS)
    hub.orders.clear()
    assert found + rows(address, taken[-1][1]) == ROWS


def test_a_file_that_is_damaged_at_the_hub_is_an_error_of_the_data(hub):
    name = "data/train-00002-of-00003.parquet"
    hub.repos["me/web"] = Repo(FILES | {name: FILES[name][:20_000] + b"?" * 9_000 + FILES[name][29_000:]})
    assert "3 times at the same place; the file is damaged where it lies" in message("hub:me/web")


def test_what_another_attempt_would_not_change_says_what_to_do(hub):
    hub.repos["me/private"], hub.repos["me/gated"] = Repo(FILES, token="secret"), Repo(FILES, gated=True)
    page = f"{hub.url}/datasets/me/"
    assert f"a private one: check the name on {page}nope, or log in with `hf auth login`" in message("hub:me/nope")
    assert "or set HF_TOKEN" in message("hub:me/private")
    assert f"the data set is gated: accept its terms on {page}gated, then log in" in message("hub:me/gated")
    assert "no revision 'v2'; choose a branch, tag or commit" in message("hub:me/web?revision=v2")
    assert "no revision '" in message(f"hub:me/web?revision={'1' * 40}")
    assert "no config 'smaller' (did you mean 'small'?); choose with name=: default, small" in message(
        "hub:me/web?name=smaller"
    )
    assert "no split 'trainn' (did you mean 'train'?); choose with split=: train, test" in message(
        "hub:me/web?split=trainn"
    )
    assert "no column 'txt' (did you mean 'text'?); found: url, text" in message("hub:me/web", "txt")
    assert "found no file that matches data_files=nope/*" in message("hub:me/web?data_files=nope/*")
    hub.fail("/api/datasets/me/web", 403)
    assert "refuses access (HTTP status 403)" in message("hub:me/web")


def test_a_data_set_of_many_configs_wants_one_chosen(hub):
    card = CARD.replace(b"config_name: default", b"config_name: large")
    hub.repos["me/web"] = Repo(FILES | {"README.md": card})
    assert "it has 2 configs; choose one with name=: large, small" in message("hub:me/web")


def test_a_token_opens_a_private_data_set(hub, monkeypatch):
    hub.repos["me/private"] = Repo(FILES, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert rows(pin(parse("hub:me/private"))) == ROWS


def test_offline_the_copy_in_the_cache_is_read(hub, offline):
    import huggingface_hub

    online = pin(parse("hub:me/web"))
    middle = list(read(online, "text"))[4][1]
    huggingface_hub.snapshot_download("me/web", repo_type="dataset")
    offline()
    address = pin(parse("hub:me/web"))
    assert address == online
    assert rows(address) == ROWS
    assert rows(address, middle) == ROWS[middle["rows"] :]
    assert "no column 'txt'" in message("hub:me/web", "txt")


def test_offline_without_a_copy_the_message_says_how_to_get_one(hub, offline):
    online = pin(parse("hub:me/web"))
    offline()
    for address in (parse("hub:me/web"), online):
        with pytest.raises(DataError, match=r"no copy in the cache; .*: hf download me/web --repo-type dataset"):
            rows(pin(address))


def test_offline_a_copy_that_lacks_files_is_no_shorter_corpus(hub, offline):
    import huggingface_hub

    huggingface_hub.snapshot_download("me/web", repo_type="dataset")
    offline()
    address = pin(parse("hub:me/web"))
    lost = Path(huggingface_hub.constants.HF_HUB_CACHE).glob("*/snapshots/*/data/train-00002*")
    next(lost).unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 4 files, such as data/train-00002.*complete it with: hf download"):
        rows(address)


def test_without_an_answer_the_commit_is_that_of_the_copy(hub):
    import huggingface_hub

    word = parse("hub:me/web")
    online = pin(word)
    for failure in (503, "cut"):
        hub.fail("/api/datasets", *[failure] * 4)
        with pytest.raises(QuatrainError, match="gave up after 4 attempts" if failure == 503 else "check the network"):
            pin(word, patience=replace(QUICK, attempts=4))
    huggingface_hub.snapshot_download("me/web", repo_type="dataset")
    told: list[str] = []
    hub.fail("/api/datasets", *["cut"] * 4)
    assert pin(word, report=told.append, patience=replace(QUICK, attempts=4)) == online
    assert "taking the commit of the copy in the cache" in told[-1]


def test_a_state_of_other_files_is_refused(hub):
    _, state = next(read(pin(parse("hub:me/web")), "text"))
    with pytest.raises(DataError, match="its 1 files are not those whose reading was interrupted"):
        rows(pin(parse("hub:me/web?split=test")), state)


def test_a_string_that_is_not_utf8_comes_as_its_bytes(hub):
    binary = pa.array([b"good", b"\xff\xfebad", None], pa.binary())
    file = io.BytesIO()
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(3, *binary.buffers()[1:], binary.buffers()[0])}), file)
    hub.repos["me/web"] = Repo({"data/train.parquet": file.getvalue()})
    assert rows(pin(parse("hub:me/web"))) == ["good", b"\xff\xfebad", None]


def test_local_files_are_pinned_by_their_content(hub, tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(["a"]))
    word = parse(f"hub:parquet?data_files={tmp_path}/*.parquet")
    first = pin(word)
    assert rows(first) == ["a"]
    path.write_bytes(parquet(["b"]))
    assert pin(word).revision != first.revision
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        rows(pin(word))


def test_the_libraries_own_settings_are_left_as_they_were(hub):
    import datasets

    before = dict(vars(datasets.config)), datasets.are_progress_bars_disabled()
    rows(pin(parse("hub:me/web")))
    assert (dict(vars(datasets.config)), datasets.are_progress_bars_disabled()) == before


SCRIPT = """
import sys
from quatrain.errors import QuatrainError
from quatrain.text import hub
assert "datasets" not in sys.modules
try:
    for values, state in hub.read(hub.pin(hub.parse("hub:me/private")), "text"):
        print(len(values), values[0])
        break
except QuatrainError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_the_environment_says_where_the_hub_is_who_asks_and_whether_at_all(hub, tmp_path):
    hub.repos["me/private"] = Repo(FILES, token="secret")
    known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    known |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

    def run(**more: str) -> str:
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=known | more, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr  # it ends well with a stream half read
        return process.stdout

    assert run(HF_TOKEN="secret") == "700 row 0 \n"
    asked = len(hub.asked)
    assert "HF_HUB_OFFLINE is set, and there is no copy in the cache" in run(HF_HUB_OFFLINE="1", HF_TOKEN="secret")
    assert len(hub.asked) == asked
