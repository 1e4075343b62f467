"""The page is whole, safe and readable: parsed as a browser would, its facts compared with the store's."""

import base64
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from quatrain.text.visible import visible
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.facts import StoreFacts, store_facts
from quatrain.tokens.store import SPLITS, TokenStore
from quatrain.tokens.writer import prepare
from quatrain.web.store_page import store_page

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = (
    "\n</pre><script>alert(1)</script>\x1b[2J\u202e<img src=x onerror=alert(1)>&lt;b&gt;\x00 -->"
    "<style>*{display:none}</style>"
)


class Parsed(HTMLParser):
    """Elements in order with their attributes and the text in them; fails where the nesting is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = defaultdict(str)
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes)
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag] += data

    def handle_decl(self, declaration):
        assert declaration == "doctype html"

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def facts(sonnets) -> StoreFacts:
    return store_facts(sonnets, 1024, 3, verify=True)


@pytest.fixture(scope="module")
def text(facts) -> str:
    return store_page(facts)


@pytest.fixture(scope="module")
def parsed(text) -> Parsed:
    return Parsed(text)


def test_it_is_one_file_that_loads_and_runs_nothing(parsed, text):
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "a "}
    for tag, attributes in parsed.elements:
        assert not any(name.startswith("on") or name in ("style", "src", "srcset") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#")
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_its_policy_allows_its_own_style_and_nothing_else(parsed):
    (policy,) = [one["content"] for one in parsed.attributes("meta") if one.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(parsed.texts["style"].encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert "unsafe" not in policy
    order = [tag for tag, _ in parsed.elements]
    assert order.index("style") > order.index("meta") + 1  # the policy stands before what it judges


def test_it_fits_a_narrow_and_a_wide_screen_in_light_and_dark(parsed):
    metas = {one.get("name"): one["content"] for one in parsed.attributes("meta") if "name" in one}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    style = parsed.texts["style"]
    for rule in ("@media (prefers-color-scheme: dark)", "@media (min-width: 48rem)", "max-width: 62rem"):
        assert rule in style
    assert set(re.findall(r"var\((--\w+)\)", style)) <= set(re.findall(r"(--\w+):", style))
    # Nothing is wider than a narrow screen but what scrolls by itself.
    assert len(parsed.attributes("table")) == sum(one.get("class") == "scroll" for one in parsed.attributes("div"))
    assert ".scroll { overflow-x: auto; }" in style
    for svg in parsed.attributes("svg"):
        assert svg.get("width", "100%") == "100%"
    for rect in parsed.attributes("rect"):
        assert rect["width"].endswith("%")


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2 (relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_light_and_dark(parsed):
    themes = re.findall(r":root \{(.*?)\}", parsed.texts["style"], re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", theme))
        for ground in ("ground", "card"):
            for ink in ("ink", "soft", "s0", "s1", "mark", "focus"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_the_keyboard_reaches_everything_and_all_names_exist(parsed):
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [one["href"].removeprefix("#") for one in parsed.attributes("a")]
    assert set(links) <= set(ids)
    assert parsed.elements[[tag for tag, _ in parsed.elements].index("body") + 1][1]["class"] == "skip"
    for _, attributes in parsed.elements:
        if attributes.get("class") in ("scroll", "window"):
            assert attributes["tabindex"] == "0"
            assert attributes["role"] == "region"
            assert attributes["aria-label"]
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    assert all(one.get("aria-label") for one in parsed.attributes("svg") if one.get("role") == "img")
    assert ":focus-visible" in parsed.texts["style"]


def test_it_tells_the_facts(parsed, facts):
    body = parsed.texts["body"]
    for fact in ("tokenizer char", "4,965", "38.9%", "validation: documents 7", facts.store["fingerprint"], "609–724"):
        assert fact in body
    assert "the hashes of all 5 files hold" in body
    for name in SPLITS:
        for shard in facts.store["splits"][name]["shards"]:
            assert shard["sha256"] in body
        assert f"{facts.splits[name].targets.never:,}" in body
    for window in facts.windows:
        for part in window.parts:
            assert visible(part.text, "\n\t") in parsed.texts["pre"]
    assert body.count(" of 7") == sum(part.begins for window in facts.windows for part in window.parts)


def test_equal_stores_give_equal_pages(facts, text):
    assert store_page(facts) == text


def test_no_text_of_a_corpus_or_a_store_becomes_markup(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": EVIL + str(n)}) + "\n" for n in range(4)))
    prepare([tmp_path / "texts.jsonl"], tmp_path / "store", PrepareConfig("bytes", val_docs=(0,), cross_dedup=False))
    facts = store_facts(TokenStore(tmp_path / "store"), 4096, 1)
    plain = {tag for tag, _ in Parsed(store_page(facts)).elements}
    changed = facts.store | {
        "examples": [{"kind": EVIL, "place": EVIL, "like": EVIL, "jaccard": 0.5, "text": EVIL}],
        "counts": {"skipped": 3, "surrogates": 1, EVIL: 1},
        "skipped": {EVIL: 3},
        "sources": [{"name": EVIL, "size": 3, "rows": 2, "etag": EVIL}, {}],
        "split": {"rule": EVIL},
        "removal": {"near": True, "threshold": EVIL},
        "shuffle": EVIL,
        "fingerprint": EVIL,
    }
    text = store_page(replace(facts, folder="a/<b>\x1b[2J", store=changed))
    parsed = Parsed(text)
    assert {tag for tag, _ in parsed.elements} <= plain | {"details", "summary", "strong", "blockquote", "span", "code"}
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert parsed.texts["pre"].count("<script>alert(1)</script>") == 3
    assert parsed.texts["blockquote"] == visible(EVIL, "\n\t")
    assert r"\x1b[2J\u202e<img src=x onerror=alert(1)>&lt;b&gt;\x00" in parsed.texts["pre"]
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
