"""Text that others wrote: shown as it is, wherever it goes out."""

from __future__ import annotations

import csv
import io
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.schema.plain_text import (
    LINE,
    csv_cell,
    for_file,
    for_html,
    for_page,
    from_csv_cell,
    in_a_line,
    printable,
    shown,
)

JOINER = "\N{WORD JOINER}"


def test_what_a_terminal_acts_on_is_written_as_an_escape():
    assert printable("\x1b[31mred\x9b2J \u202egnp\u2066 \udcff") == r"\x1b[31mred\x9b2J \u202egnp\u2066 \udcff"
    assert printable("tab\there\r\nanother\rline\n") == "tab\there\nanother\nline\n"


@given(st.text())
@example("no character: \ufffe \uffff")
def test_no_text_holds_what_a_terminal_acts_on_afterwards(text: str):
    told = in_a_line(text)
    assert not any(unicodedata.category(letter) in ("Cc", "Cs") or letter in "\ufffe\uffff" for letter in told)
    told.encode()


@pytest.mark.parametrize(
    "text",
    [
        "a ` [x](http://e.com) `` b ` c",
        "![a](http://e.com/b.png)",
        "<img src=http://e.com>",
        "https://e.com",
        "a@e.com",
    ],
)
def test_no_link_and_no_picture_is_live(text: str):
    for told in (for_page(text), for_file(text)):
        assert not re.search(r"(?<!\\)\]\(", told)
        assert "://e" not in told
        assert "@e" not in told
        assert not told.startswith("<")


def test_code_between_single_backticks_stays_code():
    assert for_page("run `nsa show a_b` :red[x]") == r"run `nsa show a_b` \:red\[x\]"
    assert for_file("`a|b` of a_b, _c_ | 5 < 6") == r"`a\|b` of a_b, \_c\_ \| 5 < 6"
    assert for_page(r"\` [x](y) `").count("](") == 1  # both backticks are code's: the backslash before is escaped
    assert for_page("www.e.com") == f"www{JOINER}.e.com"


def test_the_beginning_of_a_text_makes_no_block_and_html_is_text():
    assert all("\\" in for_page(text)[:2] for text in ("# a", "> a", "- a", "1. a", "=== a"))
    assert for_html('<b onclick="x">&amp;') == "&lt;b onclick=&quot;x&quot;&gt;&amp;amp;"


@given(st.text(alphabet=st.sampled_from("'=+-@\uff1d\uff0b\uff0d\uff20\t\r\n ab\",")))
def test_no_cell_is_a_formula_and_each_comes_back(text: str):
    cell = csv_cell(text)
    assert unicodedata.normalize("NFKC", cell[:1]) not in {"=", "+", "-", "@", "\t", "\r", "\n"}
    assert from_csv_cell(cell) == text
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\r\n").writerow([cell, "b"])
    assert next(csv.reader(io.StringIO(file.getvalue(), newline=""))) == [cell, "b"]


def test_a_long_text_keeps_its_beginning_and_its_end():
    told = in_a_line("begin" + "x" * 3_000_000 + "end")
    assert told.startswith("begin")
    assert told.endswith("end")
    assert "2,999,008 characters left out" in told
    assert len(told) < LINE + 50


def test_a_value_is_shown_in_bounded_time():
    bomb: list[object] = ["lol"] * 9
    for _ in range(30):
        bomb = [bomb] * 9
    itself: list[object] = []
    itself.append(itself)
    assert all(len(shown(value)) < 600 for value in (bomb, itself, "x" * 2_000_000, {"a": bomb}))
    assert shown({"b": 1, "a": [True, None, "it's"]}) == """{'a': [True, None, "it's"], 'b': 1}"""
