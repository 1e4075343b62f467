"""Pages as trees of elements: text and attributes are escaped when the tree is written, never before.

A page is one file that loads nothing and runs nothing: its content-security-policy names its own style by hash.
"""

import base64
import hashlib
from importlib import resources
from xml.etree.ElementTree import Element, tostring

from quatrain.text.visible import visible

Child = Element | str
KEPT = "\n\t"  # control characters that a page shows as what they are
META = {"viewport": "width=device-width, initial-scale=1", "referrer": "no-referrer", "color-scheme": "light dark"}


def element(tag: str, /, *children: Child, **attributes: object) -> Element:
    """An element with children and attributes (`class_` is class, `aria_label` is aria-label); empty ones are left out.

    Characters that cannot be printed as themselves are spelled out, in text and attributes.
    """
    spelled = {
        key.rstrip("_").replace("_", "-"): visible(str(value)) for key, value in attributes.items() if value != ""
    }
    made = Element(tag, spelled)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + visible(child, keep=KEPT)
        else:
            last.tail = (last.tail or "") + visible(child, keep=KEPT)
    return made


def page(title: str, *body: Child) -> str:
    """A whole HTML document in the style of `static/page.css`."""
    style = resources.files("quatrain.web").joinpath("static/page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        *(Element("meta", {"name": name, "content": content}) for name, content in META.items()),
        element("title", title),
        _style(style),
    )
    tree = element("html", head, element("body", *body), lang="en")
    return "<!doctype html>\n" + tostring(tree, encoding="unicode", method="html") + "\n"


def _style(css: str) -> Element:
    made = Element("style")  # its text is ours and is not escaped, in HTML as in the writer
    made.text = css
    return made


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
