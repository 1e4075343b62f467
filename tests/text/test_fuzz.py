"""Whatever bytes a source holds: one message or a store, never a traceback or a hang, and no document lost silently."""

import gzip
import io
import json
import random
import shutil
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from quatrain.text import compressed, lines, parquet, reading
from test_cli import call

SECONDS = 10
LONGEST = 2000  # --max-line-bytes, --max-document-bytes

Texts = list[str]


class Truth(NamedTuple):
    """What a file holds: its texts (empty ones included) and how many rows are none; bad is None if unknown."""

    texts: Texts
    bad: int | None


class Input(NamedTuple):
    """A file and, where it is known, what it holds."""

    name: str
    data: bytes
    truth: Truth | None
    options: tuple[str, ...] = ()


# Documents


def text_of(draw: random.Random) -> str:
    kind = draw.randrange(12)
    if kind == 0:
        return ""
    if kind == 1:
        return draw.choice(["\0", "\ufeffbom", "\u2028\x85\x0b", "<|endoftext|>", "\r\n\r", " " * 50, "\t", "é😀"])
    if kind == 2:
        return chr(draw.randrange(1, 0xD800)) * draw.randrange(1, LONGEST)
    return "".join(draw.choices("abc de\nfé", k=int(draw.expovariate(1 / 60))))


def texts_of(draw: random.Random) -> Texts:
    return [text_of(draw) for _ in range(draw.choice([0, 1, 2, 3, 10, 40, 40]))]


# JSON lines: what a line is worth is told by this reader of single lines alone


def line_of(draw: random.Random, text: str) -> bytes:
    strange: list[Callable[[], bytes]] = [
        lambda: b"[" * draw.choice([10, 1000, 100_000]) + b"1",
        lambda: b'{"text": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5001,
        lambda: b'{"text": "x", "n": ' + b"9" * draw.choice([400, 5000]) + b"}",
        lambda: b'{"text": "x", "n": 1e999999}',
        lambda: b'{"text": NaN}',
        lambda: json.dumps({"text": draw.choice([None, 7, True, [], {}, [text]])}).encode(),
        lambda: json.dumps({draw.choice(["txt", "", "\ud800", "k" * 3000]): text}).encode(),
        lambda: b'{"text": "a", "text": "b"}',
        lambda: b'{"text": "\\ud800 \\udfff\\ud83d\\ude00"}',
        lambda: b'{"text": "\x00"}',
        lambda: b'{"text": "\xff\xfe"}',
        lambda: b"\xef\xbb\xbf" + json.dumps({"text": text}).encode(),
        lambda: json.dumps({"text": text}).encode("utf-16"),
        lambda: b" \t\r",
        lambda: b"\0",
        lambda: b"x" * draw.choice([LONGEST, LONGEST + 1, 3 * LONGEST]),
        lambda: json.dumps({"text": "y" * (LONGEST + draw.randrange(-30, 10))}).encode(),
        lambda: json.dumps(text).encode(),
    ]
    return draw.choice(strange)()


def json_lines(draw: random.Random, texts: Texts) -> bytes:
    made = []
    for text in texts:
        plain = json.dumps({"id": 1, "text": text}, ensure_ascii=draw.random() < 0.5).encode()
        made.append(line_of(draw, text) if draw.random() < 0.15 else plain)
    ends = draw.choice([[b"\n"], [b"\r\n"], [b"\n", b"\r\n", b"\n\n", b"\r", b" \n"]])
    return b"".join(line + draw.choice(ends) for line in made)


def text_of_line(line: bytes) -> str | None:
    """The text of one line, or None if it is bad."""
    if len(line) > LONGEST or line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    try:
        found = json.loads(line.decode("utf-8-sig"))
        text = found["text"] if isinstance(found, dict) else None
    except (ValueError, RecursionError, KeyError):
        return None
    if not isinstance(text, str):
        return None
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole if len(whole.encode()) <= LONGEST else None


def truth_of_lines(data: bytes) -> Truth:
    found = [text_of_line(line) for line in data.split(b"\n") if line.strip()]
    return Truth([text for text in found if text is not None], found.count(None))


def truth_of_text(data: bytes) -> Truth:
    bad = len(data) > LONGEST or data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        bad = True
    return Truth([], 1) if bad else Truth([text], 0)


# Mutations of bytes


def mutated(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(changed) + 1)
        end = min(len(changed), place + draw.choice([1, 4, 100]))
        kind = draw.randrange(6)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place:place] = draw.choice([b"\0", b"\n", b"\r\n", b'"', b"\xff", b"{}", draw.randbytes(9)])
        elif kind == 3:
            changed[place:place] = changed[place:end] * draw.choice([1, 30])
        elif kind == 4:
            del changed[place:end]
        else:
            changed[place:end] = draw.randbytes(end - place)
    return bytes(changed)


# Files


def lines_input(draw: random.Random, texts: Texts) -> Input:
    data = json_lines(draw, texts)
    if draw.random() < 0.5:
        data = mutated(draw, data)
    return Input("a.jsonl", data, truth_of_lines(data))


def text_input(draw: random.Random, texts: Texts) -> Input:
    data = draw.choice(["", "\ufeff"]).join(texts).encode(draw.choice(["utf-8", "utf-8", "utf-16", "utf-16-be"]))
    if draw.random() < 0.5:
        data = mutated(draw, data)
    return Input("a.txt", data, truth_of_text(data))


def packed(draw: random.Random, plain: Input) -> Input:
    """The same in .gz or .zst, perhaps in several frames, perhaps cut or damaged."""
    ending = draw.choice([".gz", ".zst"])
    compress = gzip.compress if ending == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    border = draw.randrange(len(plain.data) + 1)
    frames = [plain.data] if draw.random() < 0.7 else [plain.data[:border], b"", plain.data[border:]]
    data = b"".join(compress(frame) for frame in frames)
    name, kind = plain.name + ending, draw.randrange(5)
    if kind < 2:  # cut inside its only frame: what comes before is whole
        data = compress(plain.data)
        data = data[: draw.randrange(max(0, len(data) - draw.choice([9, len(data)])), len(data))]
        return Input(name, data, truth_of_cut(plain.name, began(ending, data)))
    if kind == 2:
        return Input(name, mutated(draw, data), None)
    return Input(name, data, plain.truth)


def began(ending: str, data: bytes) -> bytes:
    """What the first bytes of a frame give."""
    decompressor = zlib.decompressobj(31) if ending == ".gz" else zstandard.ZstdDecompressor().decompressobj()
    return decompressor.decompress(data) if data else b""


def truth_of_cut(name: str, data: bytes) -> Truth:
    if name == "a.txt":
        return Truth([], 1)
    whole = truth_of_lines(data[: data.rfind(b"\n") + 1])
    return Truth(whole.texts, (whole.bad or 0) + 1)


def bomb(draw: random.Random, texts: Texts) -> Input:
    ending = draw.choice([".gz", ".zst"])
    compress = gzip.compress if ending == ".gz" else zstandard.compress
    data = compress(draw.choice([b"\0", b"\n", b'{"text": "']) * (400_000 + draw.randrange(10)))
    return Input(draw.choice(["a.txt", "a.jsonl"]) + ending, data, Truth([], 1), ("--max-ratio", "10"))


COLUMNS: list[Callable[[Texts], pa.Array]] = [
    lambda texts: pa.array(texts, pa.string()),
    lambda texts: pa.array(texts, pa.large_string()),
    lambda texts: pa.array(texts, pa.string_view()),
    lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
]
OTHERS: list[Callable[[int], pa.Array]] = [
    lambda count: pa.array([b"\xff"] * count, pa.binary()),
    lambda count: pa.array(range(count), pa.int64()),
    lambda count: pa.array(range(count), pa.int64()).dictionary_encode(),
    lambda count: pa.array([["a"]] * count, pa.list_(pa.string())),
    lambda count: pa.array([{"a": 1}] * count, pa.struct({"a": pa.int64()})),
    lambda count: pa.array(range(count), pa.timestamp("ns")),
    lambda count: pa.nulls(count),
    lambda count: pa.array([b"\xff\xfe"] * count, pa.binary()).view(pa.string()),
]


def parquet_input(draw: random.Random, texts: Texts) -> Input:
    nulls = [draw.random() < 0.2 for _ in texts] if draw.random() < 0.5 else [False] * len(texts)
    long = [len(text.encode()) > LONGEST for text in texts]
    kind = draw.randrange(8)
    name = "text"
    truth = Truth(
        [text for text, null, too in zip(texts, nulls, long, strict=True) if not null and not too],
        sum(null or too for null, too in zip(nulls, long, strict=True)),
    )
    column = draw.choice(COLUMNS)([None if null else text for text, null in zip(texts, nulls, strict=True)])
    if kind == 0:
        column, truth = draw.choice(OTHERS)(len(texts)), Truth([], len(texts))
    elif kind == 1:
        name, truth = draw.choice(["texts", "", "é"]), Truth([], max(1, len(texts)))
    file = io.BytesIO()
    table = pa.table({"id": pa.array(range(len(texts)), pa.int64()), name: column, "text.more": column})
    how: dict[str, Any] = {
        "compression": draw.choice(["none", "snappy", "zstd"]),
        "use_dictionary": draw.random() < 0.5,
    }
    pq.write_table(
        table, file, row_group_size=draw.choice([1, 3, 1000]), write_page_checksum=draw.random() < 0.5, **how
    )
    data = file.getvalue()
    if kind in (2, 3, 4):
        return Input("a.parquet", mutated(draw, data), None)
    if kind == 5:
        return Input("a.parquet.gz", gzip.compress(data), truth)
    return Input("a.parquet", data, truth)


def garbage(draw: random.Random, texts: Texts) -> Input:
    """Bytes that are not what the name says."""
    others = [lines_input, text_input, parquet_input]
    data = draw.choice([b"", draw.randbytes(draw.randrange(300)), draw.choice(others)(draw, texts).data])
    name = draw.choice(["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.zst", "a.parquet.zst"])
    known = {"a.txt": truth_of_text, "a.jsonl": truth_of_lines}
    return Input(name, data, known[name](data) if name in known else None)


def input_of(draw: random.Random) -> Input:
    texts = texts_of(draw)
    kind = draw.randrange(10)
    if kind < 3:
        return lines_input(draw, texts)
    if kind < 6:
        return packed(draw, draw.choice([lines_input, lines_input, text_input])(draw, texts))
    return [text_input, parquet_input, parquet_input, draw.choice([garbage, bomb])][kind - 6](draw, texts)


# What `prepare` makes of them


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (lines, "CHUNK", 500),
        (lines, "READ", 70),
        (reading, "READ", 70),
        (reading, "SPAN", 900),
        (parquet, "CHUNK", 500),
        (parquet, "IN_A_THREAD", 800),
        (compressed, "JUDGED_FROM", 1 << 18),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def alarm() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no answer after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def counted(facts: dict[str, Any]) -> int:
    counts = facts["counts"]
    written = sum(facts["splits"][split]["documents"] for split in ("train", "val"))
    left_out = ("empty", "duplicates", "near_duplicates", "near_validation", "contaminated", "skipped")
    return written + sum(counts[kind] for kind in left_out)


def check_store(facts: dict[str, Any], truth: Truth | None, beside: int) -> None:
    """Every document is written or counted; `beside` are those of the file that is always there."""
    present = sum(source["rows"] for source in facts["sources"])
    assert counted(facts) == present
    if truth is None:
        return
    assert present == len(truth.texts) + (truth.bad or 0) + beside
    assert facts["counts"]["skipped"] == truth.bad
    assert facts["counts"]["empty"] == truth.texts.count("")
    texts = Counter(text for text in truth.texts if text)
    assert facts["counts"]["duplicates"] == texts.total() - len(texts)
    written = sum(facts["splits"][split]["bytes"] for split in ("train", "val"))
    assert written == sum(len(text.encode()) for text in texts) + BESIDE_BYTES


BESIDE = ["first of two", "second of two"]
BESIDE_BYTES = sum(map(len, BESIDE))


def try_one(folder: Path, seed: int, skipping: list[bool]) -> Counter[str]:
    """One input, prepared beside a file of two documents; what came of it."""
    draw = random.Random(seed)
    one = input_of(draw)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / one.name).write_bytes(one.data)
    (folder / "z.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in BESIDE))
    options = ["--max-line-bytes", LONGEST, "--max-document-bytes", LONGEST, "--no-cross-dedup", *one.options]
    options += ["--tokenizer", draw.choice(["bytes", "bytes", "char", "gpt2"]), "--workers", draw.randrange(1, 4)]
    came: Counter[str] = Counter()
    for skip in skipping:
        out = folder / f"store {skip}"
        signal.alarm(SECONDS)
        words = [folder / one.name, folder / "z.jsonl", "--out", out, *options, *(["--skip-bad"] if skip else [])]
        answer = call("prepare", *words)
        signal.alarm(0)
        came[f"{one.name} {'--skip-bad ' if skip else ''}{answer.code}"] += 1
        assert answer.code in (0, 2), answer
        if answer.code == 0:
            check_store(json.loads((out / "store.json").read_bytes()), one.truth, len(BESIDE))
            assert not one.truth or skip or not one.truth.bad
        else:
            assert sum(line.startswith("error: ") for line in answer.err.splitlines()) == 1, answer.err
            assert not out.exists()
            assert not skip, answer.err
            assert not one.truth or one.truth.bad, answer.err
            assert one.name in answer.err
    return came


def test_150_inputs_are_prepared_or_refused_with_one_message(tmp_path, alarm):
    for seed in range(150):
        try:
            try_one(tmp_path / "x", seed, [seed % 2 == 0])
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.soak
def test_5000_inputs_are_prepared_or_refused_with_one_message(tmp_path, alarm):
    came: Counter[str] = Counter()
    for seed in range(1000, 6000):
        try:
            came += try_one(tmp_path / "x", seed, [False, True])
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    print(sorted(came.items()))
    assert came.total() == 10_000
