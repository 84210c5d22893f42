"""Charts as text and as pictures."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from colossus.chart import Line, Panel, in_encoding, save_charts, text_chart
from colossus.chart.panel import PALETTE, log_ticks, readable, ticks

STEPS = range(1, 41)
FALLING = [5 * math.exp(-step / 10) for step in STEPS]
UP = Line("up", range(5), [1, 2, 3, 4, 5])
DOWN = Line("down", range(5), [5, 4, 3, 2, 1])
EVALUATED = Line("down validation", [0, 4], [4, 2], "markers", 1)


def test_one_line_is_drawn_in_braille_with_a_gap_where_a_number_is_none() -> None:
    line = Line("", range(7), [0, 1, 2, 3, math.nan, 3, 3])
    chart = """\
   loss (nats)
  \u2502           \u2880\u2814\u2803        \u2809\u2809\u2809\u2809\u2809
 2\u2524        \u2880\u2824\u280a\u2801
  \u2502     \u2880\u2860\u280a\u2801
  \u2502  \u2880\u2860\u2812\u2801
 0\u2524\u2860\u2814\u2801
  AXIS
   0                     5"""
    chart = chart.replace("AXIS", "\u2514\u252c" + 21 * "\u2500" + " step")
    assert text_chart(Panel("loss", [line], "step", "nats"), 30, 8) == chart


def test_where_the_encoding_has_no_braille_charts_are_ascii() -> None:
    chart = text_chart(Panel("loss", [UP], "step", "nats"), 22, 8)
    assert in_encoding(chart, "utf-8") == chart
    assert in_encoding(chart, "ascii").splitlines() == [
        "   loss (nats)",
        "  |              *****",
        " 4+         ******",
        " 2+    ******",
        "  |*****",
        "  ++------------- step",
        "   0",
        "  ** up",
    ]


def test_without_colours_each_of_several_lines_has_a_letter() -> None:
    # markers stand above lines, also where a line comes later
    rows = text_chart(Panel("loss", [UP, EVALUATED, replace(DOWN, colour=1)], "step"), 36, 10).splitlines()
    assert rows[1:7] == [
        "  \u2502bbbbbb                     aaaaaa",
        " 4\u2524B    bbbbbb           aaaaaa",
        "  \u2502           bbbbbbaaaaa",
        "  \u2502           aaaaabbbbbb",
        " 2\u2524     aaaaaa           bbbbbb    B",
        "  \u2502aaaaaa                     bbbbbb",
    ]
    assert rows[9] == "  a up  b down  B down validation"


def test_with_colours_lines_are_braille_in_those_of_the_palette() -> None:
    chart = text_chart(Panel("loss", [UP, DOWN, EVALUATED]), 36, 10, colour=True)
    colours = {
        "#" + bytes(map(int, numbers)).hex().upper() for numbers in re.findall(r"\[38;2;(\d+);(\d+);(\d+)m", chart)
    }
    assert colours == set(PALETTE[:2])
    plain = re.sub(r"\033\[[\d;]+m", "", chart).splitlines()
    assert all(0x2800 < ord(drawn) < 0x2900 or drawn == "o" for row in plain[1:7] for drawn in row[3:].replace(" ", ""))
    assert plain[-1] == "  \u2812\u2812 up  \u2812\u2812 down  o down validation"


@pytest.mark.parametrize(
    "y",
    [FALLING, [3.0] * 40, [math.nan] * 40, [0.0] * 40, [1e9 * each for each in FALLING], [math.inf, *FALLING[1:]]],
    ids=["falling", "constant", "nan", "zero", "large", "inf"],
)
def test_a_chart_keeps_to_its_width_and_height(y: list[float]) -> None:
    for width, height, is_log in product((20, 81, 200), (6, 20), (False, True)):
        lines = [Line(f"a run with some name {at}", STEPS, y) for at in range(5)]
        rows = text_chart(Panel("loss", lines, "tokens", log_y=is_log), width, height).splitlines()
        assert max(map(len, rows)) <= width
        assert len(rows) <= max(height, 6 + 5)  # a legend is never cut


def test_ticks_are_round_and_no_more_than_asked_for() -> None:
    assert ticks(0, 1, 6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3, 97, 5) == [20, 40, 60, 80]
    assert ticks(-7, 7, 3) == [-5, 0, 5]
    for low, high, most in product((-3e9, -0.7, 1e-5, 12), (13, 1e4, 7e12), (2, 5, 9)):
        assert 1 <= len(ticks(low, high, most)) <= most
    powers = [10**at for at in log_ticks(-3, 2, 8)]
    assert powers == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100])
    assert [10**at for at in log_ticks(-0.5, 0.8, 8)] == pytest.approx([0.5, 1, 2, 5])
    assert [10**at for at in log_ticks(math.log10(2.1), math.log10(4.9), 8)] == pytest.approx([2.5, 3, 3.5, 4, 4.5])
    assert [*map(readable, (0.0003, 0.1 + 0.2, 1500, 20000, 1.5e6, -3e9))] == [
        "0.0003", "0.3", "1500", "20k", "1.5M", "-3G",
    ]  # fmt: skip


def test_an_axis_of_steps_has_whole_numbers() -> None:
    axis = text_chart(Panel("loss", [Line("", [7], [1.0])], "step"), 80, 8).splitlines()[-1]
    assert axis.split() == ["6", "7", "8"]


def test_a_picture_has_the_titles_labels_and_names_of_its_charts(tmp_path: Path) -> None:
    many = [Line(f"router {at}", range(5), [at, 2, 3, 4, 5]) for at in range(9)]
    raw = Line("", range(5), [1, 9, 3, 9, 5], "faint", 0)
    first = Panel("the loss", [raw, UP, DOWN, EVALUATED], "step", "nats", log_y=True)
    save_charts([first, Panel("experts", many, "tokens")], tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    names = ["up", "down", "down validation", "router 0", "router 8"]
    for label in ("the loss", "step", "nats", "experts", "tokens", *names):
        assert text.count(f"<!-- {label} -->") == 1, label
    for name in ("one.png", "one.pdf"):
        save_charts([Panel("nothing", [Line("", [1], [math.nan])], log_y=True)], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(ValueError, match="ends with"):
        save_charts([first], tmp_path / "all.gif")
