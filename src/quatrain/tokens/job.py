"""One preparation as it is asked for: what is read, by which tokenizer, into which folder."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.errors import DataError
from quatrain.text.reading import read_texts
from quatrain.text.rows import Reading
from quatrain.text.sources import Source, content_hash, find_sources
from quatrain.text.tokenizers import Tokenizer, named_tokenizer
from quatrain.tokens.claim import Claim, pinned_before
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import VERSION
from quatrain.tokens.tokenizing import Unit, units_of

if TYPE_CHECKING:
    from quatrain.text.contamination import Benchmark

RULES = 2  # of what goes where: another number where equal options would give documents other fates
NOT_IN_REQUEST = ("workers", "tokenizer", "val", "decontaminate")  # of files it has the content

Report = Callable[[str], None]


@dataclass
class Job:
    """What `prepare` was asked for. `sources` has the validation files last."""

    sources: list[Source]
    trained: int  # sources that are not validation files
    tokenizer: Tokenizer
    config: PrepareConfig
    benchmark: "Benchmark | None"
    out: Path
    name: str
    looks: list[list[int | str]] = field(init=False)  # of each source when it was found
    units: list[Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.looks = self.look()
        # The one document that a tail is cut off may lie in any of the sources.
        self.units = units_of(self.sources, 1 << 62) if self.config.val_tail else units_of(self.sources)

    @classmethod
    def plan(cls, words: Sequence[str], out: Path, config: PrepareConfig, report: Report) -> "Job":
        """Find the sources and load the tokenizer. Raises `UsageError`."""
        twice, pinned = config.allow_duplicates, pinned_before(out)
        sources, passed_over = find_sources(list(words), twice, pinned)
        val, val_passed_over = find_sources(list(config.val), twice, pinned) if config.val else ([], [])
        for path in passed_over + val_passed_over:
            report(f"passed over {path}: not a kind of file that holds documents")
        if not config.allow_duplicates:
            _check_contents_differ([*sources, *val])

        def characters() -> Iterator[str]:
            seen: set[str] = set()
            for source in [*sources, *val]:
                for text in read_texts(source, reading_of(config)):
                    seen.update(text.decode())
            return iter(seen)

        usual = "char" if all(source.kind == "poems" for source in sources) else "gpt2"
        tokenizer = named_tokenizer(config.tokenizer or usual, characters, config.eot)
        benchmark = _benchmark(config.decontaminate) if config.decontaminate else None
        name = re.sub(r"[^A-Za-z0-9._-]", "", config.name or sources[0].stem) or "data"
        return cls([*sources, *val], len(sources), tokenizer, config, benchmark, out, name)

    def claim(self, task: tuple[int, int] | None = None) -> Claim:
        """The claim on the folder, for all of the work or for one task (number, of)."""
        # By sizes and times, for contents take long to hash; `request` has the contents.
        pins = {source.name: source.address.revision for source in self.sources if source.address}
        return Claim(self.out, self.name, self._hash(self.looks), task, pinned=pins)

    def request(self, contents: Sequence[str] | None = None) -> str:
        """Hash of everything that decides the ids and the split; `contents` are the sources' hashes, if known."""
        return self._hash(contents or [content_hash(source) for source in self.sources])

    def look(self) -> list[list[int | str]]:
        """What every source looks like now. Raises `DataError`."""
        return [source.looks for source in self.sources]

    def _hash(self, of_sources: Sequence[Any]) -> str:
        options = {key: value for key, value in asdict(self.config).items() if key not in NOT_IN_REQUEST}
        sources = zip(self.sources, of_sources, strict=True)
        content = {
            "version": VERSION,
            "rules": RULES,
            "tokenizer": self.tokenizer.sha256,
            "sources": [[source.kind, source.compression, known] for source, known in sources],
            "trained": self.trained,
            "options": options | {"name": self.name},
            "benchmark": self.benchmark.describe() if self.benchmark else None,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def reading(self) -> Reading:
        """How the sources are read."""
        return reading_of(self.config)


def reading_of(config: PrepareConfig) -> Reading:
    """How sources are read under a configuration."""
    return Reading(
        config.text_column, config.skip_bad, config.max_document_bytes, config.max_line_bytes, config.max_ratio
    )


def _check_contents_differ(sources: list[Source]) -> None:
    by_size: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        by_size[source.size].append(source)
    for size, alike in by_size.items():
        seen: dict[str, Source] = {}
        for source in alike if size and len(alike) > 1 else []:
            first = seen.setdefault(content_hash(source), source)
            if first is not source:
                raise DataError(
                    f"{source.path} has the same content as {first.path}; leave one out, or allow it with "
                    f"--allow-duplicates"
                )


def _benchmark(paths: Sequence[str]) -> "Benchmark":
    from quatrain.text.contamination import Benchmark

    return Benchmark(list(paths))
