from hypothesis import given
from hypothesis import strategies as st

from quatrain.inference.stops import StopTexts


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_whatever_the_pieces_text_passes_up_to_the_first_stop_text(pieces: list[str], stop: str) -> None:
    stops = StopTexts([stop])
    passed = []
    for piece in pieces:
        passed.append(stops.push(piece))
        held = len("".join(pieces[: len(passed)])) - len("".join(passed))
        assert stops.found or held < len(stop)  # no more is held back than may begin the stop text
    passed.append(stops.end())
    whole = "".join(pieces)
    assert "".join(passed) == stops.text == whole.split(stop)[0]
    assert stops.found == (stop in whole)
