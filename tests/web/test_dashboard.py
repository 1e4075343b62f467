import asyncio
import json
import shutil
import threading
import time
from importlib import resources
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tiny_runs import tiny_run

from quatrain.tokens.excerpts import excerpts
from quatrain.tokens.store import TokenStore
from quatrain.web import through
from quatrain.web.app import create_app
from quatrain.web.dashboard import Dashboard, routes
from quatrain.web.through import CHECKPOINTS, MAX_TOKENS, Through, parse, thinned


@pytest.fixture(scope="module")
def run(sonnets: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(sonnets, tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def client(run):
    return TestClient(create_app(None, routes([run])), base_url="http://127.0.0.1:8000")


def ask(client, path, **query):
    answer = client.get(path, params=query)
    return answer.status_code, answer.json()


def refused(client, path, **query):
    status, answer = ask(client, path, **query)
    return status, answer["error"]["message"]


def test_every_file_of_the_page_is_served_under_the_policy(client):
    names = [file.name for file in resources.files("quatrain.web").joinpath("page").iterdir()]
    assert {"index.html", "main.js", "style.css", "uPlot.esm.js", "uPlot.min.css"} <= set(names)
    for address in ["/", *(f"/page/{name}" for name in names)]:
        answer = client.get(address)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert client.get("/page/main.js").headers["content-type"].startswith("text/javascript")


def test_the_page_holds_nothing_that_its_policy_refuses_and_no_other_host():
    for file in resources.files("quatrain.web").joinpath("page").iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name.endswith(".html"):
            assert " style=" not in text
            assert "<style" not in text
            assert not any(word in text for word in (" onclick=", " onload=", "javascript:"))
            assert all(part.startswith((' type="module"', " blocking")) for part in text.split("<script")[1:])
        if not file.name.startswith("uPlot"):
            assert "innerHTML" not in text
            assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_rows_are_those_of_the_files_behind_what_was_read(client, run):
    status, told = ask(client, "/api/rows", run="tiny", file="metrics")
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert status == 200
    assert [row["step"] for row in told["rows"]] == [row["step"] for row in written]
    assert [row["loss"] for row in told["rows"] if "loss" in row] == [row["loss"] for row in written if "loss" in row]
    again = ask(client, "/api/rows", run="tiny", file="metrics", after=told["next"], mark=told["mark"])[1]
    assert (again["rows"], again["start"]) == ([], told["next"])
    samples = ask(client, "/api/rows", run="tiny", file="samples")[1]["rows"]
    assert [row["step"] for row in samples] == [0, 0, 10, 10, 20, 20, 30, 30]


@pytest.mark.parametrize("name", ["..", "../tiny", "/etc", "tiny/", "tiny/..", "%2e%2e", "", "tiny\x00", "."])
def test_no_name_leads_out_of_the_runs(client, name):
    for path in ("/api/rows", "/api/store", "/api/window"):
        status, message = refused(client, path, run=name, file="metrics", split="train")
        assert status == 404
        assert "no run" in message


@pytest.mark.parametrize("address", ["/page/..%2fruns.py", "/page/../runs.py", "/page/%2e%2e/runs.py", "/page/x.js"])
def test_no_address_leads_out_of_the_page(client, address):
    answer = client.get(address)
    assert answer.status_code == 404
    assert "import" not in answer.text


@pytest.mark.parametrize(
    ("path", "query", "found"),
    [
        ("/api/rows", {"run": "tiny", "file": "../recipe.toml"}, "file is '../recipe.toml', expected one of"),
        ("/api/rows", {"run": "tiny", "file": "metrics", "after": "-1"}, "after is '-1', expected a whole number"),
        ("/api/rows", {"run": "tiny", "file": "metrics", "after": "9" * 99}, "expected a whole number"),
        ("/api/window", {"run": "tiny", "split": "test"}, "split is 'test', expected one of: train, val"),
        ("/api/window", {"run": "tiny", "split": "val", "number": "1e3"}, "number is '1e3', expected"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(client, path, query, found):
    status, message = refused(client, path, **query)
    assert status == 400
    assert found in message


def test_the_store_is_told_in_its_own_numbers_and_without_paths(client, run, sonnets):
    status, told = ask(client, "/api/store", run="tiny")
    assert status == 200
    assert told["fingerprint"] == sonnets.fingerprint
    assert (told["splits"]["train"]["tokens"], told["splits"]["val"]["tokens"]) == (
        len(sonnets.train),
        len(sonnets.val),
    )
    assert sum(one["documents"] for one in told["splits"]["train"]["histogram"]) == 7
    assert str(sonnets.folder) not in json.dumps(told)
    assert str(run) not in client.get("/api/runs").text


def test_windows_show_the_text_of_the_store_with_its_borders(client, sonnets):
    first = ask(client, "/api/window", run="tiny", split="train")[1]
    exact = excerpts(sonnets, "train", 64, 1)[0]
    assert any(part["begins"] for part in first["parts"])
    assert [part["text"] for part in first["parts"]] == [part.text for part in exact.parts]
    starts = {ask(client, "/api/window", run="tiny", split="train", number=number)[1]["start"] for number in range(8)}
    assert len(starts) > 4


def test_a_prompt_goes_through_the_checkpoints_in_their_order(client):
    body = {"run": "tiny", "prompt": "Shall", "max_tokens": 12, "temperature": 0, "seed": 1}
    rows = [json.loads(line) for line in client.post("/api/through", json=body).text.splitlines()]
    assert [row.get("step") for row in rows] == [None, 10, 20, 30, None]
    assert (rows[0], rows[-1]) == ({"checkpoints": 3}, {"done": True})
    assert all(0 < len(row["text"]) <= 12 for row in rows[1:-1])


def test_of_many_checkpoints_so_many_are_told_as_are_asked(client, monkeypatch):
    monkeypatch.setattr(through, "CHECKPOINTS", 2)
    rows = client.post("/api/through", json={"run": "tiny", "prompt": "a", "max_tokens": 1}).text.splitlines()
    assert json.loads(rows[0]) == {"checkpoints": 2}
    assert [json.loads(row)["step"] for row in rows[1:-1]] == [10, 30]


def test_a_prompt_through_a_checkpoint_is_what_sample_writes(client, run):
    from quatrain.commands.sample import sample

    body = {"run": "tiny", "prompt": "Shall", "max_tokens": 12, "temperature": 0.7, "seed": 5}
    last = client.post("/api/through", json=body).text.splitlines()[-2]
    alone = sample(run / "checkpoints" / "step_00000030", prompt="Shall", max_tokens=12, temperature=0.7, seed=5)
    assert json.loads(last)["text"] == alone["samples"][0]["text"]


def test_a_checkpoint_that_cannot_be_read_is_told_and_the_next_one_is_tried(run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "checkpoints" / "step_00000020" / "model.safetensors").unlink()
    client = TestClient(create_app(None, routes([broken])), base_url="http://127.0.0.1:8000")
    told = client.post("/api/through", json={"run": "broken", "prompt": "a", "max_tokens": 3}).text
    rows = [json.loads(line) for line in told.splitlines()]
    assert ["error" in row for row in rows[1:]] == [False, True, False, False]
    assert str(tmp_path) not in told


def test_a_prompt_that_the_vocabulary_cannot_spell_is_a_sentence_for_each(client):
    rows = client.post("/api/through", json={"run": "tiny", "prompt": "漢"}).text.splitlines()
    assert all("error" in json.loads(row) for row in rows[1:-1])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "the body is not JSON"),
        (b"[" * 50_000, "nested too deeply"),
        (b"[1]", "the body is list; expected an object"),
        ({"run": 3}, "run is 3, expected a text"),
        ({"run": "tiny", "max_tokens": MAX_TOKENS + 1}, "at most 256"),
        ({"run": "tiny", "max_tokens": -1}, "max_tokens is -1, it must be at least 0"),
        ({"run": "tiny", "max_tokens": True}, "max_tokens is True, expected a whole number"),
        ({"run": "tiny", "max_tokens": "12"}, "max_tokens is '12', expected a whole number"),
        ({"run": "tiny", "temperature": "0.5"}, "temperature is '0.5', expected a number"),
        ({"run": "tiny", "temperature": -0.5}, "temperature is -0.5, it must be at least 0"),
        ({"run": "tiny", "top_k": 5}, "no field 'top_k'"),
        ({"run": "tiny", "prompts": "a"}, "no field 'prompts' (did you mean 'prompt'?)"),
        (b'{"run": "tiny", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"run": "tiny", "prompt": "\\ud800"}', "expected a text"),
        ({"run": "tiny", "prompt": "a" * 20_000}, "at most 16,384"),
    ],
)
def test_a_wrong_request_for_through_is_refused_with_what_is_wrong(client, body, found):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/api/through", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert found in answer.json()["error"]["message"]


@pytest.fixture
def damaged(run, sonnets, tmp_path):
    """A run whose store, outside of its folder, opens, but has indices that say nothing and another tokenizer."""
    store = tmp_path / "stores" / "sonnets"
    shutil.copytree(sonnets.folder, store)
    for index in store.glob("*.idx*"):
        index.write_bytes(b"\xff" * index.stat().st_size)
    with (store / "tokenizer.json").open("a") as file:
        file.write(" ")
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    recipe = (run / "recipe.toml").read_text().replace(str(sonnets.folder), str(store))
    (tmp_path / "runs" / "broken" / "recipe.toml").write_text(recipe)
    return tmp_path / "runs" / "broken"


@pytest.mark.parametrize(
    ("path", "found"),
    [("/api/store", "sonnets: the index of train"), ("/api/window", "sonnets/tokenizer.json: sha256 is")],
)
def test_a_damaged_store_is_not_the_request_s_mistake_and_is_told_without_its_path(damaged, tmp_path, path, found):
    client = TestClient(create_app(None, routes([damaged])), base_url="http://127.0.0.1:8000")
    status, message = refused(client, path, run="broken", split="train", number=1)
    assert status == 500
    assert str(tmp_path) not in message
    assert message.startswith(found)


def test_an_unknown_run_for_through_is_404(client):
    answer = client.post("/api/through", json={"run": "tinny"})
    assert answer.status_code == 404
    assert "did you mean 'tiny'" in answer.json()["error"]["message"]


def test_of_many_checkpoints_the_first_and_the_last_are_among_those_taken():
    many = [(step, Path(str(step))) for step in range(100)]
    steps = [step for step, _ in thinned(many)]
    assert len(steps) == CHECKPOINTS
    assert (steps[0], steps[-1]) == (0, 99)
    assert thinned(many[:3]) == many[:3]


def test_through_stops_within_a_token_when_the_reader_leaves(run, monkeypatch):
    """The awaiting request is cancelled, as a server does; the thread that writes must end by itself."""
    state = {"writes": threading.Event(), "ended": threading.Event()}

    def endless(engine, tokenizer, ids, config, on_text):
        try:
            while True:
                on_text(0, "a")
                state["writes"].set()
                time.sleep(0.005)
        finally:
            state["ended"].set()

    monkeypatch.setattr(through, "write", endless)
    dashboard = Dashboard([run])

    async def leave() -> None:
        lines = dashboard._lines(run, parse(b'{"run": "tiny"}'))
        assert await anext(lines) == '{"checkpoints": 3}\n'
        task = asyncio.ensure_future(anext(lines))
        while not state["writes"].is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(leave(), 20))
    assert state["ended"].wait(5)


def test_a_reader_who_waits_for_another_may_leave_too(run):
    writer = Through()
    left = threading.Event()
    with writer._one_at_a_time:
        left.set()
        assert list(writer(run, parse(b'{"run": "tiny"}'), left)) == [{"checkpoints": 3}]


def test_a_run_that_has_not_begun_is_shown_as_empty(tmp_path):
    client = TestClient(create_app(None, routes([tmp_path / "soon"])), base_url="http://127.0.0.1:8000")
    assert ask(client, "/api/runs")[1]["runs"][0]["checkpoints"] == []
    assert ask(client, "/api/rows", run="soon", file="metrics")[1]["rows"] == []
    assert refused(client, "/api/store", run="soon")[0] == 404
    told = client.post("/api/through", json={"run": "soon"}).text.splitlines()
    assert [json.loads(line) for line in told] == [{"checkpoints": 0}, {"done": True}]


@pytest.mark.parametrize(
    "recipe", ["data = 5\n", '[data]\nseq_len = "x"\n', "[data]\nseq_len = inf\n[train]\nsteps = -1\n"]
)
def test_a_recipe_that_is_none_does_not_hide_the_other_runs(run, tmp_path, recipe):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "recipe.toml").write_text(recipe)
    client = TestClient(create_app(None, routes([tmp_path / "odd", run])), base_url="http://127.0.0.1:8000")
    status, answer = ask(client, "/api/runs")
    assert (status, [one["seq_len"] is None for one in answer["runs"]]) == (200, [True, False])
    assert refused(client, "/api/store", run="odd")[0] == 404
    assert refused(client, "/api/window", run="odd", split="train", number=0)[0] == 404
