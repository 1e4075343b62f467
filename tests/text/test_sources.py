"""Documents come out of files exactly as they went in, or one message says which file and line is at fault."""

import gzip
import io
import json
import os
import random
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from conftest import shared_file
from quatrain.errors import DataError
from quatrain.text import lines as line_reader
from quatrain.text import reading
from quatrain.text.reading import read_texts
from quatrain.text.sources import content_hash, find_sources

COMPRESS = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
# What a line reader, a locale or a C string would break.
AWKWARD = [
    "plain",
    "",
    "a\r\nb\n",
    "\u2028\u2029\x85\x0b\x0c",
    "nul \0",
    "tab\t",
    "é 日本 😀",
    "\ufeffbom",
    '"\\',
    "x" * 3000,
]
NAMES_LINE_2 = r"/bad\.jsonl:2: "


def read(path: Path, column: str = "text") -> list[str]:
    """The texts of a file, by the route that `prepare` takes."""
    how = reading.Reading(column)
    return [text.decode() for source in find_sources([str(path)])[0] for text in read_texts(source, how)]


def outcome(path: Path) -> list[str] | str:
    """The texts of a file, or the message that says why there are none."""
    try:
        return read(path)
    except DataError as error:
        return str(error)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def json_lines(texts: list[str], **how: bool) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}, **how) + "\n" for text in texts).encode()


def parquet(column: object, name: str = "text", **how: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), file, **how)
    return file.getvalue()


PARQUET = {
    "plain": lambda texts: parquet(texts),
    "row groups of 3": lambda texts: parquet(texts, row_group_size=3),
    "large_string": lambda texts: parquet(pa.array(texts, pa.large_string())),
    "dictionary": lambda texts: parquet(pa.array(texts).dictionary_encode()),
    "zstd pages": lambda texts: parquet(texts, compression="zstd"),
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_give_their_texts(tmp_path, compression, ascii_only):
    data = COMPRESS[compression](json_lines(AWKWARD, ensure_ascii=ascii_only))
    assert read(written(tmp_path / f"a.jsonl{compression}", data)) == AWKWARD


@pytest.mark.parametrize("layout", PARQUET)
@pytest.mark.parametrize("compression", COMPRESS)
def test_parquet_gives_its_texts(tmp_path, compression, layout):
    texts = AWKWARD * 40  # more than one batch of rows
    data = COMPRESS[compression](PARQUET[layout](texts))
    assert read(written(tmp_path / f"a.parquet{compression}", data)) == texts


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("text", AWKWARD[:-3])
def test_a_text_file_is_one_document_kept_as_it_is(tmp_path, compression, text):
    assert read(written(tmp_path / f"a.txt{compression}", COMPRESS[compression](text.encode()))) == [text]


@given(
    texts=st.lists(st.text(), max_size=6), ascii_only=st.booleans(), end=st.sampled_from(["\n", "\r\n"]), data=st.data()
)
def test_lines_do_not_depend_on_where_the_reads_cut(tmp_path_factory, texts, ascii_only, end, data):
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    lines.insert(data.draw(st.integers(0, len(lines))), "")
    plain = end.join(lines).encode()  # no newline at the end
    chunk = data.draw(st.integers(1, 40))
    for compression, compress in COMPRESS.items():
        path = written(tmp_path_factory.mktemp("x") / f"a.jsonl{compression}", compress(plain))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "READ", chunk)
            patch.setattr(line_reader, "READ", chunk)
            patch.setattr(line_reader, "CHUNK", chunk)
            assert read(path) == texts


def test_a_byte_order_mark_is_dropped_and_a_column_can_be_chosen(tmp_path):
    bom = b"\xef\xbb\xbf"
    assert read(written(tmp_path / "a.txt", bom + b"a")) == ["a"]
    assert read(written(tmp_path / "a.jsonl", bom + b'{"text": "a", "body": "b"}\r\n'), "body") == ["b"]
    assert read(written(tmp_path / "a.parquet", parquet(["b"], "meta.body")), "meta.body") == ["b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a line of JSON .*Unterminated string"),
        (b'{"text": "a"}{"text": "b"}', "not a line of JSON .*Extra data"),
        (b'{"text": "raw\ttab"}', "not a line of JSON .*Invalid control character"),
        (b'{"text": "raw\0nul"}', "not a line of JSON .*Invalid control character"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'{"text": "b", "id": ' + b"1" * 5000 + b"}", "not a line of JSON"),
        (b'{"text": "\xe9t\xe9"}', "not valid UTF-8 .*at byte 10"),
        (b'{"text": null}', "column 'text' holds null, expected a string"),
        (b'{"text": 7}', "column 'text' holds a number, expected a string"),
        (b'{"text": NaN}', "column 'text' holds a number, expected a string"),
        (b'{"text": true}', "column 'text' holds a boolean, expected a string"),
        (b'{"text": ["a"]}', "column 'text' holds a list, expected a string"),
        (b'{"text": {"a": 1}}', "column 'text' holds an object, expected a string"),
        (b'["a"]', "expected a JSON object, found a list"),
        (b'"a"', "expected a JSON object, found a"),
        (b'{"txt": "a"}', r"no column 'text' \(did you mean 'txt'\?\); found: txt .*--text-column"),
        (b"{}", r"no column 'text'; found: none .*--text-column"),
    ],
)
def test_case_55_a_bad_line_is_an_error_with_file_and_line(tmp_path, line, message):
    path = written(tmp_path / "bad.jsonl", b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(DataError, match=NAMES_LINE_2 + message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", None], "bad.parquet, row 2: column 'text' holds null, expected a string"),
        ([7], "bad.parquet, row 1: column 'text' holds a number, expected a string"),
        ([b"a"], "bad.parquet, row 1: column 'text' holds values of type binary, expected a string"),
        (pa.array([b"a", b"\xff"]).view(pa.string()), "bad.parquet, row 2: not valid UTF-8 .*at byte 0"),
    ],
)
def test_case_55_a_bad_row_is_an_error_with_file_and_row(tmp_path, column, message):
    with pytest.raises(DataError, match=message):
        read(written(tmp_path / "bad.parquet", parquet(column)))


def test_rows_are_counted_over_all_batches(tmp_path):
    path = written(tmp_path / "a.parquet", parquet(["a"] * 1000 + [None], row_group_size=300))
    with pytest.raises(DataError, match="row 1001:"):
        read(path)


def test_a_missing_parquet_column_is_named_with_those_that_are_there(tmp_path):
    path = written(tmp_path / "a.parquet", parquet(["a"], "texts"))
    with pytest.raises(
        DataError, match=r"a.parquet: no column 'text' \(did you mean 'texts'\?\); found: id, texts .*--text-col"
    ):
        read(path)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize(("name", "place"), [("a.txt", "a.txt: "), ("a.jsonl", "a.jsonl:1: ")])
def test_utf_16_is_named_with_the_way_out(tmp_path, codec, name, place):
    path = written(tmp_path / name, '\ufeff{"text": "a"}'.encode(codec))
    with pytest.raises(DataError, match=f"{place}.*UTF-16.*iconv" if codec == "utf-16" else f"{place}.*UTF-16"):
        read(path)


def test_a_text_file_that_is_not_utf_8_is_named_with_the_byte(tmp_path):
    with pytest.raises(DataError, match=r"a\.txt: not valid UTF-8 .*at byte 2"):
        read(written(tmp_path / "a.txt", b"ol\xe9"))


def framed(compression: str) -> tuple[bytes, dict[int, list[str]]]:
    """Three frames of JSON lines, and what a cut at each border between them must give: whole frames."""
    data, at_border = b"", {}
    texts: list[str] = []
    for frame in range(3):
        more = [f"{frame}.{number}" for number in range(2)]
        data += COMPRESS[compression](json_lines(more))
        texts += more
        at_border[len(data)] = list(texts)
    return data, at_border


def cuts_passed_unseen(tmp_path: Path, compression: str) -> list[int]:
    """The lengths at which a cut file is not called truncated, but for those at a frame's end."""
    data, at_border = framed(compression)
    found = {cut: outcome(written(tmp_path / f"cut.jsonl{compression}", data[:cut])) for cut in range(len(data))}
    message = f"{tmp_path / 'cut.jsonl'}{compression}: truncated: "
    return [
        cut
        for cut, texts in found.items()
        if not (texts == at_border[cut] if cut in at_border else isinstance(texts, str) and message in texts)
    ]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_case_57_every_cut_of_a_compressed_file_is_seen(tmp_path, compression):
    data, at_border = framed(compression)
    assert read(written(tmp_path / f"whole.jsonl{compression}", data)) == at_border[len(data)]
    assert cuts_passed_unseen(tmp_path, compression) == []


def test_case_57_the_check_sees_a_reader_that_stops_early(tmp_path, monkeypatch):
    def stream_reader(path, compression, raw, max_ratio):
        with zstandard.ZstdDecompressor().stream_reader(b"".join(raw), read_across_frames=True) as file:
            yield file.read()

    monkeypatch.setattr(reading, "decompress", stream_reader)
    assert cuts_passed_unseen(tmp_path, ".zst")


def test_case_57_the_check_sees_a_reader_that_does_not_ask_for_the_end_of_a_member(tmp_path, monkeypatch):
    monkeypatch.setattr(
        reading, "decompress", lambda path, kind, raw, ratio: [zlib.decompressobj(31).decompress(b"".join(raw))]
    )
    assert cuts_passed_unseen(tmp_path, ".gz")


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_case_57_a_flipped_bit_never_changes_a_text_unseen(tmp_path, compression):
    texts = [f"document {number}" for number in range(30)]
    data = COMPRESS[compression](json_lines(texts))
    draw = random.Random(57)
    for _ in range(120):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        found = outcome(written(tmp_path / f"a.jsonl{compression}", bytes(flipped)))
        assert found == texts or f"a.jsonl{compression}" in found  # a flip in the head may mean nothing


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.zst", "a.parquet", "a.parquet.gz"])
def test_case_57_a_file_of_no_bytes_is_an_error_where_its_kind_cannot_be_empty(tmp_path, name):
    with pytest.raises(DataError, match=f"{name}: .*(truncated|not a readable parquet file)"):
        read(written(tmp_path / name, b""))


def test_an_empty_text_file_is_an_empty_document_and_an_empty_jsonl_holds_none(tmp_path):
    assert read(written(tmp_path / "a.txt", b"")) == [""]
    assert read(written(tmp_path / "a.jsonl", b"\n \r\n")) == []


def test_frames_without_text_and_padding_between_members_are_passed_over(tmp_path):
    gz, zst = COMPRESS[".gz"], COMPRESS[".zst"]
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    assert read(written(tmp_path / "a.txt.gz", gz(b"ab") + bytes(9) + gz(b"") + gz(b"c") + bytes(512))) == ["abc"]
    assert read(written(tmp_path / "a.txt.zst", skippable + zst(b"ab") + zst(b"") + skippable + zst(b"c"))) == ["abc"]


@pytest.mark.parametrize("chunk", [1, 20, 29])
def test_padding_between_members_may_lie_on_the_border_of_two_reads(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "READ", chunk)
    gz = COMPRESS[".gz"](b"ab")
    assert read(written(tmp_path / "a.txt.gz", gz + bytes(40) + gz + bytes(50))) == ["abab"]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_bytes_that_are_no_frame_are_damage(tmp_path, compression):
    for data in (b"no frame at all", COMPRESS[compression](b"a") + b"garbage"):
        with pytest.raises(DataError, match=rf"a\.txt{compression}: damaged {compression} data"):
            read(written(tmp_path / f"a.txt{compression}", data))


def test_a_parquet_file_cut_anywhere_is_an_error(tmp_path):
    data = parquet([f"document {number}" for number in range(500)])
    for cut in [*range(0, len(data), len(data) // 60), len(data) - 1]:
        with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
            read(written(tmp_path / "a.parquet", data[:cut]))


def test_damage_inside_a_parquet_page_is_an_error_with_the_file(tmp_path):
    data = bytearray(parquet([f"document {number}" for number in range(500)], compression="zstd"))
    page = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(1).dictionary_page_offset
    data[page + 100 : page + 200] = bytes(100)
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
        read(written(tmp_path / "a.parquet", bytes(data)))


def test_a_flipped_bit_is_seen_where_pages_carry_checksums(tmp_path):
    texts = [f"document {number}" for number in range(500)]
    data = bytearray(parquet(texts, write_page_checksum=True, compression="none", use_dictionary=False))
    data[data.index(b"document 300")] ^= 1
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
        read(written(tmp_path / "a.parquet", bytes(data)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with documents of each kind, other files, and hidden ones."""
    for name in ["b.txt", "a.jsonl", "deep/c.parquet.gz", "deep/er/d.TXT", "[x] 1.jsonl", "x 1.jsonl"]:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    for name in ["README.md", "deep/picture.png", ".hidden.txt", ".git/e.txt"]:
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return Path("data")


def names(*words: str) -> list[str]:
    return [source.path.relative_to("data").as_posix() for source in find_sources(list(words))[0]]


def test_a_folder_is_searched_whole_and_sorted_and_tells_what_it_passed_over(folder):
    found, passed_over = find_sources(["data"])
    kept = ["[x] 1.jsonl", "a.jsonl", "b.txt", "x 1.jsonl", "deep/c.parquet.gz", "deep/er/d.TXT"]
    assert [source.path.relative_to("data").as_posix() for source in found] == kept
    assert passed_over == [folder / "README.md", folder / "deep/picture.png"]
    assert [(source.kind, source.compression) for source in found[-2:]] == [(".parquet", ".gz"), (".txt", "")]


def test_words_keep_their_order_and_a_pattern_is_sorted(folder):
    assert names("data/b.txt", "data/*.jsonl") == ["b.txt", "[x] 1.jsonl", "a.jsonl", "x 1.jsonl"]
    assert names("data/**/*.TXT") == ["deep/er/d.TXT"]


def test_an_existing_path_wins_over_a_pattern(folder):
    (folder / "[x] *.jsonl").touch()
    assert names("data/[x] 1.jsonl") == ["[x] 1.jsonl"]  # as a pattern it is "x 1.jsonl"
    assert names("data/[x] *.jsonl") == ["[x] *.jsonl"]
    (folder / "[x] *.jsonl").unlink()
    assert names("data/[x] *.jsonl") == ["x 1.jsonl"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data/README.md", r"data/README.md: unknown kind of file; expected .txt, .jsonl, .parquet, each also .gz or"),
        ("data/none.txt", "data/none.txt: no such file or folder, and no file matches"),
        ("data/*.csv", r"data/\*.csv: no such file or folder, and no file matches"),
        (
            "corpus:sonets",
            r"no built-in corpus 'corpus:sonets' \(did you mean 'corpus:sonnets'\?\); there is corpus:sonnets",
        ),
    ],
)
def test_a_word_that_names_no_documents_is_an_error(folder, word, message):
    with pytest.raises(DataError, match=message):
        find_sources(["data/b.txt", word])


@pytest.mark.parametrize("again", ["data/b.txt", "data", "data/*.txt", "data/../data/b.txt", "link.txt", "hard.txt"])
def test_the_same_file_named_twice_is_an_error(folder, again):
    Path("link.txt").symlink_to("data/b.txt")
    Path("hard.txt").hardlink_to("data/b.txt")
    with pytest.raises(
        DataError, match=r"b\.txt.* is the same file as .*; name it once|is the same file as data/b\.txt"
    ):
        find_sources(["data/b.txt", again])


def test_equal_content_in_two_files_is_two_sources(folder):
    assert names("data/b.txt", "data/a.jsonl") == ["b.txt", "a.jsonl"]  # both are empty


def test_folders_without_any_document_file_are_an_error(tmp_path):
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"no document files in .*; expected .txt, .jsonl, .parquet"):
        find_sources([str(tmp_path)])


@pytest.mark.parametrize("word", ["pipe.jsonl", "zeros.txt.gz", "data", "p*"])
def test_a_pipe_or_a_device_is_refused_before_it_is_read(folder, word):
    os.mkfifo("pipe.jsonl")
    os.mkfifo("data/pipe.parquet")
    Path("zeros.txt.gz").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"(pipe|zeros)\.\S+: a pipe or a device; expected a file|no such file"):
        find_sources([word])


def test_a_file_that_cannot_be_opened_is_one_message(tmp_path):
    source = find_sources([str(written(tmp_path / "a.txt", b"a"))])[0][0]
    source.path.unlink()
    for use in (content_hash, lambda source: list(read_texts(source))):
        with pytest.raises(DataError, match=r"a\.txt: No such file"):
            use(source)


def test_the_built_in_corpus_is_eight_sonnets_of_fourteen_lines():
    source = find_sources(["corpus:sonnets"])[0][0]
    sonnets = [text.decode() for text in read_texts(source)]
    assert [sonnet.count("\n") + 1 for sonnet in sonnets] == [14] * 8
    assert 4900 <= sum(map(len, sonnets)) <= 5000
    assert [number for number, sonnet in enumerate(sonnets) if "!" in sonnet] == [7]
    assert all(sonnet.splitlines()[-1].startswith("  ") for sonnet in sonnets)  # couplets keep their indent
    assert sonnets[1].startswith("Shall I compare thee to a summer's day?\n")
    assert source.stem == "sonnets"


def test_the_built_in_corpus_is_that_of_the_shared_data():
    blocks = shared_file("eight_sonnets.txt").read_text(encoding="utf-8").strip("\n").split("\n\n")
    assert [text.decode() for text in read_texts(find_sources(["corpus:sonnets"])[0][0])] == blocks


@pytest.mark.parametrize("name", ["a.b.jsonl", "a.b.jsonl.zst", "a.b.parquet.gz", "a.b.txt", "a.b.TXT"])
def test_a_stem_is_the_name_without_the_endings_that_say_how_to_read_it(tmp_path, name):
    assert find_sources([str(written(tmp_path / name, b""))])[0][0].stem == "a.b"
