"""The tokenizer.json of Hugging Face, written without its library: byte for byte the same everywhere."""

import json
from json.encoder import encode_basestring
from typing import Any

EOT_TEXT = "<|endoftext|>"


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte, in the order of its first 256 ids: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def byte_level_json(vocab: dict[str, int], merges: list[str], eot: int, use_regex: bool) -> bytes:
    """The file of a byte-level BPE: each byte is a letter, and `use_regex` cuts into words before merging."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return bpe_json(vocab, merges, eot, pre_tokenizer=byte_level, decoder=byte_level)


def bpe_json(vocab: dict[str, int], merges: list[str], eot: int, pre_tokenizer: Any, decoder: Any) -> bytes:
    """The file of a BPE tokenizer whose only special token is eot."""
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {},
        "merges": [],
    }
    marker = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": eot, "content": EOT_TEXT, **marker}],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    frame = json.dumps(whole, ensure_ascii=False, indent=1)
    # The two long members by hand: with an indent, the library takes four times as long.
    quoted = encode_basestring
    words = ",".join([f"\n   {quoted(word)}: {token}" for word, token in vocab.items()])
    pairs = ",".join([f"\n   {quoted(merge)}" for merge in merges])
    frame = frame.replace('"vocab": {}', f'"vocab": {{{words}\n  }}') if vocab else frame
    head, tail = frame.rsplit('"merges": []', 1)
    frame = f'{head}"merges": [{pairs}\n  ]{tail}' if merges else frame
    return (frame + "\n").encode()
