"""Spans, chunks and states lose no row and give none twice, wherever they cut; what is bad is counted with its row."""

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.text import compressed, lines, parquet, reading
from quatrain.text.reading import chunks, parse, spans
from quatrain.text.rows import Chunk, Reading, Rows
from quatrain.text.sources import Source, find_sources

SKIPPING = Reading(skip_bad=True)


def source_of(path: Path, data: bytes) -> Source:
    path.write_bytes(data)
    return find_sources([str(path)])[0][0]


def json_line(text: object) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def read(source: Source, how: Reading = SKIPPING) -> Rows:
    """All rows of a source; rows are counted from 0 in their span."""
    found = Rows()
    for span in spans(source):
        for chunk in chunks(span, how):
            rows = parse(span, chunk, how)
            found.texts += rows.texts
            found.rows += [chunk.first + row for row in rows.rows]
            found.bad += [bad._replace(row=chunk.first + bad.row) for bad in rows.bad]
            found.surrogates += rows.surrogates
    return found


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_the_lines_before_a_cut_are_kept_and_the_cut_is_counted_once(tmp_path, monkeypatch, compression, chunk):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    data = b"".join(json_line(f"document {number}") for number in range(300))
    packed = gzip.compress(data, mtime=0) if compression == ".gz" else zstandard.compress(data)
    for cut in (1, len(packed) // 3, len(packed) // 2, len(packed) - 1):
        source = source_of(tmp_path / f"a.jsonl{compression}", packed[:cut])
        decompressor = zlib.decompressobj(31) if compression == ".gz" else zstandard.ZstdDecompressor().decompressobj()
        whole = decompressor.decompress(packed[:cut]).split(b"\n")[:-1]
        found = read(source)
        assert found.texts == [json.loads(line)["text"].encode() for line in whole]
        assert [(bad.row, bad.kind, bad.lost) for bad in found.bad] == [(len(whole), "truncated file", 1)]
        assert found.bad[0].sentence.startswith("truncated: its")  # the place is told beside it, the path never
        with pytest.raises(DataError, match=rf"a\.jsonl{compression}: truncated: its {compression} data stops"):
            read(source, Reading())


def parquet_of(path: Path, column: object, name: str = "text", **how: object) -> Source:
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), path, **how)
    return find_sources([str(path)])[0][0]


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([1, None], pa.timestamp("ns")), "values of type timestamp[ns]"),
        (pa.array([7, 7]).dictionary_encode(), "a number"),
        (pa.array([[b"\xff"], None]), "a list"),
        (pa.array([{"a": 1}, None]), "an object"),
        (pa.array([True, None]), "a boolean"),
        (pa.array([b"a", b"b"]), "values of type binary"),
        (pa.nulls(2), "null"),
    ],
)
def test_a_column_of_another_type_is_bad_in_every_row(tmp_path, column, found):
    bad = read(parquet_of(tmp_path / "a.parquet", column)).bad
    assert [(one.row, one.kind) for one in bad] == [(0, "text is no string"), (1, "text is no string")]
    assert bad[0].sentence == f"column 'text' holds {found}, expected a string"


def test_views_and_dictionaries_of_strings_are_texts(tmp_path):
    texts = ["a", "", "é" * 20, "a"]
    for column in (pa.array(texts, pa.string_view()), pa.array(texts).dictionary_encode()):
        assert [text.decode() for text in read(parquet_of(tmp_path / "a.parquet", column)).texts] == texts


def test_the_column_is_taken_by_its_whole_name(tmp_path):
    pq.write_table(pa.table({"text.more": ["wrong"], "text": ["right"]}), tmp_path / "a.parquet")
    assert read(find_sources([str(tmp_path / "a.parquet")])[0][0]).texts == [b"right"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_missing_column_is_bad_for_as_many_documents_as_there_are(tmp_path, ending):
    source = parquet_of(tmp_path / "a.parquet", ["one", "two", "three"], "texts", row_group_size=2)
    if ending:
        source = source_of(tmp_path / "a.parquet.gz", gzip.compress(source.path.read_bytes()))
    (bad,) = read(source).bad
    assert (bad.row, bad.kind, bad.lost) == (0, "no text", 3)
    assert bad.sentence.startswith("no column 'text' (did you mean 'texts'?); found: id, texts")


@pytest.mark.parametrize("at_once", [0, 1 << 20])
def test_a_damaged_row_group_is_bad_for_as_many_documents_as_it_holds(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(parquet, "CHUNK", 1)
    monkeypatch.setattr(parquet, "IN_A_THREAD", at_once)
    monkeypatch.setattr(reading, "SPAN", 1)
    texts = [f"document {number}" for number in range(90)]
    how = {"compression": "none", "write_page_checksum": True, "use_dictionary": False}
    source = parquet_of(tmp_path / "a.parquet", texts, row_group_size=30, **how)
    source.path.write_bytes(source.path.read_bytes().replace(b"document 45", b"document 4_"))
    found = read(source)
    assert [text.decode() for text in found.texts] == texts[:30] + texts[60:]
    assert [(bad.kind, bad.lost) for bad in found.bad] == [("damaged file", 30)]


def test_a_name_that_is_no_text_is_no_hindrance(tmp_path):
    source = parquet_of(tmp_path / "a.parquet", ["one", "two"])
    strange = tmp_path / os.fsdecode(b"\xff.parquet")
    source.path.rename(strange)
    assert read(find_sources([str(strange)])[0][0]).texts == [b"one", b"two"]


def test_of_many_and_long_keys_a_message_shows_the_beginning(tmp_path):
    keys = {"\ud800": 1, "long" * 1000: 2} | {f"key {number}": number for number in range(1000)}
    source = source_of(tmp_path / "a.jsonl", json.dumps(keys).encode())
    (bad,) = read(source).bad
    assert len(bad.sentence) < 300
    assert "found: \ufffd, longlong" in bad.sentence


TEXTS = st.lists(st.text(max_size=30) | st.sampled_from(["", "\n", "x" * 100]), max_size=12)


@contextlib.contextmanager
def cut_at(size: int, span: int) -> Iterator[None]:
    """Reads, chunks and spans of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((reading, "READ"), (lines, "READ"), (lines, "CHUNK"), (parquet, "CHUNK")):
            patch.setattr(module, name, size)
        patch.setattr(parquet, "IN_A_THREAD", 3 * size)
        patch.setattr(parquet, "ROWS_AT_ONCE", 2)
        patch.setattr(reading, "SPAN", span)
        yield


@given(
    texts=TEXTS,
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \n"]),
    last=st.booleans(),
    size=st.integers(1, 60),
    span=st.integers(1, 90),
)
def test_spans_cut_anywhere_give_every_line_once_with_its_number(tmp_path_factory, texts, end, last, size, span):
    data = end.join(json.dumps({"text": text}).encode() for text in texts) + (end if last else b"")
    source = source_of(tmp_path_factory.mktemp("x") / "a.jsonl", data)
    numbers = [number for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    found, places = [], []
    with cut_at(size, span):
        assert [(one.start, one.stop) for one in spans(source)][:1] == [(0, min(span, len(data)))]
        for one in spans(source):
            row = 0
            for chunk in chunks(one, SKIPPING):
                assert chunk.first == row
                row += chunk.rows
                rows = parse(one, chunk, SKIPPING)
                assert all(row < chunk.rows for row in rows.rows)
                found += rows.texts
                places += [one.place(chunk.first + row, short=True) for row in rows.rows]
    assert [text.decode() for text in found] == texts
    assert places == [f"a.jsonl:{number}" for number in numbers]


@given(
    texts=TEXTS,
    ending=st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".parquet.gz"]),
    size=st.integers(1, 60),
    group=st.integers(1, 4),
)
def test_behind_the_state_of_any_chunk_comes_exactly_the_rest(tmp_path_factory, texts, ending, size, group):
    folder = tmp_path_factory.mktemp("x")
    data = b"".join(json_line(text) for text in texts) + b"no JSON\n\n"
    if "parquet" in ending:
        data = parquet_of(
            folder / "b.parquet", pa.array([*texts, None], pa.string()), row_group_size=group
        ).path.read_bytes()
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(ending).suffix, bytes)
    source = source_of(folder / f"a{ending}", compress(data))
    with cut_at(size, 40):
        for span in spans(source):
            whole = list(chunks(span, SKIPPING))
            for number, chunk in enumerate(whole):
                state = json.loads(json.dumps(chunk.state))
                rest = list(chunks(span, SKIPPING, state))
                assert contents(span, rest) == contents(span, whole[number + 1 :])


def contents(span: reading.Span, found: list[Chunk]) -> list[tuple[object, ...]]:
    """The rows of chunks, wherever the borders are."""
    rows = [(chunk.first, parse(span, chunk, SKIPPING)) for chunk in found]
    texts = [(first + row, text) for first, one in rows for row, text in zip(one.rows, one.texts, strict=True)]
    return [*texts, *((first + bad.row, bad.kind) for first, one in rows for bad in one.bad)]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_behind_a_file_that_stops_early_comes_nothing(tmp_path, ending):
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[ending]
    source = source_of(tmp_path / f"a.jsonl{ending}", compress(json_line("one") * 9)[:-1])
    (span,) = spans(source)
    *_, last = chunks(span, SKIPPING)
    assert parse(span, last, SKIPPING).bad[0].kind == "truncated file"
    assert list(chunks(span, SKIPPING, last.state)) == []


def test_spans_of_a_parquet_file_are_row_groups_and_know_their_rows(tmp_path, monkeypatch):
    texts = [f"document {number}" for number in range(50)]
    source = parquet_of(tmp_path / "a.parquet", [*texts, None], row_group_size=7)
    monkeypatch.setattr(reading, "SPAN", 600)
    found = list(spans(source))
    assert len(found) > 2
    assert [(one.start, one.stop) for one in found] == list(pairwise([0, *(one.stop for one in found)]))
    assert [text.decode() for text in read(source).texts] == texts
    with pytest.raises(DataError, match=r"a\.parquet, row 51: column 'text' holds null, expected a string"):
        read(source, Reading())


@pytest.mark.parametrize(
    ("how", "bad"),
    [
        (Reading(max_line=31), {2: "a line of over 31 bytes; allow it with --max-line-bytes"}),
        (Reading(max_line=32), {}),
        (Reading(max_document=19), {2: "a document of 20 bytes; allow it with --max-document-bytes"}),
        (Reading(max_document=20), {}),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_caps_are_exact_and_what_is_beyond_them_is_one_bad_row(tmp_path, how, bad, size):
    source = source_of(
        tmp_path / "a.jsonl", json_line("a") + b"\n" + b'{"text": "' + b"b" * 20 + b'"}\n' + json_line("c")
    )
    with cut_at(size, 1000):
        found = read(source, replace(how, skip_bad=True))
        assert {one.row: one.sentence for one in found.bad} == bad
        assert found.texts == [b"a", *([] if bad else [b"b" * 20]), b"c"]
        assert all(one.kind == "too long" for one in found.bad)
        if bad:
            with pytest.raises(DataError, match=r"a\.jsonl:3: a (line|document) of .* allow it with --max-"):
                read(source, how)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
def test_a_document_beyond_the_cap_is_bad_in_every_kind_of_file(tmp_path, name):
    text = "x" * 51
    if name == "a.parquet":
        source = parquet_of(tmp_path / name, [text])
    else:
        source = source_of(tmp_path / name, gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (bad,) = read(source, Reading(skip_bad=True, max_document=50)).bad
    assert bad.sentence == "a document of 51 bytes; allow it with --max-document-bytes"
    assert read(source, Reading(skip_bad=True, max_document=51)).texts == [text.encode()]


@pytest.mark.parametrize(("ratio", "refused"), [(20, True), (10_000, False)])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_grows_beyond_the_ratio_is_bad(tmp_path, monkeypatch, ending, ratio, refused):
    monkeypatch.setattr(compressed, "JUDGED_FROM", 1 << 16)
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[ending]
    source = source_of(tmp_path / f"a.txt{ending}", compress(b"z" * 200_000))
    if not refused:
        assert read(source, Reading(max_ratio=ratio)).texts == [b"z" * 200_000]
        return
    with pytest.raises(
        DataError, match=rf"a\.txt{ending}: its first \d+ bytes give over [\d,]+, more than 20 times as"
    ):
        read(source, Reading(max_ratio=ratio))
    (bad,) = read(source, Reading(max_ratio=ratio, skip_bad=True)).bad
    assert bad.kind == "damaged file"
    assert bad.sentence.endswith("if that is right, allow it with --max-ratio")


def test_a_row_group_that_declares_more_than_its_file_can_hold_is_refused_before_room_is_made(tmp_path):
    source = parquet_of(tmp_path / "a.parquet", ["one"])
    found = parquet.metadata(source.path)
    size = found.row_group(0).total_byte_size
    parquet.check_sizes(source.path, size, found, (0, 1), Reading(max_ratio=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "JUDGED_FROM", 0)
        with pytest.raises(DataError, match=rf"declares 1 rows and {size} bytes, in a file of {size - 1} bytes; if"):
            parquet.check_sizes(source.path, size - 1, found, (0, 1), Reading(max_ratio=1))
        (bad,) = read(source, Reading(skip_bad=True, max_ratio=0.01)).bad
    assert (bad.kind, bad.lost) == ("damaged file", 1)
    assert bad.sentence.endswith("allow it with --max-ratio")


@pytest.mark.parametrize(("at_once", "texts", "lost"), [(0, 3, 2), (1 << 20, 0, 5)])
def test_a_file_that_declares_more_rows_than_it_holds_is_damaged(tmp_path, monkeypatch, at_once, texts, lost):
    source = parquet_of(tmp_path / "a.parquet", ["one", "two", "three"])
    monkeypatch.setattr(parquet, "rows_of", lambda found, start, stop: 5)
    monkeypatch.setattr(parquet, "IN_A_THREAD", at_once)
    found = read(source)
    assert len(found.texts) == texts
    assert [(bad.kind, bad.lost) for bad in found.bad] == [("damaged file", lost)]
    assert found.bad[0].sentence == "damaged: 5 rows are declared, and there are 3; copy it again"


def test_a_row_group_of_any_size_is_read_a_buffer_at_a_time(tmp_path):
    texts = [os.urandom(1500).hex() for _ in range(10_000)]  # 30 MB that do not compress to nothing
    pq.write_table(pa.table({"text": texts}), tmp_path / "one.parquet", row_group_size=len(texts))
    (source,) = find_sources([str(tmp_path / "one.parquet")])[0]
    (span,) = reading.spans(source)
    before = pa.total_allocated_bytes()
    most = count = 0
    for chunk in reading.chunks(span, Reading()):
        most = max(most, pa.total_allocated_bytes() - before)
        count += len(chunk.parse().texts)
    assert count == len(texts)
    assert most < 15_000_000
