"""What store.json says of a store, in words; keys that an older or another program left out are passed over."""

from collections.abc import Iterator
from typing import Any

LEFT_OUT = {  # counts of documents that are not in the store
    "empty": "empty",
    "duplicates": "exact duplicates",
    "near_duplicates": "near-duplicates",
    "near_validation": "train documents too near to a validation document",
    "contaminated": "documents that hold a benchmark's text",
    "skipped": "could not be read",
}
KINDS = {  # of one example
    "duplicate": "duplicate",
    "near_duplicate": "near-duplicate",
    "near_validation": "near validation",
    "contaminated": "benchmark's text",
    "skipped": "skipped",
}


def split_rule(store: dict[str, Any]) -> str:
    """How documents came into train or validation."""
    rule = store.get("split")
    if not isinstance(rule, dict):
        return str(rule or "not written down")
    match rule.get("rule"):
        case "hash":
            fraction = _percent(rule["fraction"])
            return f"validation: documents whose hash of text and seed {rule['seed']} is below {fraction}"
        case "documents":
            indices = ", ".join(map(str, rule["indices"]))
            return f"validation: documents {indices} (counted from 0), and others of the same text"
        case "files":
            return "validation: the files given with --val"
        case "tail":
            return f"validation: the last {_percent(rule['share'])} of one document, its neighbour in train"
        case "file names":
            chosen = f", and of those that match {rule['val_files']}" if rule.get("val_files") else ""
            return f"validation: the documents of files whose names say so{chosen}"
    return ", ".join(f"{key} {value}" for key, value in rule.items())


def looked_for(store: dict[str, Any]) -> Iterator[str]:
    """What prepare was asked to leave out, and how it ordered what stayed; nothing where that is not written down."""
    removal = store.get("removal")
    if removal is not None:
        words = {"exact": "exact duplicates", "near": "near-duplicates", "cross": "near copies of validation documents"}
        kinds = [word for key, word in words.items() if removal.get(key)]
        near = removal.get("near") or removal.get("cross")
        threshold = f" (near: Jaccard similarity from {removal.get('threshold')})" if near else ""
        yield f"looked for {', '.join(kinds)}{threshold}" if kinds else "no duplicates were looked for"
        for file in removal.get("benchmark") or []:
            facts = f"{file['items']:,} items, sha256 {file['sha256'][:12]}"
            yield f"looked for 13 words in a row of {file['name']} ({facts})"
    if "shuffle" in store:
        seed = store["shuffle"]
        yield "documents in the order of the sources" if seed is None else f"documents shuffled with seed {seed}"


def left_out(store: dict[str, Any]) -> list[tuple[str, int]]:
    """Each reason for which documents are not in the store, with how many; reasons of skipping under theirs."""
    counts = store.get("counts") or {}
    skipped = store.get("skipped") or {}
    found = []
    for key, count in counts.items():
        if count and key != "surrogates":
            found.append((LEFT_OUT.get(key, key.replace("_", " ")), count))
            found += [(f"  {reason}", times) for reason, times in skipped.items() if key == "skipped"]
    return found


def examples(store: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Documents that were left out: kind, place, like (what it resembles) and the beginning of the text."""
    for example in store.get("examples") or []:
        jaccard = example.get("jaccard")
        like = example.get("like") or ""
        yield {
            "kind": KINDS.get(example.get("kind", ""), str(example.get("kind", ""))),
            "place": str(example.get("place", "")),
            "like": f"{like} (Jaccard {jaccard:.2f})" if like and jaccard is not None else like,
            "text": str(example.get("text", "")),
        }


def remarks(store: dict[str, Any]) -> Iterator[str]:
    """What else is worth a sentence: replaced characters, validation that stands in train."""
    replaced = (store.get("counts") or {}).get("surrogates")
    if replaced:
        yield f"{replaced:,} lone surrogates became U+FFFD"
    share = store["splits"]["val"].get("share_in_train")
    if share is not None:
        yield f"{share:.2%} of sampled 32-token validation spans stand word for word in train"


def size(count: int) -> str:
    """Bytes as a person reads them.

    >>> size(999), size(1_806_733)
    ('999 bytes', '1.8 MB')
    """
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 999.95:
            return f"{amount:,.1f} {unit}" if unit != "bytes" else f"{count} bytes"
        amount /= 1000
    return f"{amount:,.1f} TB"


def short(number: int) -> str:
    """A number in few characters.

    >>> short(512), short(1448), short(131_071), short(2_000_000)
    ('512', '1.45k', '131k', '2M')
    """
    for factor, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return str(number)


def bin_label(first: int, last: int) -> str:
    """The lengths of a histogram's bin, in full below a million.

    >>> bin_label(0, 0), bin_label(1024, 2047), bin_label(1_048_576, 2_097_151)
    ('0', '1,024–2,047', '1.05M–2.1M')
    """
    if first == last:
        return f"{first:,}"
    return f"{first:,}–{last:,}" if last < 10**6 else f"{short(first)}–{short(last)}"


def spelled(text: str, raw: str | None) -> str:
    r"""A token as Python spells it, so that spaces are seen; its bytes where it is a part of a character.

    >>> spelled(" the", None), spelled("\ufffd", "e280")
    ("' the'", 'bytes e2 80')
    """
    return repr(text) if raw is None else f"bytes {bytes.fromhex(raw).hex(' ')}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
