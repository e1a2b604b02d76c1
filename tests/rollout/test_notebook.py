import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.events.event import EventPrompt
from rollout.notebook import (
    Assessment,
    LedgerEntry,
    Notebook,
    NotebookState,
    not_updated,
    parse_notebook,
    render_notebook,
)

EVENT = EventPrompt(
    id="e", question="?", criteria="", background="", options=("YES", "NO"), selection="single", deadline=None
)
ENTRY = {
    "claim": "A review opened",
    "supports": ["YES"],
    "rules_out": [],
    "date_observed": "2024-05-13",
    "note": "primary",
}
DAY = dt.date(2024, 6, 1)


def tagged(**fields: object) -> str:
    body = {"assessment": {"p": {"YES": 0.3, "NO": 0.7}}, "evidence_ledger": [ENTRY]} | fields
    return f"<belief_notebook>{json.dumps(body)}</belief_notebook><answer>{{}}</answer>"


def state(*claims: str) -> NotebookState:
    entries = tuple(LedgerEntry(claim=claim) for claim in claims)
    return NotebookState(
        notebook=Notebook(assessment=Assessment(p={"YES": 1.0}), evidence_ledger=entries),
        status="valid",
        written=dt.date(2024, 5, 20),
    )


def test_a_valid_notebook_is_read():
    found = parse_notebook(tagged(), None, EVENT, DAY)
    assert found.status == "valid"
    assert found.notebook is not None
    assert found.notebook.assessment.p == {"YES": 0.3, "NO": 0.7}
    (entry,) = found.notebook.evidence_ledger
    assert (entry.claim, entry.supports, entry.rules_out) == ("A review opened", ("YES",), ())
    assert (entry.date_observed, entry.status, entry.note) == (dt.date(2024, 5, 13), "active", "primary")


def test_the_last_complete_notebook_counts():
    text = tagged(evidence_ledger=[]) + tagged() + "<belief_notebook>{"
    found = parse_notebook(text, None, EVENT, DAY)
    assert found.notebook is not None
    assert len(found.notebook.evidence_ledger) == 1


@pytest.mark.parametrize("depth", [200, 600, 900, 20_000])
@pytest.mark.parametrize("field", ["open_questions", "claim", "unknown"])
def test_a_deeply_nested_notebook_is_invalid_and_not_an_exception(depth, field):
    nested = "[" * depth + "]" * depth
    fields = {"assessment": {"p": {"YES": 0.5}, field: "HERE"}, "evidence_ledger": [{"claim": "c"} | {field: "HERE"}]}
    found = parse_notebook(tagged(**fields).replace('"HERE"', nested), state("old"), EVENT, DAY)
    assert found.notebook == state("old").notebook or field == "unknown"
    assert found.status == "invalid" or field == "unknown"


def test_a_missing_notebook_keeps_the_last_valid_one_and_is_marked():
    found = parse_notebook("<answer>{}</answer>", state("old"), EVENT, DAY)
    assert found.status == "missing"
    assert found.notebook == state("old").notebook


@pytest.mark.parametrize(
    "text",
    [
        "<belief_notebook>not json</belief_notebook>",
        "<belief_notebook>[]</belief_notebook>",
        "<belief_notebook>" + "[" * 200_000 + "</belief_notebook>",
        tagged(assessment={"p": {"YES": int("9" * 4000)}}),
        tagged(assessment={}),
        tagged(assessment={"p": {"YES": True, "NO": 0.5}}),
        tagged(assessment={"p": {"YES": 1.5}}),
        tagged(assessment={"p": {"Maybe": 0.5}}),
        tagged(evidence_ledger={}),
        tagged(evidence_ledger=["a fact"]),
        tagged(evidence_ledger=[{"supports": ["YES"]}]),
        tagged(evidence_ledger=[ENTRY | {"status": "deleted"}]),
        tagged(evidence_ledger=[ENTRY | {"supports": [1]}]),
    ],
)
def test_an_invalid_notebook_keeps_the_last_valid_one_and_says_why(text):
    found = parse_notebook(text, state("old"), EVENT, DAY)
    assert found.status == "invalid"
    assert found.why
    assert found.notebook == state("old").notebook


def test_a_first_notebook_that_is_invalid_leaves_none():
    assert parse_notebook(tagged(assessment={}), None, EVENT, DAY).notebook is None


def test_dropped_claims_are_counted_and_not_put_back():
    found = parse_notebook(tagged(), state("a  review OPENED", "lost", "also lost"), EVENT, DAY)
    assert found.dropped_entries == 2
    assert found.notebook is not None
    assert [e.claim for e in found.notebook.evidence_ledger] == ["A review opened"]


@pytest.mark.parametrize("day", ["May 2024", "2024-02-30", 20240513, None, "0000-00-00"])
def test_a_date_that_is_no_day_is_absent(day):
    found = parse_notebook(tagged(evidence_ledger=[ENTRY | {"date_observed": day}]), None, EVENT, DAY)
    assert found.status == "valid"
    assert found.notebook is not None
    assert found.notebook.evidence_ledger[0].date_observed is None


def test_absent_and_unknown_fields_do_not_invalidate():
    found = parse_notebook(
        tagged(evidence_ledger=[{"claim": "c", "supports": None, "source": "x"}], extra=1), None, EVENT, DAY
    )
    assert found.notebook is not None
    assert found.notebook.evidence_ledger == (LedgerEntry(claim="c"),)


def test_a_notebook_beyond_the_bound_is_invalid():
    found = parse_notebook(tagged(), state("old"), EVENT, DAY, limit=100)
    assert found.status == "invalid"
    assert "at most 100" in found.why
    assert found.notebook == state("old").notebook


_TEXT = st.text(max_size=12)
_NOTEBOOKS = st.builds(
    Notebook,
    assessment=st.builds(
        Assessment,
        p=st.dictionaries(_TEXT, st.floats(0, 1), max_size=2).map(lambda p: p | {"YES": 0.5}),
        open_questions=st.lists(_TEXT, max_size=2).map(tuple),
    ),
    evidence_ledger=st.lists(
        st.builds(
            LedgerEntry,
            claim=_TEXT | st.just("</belief_notebook><answer>"),
            supports=st.lists(_TEXT, max_size=2).map(tuple),
            date_observed=st.none() | st.dates(),
            status=st.sampled_from(["active", "superseded"]),
            note=_TEXT,
        ),
        max_size=3,
    ).map(tuple),
)


@given(_NOTEBOOKS)
def test_a_rendered_notebook_parses_back_to_an_equal_one(notebook):
    found = parse_notebook(f"<belief_notebook>{render_notebook(notebook)}</belief_notebook>", None, EVENT, DAY)
    assert found.notebook == notebook


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["assessment", "p", "YES", "evidence_ledger", "claim", "date_observed", "supports"]), inner
        )
    ),
    max_leaves=12,
)


@given(_JSON.map(json.dumps) | st.text(st.characters(exclude_categories=[])))
def test_no_text_breaks_the_parser_or_wipes_the_memory(body):
    found = parse_notebook(f"<belief_notebook>{body}</belief_notebook>", state("old"), EVENT, DAY)
    assert found.notebook is not None
    assert found.model_dump_json()
    assert (found.status == "valid") or found.notebook == state("old").notebook


def test_a_notebook_says_which_date_wrote_it_and_which_have_left_none_since():
    first = parse_notebook(tagged(), None, EVENT, DAY)
    assert (first.written, first.missed) == (DAY, ())
    days = [DAY + dt.timedelta(days=n) for n in (1, 2, 3)]
    failed = not_updated(first, days[0], "straggler")
    without = parse_notebook("no notebook", failed, EVENT, days[1])
    assert without.notebook == first.notebook
    assert (without.written, without.missed) == (DAY, (days[0], days[1]))
    again = parse_notebook(tagged(), without, EVENT, days[2])
    assert (again.written, again.missed) == (days[2], ())
    assert not_updated(None, DAY, "straggler").missed == (DAY,)
