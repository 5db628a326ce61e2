"""Text that others wrote, on its way out: escaped for the place where it is read, and shortened.

A label, a reason or a name may hold anything. Each function here is for one sort of output, and all text leaves by
them: `shown` for values in messages, `printable` for terminals, `for_page` for pages, `for_file` and `for_html` for
reports, `csv_cell` for tables that a spreadsheet opens. The whole text stays in journal, database and files.
"""

import html
import re
import reprlib

LINE = 1_000  # characters of a text in a line, a cell or a sentence
_VALUE = 500  # characters of a value in a message, and what is said of those left out
_SAID = 50
_ERROR = 200  # characters of an error's text
_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxstring, _BOUNDED.maxother, _BOUNDED.maxlong = 4, _VALUE, _VALUE, _VALUE
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = 20

# Controls but tab and newline (C0, delete, C1), separators of lines, marks that turn the direction of writing, halves
# of characters and what is none: a terminal acts on them or shows something else than is there, and no XML holds them.
_ACTING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)

# On a page, whose source nobody reads: all that Streamlit's Markdown ever acts on.
_PAGE_MARKS = re.compile(r"([\\`*_{}\[\]$~|<>:#&])")
# In a file, whose source is read, too: the same marks of GitHub's Markdown, but only where they mean something.
_FILE_MARKS = re.compile(
    r"""([\\`*|$] | (?<![^\W_])_ | _(?![^\W_]) | \](?=\() | <(?=[A-Za-z/!?]) | &(?=\#?\w+;)
    | ~(?=\S) | (?<=\S)~)""",
    re.VERBOSE,
)
# The beginning of a heading, a quotation or an item.
_BLOCK = re.compile(r"^(?:(\d+)(?=[.)](?:\s|$))|(?=[-+](?:\s|$)|--|[=>#]))")
_CODE = re.compile(r"(?<!`)`(?!`)")
# Addresses become links without any mark; an invisible joiner keeps them text.
_ADDRESS = re.compile(r"(?i)((?:https?|ftp)\\?:\\?/\\?/|www(?=\\?\.)|@)(?=[^\s@])")
_JOINER = "\N{WORD JOINER}"

# Beginnings of formulas, also in the full width of East Asian scripts; behind apostrophes, so that each comes back.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")


def shortened(text: str, most: int = LINE) -> str:
    """The text; of one with more than `most` characters the beginning, the end and the number left out between."""
    if len(text) <= most:
        return text
    head, tail = most - most // 4, most // 4  # at the end a message has its fix
    return f"{text[:head]}… ({len(text) - most:,} characters left out) …{text[-tail:]}"


def shown(value: object, most: int = _VALUE) -> str:
    """The value as Python writes it, in bounded time and length, however large, deep or recursive it is."""
    return shortened(printable(_BOUNDED.repr(value)), most + _SAID)


def printable(text: str) -> str:
    """The text for a terminal: what a terminal would act on is written as an escape; tabs and ends of lines stay."""
    if not _ACTING.search(text):
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def in_a_line(text: object, most: int = LINE) -> str:
    """The text on one printable line, shortened."""
    return " ".join(printable(shortened(str(text), most)).split())


def error_in_a_line(err: BaseException, most: int = _ERROR) -> str:
    """An error's kind and its text on one printable line, shortened; of one without a text the kind."""
    text = in_a_line(err, most)
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def for_page(text: object, most: int = LINE) -> str:
    """The text on one line, shortened, as Markdown of a page that shows it and nothing else; `code` stays code."""
    return _BLOCK.sub(r"\g<1>\\", _as_markdown(in_a_line(text, most), _PAGE_MARKS))


def for_file(text: object, most: int = LINE) -> str:
    """The text on one line, shortened, as a cell or title of a Markdown file that shows it and nothing else; `code`
    stays code."""
    return re.sub(r"(?<!\\)\|", r"\\|", _as_markdown(in_a_line(text, most), _FILE_MARKS))  # also within code


def code(text: object, most: int = LINE) -> str:
    """The text on one line, shortened, as Markdown code, its backticks replaced so that it cannot end the code."""
    return "`" + (in_a_line(text, most).replace("`", "'") or " ") + "`"


def for_html(text: object, most: int = LINE) -> str:
    """The text, shortened, as HTML that shows it and nothing else."""
    return html.escape(printable(shortened(str(text), most)))


def csv_cell(text: str) -> str:
    """The text as a cell that a spreadsheet shows and does not compute; `from_csv_cell` gives it back."""
    return f"'{text}" if _FORMULA.match(text) else text


def from_csv_cell(cell: str) -> str:
    """The text that `csv_cell` made the cell of; other cells stay."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _as_markdown(line: str, marks: re.Pattern[str]) -> str:
    pieces = _CODE.split(line)
    if len(pieces) % 2 == 0 or "``" in line:  # where code begins and ends there is up to the reader's Markdown
        pieces = [line]
    for place in range(0, len(pieces), 2):  # the others are code
        pieces[place] = _ADDRESS.sub(rf"\1{_JOINER}", marks.sub(r"\\\1", pieces[place]))
    return "`".join(pieces)
