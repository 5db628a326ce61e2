"""Values as texts, also such that others wrote, and the arithmetic of a planned training run."""

import csv
import io
import math
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

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
from jobs.schema.quantities import Quantities, in_words, readable, readable_interval
from jobs.schema.training_plan import TrainingPlan, mode_of


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (264447.3, "tok/s", "264,447 tok/s"),
        (999.96, "1", "1000"),
        (0.123456, "ms", "0.1235 ms"),
        (0.215124, "h", "12.9 min"),
        (1.303361, "h", "1 h 18 min"),
        (1234.5, "h", "1,234 h"),
        (math.inf, "h", "inf h"),
        (150.0, "min", "2 h 30 min"),
        (8.00886, "s", "8.009 s"),
        (0.0005634, "s", "0.563 ms"),
        (12_345.0, "ms", "12.3 s"),
        (35.0, "C", "35 °C"),
        (262144.0, "token", "262,144 tokens"),
        (1.0, "token", "1 token"),
    ],
)
def test_values_are_written_to_be_read(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


def test_an_interval_has_its_unit_once_and_few_samples_have_a_range() -> None:
    assert readable_interval(15.48, 15.49, None, "ms") == "15.48 – 15.49 ms"
    assert readable_interval(0.9, 1.1, None, "h", to=" .. ") == "54 min .. 1 h 06 min"
    assert readable_interval(math.nan, math.nan, [2, 1, 3], "1") == "range 1 – 3"
    assert not readable_interval(None, None, [1.0] * 9, "ms")


def test_names_keep_their_acronyms() -> None:
    assert in_words("gpu_sm_clock") == "GPU SM clock"
    assert in_words("eta") == "ETA"
    assert in_words("not-slower-than-dense") == "Not slower than dense"
    assert Quantities().of("mfu").title == "MFU"


PLAN = {"steps": 50_000, "tokens_per_step": 4096, "hours": 24.0}  # needs 2,370.4 tok/s


@pytest.mark.parametrize(("stated", "agrees"), [(2340.0, False), (2350.0, True), (2720.0, True), (2740.0, False)])
def test_a_stated_throughput_may_be_rounded_down_or_have_headroom(stated: float, agrees: bool) -> None:
    if agrees:
        assert TrainingPlan.model_validate({**PLAN, "tokens_per_second": stated}).tokens_per_second == stated
    else:
        with pytest.raises(ValidationError, match="contradicts 50,000 steps of 4,096 tokens in 24 h"):
            TrainingPlan.model_validate({**PLAN, "tokens_per_second": stated})


def test_either_fix_that_a_contradiction_names_mends_it() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingPlan.model_validate({**PLAN, "tokens_per_second": 50.0})
    fix = str(caught.value).split("set tokens_per_second to ")[1].split(" [")[0]
    throughput, hours = (float(number) for number in fix.split(", or hours to "))
    for mended in ({"tokens_per_second": throughput}, {"tokens_per_second": 50.0, "hours": hours}):
        TrainingPlan.model_validate({**PLAN, **mended})


def test_only_a_training_on_packed_documents_has_that_axis() -> None:
    config = {"model": {}, "steps": 9, "batch": 1}
    whole = mode_of({**config, "data": {"pack": False}})
    assert whole == mode_of(config)
    assert mode_of({**config, "data": {"pack": True}}) == {**whole, "pack": "on"}


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
