import errno
import importlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quatrain import cli, console
from quatrain.recipes.resolve import options

COMMANDS = [
    *("prepare", "train", "evaluate", "sample", "serve", "inspect", "adopt", "export", "ablate", "plan", "recipes"),
    "demo",
]

# A model that trains in a blink: 6 steps of 4 windows of 16 ids.
TINY = [
    f"--{key}={value}"
    for key, value in {
        "model.n-layer": 1,
        "model.n-head": 2,
        "model.n-embd": 16,
        "model.block-size": 16,
        "data.seq-len": 16,
        "optim.warmup": 2,
        "train.steps": 6,
        "train.tokens-per-step": 64,
        "train.micro-batch": 2,
        "train.eval-every": 3,
        "train.save-every": 3,
        "train.samples": 1,
        "train.sample-tokens": 4,
        "train.precision": "fp32",
        "device": "cpu",
    }.items()
]


class Answer(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


def call(*words: object) -> Answer:
    """One command in this process, which keeps its signal handler and its console."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, handler)
        console.people_read_stderr(False)
    return Answer(code, out.getvalue(), err.getvalue())


def done(*words: object) -> Answer:
    """A command that must succeed."""
    answer = call(*words)
    assert answer.code == 0, answer.err
    return answer


def refused(*words: object) -> str:
    """The one message of a command that must end with exit 2 and leave the current folder as it is."""
    before = files_in(Path.cwd())
    answer = call(*words)
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("error: ") == 1
    assert "Traceback" not in answer.out + answer.err
    assert files_in(Path.cwd()) == before
    return answer.err


def files_in(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by relative path: a file's content, None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def full_after(count: int) -> Callable[[int], None]:
    """An `os.fsync` that succeeds so many times, and then finds the disk full."""
    left = iter(range(count))

    def fsync(descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")

    return fsync


def in_process(script: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a Python of its own."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ | environment, timeout=60)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_no_help_and_no_module_without_tensors_imports_torch():
    script = """
import sys, importlib
from quatrain.cli import main
for command in sys.argv[1].split():
    assert main([command, "--help"]) == 0, command
assert main(["--help"]) == main(["--version"]) == main(["recipes", "gpt2"]) == main([]) == 0
assert main(["train", "gpt2", "--lr", "3"]) == 2
for name in "text.sources text.tokenizers text.split tokens.store tokens.order tokens.writer model.config".split():
    importlib.import_module("quatrain." + name)
print("torch" in sys.modules)
"""
    process = in_process(script, " ".join(COMMANDS))
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_sentence_for_every_flag(command):
    text = done(command, "--help").out
    assert text.startswith(f"Usage: quatrain {command}")
    function = getattr(importlib.import_module(f"quatrain.commands.{command}"), command)
    for name in inspect.signature(function).parameters:
        if name == "settings":  # taken whole; `train --help` has their table
            continue
        assert re.search(rf"(--{name.replace('_', '-')}|{name.upper()})\b", text), name
        assert re.search(rf"^ *{name}\n +\w", function.__doc__, re.MULTILINE), name


def test_help_of_train_lists_every_setting_with_sentence_unit_and_default():
    text = " ".join(done("train", "--help").out.split())
    for option in options():
        default = "" if option.default == "" else f" ({option.default!r})"
        unit = f" [{option.unit}]" if option.unit else ""
        assert f"--{option.key} {option.sentence}{unit}{default}" in text


def test_version_is_the_packages():
    import quatrain

    assert done("--version").out == f"{quatrain.__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluat", "RUN"], 'Did you mean "evaluate"?'),
        (["nonsense"], "Available commands: prepare"),
        (["train"], "quatrain train --help"),
        (["prepare", "corpus:sonnets"], "--out requires an argument"),
        (["prepare", "corpus:sonnets", "--out", "S", "--tokeniser", "char"], "did you mean '--tokenizer'?"),
        (["prepare", "corpus:sonnets", "--out", "S", "--workers", "many"], '"many"'),
        (["evaluate", "RUN", "--split", "test"], 'Choose from: "val", "train"'),
        (["sample", "RUN", "--temprature", "1"], "did you mean '--temperature'?"),
        (["demo", "--output", "x"], "no option --output (did you mean '--out'?)"),
        (["recipes", "gpt2", "sonnets"], "quatrain recipes --help"),
    ],
)
def test_case_61_a_mistyped_command_or_flag_is_exit_2_and_says_what_there_is(words, expected):
    assert expected in refused(*words)


@pytest.mark.parametrize(
    "words",
    [["recipes", "nope"], ["nonsense"], ["prepare", "nope.txt", "--out", "S"], ["evaluate", "nope"]],
)
def test_json_tells_of_an_error_too(words):
    answer = call(*words, "--json")
    assert answer.code == 2
    assert answer.json == {"error": answer.err.removeprefix("error: ").rstrip("\n"), "exit": 2}
    assert answer.out.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_where_no_work_is_saved_is_one_message_and_its_code(monkeypatch, number, code):
    def stopped(text: str, end: str = "\n") -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("quatrain.commands.recipes.say", stopped)
    answer = call("recipes")
    assert answer.code == code
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("error: ")


@pytest.mark.parametrize("words", [["recipes", "gpt2"], ["recipes", "gpt2", "--json"]])
def test_a_reader_that_has_gone_ends_the_command_without_a_traceback(words):
    gone, output = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "quatrain", *words]
    process = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(output)
    assert process.returncode == 141
    assert "Traceback" not in process.stderr
    assert "Error" not in process.stderr


UNICODE = "Übergroße naïve Ωmega – “日本語” 🙂\n" * 20


def test_case_54_c_locale_text_in_output_and_file_names_is_utf_8():
    Path("gedichte_ü.txt").write_text(UNICODE, encoding="utf-8")
    script = """
import sys
from quatrain.cli import main
assert main(["prepare", "gedichte_ü.txt", "--out", "S", "--tokenizer", "char", "--val-tail", "0.2"]) == 0
assert main(["inspect", "S", "--windows", "1"]) == 0
assert main(["prepare", "fehlt_ü.txt", "--out", "T", "--json"]) == 2
"""
    process = in_process(script, LC_ALL="C")
    assert process.returncode == 0, process.stderr
    assert f"│ {UNICODE.splitlines()[0]}\n" in process.stdout
    assert json.loads(process.stdout.splitlines()[-1])["error"].startswith("fehlt_ü.txt: ")
    assert "gedichte_ü.txt" in Path("S/store.json").read_text(encoding="utf-8")


def test_case_54_files_never_depend_on_the_locales_encoding():
    Path("text.txt").write_text(UNICODE, encoding="utf-8")
    prepare = ["prepare", "text.txt", "--tokenizer", "char", "--val-tail", "0.2", "--json"]
    script = "import sys; from quatrain.cli import main; sys.exit(main(sys.argv[1:]))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = in_process(script, *prepare, "--out", "A", **ascii_only)
    assert process.returncode == 0, process.stderr
    done(*prepare, "--out", "B")
    assert files_in(Path("A")) == files_in(Path("B"))


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "cp1252"}],
)
def test_case_54_output_is_utf_8_in_every_locale(environment):
    Path("text.txt").write_text(UNICODE, encoding="utf-8")
    script = """
from quatrain.cli import main
assert main(["prepare", "text.txt", "--out", "S", "--tokenizer", "char", "--val-tail", "0.2"]) == 0
assert main(["inspect", "S", "--windows", "1"]) == 0
"""
    process = in_process(script, **environment)
    assert process.returncode == 0, process.stderr
    assert "“日本語” 🙂" in process.stdout


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "--json"], ["recipes", "gpt2"]])
def test_a_full_disk_behind_stdout_is_one_message(words):
    command = [sys.executable, "-m", "quatrain", *words]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "error: standard output: No space left on device"
    assert "Traceback" not in process.stderr


def test_the_last_of_two_equal_flags_wins():
    done("prepare", "corpus:sonnets", "--val-docs", "1", "--out", "S", "--val-docs", "7")
    assert json.loads(Path("S/store.json").read_text(encoding="utf-8"))["split"]["indices"] == [7]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_are_words_also_under_json(words):
    assert done(*words, "--json").out == done(*words).out


@pytest.mark.parametrize("tokenizer", ["char", "bytes", "gpt2"])
def test_the_four_lines_from_text_to_a_sample_give_the_same_again(tokenizer):
    texts = [f"{number} bottles of “beer” on the wall, take {number % 3} down" for number in range(40)]
    Path("songs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    told = []
    for folder in ("first", "second"):
        prepare = ["songs.jsonl", "--tokenizer", tokenizer, "--val-docs", "3,30", "--out", f"{folder}/store"]
        train = ["sonnets", "--data", f"{folder}/store", "--out", f"{folder}/run", *TINY]
        prompt = ["--prompt", "9 bottles", "--max-tokens", "5", "--n", "2"]
        prepared = done("prepare", *prepare, "--json").json
        trained = done("train", *train, "--json").json
        scored = done("evaluate", f"{folder}/run", "--json").json
        drawn = done("sample", f"{folder}/run", *prompt, "--json").json
        assert (prepared["documents"], trained["step"]) == (40, 6)
        assert scored["loss"] == pytest.approx(trained["val_loss"])
        assert scored["tokens"] == prepared["val_tokens"] - 1
        told.append([prepared["fingerprint"], trained["train_loss"], scored["loss"], drawn["samples"]])
    assert told[0] == told[1]


def test_ctrl_c_before_anything_is_imported_is_no_traceback():
    script = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from quatrain.__main__ import main
sys.exit(main())
"""
    process = in_process(script)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")
