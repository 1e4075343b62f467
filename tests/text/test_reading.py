"""Spans, chunks and states lose no row and give none twice, wherever they cut; what is bad is counted with its row."""

import gzip
import json
import zlib
from pathlib import Path

import pytest
import zstandard

from quatrain.errors import DataError
from quatrain.text import lines, reading
from quatrain.text.reading import Span, chunks, parse, spans
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
