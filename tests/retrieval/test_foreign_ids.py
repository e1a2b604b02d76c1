"""Ids that a step guessed, copied from another step or wrote a little differently: the ids of real articles from after its cutoff."""

import asyncio
import datetime as dt
import unicodedata
from pathlib import Path

import pytest
from corpora import article
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.view import DatedView, NotReturned

CLOSE = dt.date(2024, 6, 10)
BEFORE = dt.datetime(2024, 6, 10, 23, 59, 59, 999_999, tzinfo=dt.UTC)
AFTER = dt.datetime(2024, 6, 11, tzinfo=dt.UTC)

SEEN = unicodedata.normalize("NFC", "Café-ﬁn 1")
"""Visible at the close. It has another form under every normalization of Unicode."""


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def written_otherwise(text: str) -> list[str]:
    """What a reader might take for the same id: another case, other spaces, other code points."""
    made = [text.lower(), text.upper(), text.swapcase(), text.casefold(), text.title()]
    made += [f"{space}{text}" for space in (" ", "\t", "\n", "\u00a0", "\u2009", "\u3000")]
    made += [f"{text}{space}" for space in (" ", "\r\n", "\0", "\u00a0")]
    made += [text.replace(" ", space) for space in ("", "  ", "\u00a0", "_", "%20", "+")]
    made += [unicodedata.normalize(form, text) for form in ("NFD", "NFKC", "NFKD")]
    made += [full_width(text), text.replace("a", "а"), text.replace("-", "‐"), text.replace("-", "−")]
    made += [text[:3] + mark + text[3:] for mark in ("\u200b", "\u200d", "\ufeff", "\u00ad", "\u2060", "\u202e")]
    made += [f"[{text}]", f'"{text}"', f"id: {text}", f"./{text}", f"{text}/", f"{text}#", text.replace("1", "١")]
    return sorted({other for other in made if other != text})


LATE = written_otherwise(SEEN)
"""Ids of articles from the day after the close."""


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> LocalSearcher:
    directory: Path = tmp_path_factory.mktemp("index")
    late = [article(other, AFTER, f"a later report {i}") for i, other in enumerate(LATE)]
    build_index([article(SEEN, BEFORE, "the report"), *late], HashingEncoder(32), directory)
    return LocalSearcher(Library.open(directory), HashingEncoder(32))


def search(view: DatedView, k: int = 100) -> list[str]:
    return [hit.article_id for hit in asyncio.run(view.search("a later report", k))]


def test_an_id_written_otherwise_is_another_article_and_stays_unseen(searcher: LocalSearcher) -> None:
    assert len(LATE) > 35
    view = DatedView(searcher, CLOSE)
    assert search(view) == [SEEN]
    for other in LATE:
        with pytest.raises(NotReturned):
            asyncio.run(view.read(other))
    assert asyncio.run(view.read(SEEN)).id == SEEN


def test_an_id_copied_from_a_later_step_opens_nothing_in_an_earlier_one(searcher: LocalSearcher) -> None:
    later, earlier = DatedView(searcher, CLOSE + dt.timedelta(days=1)), DatedView(searcher, CLOSE)
    copied = search(later)
    assert sorted(copied) == sorted([SEEN, *LATE])
    assert {asyncio.run(later.read(found)).id for found in copied} == set(copied)
    for found in copied:
        with pytest.raises(NotReturned):
            asyncio.run(earlier.read(found))
    search(earlier)
    for found in set(copied) - {SEEN}:
        with pytest.raises(NotReturned):
            asyncio.run(earlier.read(found))


def test_a_step_of_the_same_day_lends_nothing_to_another(searcher: LocalSearcher) -> None:
    one, other = DatedView(searcher, CLOSE), DatedView(searcher, CLOSE)
    search(one)
    with pytest.raises(NotReturned):
        asyncio.run(other.read(SEEN))


@given(st.text(st.characters(), max_size=12) | st.sampled_from([SEEN, *LATE]).map(lambda text: text + "\ud800"))
@settings(max_examples=200)
def test_a_guessed_id_opens_nothing(searcher: LocalSearcher, guess: str) -> None:
    view = DatedView(searcher, CLOSE)
    search(view)
    if guess == SEEN:
        assert asyncio.run(view.read(guess)).id == SEEN
    else:
        with pytest.raises(NotReturned):
            asyncio.run(view.read(guess))
