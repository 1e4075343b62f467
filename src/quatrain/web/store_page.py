"""The page about a store: what `inspect` tells in a terminal, with plots."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from quatrain.tokens import sentences
from quatrain.tokens.excerpts import Excerpt
from quatrain.tokens.facts import Frequent, Padded, SplitFacts, StoreFacts
from quatrain.tokens.store import SPLITS, SplitName
from quatrain.web.markup import Child, element, page
from quatrain.web.plots import Bar, Point, bars, curves, meter

NUMBER, TEXT = "n", ""  # classes of a table's columns
Column = tuple[str, str]  # heading and class


def store_page(facts: StoreFacts) -> str:
    """One HTML file about a store, which needs no other and holds no script."""
    name = Path(facts.folder).resolve().name
    sections = {
        "splits": ("Splits", _splits(facts)),
        "left-out": ("Left out", _left_out(facts)),
        "lengths": ("Document lengths", _lengths(facts)),
        "padding": ("Padding against packing", _padding(facts)),
        "targets": ("Targets", _targets(facts)),
        "windows": ("Windows", _windows(facts)),
        "files": ("Files", _files(facts)),
    }
    links = [element("a", title, href=f"#{anchor}") for anchor, (title, _) in sections.items()]
    return page(
        f"{name} – token store",
        element("a", "Skip to the facts", class_="skip", href="#splits"),
        element("header", element("h1", name), element("p", _kind(facts)), _figures(facts)),
        element("nav", *_spaced(links), aria_label="Sections"),
        element("main", *(_section(anchor, *section) for anchor, section in sections.items())),
        element("footer", element("p", "Fingerprint ", element("code", facts.store["fingerprint"]))),
    )


def _spaced(items: Iterable[Element]) -> Iterable[Child]:
    for item in items:
        yield from (item, " ")


def _section(anchor: str, title: str, parts: Iterable[Child]) -> Element:
    heading = element("h2", title, id=f"{anchor}-title")
    return element("section", heading, *parts, id=anchor, aria_labelledby=f"{anchor}-title")


def _kind(facts: StoreFacts) -> str:
    tokenizer = facts.store["tokenizer"]
    verified = facts.verified
    checked = f"; the hashes of all {verified['files']} files hold" if verified else "; hashes were not compared"
    return f"token store, tokenizer {tokenizer['name']}, eot {tokenizer['eot']}{checked}"


def _figures(facts: StoreFacts) -> Element:
    per_token = "–" if facts.bytes_per_token is None else f"{facts.bytes_per_token:.3f}"
    told = {
        "documents": f"{facts.documents:,}",
        "ids": f"{facts.tokens:,}",
        "bytes of text an id": per_token,
        "ids in the vocabulary": f"{facts.store['tokenizer']['vocab_size']:,}",
    }
    boxes = (element("div", element("dt", word), element("dd", number)) for word, number in told.items())
    return element("dl", *boxes, class_="figures")


def _table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Child]]) -> Element:
    """A table that scrolls by itself, by keyboard too, where the screen is narrower."""
    head = element("tr", *(element("th", title, scope="col", class_=kind) for title, kind in columns))
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, (_, kind) in zip(row, columns, strict=True)))
        for row in rows
    ]
    made = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _splits(facts: StoreFacts) -> Iterable[Child]:
    columns = [("split", TEXT), *((word, NUMBER) for word in ("documents", "ids", "bytes of text", "bytes an id"))]
    rows = [[name, *_sums(facts.splits[name])] for name in SPLITS]
    yield _table("ids count every eot, bytes an id does not", columns, [*rows, ["both", *_sums(facts)]])
    yield _list([sentences.split_rule(facts.store), *sentences.remarks(facts.store)])


def _sums(one: SplitFacts | StoreFacts) -> list[str]:
    known = ["unknown", "–"] if one.bytes is None else [f"{one.bytes:,}", f"{one.bytes_per_token or 0:.3f}"]
    return [f"{one.documents:,}", f"{one.tokens:,}", *known]


def _list(items: Iterable[str]) -> Element:
    return element("ul", *(element("li", item) for item in items))


def _left_out(facts: StoreFacts) -> Iterable[Child]:
    reasons = sentences.left_out(facts.store)
    if reasons:
        rows = [[reason, f"{count:,}"] for reason, count in reasons]
        yield _table("documents that are not in the store", [("reason", TEXT), ("documents", NUMBER)], rows)
    else:
        yield element("p", "No document was left out.")
    looked_for = list(sentences.looked_for(facts.store))
    if looked_for:
        yield _list(looked_for)
    examples = [
        element(
            "li",
            element("strong", example["kind"]),
            " ",
            element("code", example["place"]),
            _like(example),
            _text(example),
        )
        for example in sentences.examples(facts.store)
    ]
    if examples:
        yield _details(f"{len(examples)} examples", element("ul", *examples, class_="examples"))


def _like(example: dict[str, str]) -> Element:
    return element("span", f" like {example['like']}" if example["like"] else "")


def _text(example: dict[str, str]) -> Element:
    return element("blockquote", example["text"], dir="auto")


def _details(summary: str, *body: Child) -> Element:
    return element("details", element("summary", summary), *body)


def _lengths(facts: StoreFacts) -> Iterable[Child]:
    lengths = {name: facts.splits[name].lengths for name in SPLITS}
    words = list(lengths["train"].quantiles)
    columns = [("split", TEXT), ("mean", NUMBER), *((word.replace("percentile_", "p"), NUMBER) for word in words)]
    yield _table(
        "ids of text in a document, its eot not counted",
        columns,
        [[name, f"{one.mean:,.1f}", *(f"{one.quantiles[word]:,}" for word in words)] for name, one in lengths.items()],
    )
    documents = [max(1, facts.splits[name].documents) for name in SPLITS]
    places, rows = [], []
    for pair in zip(*(one.histogram for one in lengths.values()), strict=True):
        label = sentences.bin_label(pair[0].first, pair[0].last)
        counts = [one.documents for one in pair]
        told = f"{label} ids: {counts[0]:,} train documents, {counts[1]:,} val"
        heights = [count / all_of_it for count, all_of_it in zip(counts, documents, strict=True)]
        places.append(Bar(sentences.short(pair[0].first), heights, told))
        rows.append([label, *(f"{count:,}" for count in counts)])
    yield _figure(
        bars(places, "Histogram of document lengths"), "Share of each split's documents by their length in ids"
    )
    columns = [("ids", NUMBER), *((f"{name} documents", NUMBER) for name in SPLITS)]
    yield _details("The numbers", _table("documents by length", columns, rows))


def _figure(plot: Element, caption: str, names: Sequence[str] = SPLITS) -> Element:
    keys = [element("span", name, class_=f"key k{number}") for number, name in enumerate(names)]
    return element("figure", plot, element("figcaption", caption, " ", *_spaced(keys)))


def _padding(facts: StoreFacts) -> Iterable[Child]:
    seq_len = facts.splits["train"].padding.seq_len
    columns = [
        ("", TEXT),
        *((word, NUMBER) for word in ("documents", "rows", "positions", "wasted", "share")),
        ("", TEXT),
    ]
    rows: list[list[Child]] = []
    for name in SPLITS:
        told = facts.splits[name].padding
        rows.append(_padded(f"{name}, padded, by formula", told.formula, seq_len))
        if told.measured:
            rows.append(_padded(f"{name}, padded, measured", told.measured, seq_len))
        rows.append(_padded(f"{name}, best fit", told.best_fit, seq_len))
        packed = Padded(facts.splits[name].documents, told.packed_windows, 0, 0.0)
        rows.append(_padded(f"{name}, packed", packed, seq_len))
    yield _table(f"rows of {seq_len:,} ids: of documents, against windows cut from the stream", columns, rows)
    cut = " and ".join(f"{facts.splits[name].padding.cut:,} of {name}" for name in SPLITS)
    left_out = " and ".join(f"{facts.splits[name].padding.left_out:,} of {name}" for name in SPLITS)
    yield _list(
        [
            "by formula: a document of l targets (its ids and the eot that follows) wastes T ⌈l/T⌉ − l positions",
            "measured: documents as the eots in the ids cut them",
            f"best fit: whole documents, several to a row; longer than a row, so cut: {cut}",
            f"an epoch of packed windows leaves out (n − 1) mod T targets: {left_out}",
        ]
    )
    shares = [list(facts.splits[name].padding.share_by_seq_len.items()) for name in SPLITS]
    series = [[Point(T, share, f"{T:,} ids: {share:.1%} wasted") for T, share in split] for split in shares]
    marks = [(float(T), _short_power(T)) for T, _ in shares[0] if T in (64, 256, 1024, 4096, 16384)]
    plot = curves(series, "Waste of padding by the length of the rows", marks, y_log=False)
    yield _figure(plot, "Share of positions that padding wastes, by the length T of the rows")


def _short_power(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


def _padded(what: str, padded: Padded, seq_len: int) -> list[Child]:
    numbers = (padded.documents, padded.rows, padded.rows * seq_len, padded.wasted)
    return [what, *(f"{number:,}" for number in numbers), f"{padded.share:.1%}", meter(padded.share)]


def _targets(facts: StoreFacts) -> Iterable[Child]:
    words = ("targets", "counted", "ids used", "ids never", "ids for half of the targets")
    rows = []
    for name in SPLITS:
        one = facts.splits[name].targets
        numbers = (one.targets, one.counted, one.used, one.never, one.half)
        rows.append([name, *(f"{number:,}" for number in numbers)])
    yield _table("how often each id is a target", [("split", TEXT), *((word, NUMBER) for word in words)], rows)
    if not all(facts.splits[name].targets.whole for name in SPLITS):
        yield element("p", "A sample was counted: “never” means not in the sample (--all counts everything).")
    curve = [[Point(*point) for point in facts.splits[name].targets.curve] for name in SPLITS]
    marks = [(10.0**power, f"{10**power:,}") for power in range(7)]
    plot = curves(curve, "How often an id is a target, by its rank", marks, y_log=True)
    yield _figure(plot, "How often an id is a target, by its rank among all ids (both axes are logarithmic)")
    frequent = facts.splits["train"].targets.most_frequent
    columns = [("id", NUMBER), ("text", TEXT), ("times", NUMBER), ("share", NUMBER), ("", TEXT)]
    yield _table("most frequent in train", columns, [_frequent(one, frequent[0].count) for one in frequent])


def _frequent(one: Frequent, most: int) -> list[Child]:
    spelled = element("code", sentences.spelled(one.text, one.bytes))
    return [str(one.id), spelled, f"{one.count:,}", f"{one.share:.2%}", meter(one.count / most)]


def _windows(facts: StoreFacts) -> Iterable[Child]:
    if not facts.windows:
        yield element("p", "No window was asked for.")
    for number, window in enumerate(facts.windows, 1):
        yield _window(number, window, facts.splits[window.split].documents)


def _window(number: int, window: Excerpt, documents: int) -> Element:
    where = f"{window.split}, ids {window.start:,} to {window.start + window.ids - 1:,}"
    parts: list[Child] = []
    for part in window.parts:
        if part.begins:
            parts.append(element("p", f"document {part.document:,} of {documents:,}", class_="border"))
        parts.append(element("pre", "\n" + part.text, dir="auto"))  # a parser drops the first line end of a pre
    text = element("div", *parts, class_="window", tabindex="0", role="region", aria_label=f"Window {number}, {where}")
    return element("div", element("h3", where), text)


def _files(facts: StoreFacts) -> Iterable[Child]:
    words = [("file", TEXT), ("ids", NUMBER), ("dtype", TEXT), ("offset", NUMBER), ("sha256", TEXT)]
    yield _table("shards", words, [row for name in SPLITS for row in _shards(facts, name)])
    words = [("source", TEXT), ("documents read", NUMBER), ("size", NUMBER), ("sha256", TEXT)]
    sources = facts.store.get("sources") or []
    yield _table("what the store was made from", words, [_source(source) for source in sources])


def _shards(facts: StoreFacts, name: SplitName) -> Iterable[list[Child]]:
    for shard in facts.store["splits"][name]["shards"]:
        file = Path(shard["file"]).name
        yield [file, f"{shard['tokens']:,}", shard["dtype"], f"{shard['offset']:,}", _hash(shard["sha256"])]


def _source(source: dict[str, object]) -> list[Child]:
    rows, size = source.get("rows"), source.get("size")
    numbers = [f"{rows:,}" if isinstance(rows, int) else "–", sentences.size(size) if isinstance(size, int) else "–"]
    return [str(source.get("name", "")), *numbers, _hash(str(source.get("sha256") or source.get("etag") or ""))]


def _hash(digest: str) -> Element:
    return element("code", digest)
