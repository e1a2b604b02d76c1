from hypothesis import given
from hypothesis import strategies as st

from retrieval.snippet import snippet

texts = st.text(alphabet="ab \n\t,é", max_size=80)


@given(texts, texts, st.integers(1, 40))
def test_a_snippet_is_one_line_within_its_length(summary: str, text: str, characters: int) -> None:
    short = snippet(summary, text, characters)
    assert len(short) <= characters
    assert "\n" not in short
    assert "\t" not in short


@given(st.lists(st.sampled_from(["rain", "vote", "coast", "Überlingen", "a"]), min_size=40), st.integers(12, 280))
def test_a_snippet_that_is_cut_ends_with_a_whole_word_of_the_text(words: list[str], characters: int) -> None:
    short = snippet(" ".join(words), "", characters)
    kept = short.removesuffix("…").split()
    assert kept == words[: len(kept)]
    following = len(short) + 1 + len(words[len(kept)]) if len(kept) < len(words) else characters + 1
    assert following > characters, "a word more would have fitted"


@given(st.text(alphabet="ab \n\t,é", max_size=400), st.integers(1, 12))
def test_a_snippet_begins_as_its_text_does(text: str, characters: int) -> None:
    whole = snippet("", text, 1_000)
    short = snippet("", text, characters)
    assert short == whole if len(whole) <= characters else whole.startswith(short.removesuffix("…"))
    assert short.endswith("…") == (len(whole) > characters)


def test_a_snippet_is_cut_at_a_word_and_says_so() -> None:
    assert snippet("The harbour reopened on Tuesday", "", 14) == "The harbour…"


def test_what_fits_is_not_cut() -> None:
    assert snippet("The harbour\nreopened", "", 20) == "The harbour reopened"


def test_the_text_stands_in_for_a_missing_summary() -> None:
    assert snippet(" \n", "Body of the report", 280) == "Body of the report"


def test_one_endless_word_is_cut_inside() -> None:
    assert snippet("x" * 50, "", 10) == "x" * 9 + "…"
