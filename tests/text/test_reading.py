"""Spans, chunks and states lose no row and give none twice, wherever they cut; what is bad is counted with its row."""

import gzip
import json
import os
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from quatrain.errors import DataError
from quatrain.text import lines, parquet, reading
from quatrain.text.reading import chunks, parse, spans
from quatrain.text.rows import Reading, Rows
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
