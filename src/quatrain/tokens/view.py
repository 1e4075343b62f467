"""What a person sees of a store in a terminal: tables, bars, windows of text, no raw character of the corpus."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quatrain.console import human, say
from quatrain.text.visible import visible
from quatrain.tokens import sentences
from quatrain.tokens.excerpts import Excerpt
from quatrain.tokens.facts import Bin, Padded, SplitFacts, StoreFacts
from quatrain.tokens.store import SPLITS

FILES_SHOWN = 12  # shards of a split; sources
EXAMPLES_SHOWN = 6
FREQUENT_SHOWN = 12
LINES_SHOWN = 14  # of a window
BAR = 20  # cells
NARROWEST, WIDEST = 80, 120  # numbers are never cut; lines longer than that are hard to read
BORDER = "──"

COLOURS = {"train": "cyan", "val": "magenta"}


def show_store(facts: StoreFacts) -> None:
    """Print everything about a store for a person."""
    console = Console(file=human(), highlight=False, markup=False, emoji=False)
    console.width = min(max(console.width, NARROWEST), WIDEST)
    for part in _parts(facts, console):
        with console.capture() as captured:  # rich would turn a reader that has gone into its own exit
            console.print(part)
        say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _parts(facts: StoreFacts, console: Console) -> Iterator[RenderableType]:
    yield _head(facts)
    yield _titled("Splits", _splits(facts))
    yield _titled("Shards", _shards(facts))
    yield _titled("Sources and rules", _rules(facts))
    yield _titled("Left out", _left_out(facts))
    yield _titled("Document lengths", _lengths(facts), "ids of text, without the eot")
    seq_len = facts.splits["train"].padding.seq_len
    yield _titled("Padding against packing", _padding(facts), f"rows of {seq_len:,} ids")
    yield _titled("Targets", _targets(facts), "how often each id is to be predicted")
    for window in facts.windows:
        yield _titled("Window", _window(facts, window, console), _where(window))


def _titled(title: str, body: RenderableType, remark: str = "") -> RenderableType:
    head = Text.assemble("\n", (title, "bold"), ("  " + remark if remark else "", "dim"))
    return Group(head, Padding(body, (0, 0, 0, 2)))


def _head(facts: StoreFacts) -> RenderableType:
    tokenizer = facts.store["tokenizer"]
    return Text.assemble(
        (visible(facts.folder), "bold"),
        f"\ntokenizer {visible(tokenizer['name'])}, {tokenizer['vocab_size']:,} ids, eot {tokenizer['eot']}",
        (f"\nfingerprint {visible(facts.store['fingerprint'])}", "dim"),
        f"\nevery file has the hash that store.json says ({facts.verified['files']} files, "
        f"{sentences.size(facts.verified['bytes'])})"
        if facts.verified
        else "",
    )


def table(*columns: str) -> Table:
    """A table without lines; a column whose name begins with `>` is aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        right = column.startswith(">")
        title = Text(column.removeprefix(">"))
        made.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=right or not column)
    return made


def _row(made: Table, *cells: object, style: str = "") -> None:
    made.add_row(*(cell if isinstance(cell, Text) else Text(visible(str(cell))) for cell in cells), style=style)


def _splits(facts: StoreFacts) -> RenderableType:
    made = table("", ">documents", ">ids", ">bytes of text", ">bytes/id")
    for name in SPLITS:
        _row(made, _name(name), *_sums(facts.splits[name]))
    _row(made, "both", *_sums(facts), style="bold")
    return Group(made, Text("ids count every eot; bytes/id does not", style="dim"))


def _sums(one: SplitFacts | StoreFacts) -> tuple[str, str, str, str]:
    known = "unknown" if one.bytes is None else f"{one.bytes:,}"
    return f"{one.documents:,}", f"{one.tokens:,}", known, f"{one.bytes_per_token or 0:.3f}" if one.bytes else "–"


def _shards(facts: StoreFacts) -> RenderableType:
    made = table("file", ">ids", "dtype", ">offset", ">bytes", "sha256")
    more = Text(style="dim")
    for name in SPLITS:
        shards = facts.store["splits"][name]["shards"]
        for shard in shards[:FILES_SHOWN]:
            size = shard["tokens"] * int(shard["dtype"].removeprefix("uint")) // 8
            numbers = (f"{shard['tokens']:,}", shard["dtype"], shard["offset"], f"{size:,}")
            _row(made, Path(shard["file"]).name, *numbers, shard["sha256"][:12])
        more.append(_not_shown(len(shards) - FILES_SHOWN, f"shards of {name}"))
    return Group(made, *([more] if more else []))


def _not_shown(count: int, what: str) -> str:
    return f"… {count:,} more {what} (--html and --json have all) " if count > 0 else ""


def _rules(facts: StoreFacts) -> RenderableType:
    made = table("source", ">rows", ">size", "sha256")
    sources = facts.store.get("sources") or []
    for source in sources[:FILES_SHOWN]:
        rows, size = source.get("rows"), source.get("size")
        cells = ["" if rows is None else f"{rows:,}", "" if size is None else sentences.size(size)]
        _row(made, source.get("name", ""), *cells, str(source.get("sha256") or source.get("etag") or "")[:12])
    more = _not_shown(len(sources) - FILES_SHOWN, "sources")
    rules = [sentences.split_rule(facts.store), *sentences.remarks(facts.store)]
    return Group(made, *(Text(visible(line)) for line in [more, *rules] if line))


def _left_out(facts: StoreFacts) -> RenderableType:
    reasons = sentences.left_out(facts.store)
    parts: list[RenderableType] = []
    if reasons:
        made = table(">documents", "reason")
        for reason, count in reasons:
            _row(made, f"{count:,}", reason)
        parts.append(made)
    else:
        parts.append(Text("no document was left out"))
    parts += [Text(visible(sentence), style="dim") for sentence in sentences.looked_for(facts.store)]
    shown = list(sentences.examples(facts.store))
    for example in shown[:EXAMPLES_SHOWN]:
        like = f" like {example['like']}" if example["like"] else ""
        parts.append(Text.assemble((visible(f"{example['kind']}: {example['place']}{like}"), "yellow")))
        parts.append(Text("  " + visible(example["text"]), overflow="ellipsis", no_wrap=True))
    more = _not_shown(len(shown) - EXAMPLES_SHOWN, "examples")
    return Group(*parts, *([Text(more, style="dim")] if more else []))


def _lengths(facts: StoreFacts) -> RenderableType:
    summary = table("", ">mean", *(f">{word.replace('percentile_', 'p')}" for word in _quantiles(facts)))
    for name in SPLITS:
        lengths = facts.splits[name].lengths
        _row(summary, _name(name), f"{lengths.mean:,.1f}", *(f"{value:,}" for value in lengths.quantiles.values()))
    bars = table(">ids", ">train", "", ">val", "")
    train, val = (facts.splits[name].lengths.histogram for name in SPLITS)
    for one, other in zip(train, val, strict=True):
        cells = (f"{one.documents:,}", _bar(one, train, "train"), f"{other.documents:,}", _bar(other, val, "val"))
        _row(bars, sentences.bin_label(one.first, one.last), *cells)
    return Group(summary, Text(), bars)


def _quantiles(facts: StoreFacts) -> Iterable[str]:
    return facts.splits["train"].lengths.quantiles


def _bar(one: Bin, bins: list[Bin], name: str) -> Text:
    longest = max(other.documents for other in bins)
    width = BAR if name == "train" else BAR // 2
    eighths = round(8 * width * one.documents / longest) if longest else 0
    eighths = max(eighths, 1 if one.documents else 0)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=COLOURS[name])


def _padding(facts: StoreFacts) -> RenderableType:
    made = table("", "", ">documents", ">rows", ">wasted", ">share")
    for name in SPLITS:
        padding = facts.splits[name].padding
        _padded_row(made, _name(name), "padded, by formula", padding.formula)
        if padding.measured:
            _padded_row(made, "", "padded, measured", padding.measured)
        _padded_row(made, "", "best fit", padding.best_fit)
        _row(made, "", "packed", f"{facts.splits[name].documents:,}", f"{padding.packed_windows:,}", "0", "0.0%")
    cut = ", ".join(f"{facts.splits[name].padding.cut:,} of {name}" for name in SPLITS)
    left_out = ", ".join(f"{facts.splits[name].padding.left_out:,} of {name}" for name in SPLITS)
    return Group(
        made,
        Text("formula: a document of l targets wastes T ⌈l/T⌉ − l; measured: documents as the eots cut them", "dim"),
        Text(f"best fit: whole documents, several to a row; longer than a row, so cut: {cut}", "dim"),
        Text(f"packed windows leave out (n−1) mod T targets an epoch: {left_out}", "dim"),
    )


def _padded_row(made: Table, name: str | Text, how: str, padded: Padded) -> None:
    numbers = (padded.documents, padded.rows, padded.wasted)
    _row(made, name, how, *(f"{number:,}" for number in numbers), f"{padded.share:.1%}")


def _targets(facts: StoreFacts) -> RenderableType:
    summary = table("", ">counted", ">of", ">ids used", ">ids never", ">ids for half")
    for name in SPLITS:
        one = facts.splits[name].targets
        cells = [one.counted, one.targets, one.used, one.never, one.half]
        _row(summary, _name(name), *(f"{cell:,}" for cell in cells))
    most = table(">id", "text", ">times", ">share", "")
    frequent = facts.splits["train"].targets.most_frequent[:FREQUENT_SHOWN]
    for one_id in frequent:
        bar = Text("█" * max(1, round(BAR * one_id.count / frequent[0].count)), style=COLOURS["train"])
        _row(
            most,
            one_id.id,
            sentences.spelled(one_id.text, one_id.bytes),
            f"{one_id.count:,}",
            f"{one_id.share:.2%}",
            bar,
        )
    parts: list[RenderableType] = [summary]
    if not all(facts.splits[name].targets.whole for name in SPLITS):
        parts.append(Text("a sample was counted, so `never` means not in it; --all reads everything", style="yellow"))
    return Group(*parts, Text("\nmost frequent in train", style="dim"), most)


def _name(split: str) -> Text:
    return Text(split, style=COLOURS[split])


def _where(window: Excerpt) -> str:
    return f"{window.split} {window.start:,} … {window.start + window.ids - 1:,} ({window.ids:,} ids)"


def _window(facts: StoreFacts, window: Excerpt, console: Console) -> RenderableType:
    """The lines around the window's first border, or its first lines."""
    lines = _lines(facts, window, console)
    border = next((number for number, line in enumerate(lines) if number and line.plain.startswith(BORDER)), 0)
    first = max(0, min(border - LINES_SHOWN // 2, len(lines) - LINES_SHOWN))
    shown = lines[first : first + LINES_SHOWN]
    below = len(lines) - first - len(shown)
    return Group(*_more(first, "above"), *shown, *_more(below, "below"))


def _more(lines: int, where: str) -> list[RenderableType]:
    return [Text(f"… {lines:,} more line{'s' if lines > 1 else ''} {where}", style="dim")] if lines else []


def _lines(facts: StoreFacts, window: Excerpt, console: Console) -> list[Text]:
    """Text behind a gutter, which borders do not have: no text can look like one."""
    documents = f"{facts.splits[window.split].documents:,}"
    lines: list[Text] = []
    for part in window.parts:
        if part.begins:
            lines.append(Text(f"{BORDER} document {part.document:,} of {documents} {BORDER * 4}", "yellow"))
        for paragraph in visible(part.text, keep="\n\t").split("\n"):
            wrapped = Text(paragraph).wrap(console, max(8, console.width - 6))
            lines += [Text.assemble(("│ ", "dim"), line) for line in wrapped]
    return lines
