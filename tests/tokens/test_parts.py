"""A part survives as it was written, and whatever spoils it is seen."""

import random
from pathlib import Path

import numpy as np
import pytest

from quatrain.errors import DataError, QuatrainError
from quatrain.text.rows import Bad
from quatrain.tokens.encoding import DOCUMENT, Tokenized
from quatrain.tokens.parts import EXAMPLES, FOOTER, NAME, Part, PartWriter, Record, finished_parts, whole_parts

IDS = np.dtype("<u2")


def ids_of(part: Part, start: int, stop: int) -> np.ndarray:
    ids = np.empty(stop - start, dtype=IDS)
    part.read_ids(start, ids)
    return ids


def tokenized(*lengths: int, bad: int = 0, empty: int = 0) -> Tokenized:
    """Documents of so many ids, each id the number of its document."""
    documents = np.zeros(len(lengths), dtype=DOCUMENT)
    documents["tokens"], documents["bytes"] = lengths, [3 * length for length in lengths]
    documents["hash"] = np.arange(len(lengths)) * 2**61
    ids = np.repeat(np.arange(len(lengths)), lengths).astype(IDS)
    spoiled = [Bad(row, f"kind {row % 2}", f"sentence {row} \ud800") for row in range(bad)]
    return Tokenized(ids, documents, len(lengths) + bad + empty, empty, 1, spoiled)


def written(path: Path, *chunks: Tokenized, last: bool = True) -> Path:
    with PartWriter(path) as writer:
        for span, chunk in enumerate(chunks):
            writer.add(span, chunk)
            writer.record.resume = [span, {"row": span}]
        writer.record.last = last
        writer.finish()
    return path


def test_a_part_is_read_as_it_was_written(tmp_path):
    chunks = tokenized(3, 1, 9, bad=2), tokenized(), tokenized(70_000, empty=4)
    part = Part.open(written(tmp_path / "x.part", *chunks), check=True)
    assert part.count == 4
    assert np.array_equal(part.table(), np.concatenate([chunk.documents for chunk in chunks]))
    assert np.array_equal(ids_of(part, 0, 13 + 70_000), np.concatenate([chunk.ids for chunk in chunks]))
    assert ids_of(part, 3, 6).tolist() == [1, 2, 2]
    assert part.record == Record(
        last=True,
        resume=[2, {"row": 2}],
        read={"0": 5, "1": 0, "2": 5},
        empty=4,
        surrogates=3,
        bad={"kind 0": 1, "kind 1": 1},
        bad_examples=[[0, 0, "kind 0", "sentence 0 \ufffd"], [0, 1, "kind 1", "sentence 1 \ufffd"]],
    )
    assert list(tmp_path.iterdir()) == [part.path]


def test_a_part_without_documents_is_whole(tmp_path):
    part = Part.open(written(tmp_path / "x.part"), check=True)
    assert (part.count, part.ids_size, len(part.table())) == (0, 0, 0)


def test_a_few_examples_of_each_kind_are_kept_and_all_are_counted(tmp_path):
    lost = tokenized(bad=40)
    lost.bad[0] = lost.bad[0]._replace(lost=100)
    record = Part.open(written(tmp_path / "x.part", tokenized(bad=2), lost)).record
    assert record.bad == {"kind 0": 1 + 119, "kind 1": 1 + 20}
    assert [example[0] for example in record.bad_examples] == [0, 0] + [1] * (2 * EXAMPLES - 2)


def test_every_cut_and_every_flipped_bit_is_seen(tmp_path):
    path = written(tmp_path / "x.part", tokenized(5, 0, 20, bad=1))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"x\.part: not a whole part of a preparation \("):
            Part.open(path)
    draw = random.Random(1)
    for place in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << draw.randrange(8)
        path.write_bytes(spoiled)
        with pytest.raises(DataError, match=r"x\.part: not a whole part of a preparation \("):
            Part.open(path, check=True)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="not a whole part"):
        Part.open(path)
    assert len(whole) > FOOTER.size


def test_until_it_is_finished_a_part_has_not_its_name(tmp_path):
    path = tmp_path / NAME.format(unit=0, number=0)
    with PartWriter(path) as writer:
        writer.add(0, tokenized(4))
    assert [one.name for one in tmp_path.iterdir()] == [f"{path.name}.tmp"]
    assert whole_parts(tmp_path, 0) == []
    assert list(tmp_path.iterdir()) == []  # it is made again under that name


def test_a_part_that_cannot_be_begun_is_one_message(tmp_path):
    with pytest.raises(QuatrainError, match=r"none/x\.part: cannot write: No such file or directory; make room or"):
        PartWriter(tmp_path / "none" / "x.part")


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    """Unit 0 in three parts and unit 2 in one."""
    names = [(0, 0), (0, 1), (0, 2), (2, 0)]
    paths = [tmp_path / NAME.format(unit=unit, number=number) for unit, number in names]
    return [written(path, tokenized(9), last=path in (paths[2], paths[3])) for path in paths]


@pytest.mark.parametrize(("spoiled", "left"), [(None, 3), (2, 2), (1, 1), (0, 0)])
def test_what_follows_a_spoiled_part_of_a_unit_is_removed(tmp_path, parts, spoiled, left):
    if spoiled is not None:
        parts[spoiled].write_bytes(parts[spoiled].read_bytes()[:-1])
    assert [part.path for part in whole_parts(tmp_path, 0)] == parts[:left]
    assert sorted(tmp_path.iterdir()) == [*parts[:left], parts[3]]


def test_what_follows_the_last_part_of_a_unit_is_removed(tmp_path, parts):
    more = written(tmp_path / NAME.format(unit=2, number=1), tokenized(1))
    assert [part.path for part in whole_parts(tmp_path, 2)] == [parts[3]]
    assert not more.exists()


def test_finished_parts_are_in_order_and_units_that_lack_one_are_named(tmp_path, parts):
    found, missing = finished_parts(tmp_path, 4)
    assert [(unit, part.path) for unit, part in found] == list(zip([0, 0, 0, 2], parts, strict=True))
    assert missing == [1, 3]
    parts[1].unlink()
    assert finished_parts(tmp_path, 4)[1] == [0, 1, 3]


def test_a_flipped_bit_is_seen_if_every_byte_is_read_and_nothing_is_removed(tmp_path, parts):
    content = bytearray(parts[1].read_bytes())
    content[3] ^= 4
    parts[1].write_bytes(content)
    assert finished_parts(tmp_path, 1)[1] == []
    assert finished_parts(tmp_path, 1, check=True)[1] == [0]
    assert all(part.exists() for part in parts)
