"""Whatever stops `prepare`, the same command gives, byte for byte, the store of a run that nothing disturbed."""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from dying import DEAD

OPTIONS = ["--tokenizer", "bytes", "--val-fraction", "0.1", "--shard-size", "30000", "--skip-bad", "--shuffle", "1"]
WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 9)) for n in range(900)]


class End(NamedTuple):
    """How a child of `dying.py` ended."""

    code: int
    calls: int
    said: str


class Runner:
    """`dying.py` at work, perhaps inside a namespace of its own."""

    def __init__(self, *before: str) -> None:
        command = [*before, sys.executable, str(Path(__file__).with_name("dying.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: object) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def together(self, *runs: tuple[Sequence[object], int]) -> list[End]:
        return [End(*end) for end in self.ask([[[str(word) for word in words], fatal] for words, fatal in runs])]

    def run(self, *words: object, fatal: int = 0) -> End:
        return self.together((words, fatal))[0]

    def done(self, *words: object) -> End:
        end = self.run(*words)
        assert end.code == 0, end.said
        return end

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


def documents(draw: random.Random, count: int) -> list[object]:
    """Texts of many lengths; some are empty, equal, near one before or no text at all."""
    found: list[object] = []
    for _ in range(count):
        kind = draw.random()
        text = " ".join(draw.choices(WORDS, k=1 + int(draw.expovariate(1 / 40))))
        if kind < 0.05:
            text = ""
        elif kind < 0.2 and found:
            text = draw.choice(found)  # equal to one before
            text = text + " and more" if isinstance(text, str) and kind < 0.12 else text
        found.append(None if kind > 0.98 else text)
    return found


def corpus(folder: Path, count: int) -> list[Path]:
    """Sources of all kinds, with `count` documents in the first."""
    folder.mkdir()
    draw = random.Random(count)
    lines = [
        "".join(json.dumps({"text": text}) + "\n" for text in documents(draw, some)) for some in (count, count // 2)
    ]
    (folder / "a.jsonl").write_text(lines[0] + "no JSON\n\n")
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines[1].encode()))
    table = pa.table({"text": pa.array(documents(draw, count // 2), pa.string())})
    pq.write_table(table, folder / "c.parquet", row_group_size=max(1, count // 15))
    for number in range(3):
        (folder / f"d{number}.txt").write_text(" ".join(draw.choices(WORDS, k=count * (number + 1) // 3)))
    return sorted(folder.iterdir())


def files(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


class Whole(NamedTuple):
    """A corpus, the command that prepares it, and the store that nothing disturbed."""

    words: list[object]
    store: dict[str, bytes | None]
    calls: int

    def into(self, out: Path, workers: int = 1) -> list[object]:
        return [*self.words, "--out", out, "--workers", workers]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Whole:
    home = tmp_path_factory.mktemp("faults")
    words = ["prepare", *corpus(home / "sources", 250), *OPTIONS]
    end = runner.done(*words, "--out", home / "store")
    return Whole(words, files(home / "store"), end.calls)


def test_the_undisturbed_store_holds_something_of_every_kind(whole, tmp_path):
    facts = json.loads(whole.store["store.json"] or b"")
    assert set(facts["skipped"]) == {"not JSON", "text is no string"}
    assert all(facts["counts"][kind] for kind in ("empty", "duplicates", "near_validation", "skipped"))
    assert min(len(split["shards"]) for split in facts["splits"].values()) >= 1
    assert len(facts["splits"]["train"]["shards"]) > 1
    # Neither the constants nor the process decide what it is.
    command = [sys.executable, "-m", "quatrain", *map(str, whole.into(tmp_path / "store", 3))]
    subprocess.run(command, check=True, capture_output=True)
    assert files(tmp_path / "store") == whole.store


def killed_and_finished(runner: Runner, whole: Whole, out: Path, fatal: Sequence[int], workers: int) -> None:
    for number in fatal:
        end = runner.run(*whole.into(out, workers), fatal=number)
        assert end.code in (0, DEAD), end.said
    runner.done(*whole.into(out, workers % 3 + 1))
    assert files(out) == whole.store, fatal


def test_killed_at_any_call_the_same_command_gives_the_same_store(runner, whole, tmp_path):
    assert whole.calls > 120
    for number in range(2, whole.calls + 1, whole.calls // 8):
        killed_and_finished(runner, whole, tmp_path / f"{number}", [number, 1 + number * 7 % 31], 1 + number % 4)


@pytest.mark.soak
def test_killed_at_every_call(runner, whole, tmp_path):
    for number in range(1, whole.calls + 1):
        killed_and_finished(runner, whole, tmp_path / f"{number}", [number], 1)


def test_a_tail_cut_off_by_a_run_that_was_killed_is_cut_once(runner, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(random.Random(1).choices(WORDS, k=4000)))  # more than a part holds
    words = ["prepare", text, "--val-tail", "0.1", "--tokenizer", "char", "--out"]
    calls = runner.done(*words, tmp_path / "store").calls
    for number in range(1, calls + 1, 3):
        out = tmp_path / f"{number}"
        assert runner.run(*words, out, fatal=number).code == DEAD
        runner.done(*words, out)
        assert files(out) == files(tmp_path / "store"), number


def test_tasks_that_run_at_once_and_are_killed_give_the_same_store(runner, whole, tmp_path):
    out = tmp_path / "store"
    tasks = [[*whole.into(out, 2), "--task", f"{number}/3"] for number in range(3)]
    ends = runner.together(*((task, fatal) for task, fatal in zip(tasks, (9, 14, 18), strict=True)))
    assert [end.code for end in ends] == [DEAD] * 3, ends
    ends = runner.together(*((task, 0) for task in tasks))
    assert [end.code for end in ends] == [0] * 3, ends
    assert runner.run(*whole.into(out), "--finish", fatal=30).code == DEAD
    runner.done(*whole.into(out), "--finish")
    assert files(out) == whole.store
    for again in (*tasks, [*whole.into(out), "--finish"], whole.into(out)):  # a queue may start a task twice
        assert "already holds the store of this request" in runner.done(*again).said
    assert files(out) == whole.store


def test_finish_names_a_task_that_is_missing_and_removes_nothing(runner, whole, tmp_path):
    out = tmp_path / "store"
    nothing = runner.run(*whole.into(out), "--finish")
    assert nothing.code == 2
    assert "units of the input are not tokenized yet; run the tasks first, such as --task 0/8" in nothing.said
    assert not out.exists()
    for number in (0, 2):
        runner.done(*whole.into(out), "--task", f"{number}/3")
    before = files(out / "parts")
    end = runner.run(*whole.into(out), "--finish")
    assert end.code == 2
    assert "units of the input are not tokenized yet; run --task 1/3 first, or leave --finish out" in end.said
    assert files(out / "parts") == before
    runner.done(*whole.into(out), "--task", "1/3")
    runner.done(*whole.into(out), "--finish")
    assert files(out) == whole.store


def test_without_tasks_the_same_command_takes_over_what_tasks_have_done(runner, whole, tmp_path):
    out = tmp_path / "store"
    assert runner.run(*whole.into(out), "--task", "1/3", fatal=20).code == DEAD
    runner.done(*whole.into(out), "--task", "0/2")  # shares of another size
    runner.done(*whole.into(out))
    assert files(out) == whole.store


def spoil(path: Path, how: str, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_spoiled_part_is_made_again(runner, whole, tmp_path, how):
    draw = random.Random(how)
    for number in range(3):
        out = tmp_path / f"{number}"
        assert runner.run(*whole.into(out), fatal=whole.calls // 2).code == DEAD
        spoil(draw.choice(sorted((out / "parts").glob("*.part"))), how, draw)
        runner.done(*whole.into(out))
        assert files(out) == whole.store


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_spoiled_part_of_a_task_is_seen_by_finish_and_made_again_by_the_task(runner, whole, tmp_path, how):
    draw, out = random.Random(how), tmp_path / "store"
    for number in range(2):
        runner.done(*whole.into(out), "--task", f"{number}/2")
    part = draw.choice(sorted((out / "parts").glob("*.part")))
    spoil(part, how, draw)
    end = runner.run(*whole.into(out), "--finish")
    task = f"--task {int(part.name[:6]) % 2}/2"
    assert end.code == 2
    assert f"1 units of the input are not tokenized yet; run {task} first" in end.said
    runner.done(*whole.into(out), *task.split())
    runner.done(*whole.into(out), "--finish")
    assert files(out) == whole.store


@pytest.mark.soak
def test_killed_at_50_random_moments(tmp_path):
    """By the system, and with the program's own constants, on about 30 MB."""
    draw = random.Random(50)
    sources = corpus(tmp_path / "sources", 60_000)
    options = ["--tokenizer", "gpt2", "--val-fraction", "0.01", "--shard-size", "1000000", "--skip-bad"]
    command = [sys.executable, "-m", "quatrain", "prepare", *map(str, sources), *options]
    began = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    seconds = time.monotonic() - began
    expected, kills = files(tmp_path / "whole"), 0
    while kills < 50:
        for _ in range(draw.randrange(1, 4)):
            words = [*command, "--out", str(tmp_path / "store"), "--workers", f"{draw.randrange(1, 5)}"]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(draw.random() * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
        subprocess.run([*command, "--out", str(tmp_path / "store")], check=True, capture_output=True)
        assert files(tmp_path / "store") == expected
        shutil.rmtree(tmp_path / "store")
    print(f"{kills} kills on {sum(path.stat().st_size for path in sources):,} bytes; undisturbed {seconds:.1f} s")


@pytest.fixture(scope="module")
def namespace() -> Iterator[Runner]:
    """A runner that may mount; nobody else sees what."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces: unshare --user --mount is not allowed here")
    runner = Runner(*inside)
    yield runner
    runner.close()


def full_and_finished(namespace: Runner, whole: Whole, folder: Path, limit: str) -> str:
    """Prepare onto a disk that is too small, then on the same one, grown. The place at which it was full."""
    folder.mkdir(exist_ok=True)
    out = folder / "store"
    assert namespace.ask(f"mount -t tmpfs -o {limit} none '{folder}'") == 0
    end = namespace.run(*whole.into(out, 2))
    assert end.code == 1, (limit, end)  # -7 would be SIGBUS
    *_, told = end.said.strip().split("\n")
    assert end.said.count("error: ") == 1
    assert "Traceback" not in end.said
    reason = r"(cannot write( [\d,]+ bytes)?: No space left on device|[\d,]+ bytes are needed .*, and [\d,]+ are free)"
    match = re.fullmatch(rf"error: {re.escape(str(out))}(\S*): {reason}; make room or choose .*", told)
    assert match, end.said
    assert namespace.ask(f"mount -o remount,size=64m,nr_inodes=1000 '{folder}'") == 0
    namespace.done(*whole.into(out, 2))
    copy = folder.with_name("copy")  # only the namespace sees what is mounted
    assert namespace.ask(f"rm -rf '{copy}' && cp -r '{out}' '{copy}' && umount '{folder}'") == 0
    assert files(copy) == whole.store
    return match[1] or re.sub(r"[\d,]", "", match[2])


def test_on_a_full_disk_one_message_says_so_and_the_same_command_goes_on(namespace, whole, tmp_path):
    limits = ("size=164k", "size=364k", "nr_inodes=18")
    places = [full_and_finished(namespace, whole, tmp_path / "full", limit) for limit in limits]
    assert re.fullmatch(r"/parts/\d+_\d+\.part", places[0])
    assert "needed for the shards" in places[1]
    assert places[2] == "/a_train_000000.bin"


@pytest.mark.soak
def test_full_at_every_point(namespace, whole, tmp_path):
    limits = [*(f"size={size}k" for size in range(4, 600, 40)), *(f"nr_inodes={number}" for number in range(2, 25))]
    places = {full_and_finished(namespace, whole, tmp_path / "full", limit) for limit in limits}
    assert len(places) > 10, places
