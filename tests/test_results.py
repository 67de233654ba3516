from dataclasses import dataclass

import pytest

from plpkg.results import Sentences, Tabular, bits, shown


@dataclass(frozen=True)
class Example(Tabular):
    rate: float

    def rows(self):
        return [{"what": "a <b>", "value": self.rate}, {"what": "n", "value": 1234567}]

    def __repr__(self):
        return f"Example <{self.rate}>"


def test_html_is_escaped_and_rounded_and_a_frame_keeps_full_precision():
    html = Example(3.14159265)._repr_html_()
    assert "a &lt;b&gt;" in html
    assert "Example &lt;3.14159265&gt;" in html
    assert "<td>3.142</td>" in html
    assert "<td>1,234,567</td>" in html
    frame = Example(3.14159265).to_frame()
    assert list(frame.columns) == ["what", "value"]
    assert frame["value"][0] == 3.14159265


@pytest.mark.parametrize(
    ("count", "text"),
    [(8, "8 bit"), (32_768, "32.77 kbit"), (4_194_304, "4.194 Mbit"), (1_048_576_000, "1.049 Gbit"), (-2e6, "-2 Mbit")],
)
def test_bits(count, text):
    assert bits(count) == text


def test_shown_leaves_words_and_flags_alone():
    assert shown("x") == "x"
    assert shown(14_336.0) == "14,336"
    assert shown(2**53 + 1) == "9,007,199,254,740,993"
    assert shown(0.00012345) == "0.0001234"
    assert shown(True) == "True"
    assert shown(None) == "None"


def test_sentences_are_shown_in_full():
    """And those of what is made of the table, while another table is cut as ever."""
    sentence = "A sentence of more than fifty letters, whose end is what one would like to read."

    class Said(Sentences):
        def rows(self):
            return [{"what": sentence, "number": 1.26}]

    frame = Said().to_frame()
    for shown_in_full in (frame, frame.round(1), frame.drop(columns="number")):
        assert sentence in repr(shown_in_full)
        assert sentence in shown_in_full._repr_html_()
    assert sentence not in repr(Tabular.to_frame(Said()))
