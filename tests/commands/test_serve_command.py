import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quatrain.web.listening import Server, listen
from quatrain.web.serving import Serving
from served import Site
from test_cli import TINY, call, done, refused


@pytest.fixture(scope="module")
def run(sonnets, tmp_path_factory):
    """A tiny run on the sonnets; its model sees 16 ids."""
    folder = tmp_path_factory.mktemp("serve") / "first"
    done("train", "sonnets", "--data", sonnets.folder, "--out", folder, *TINY)
    return folder


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUATRAIN_TOKEN", raising=False)


@pytest.fixture
def visited(monkeypatch):
    """What happens while the command serves, in place of waiting for a signal: requests, and then the end."""

    def during(visit):
        def here(self):
            port = self._sock.getsockname()[1]
            self.beside()
            visit(Site(port, None))
            self.end()

        monkeypatch.setattr(Server, "here", here)

    return during


def test_a_run_answers_as_sample_does(run, visited):
    found = {}

    def visit(site):
        found["url"] = f"{site.url}/"
        found["models"] = site.ask("/v1/models").json["data"]
        found["answer"] = site.ask(fields={"prompt": "Shall", "n": 2, "max_tokens": 6, "seed": 42}).json

    visited(visit)
    answer = done("serve", run, "--port", "0")
    samples = done("sample", run, "--prompt", "Shall", "--n", "2", "--max-tokens", "6", "--json").json["samples"]
    assert [choice["text"] for choice in found["answer"]["choices"]] == [sample["text"] for sample in samples]
    (model,) = found["models"]
    assert (model["id"], model["checkpoint"], model["block_size"]) == ("first", "step_00000006", 16)
    assert model["created"] > 0
    url = found["url"]
    assert answer.out == f"first (step_00000006, fp32) at {url}\ncompletions: {url}v1/completions; Ctrl-C ends\n"


def test_every_limit_is_an_option(run, visited):
    statuses = []

    def visit(site):
        for fields in ({"n": 3}, {"max_tokens": 31}, {"prompt": "x" * 300}, {"n": 2, "prompt": ["a", "b"]}, {}):
            statuses.append(site.ask(fields={"prompt": "S"} | fields).status)

    visited(visit)
    words = ["--slots", "1", "--queue", "0", "--samples", "2", "--max-tokens", "30", "--max-body", "200"]
    done("serve", run, "--port", "0", *words, "--timeout", "60", "--body-timeout", "5")
    assert statuses == [400, 400, 413, 400, 200]


def test_a_token_of_the_environment_is_asked_for_and_stands_in_the_address(run, visited, monkeypatch):
    monkeypatch.setenv("QUATRAIN_TOKEN", "sesame")
    seen = []
    visited(lambda site: seen.extend([site.ask("/v1/models").status, site.ask("/?token=sesame").status]))
    told = done("serve", run, "--port", "0", "--host", "0.0.0.0", "--allow-host", "gpu7").out
    assert seen == [401, 303]
    assert "/?token=sesame\n" in told
    assert "http://127.0.0.1:" in told


def test_a_token_of_any_signs_is_one_that_the_printed_address_brings(run, visited):
    token, seen = "a+b&c=%20#?/ d", []
    visited(lambda site: seen.append(site.port))
    told = done("serve", run, "--port", "0", "--token", token).out
    printed = urlsplit(told.splitlines()[0].split()[-1])
    visited(lambda site: seen.append(site.ask(f"/?{printed.query}").status))
    done("serve", run, "--port", "0", "--token", token)
    assert seen[1:] == [303]


def test_a_checkpoint_speaks_and_its_run_is_shown(run, visited):
    found = []
    visited(lambda site: found.extend(site.ask("/api/runs").json["runs"]))
    done("serve", run / "checkpoints" / "step_00000006", run, "--port", "0")
    assert [one["name"] for one in found] == ["first"]


def test_documents_are_apart_where_the_run_trained_them_so(sonnets, tmp_path, visited, monkeypatch):
    out = tmp_path / "documents"
    done("train", "sonnets", "--data", sonnets.folder, "--out", out, *TINY, "--data.packing", "document")
    engines = []
    visited(lambda site: None)
    before = Serving.start
    monkeypatch.setattr(Serving, "start", lambda self: (engines.append(self._engine), before(self))[1])
    done("serve", out, "--port", "0")
    assert engines[0].restart == sonnets.tokenizer.eot


def test_documents_run_into_each_other_where_windows_did(run, visited, monkeypatch):
    engines = []
    visited(lambda site: None)
    before = Serving.start
    monkeypatch.setattr(Serving, "start", lambda self: (engines.append(self._engine), before(self))[1])
    done("serve", run, "--port", "0")
    assert engines[0].restart is None


def test_an_engine_that_is_gone_ends_the_command_with_1(run, visited, monkeypatch):
    def visit(site):
        for _ in range(3):
            assert site.ask(fields={"prompt": "S"}).status == 500
        assert site.ask("/healthz").status == 503

    def never(self, *words):
        raise RuntimeError("no device")

    monkeypatch.setattr("quatrain.inference.engine.Engine.prefill", never)
    visited(visit)
    answer = call("serve", run, "--port", "0")
    assert answer.code == 1
    assert answer.err.count("error: the engine failed (RuntimeError: no device)") == 3
    assert answer.err.endswith("error: the engine failed again and again; what went wrong stands above\n")
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets others in: give a token with --token or QUATRAIN_TOKEN"),
        (["--host", "gpu7.example"], "lets others in"),
        (["--token", ""], "the token must be printable ASCII"),
        (["--token", "gr\u00fcn"], "the token must be printable ASCII"),
        (["--port", "70000"], "--port is 70000, it must be in 0 .. 65535"),
        (["--port=-1"], "--port is -1, it must be in 0 .. 65535"),
        (["--slots", "0"], "--slots is 0, it must be above 0"),
        (["--queue=-1"], "--queue is -1, it must be at least 0"),
        (["--timeout", "nan"], "--timeout is nan, it must be above 0"),
        (["--max-body", "0", "--samples", "0"], "2 mistakes"),
        (["nowhere"], "nowhere: no such run; the folders behind the first are runs whose curves are shown"),
        (["--slots", "1000000000000"], "no engine with --slots 1000000000000: "),
        (["--allow-host", "https://tunnel.example"], "--allow-host https://tunnel.example is no name of a host"),
        (["--device", "tpu"], "device 'tpu' is not on this machine"),
        (["--prot", "1"], "did you mean '--port'?"),
    ],
)
def test_wrong_input_is_exit_2_and_one_message(run, words, expected):
    words = words if "--port" in str(words) else [*words, "--port", "0"]
    assert expected in refused("serve", run, *words)


def test_a_port_in_use_is_exit_2_and_named(run):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        expected = f"port {port} of 127.0.0.1 is in use; give another with --port (0: one that is free)"
        assert expected in refused("serve", run, "--port", port)


def test_a_run_that_is_not_there_is_told():
    assert "nope: no such run or checkpoint folder" in refused("serve", "nope", "--port", "0")


@pytest.fixture
def swapped(run, tmp_path_factory):
    """A checkpoint whose tokenizer.json is that of another data set."""
    folder = tmp_path_factory.mktemp("swapped") / "step_00000006"
    folder.mkdir()
    for path in (run / "checkpoints" / "step_00000006").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    vocabulary = json.loads((folder / "tokenizer.json").read_bytes())
    names = vocabulary["model"]["vocab"]
    names["~"] = names.pop("S")  # as many ids, other characters
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["sample"]])
def test_case_59_a_checkpoint_with_another_tokenizer_than_its_own_is_refused(swapped, command):
    expected = "step_00000006: tokenizer.json is not what its manifest says; take another checkpoint of the run"
    assert expected in refused(command[0], swapped, *command[1:])


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["sample"]])
def test_case_59_the_tokenizer_s_hash_of_the_trainer_counts_where_there_is_no_manifest(swapped, command):
    (swapped / "manifest.json").unlink()
    assert "step_00000006: its tokenizer.json is not the one" in refused(command[0], swapped, *command[1:])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_tells_those_who_wait_and_is_the_exit_code(run, number, code):
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from quatrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "serve", str(run), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with contextlib.closing(process.stdout), contextlib.closing(process.stderr):
        url = process.stderr.readline().split()[-1]
        process.stderr.readline()
        # A penalty makes the characters take turns: the sample does not end for a long time.
        fields = {"prompt": "S", "max_tokens": 8000, "sliding": True, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            url + "v1/completions", json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.readline().startswith(b"data: ")
            process.send_signal(number)
            last = reply.read().decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith("the server is ending")
        assert process.wait(30) == code
        told = "ended by a signal; requests under way were told"
        assert process.stderr.read() == f"error: {told}\n"
        assert json.loads(process.stdout.read()) == {"error": told, "exit": code}


# train --serve


def test_training_that_is_shown_ends_with_the_same_weights(run, sonnets, tmp_path, monkeypatch):
    """Visited all the while, from beginning to end."""
    from quatrain.web import listening

    answers, beside = [], Server.beside

    def visited(self):
        beside(self)
        site = Site(self._sock.getsockname()[1], None)
        answers.append(site.ask("/healthz").json)
        answers.append(site.ask(fields={"prompt": "x"}).status)

    monkeypatch.setattr(listening.Server, "beside", visited)
    shown = done("train", "sonnets", "--data", sonnets.folder, "--out", tmp_path / "shown", *TINY, "--serve", "0")
    assert answers == [{"status": "ok", "model": None}, 404]
    for path in (run / "checkpoints").rglob("*.safetensors"):
        assert (tmp_path / "shown" / path.relative_to(run)).read_bytes() == path.read_bytes()
    url = next(line.split()[-1] for line in shown.out.splitlines() if line.startswith("the run's page: "))
    with pytest.raises(urllib.error.URLError):  # it ended with the training
        urllib.request.urlopen(url, timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "server"]


def test_a_port_in_use_is_told_before_anything_is_trained(sonnets):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        words = ["train", "sonnets", "--data", sonnets.folder, "--out", "new", *TINY, "--serve", port]
        assert f"port {port} of 127.0.0.1 is in use; give another with --serve" in refused(*words)
        assert not Path("new").exists()


def test_without_a_number_the_page_is_at_the_usual_port(sonnets, monkeypatch):
    asked = []

    @contextlib.contextmanager
    def noted(run, port):
        asked.append(port)
        yield "http://nowhere/"

    monkeypatch.setattr("quatrain.commands.train.live", noted)
    words = ["train", "sonnets", "--data", sonnets.folder, "--out", "new", *TINY]
    done(*words, "--stop-at", "0", "--serve")
    done(*words, "--stop-at", "0", "--serve", "9000")
    monkeypatch.setenv("RANK", "1")
    done(*words, "--stop-at", "0", "--serve")
    assert asked == [8000, 9000]
    assert "unable to convert" in refused(*words, "--serve", "here")


def test_a_socket_is_free_again_behind_the_command(run, visited):
    ports = []
    visited(lambda site: ports.append(site.port))
    done("serve", run, "--port", "0")
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
