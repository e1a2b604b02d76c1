import asyncio
import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import BudgetSettings, PythonSettings, RetrievalSettings, RolloutSettings
from cluster.failures import InfrastructureError
from retrieval.article import Article, Hit
from retrieval.view import DatedView
from rollout.sandbox import CellResult, Sandbox
from rollout.tools import (
    TOOLS,
    Read,
    RunPython,
    Search,
    ToolRunner,
    malformed,
    over_budget,
    python_result,
    read_call,
    read_result,
    search_result,
)
from rollout.trajectory import MalformedCall, ShownArticle, ToolCall, ToolResult

SETTINGS = RetrievalSettings(default_top_k=5, maximum_top_k=20)
DAY = dt.date(2024, 6, 1)


def read(name: str, arguments: object, offered: tuple[str, ...] = tuple(TOOLS)) -> object:
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return read_call(ToolCall(id="c1", name=name, arguments=raw), offered, SETTINGS)


def hit(name: str, **fields: object) -> Hit:
    given = {"article_id": name, "title": f"Title {name}", "url": f"https://x/{name}", "day": DAY, "score": 0.5}
    return Hit.model_validate(given | {"snippet": "s" * 50} | fields)


def article(name: str, text: str = "The text.\nMore.", day: int = 1) -> Article:
    return Article(
        id=name,
        url=f"https://x/{name}",
        title=f"Title\n{name}",
        summary="",
        text=text,
        published=dt.datetime(2024, 6, day, 8, tzinfo=dt.UTC),
        date_source="published",
        source="x",
    )


def cell(**fields: object) -> CellResult:
    return CellResult.model_validate({"stdout": "", "error": "", "exit_status": 0, "seconds": 0.1} | fields)


def test_good_calls_become_wants():
    assert read("search", {"query": " rain "}) == Search(call_id="c1", query="rain", top_k=5)
    assert read("search", {"query": "rain", "top_k": 20}) == Search(call_id="c1", query="rain", top_k=20)
    assert read("scrape", {"article_id": "a"}) == Read(call_id="c1", article_id="a")
    assert read("python", {"code": "1"}) == RunPython(call_id="c1", code="1")


@pytest.mark.parametrize(
    ("name", "arguments", "error", "says"),
    [
        ("browse", {}, "unknown-tool", "search, scrape, python"),
        ("search", "{", "bad-json", "not valid JSON"),
        ("search", "", "bad-json", "not valid JSON"),
        ("search", "[" * 100_000, "bad-json", "not valid JSON"),
        ("search", '{"query": "x", "top_k": ' + "9" * 5000 + "}", "bad-json", "not valid JSON"),
        ("search", [1], "bad-arguments", "JSON object"),
        ("search", {}, "bad-arguments", "needs the argument query"),
        ("search", {"query": 5}, "bad-arguments", "must be a JSON string"),
        ("search", {"query": "  "}, "bad-arguments", "empty"),
        ("search", {"query": "x" * 3000}, "bad-arguments", "longer than 2000"),
        ("search", {"query": "x", "top_k": True}, "bad-arguments", "must be a JSON integer"),
        ("search", {"query": "x", "top_k": 5.0}, "bad-arguments", "must be a JSON integer"),
        ("search", {"query": "x", "top_k": "5"}, "bad-arguments", "must be a JSON integer"),
        ("search", {"query": "x", "top_k": 0}, "bad-arguments", "from 1 to 20"),
        ("search", {"query": "x", "top_k": 21}, "bad-arguments", "from 1 to 20"),
        ("search", {"query": "x", "before": "2030-01-01"}, "bad-arguments", 'no argument "before"'),
        ("scrape", {"article_id": None}, "bad-arguments", "must be a JSON string"),
        ("python", {"source": "1"}, "bad-arguments", "needs the argument code"),
        ("python", {"code": "1" * 200_000}, "bad-arguments", "longer than"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(name, arguments, error, says):
    result = read(name, arguments)
    assert isinstance(result, ToolResult)
    assert (result.error, result.call_id, result.name) == (error, "c1", name)
    assert says in result.text
    assert len(result.text) < 500


def test_a_tool_that_is_not_offered_does_not_run():
    result = read("python", {"code": "1"}, offered=("search",))
    assert isinstance(result, ToolResult)
    assert result.error == "unknown-tool"


def test_no_tool_takes_a_date():
    assert {name for tool in TOOLS.values() for name in tool.parameters["properties"]} == {
        "query",
        "top_k",
        "article_id",
        "code",
    }


_VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)


@given(
    name=st.sampled_from([*TOOLS, "other"]),
    arguments=st.text()
    | st.dictionaries(st.sampled_from(["query", "top_k", "article_id", "code"]) | st.text(), _VALUES).map(json.dumps),
)
def test_no_call_raises(name, arguments):
    found = read(name, arguments)
    assert found.model_dump_json()
    if isinstance(found, Search):
        assert 1 <= found.top_k <= 20


def test_a_lone_surrogate_in_an_argument_cannot_break_a_want():
    assert read("search", '{"query": "a\\ud800"}') == Search(call_id="c1", query="a?", top_k=5)


def test_search_results_read_as_documented():
    hits = [hit("a", title="One\n two", score=0.12345), hit("b", snippet="x\ny")]
    result = search_result(Search(call_id="c", query="q", top_k=2), hits, 1000)
    assert result.text == (
        f"[a] One two | published 2024-06-01 | score 0.123 | https://x/a\n{'s' * 50}\n\n"
        "[b] Title b | published 2024-06-01 | score 0.500 | https://x/b\nx y"
    )
    assert result.shown == (ShownArticle(article_id="a", day=DAY), ShownArticle(article_id="b", day=DAY))
    assert search_result(Search(call_id="c", query="q", top_k=2), [], 1000).text == "No article matches."


@given(limit=st.integers(1, 700), count=st.integers(1, 6))
def test_a_bounded_search_lists_exactly_the_articles_it_shows(limit, count):
    hits = [hit(str(i)) for i in range(count)]
    result = search_result(Search(call_id="c", query="q", top_k=9), hits, limit)
    full = search_result(Search(call_id="c", query="q", top_k=9), hits, 10**6)
    assert len(result.text) <= limit
    if result.cut_characters == 0:
        assert result == full
    else:
        kept = full.text[: len(full.text) - result.cut_characters]
        assert result.text.startswith(kept[:limit])
        begun = [s for s, i in zip(full.shown, range(count), strict=True) if full.text.find(f"[{i}]") < len(kept)]
        assert result.shown == tuple(begun)


def test_an_article_reads_as_documented_and_is_cut_with_a_word_about_it():
    want = Read(call_id="c", article_id="a")
    whole = read_result(want, article("a"), 1000)
    assert whole.text == "[a] Title a | published 2024-06-01 | https://x/a\n\nThe text.\nMore."
    assert whole.shown == (ShownArticle(article_id="a", day=DAY),)
    long = read_result(want, article("a", "y" * 5000), 300)
    assert len(long.text) <= 300
    assert f"[cut: {long.cut_characters} more characters]" in long.text
    assert long.cut_characters == 5000 - long.text.count("y")


@pytest.mark.parametrize(
    ("result", "text", "error"),
    [
        (cell(stdout="a\n"), "a", ""),
        (cell(), "Nothing was printed.", ""),
        (cell(stdout="a\n", error="Trace\nE: x\n", exit_status=1), "a\nTrace\nE: x", "exit-status"),
        (cell(exit_status=3), "Exit status 3.", "exit-status"),
        (cell(stdout="a", timed_out=True, exit_status=137), "a\nStopped at the time limit.", "time-out"),
        (
            cell(stdout="a", cut=7, flooded=True, exit_status=137),
            "a\n[cut: 7 characters of output]\nStopped: it",
            "exit-status",
        ),
    ],
)
def test_python_output_is_shown_with_how_it_ended(result, text, error):
    shown = python_result(RunPython(call_id="c", code=""), result, 1000)
    assert shown.text.startswith(text)
    assert (shown.error, shown.cut_characters) == (error, result.cut)


def test_python_output_is_bounded():
    shown = python_result(RunPython(call_id="c", code=""), cell(stdout="x" * 900, cut=10), 200)
    assert len(shown.text) <= 200
    assert shown.cut_characters > 700


def test_calls_that_did_not_run_say_so():
    assert over_budget(ToolCall(id="c", name="search", arguments="{}")).error == "budget"
    assert "missing brace" in malformed(MalformedCall(kind="bad-json", reason="missing brace"), "t000c0000").text


class Corpus:
    """A searcher over a few articles."""

    def __init__(self, *articles: Article) -> None:
        self.articles = {a.id: a for a in articles}
        self.down = False

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        assert query
        assert first_day is None
        if self.down:
            raise InfrastructureError("shard-lost")
        return tuple(hit(a.id, day=a.day) for a in self.articles.values() if a.day <= cutoff)[:top_k]

    async def fetch(self, article_id: str) -> Article | None:
        return self.articles.get(article_id)


def runner(corpus: Corpus) -> ToolRunner:
    sandbox = Sandbox(PythonSettings())
    limits = RolloutSettings(budget=BudgetSettings(tool_output_tokens=50))
    return ToolRunner(DatedView(corpus, DAY), sandbox, DAY, limits)


def test_only_what_a_search_returned_can_be_read():
    tools = runner(Corpus(article("a"), article("future", day=2)))

    async def script() -> list[ToolResult]:
        read_a = Read(call_id="2", article_id="a")
        wants = [read_a, Search(call_id="1", query="q", top_k=5), read_a, Read(call_id="3", article_id="future")]
        return [await tools.run(want) for want in wants]

    before, found, after, future = asyncio.run(script())
    assert (before.error, found.error, after.error, future.error) == ("not-returned", "", "", "not-returned")
    assert "future" not in found.text
    assert "The text." in after.text
    assert future.shown == ()


def test_the_python_tool_stands_at_the_forecast_date():
    result = asyncio.run(
        runner(Corpus()).run(RunPython(call_id="1", code="import datetime\nprint(datetime.date.today())"))
    )
    assert (result.text, result.error) == ("2024-06-01", "")
    assert result.seconds > 0


def test_a_dead_index_is_never_shown_to_the_model():
    corpus = Corpus(article("a"))
    corpus.down = True
    with pytest.raises(InfrastructureError):
        asyncio.run(runner(corpus).run(Search(call_id="1", query="q", top_k=5)))
