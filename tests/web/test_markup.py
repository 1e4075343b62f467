from hypothesis import given
from hypothesis import strategies as st
from test_store_page import Parsed

from quatrain.text.visible import visible
from quatrain.web.markup import KEPT, element, page


@given(text=st.text(st.characters()), attribute=st.text(st.characters(), min_size=1))
def test_any_text_and_attribute_comes_out_of_a_parser_as_it_went_in(text, attribute):
    parsed = Parsed(page(text, element("p", text, element("b", text), text, title=attribute, class_="c")))
    assert parsed.texts["title"] == visible(text, KEPT)
    assert parsed.texts["p"] == visible(text, KEPT) * 3
    assert parsed.attributes("p") == [{"title": visible(attribute), "class": "c"}]


def test_names_of_attributes_and_order_of_children():
    made = element("meta", http_equiv="x", aria_label="y", viewBox="z", id="")
    assert made.attrib == {"http-equiv": "x", "aria-label": "y", "viewBox": "z"}
    mixed = element("p", "a", element("i", "b"), "c", "d", element("i"), "e")
    assert "".join(mixed.itertext()) == "abcde"
