import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.text.visible import visible


@given(text=st.text(st.characters()), keep=st.sampled_from(["", "\n", "\n\t"]))
def test_what_is_left_can_be_printed_or_was_asked_for(text, keep):
    shown = visible(text, keep)
    assert all(character.isprintable() or character in keep for character in shown)
    assert visible(shown, keep) == shown


@given(text=st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_text_is_left_alone(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\tb\nc", r"a\tb\nc"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("line\u2028end", r"line\u2028end"),
        ("\ud800", r"\ud800"),
        ("日本語 🙂", "日本語 🙂"),
    ],
)
def test_controls_directions_and_separators_are_spelled(text, shown):
    assert visible(text) == shown
