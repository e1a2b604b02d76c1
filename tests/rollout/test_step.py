"""The step's state machine over the real chat formats, parser, tools' renderers and ledger; only the sampler is scripted."""

import datetime as dt
import importlib.util
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config import BudgetSettings, RetrievalSettings
from cluster.failures import SettingsError
from cluster.home import model_path
from retrieval.article import Article, Hit
from rollout.audit import Exchange, faults
from rollout.chat import HermesFormat, TemplateFormat, TurnParser
from rollout.dialogue import MessageDialogue, TokenDialogue
from rollout.events.event import EventPrompt
from rollout.ledger import Ledger
from rollout.model import Completion, SampleRequest
from rollout.notebook import Assessment, LedgerEntry, Notebook, NotebookState
from rollout.packed import pack
from rollout.record import MODES, ForecastKey, ForecastRecord
from rollout.rendered import RenderedDialogue, RenderedFormat
from rollout.sandbox import CellResult
from rollout.step import ANSWER_RESERVE, Sample, StepTask, UseTools, fair_share, forecast_step
from rollout.tools import TOOLS, Read, Search, not_returned, python_result, read_result, search_result
from rollout.trajectory import Message, ToolResult, Trajectory

DAY = dt.date(2031, 5, 4)
EVENT = EventPrompt(
    id="e",
    question="Will the bridge open?",
    criteria="As announced.",
    background="",
    options=("Yes", "No"),
    selection="single",
    deadline=None,
)
ARTICLES = {
    f"a-{i}": Article(
        id=f"a-{i}",
        url=f"https://news.example/{i}",
        title=f"Bridge {i}",
        summary="",
        text="It opens soon. " * 300,
        published=dt.datetime(2031, 5, 1 + i, tzinfo=dt.UTC),
        date_source="published",
        source="news",
    )
    for i in range(3)
}
ANSWER = '<answer>{"Yes": 0.6, "No": 0.4}</answer>'
NOTEBOOK = (
    '<belief_notebook>{"assessment": {"p": {"Yes": 0.6}}, "evidence_ledger": [{"claim": "new"}]}</belief_notebook>'
)
OLD = NotebookState(
    notebook=Notebook(assessment=Assessment(p={"Yes": 0.5}), evidence_ledger=(LedgerEntry(claim="old"),)),
    status="valid",
)
HEADER = re.compile(r"(?:\A|\n\n)\[(\S+)\] ")


def call(name: str, arguments: object) -> str:
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}</tool_call>'


SEARCH = call("search", {"query": "bridge"})


@pytest.fixture(scope="module")
def tokenizer():
    path = model_path("smollm2-135m")
    if not path.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def hermes(tokenizer):
    return HermesFormat(tokenizer, TurnParser(tokenizer, "hermes", ""))


@pytest.fixture(scope="module")
def template(tokenizer):
    changed = type(tokenizer).from_pretrained(model_path("smollm2-135m"))
    bundled = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates/qwen3.jinja"
    changed.chat_template = bundled.read_text()
    return TemplateFormat(changed, TurnParser(changed, "hermes", ""))


@pytest.fixture(scope="module")
def rendered(tokenizer):
    changed = type(tokenizer).from_pretrained(model_path("smollm2-135m"))
    bundled = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates/qwen3.jinja"
    changed.chat_template = bundled.read_text() + "{% if messages | length > 3 %}{{ messages | length }}{% endif %}"
    with pytest.raises(SettingsError, match="depends on what stands before"):
        TemplateFormat(changed, TurnParser(changed, "hermes", ""))
    return RenderedFormat(changed, TurnParser(changed, "hermes", ""))


@dataclass(frozen=True)
class Said:
    """One scripted turn."""

    text: str
    finish: str = "stop"
    ids: tuple[int, ...] = ()


@dataclass
class Play:
    """What happened in one step."""

    record: ForecastRecord
    trajectory: Trajectory
    requests: list[SampleRequest]
    ran: list[object]
    task: StepTask
    dialogue: TokenDialogue | RenderedDialogue


def play(chat, script, *, mode="memory-free", limit=4000, carried=None, tick=0.0, max_tokens=400, **budget) -> Play:
    """Drive a step with scripted turns (silence once they are spent), checking what every request must hold."""
    tokenizer = chat._parser._tokenizer
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += tick
        return seconds[0]

    task = StepTask(
        key=ForecastKey(model="m", event="e", date=DAY, mode=mode, rollout=0),
        event=EVENT,
        carried=carried,
        variant="compact",
        policy="strict",
        budget=BudgetSettings(**{"iterations": 3, "calls": 5, **budget}),
        retrieval=RetrievalSettings(),
        max_tokens=max_tokens,
    )
    renders = isinstance(chat, RenderedFormat)
    dialogue = RenderedDialogue(chat, limit) if renders else TokenDialogue(chat, limit)
    step = forecast_step(task, dialogue, clock)
    left, seen = list(script), ()
    requests: list[SampleRequest] = []
    ran: list[object] = []
    exchanges: list[Exchange] = []
    answer: object = None
    try:
        while True:
            want = step.send(answer)
            if isinstance(want, UseTools):
                ran += want.wants
                answer = tuple(run(w) for w in want.wants)
                continue
            assert isinstance(want, Sample)
            request = want.request
            assert renders or request.prompt_ids[: len(seen)] == seen, "the context only grows"
            assert request.max_tokens >= 1
            assert len(request.prompt_ids) + request.max_tokens <= limit
            said = left.pop(0) if left else Said("")
            ids = (*tokenizer.encode(said.text, add_special_tokens=False), *said.ids)
            finish = said.finish
            if finish == "stop":
                ids = (*ids, chat.stop_ids[0])
            if len(ids) > request.max_tokens:
                ids, finish = ids[: request.max_tokens], "length"
            seen = request.prompt_ids + ids
            requests.append(request)
            answer = Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), finish=finish, seconds=0.25, weights="w")
            exchanges.append(Exchange(request, answer))
    except StopIteration as end:
        record, trajectory = end.value
    assert faults(trajectory, exchanges, chat, DAY) == []
    check(record, trajectory, requests, seen)
    return Play(record, trajectory, requests, ran, task, dialogue)


def run(want) -> ToolResult:
    if isinstance(want, Search):
        hits = [Hit(article_id=a.id, score=0.5, snippet=a.text[:200], **meta(a)) for a in ARTICLES.values()]
        return search_result(want, hits[: want.top_k], 12_000)
    if isinstance(want, Read):
        article = ARTICLES.get(want.article_id)
        return read_result(want, article, 12_000) if article else not_returned(want)
    return python_result(want, CellResult(stdout="7\n" * 400, error="", exit_status=0, seconds=0.1), 12_000)


def meta(article: Article) -> dict[str, object]:
    return {"title": article.title, "url": article.url, "day": article.day}


def check(record: ForecastRecord, trajectory: Trajectory, requests: list[SampleRequest], seen: tuple[int, ...]) -> None:
    """What holds for every step, whatever the model did."""
    turns = trajectory.turns
    unsent = turns[len(requests) :]
    assert [record.failure.reason for _ in unsent] == ["prompt-too-long"] * len(unsent)
    sampled = [i for turn in turns for i in turn.sampled_ids]
    assert record.transcript == trajectory.transcript
    if record.transcript == "exact":
        before: tuple[int, ...] = ()
        for request, turn in zip(requests, turns, strict=False):
            assert request.prompt_ids == before + turn.prompt_ids
            before = request.prompt_ids + turn.sampled_ids
        assert before == seen
        assert trajectory.token_ids() == [*seen, *(i for turn in unsent for i in turn.prompt_ids)]
        mask = trajectory.mask()
        assert [i for i, m in zip(trajectory.token_ids(), mask, strict=True) if m] == sampled
    else:
        assert [r.prompt_ids for r in requests] == [t.prompt_ids for t in turns[: len(requests)]]
        with pytest.raises(ValueError, match="rendered transcript"):
            trajectory.token_ids()
    assert record.usage.model_calls == len(requests)
    assert record.usage.input_tokens == sum(len(r.prompt_ids) for r in requests)
    assert record.usage.output_tokens == len(sampled)
    assert (record.report.verdict == "unusable") == (record.failure is not None)
    assert record.failure is None or record.failure.kind == "model"
    for turn, later in itertools.pairwise(turns):
        assert len(turn.results) == len(turn.tool_calls) + len(turn.malformed_calls)
        told = [m.content for m in later.messages if m.role == "tool"]
        assert [t.removesuffix(f"\n{notice(t)}") if notice(t) else t for t in told] == [r.text for r in turn.results]
        assert [notice(t) for t in told[:-1]] == [""] * (len(told) - 1), "said once a turn"
        assert bool(notice(told[-1] if told else "")) == bool(told and later.tools), "said as long as there are tools"
        for result in turn.results:
            if result.name == "search":
                assert HEADER.findall(result.text) == [s.article_id for s in result.shown]
    with Ledger.create(Path(":memory:"), [record.key]) as ledger:
        assert ledger.commit([pack(record, trajectory)]) == [True]
        assert list(ledger.records()) == [record]
        assert ledger.trajectory(record.key) == trajectory


def notice(text: str) -> str:
    """The line that says what is left."""
    last = text.rsplit("\n", 1)[-1]
    return last if re.fullmatch(r"\[.*(turns with tools left|last turn with tools).*\]", last) else ""


def notices(play: Play) -> list[str]:
    """By turn; empty where no budget is left to speak of."""
    return [
        next((notice(m.content) for m in reversed(t.messages) if m.role == "tool"), "") for t in play.trajectory.turns
    ]


def tool_text(play: Play) -> list[str]:
    return [r.text for turn in play.trajectory.turns for r in turn.results]


def demanded(play: Play) -> list[int]:
    """Numbers of the turns that a demand opened."""
    return [i for i, t in enumerate(play.trajectory.turns) if any("No more tools" in m.content for m in t.messages)]


def test_an_answer_at_once_ends_the_step(hermes):
    found = play(hermes, [Said(ANSWER), Said(SEARCH)])
    assert found.record.report.probabilities == {"Yes": 0.6, "No": 0.4}
    assert found.record.failure is None
    assert len(found.requests) == 1
    assert found.record.weights == "w"


def test_a_search_is_run_and_its_result_is_appended(hermes):
    found = play(hermes, [Said(SEARCH), Said(ANSWER)])
    assert [type(w) for w in found.ran] == [Search]
    assert found.requests[1].messages[-1].role == "tool"
    assert [s.article_id for s in found.trajectory.shown()] == ["a-0", "a-1", "a-2"]
    assert found.record.usage.tool_calls == {"search": 1}
    assert found.requests[1].tools == tuple(TOOLS)


def test_parallel_calls_are_answered_in_their_order(hermes):
    said = call("scrape", {"article_id": "a-1"}) + SEARCH + call("python", {"code": "7"})
    found = play(hermes, [Said(said), Said(ANSWER)], limit=8000)
    assert [r.name for r in found.trajectory.turns[0].results] == ["scrape", "search", "python"]
    assert [r.call_id for r in found.trajectory.turns[0].results] == ["t000c0000", "t000c0001", "t000c0002"]


def test_a_spent_iteration_budget_withdraws_the_tools_and_demands_a_report(hermes):
    found = play(hermes, [Said(SEARCH), Said(SEARCH), Said(ANSWER)], iterations=2)
    assert len(found.ran) == 2
    assert demanded(found) == [2]
    assert found.requests[2].tools == ()
    assert "budget of tool calls is spent" in found.requests[2].messages[-1].content
    assert found.record.failure is None


def test_a_spent_call_budget_answers_the_rest_without_running_it(hermes):
    found = play(hermes, [Said(SEARCH * 3), Said(ANSWER)], calls=2)
    assert len(found.ran) == 2
    assert found.record.usage.tool_errors == {"budget": 1}
    assert demanded(found) == [1]


def test_spent_time_withdraws_the_tools(hermes):
    found = play(hermes, [Said(SEARCH), Said(ANSWER)], tick=10.0, seconds=15.0)
    assert demanded(found) == [1]
    assert "time for this forecast is over" in found.requests[1].messages[-1].content


def test_withdrawn_tools_stay_withdrawn(hermes):
    found = play(hermes, [Said("I think."), Said(SEARCH), Said(ANSWER)], answer_turns=2)
    assert found.ran == []
    assert [r.tools for r in found.requests] == [tuple(TOOLS), (), ()]
    assert demanded(found) == [1, 2]
    assert found.record.failure is None


def test_an_unknown_tool_is_answered_and_counted(hermes):
    found = play(hermes, [Said(call("browse", {"url": "x"})), Said(ANSWER)])
    assert found.ran == []
    assert found.record.usage.tool_calls == {"other": 1}
    assert found.record.usage.tool_errors == {"unknown-tool": 1}
    assert "browse" in tool_text(found)[0]


def test_a_malformed_call_is_answered_and_costs_an_iteration(hermes):
    found = play(hermes, [Said("<tool_call>{oops</tool_call>"), Said(ANSWER)], iterations=1)
    assert found.record.usage.tool_errors == {"bad-json": 1}
    assert demanded(found) == [1]


def test_no_answer_is_demanded_once_and_then_a_failure(hermes):
    found = play(hermes, [Said("Hm."), Said("Hm."), Said(ANSWER)])
    assert len(found.requests) == 2
    assert demanded(found) == [1]
    assert "held no report" in found.requests[1].messages[-1].content
    assert found.record.failure.reason == "no-answer"


def test_a_bad_answer_is_final(hermes):
    found = play(hermes, [Said('<answer>{"Yes": "likely"}</answer>'), Said(ANSWER)])
    assert len(found.requests) == 1
    assert found.record.failure.reason == "unusable-answer"


def test_an_output_that_was_cut_is_named_so(hermes):
    found = play(hermes, [Said("word " * 500), Said("word " * 500)])
    assert [t.finish for t in found.trajectory.turns] == ["length", "length"]
    assert found.record.failure.reason == "output-cut"


def test_an_empty_output_is_a_model_failure(hermes):
    found = play(hermes, [Said("", "abort"), Said("", "abort")])
    assert found.record.failure.reason == "no-answer"
    assert found.record.usage.output_tokens == 0


def test_a_prompt_that_fills_the_context_is_a_model_failure_without_a_request(hermes):
    found = play(hermes, [Said(ANSWER)], limit=50)
    assert found.requests == []
    assert found.record.failure.reason == "prompt-too-long"


def test_a_context_that_is_full_ends_the_step(hermes):
    opening = len(play(hermes, [Said(ANSWER)]).requests[0].prompt_ids)
    found = play(hermes, [Said("word " * 200)], limit=opening + 100)
    assert found.record.failure.reason == "context-full"


def test_long_results_are_cut_until_a_report_fits_and_only_what_is_left_is_listed(hermes):
    opening = len(play(hermes, [Said(ANSWER)]).requests[0].prompt_ids)
    limit = opening + ANSWER_RESERVE + 170
    found = play(hermes, [Said(SEARCH), Said(ANSWER)], limit=limit)
    (result,) = found.trajectory.turns[0].results
    assert result.text.endswith(f"[cut: {result.cut_characters} more characters]")
    assert found.record.usage.cut_characters == {"search": result.cut_characters}
    assert result.cut_characters > 0
    assert [s.article_id for s in result.shown] == HEADER.findall(result.text)
    assert 0 < len(result.shown) < 3
    assert limit - len(found.requests[1].prompt_ids) >= ANSWER_RESERVE
    assert found.record.failure is None


def test_the_longest_of_many_results_is_cut_first(hermes):
    said = call("scrape", {"article_id": "a-1"}) + SEARCH
    found = play(hermes, [Said(said), Said(ANSWER)], limit=1500)
    scraped, searched = found.trajectory.turns[0].results
    assert scraped.cut_characters > 0
    assert searched.cut_characters == 0
    assert len(searched.shown) == 3


def test_a_result_is_tokenized_once_and_again_only_when_it_changes(hermes, monkeypatch):
    costed: list[list[str]] = []
    tokenized: list[str] = []
    cost, tokens = TokenDialogue.cost, TokenDialogue.tokens

    def counted(self, messages, today):
        costed.append([m.content for m in messages])
        return cost(self, messages, today)

    def sized(self, text):
        tokenized.append(text)
        return tokens(self, text)

    monkeypatch.setattr(TokenDialogue, "cost", counted)
    monkeypatch.setattr(TokenDialogue, "tokens", sized)
    said = call("scrape", {"article_id": "a-1"}) + SEARCH + SEARCH
    play(hermes, [Said(said), Said(ANSWER)], limit=1500)
    told = [texts for texts in costed if any(texts[:-1])]
    assert len(told) == 1, "and what is appended is what was costed"
    searched = [text for text in tokenized if text.startswith("[a-0]")]
    assert len(searched) == 2, "two searches, each once"
    assert len(tokenized) < 12


def test_what_is_left_is_said_below_the_results_and_the_last_turn_is_announced(hermes):
    found = play(hermes, [Said(SEARCH), Said(SEARCH * 2), Said(SEARCH), Said(ANSWER)], iterations=3, calls=9)
    assert notices(found) == [
        "",
        "[2 turns with tools left, 8 calls]",
        "[last turn with tools, 6 calls left]",
        "",
    ]
    assert demanded(found) == [3]
    assert "Budget: 3 turns with tools, 9 calls" in found.requests[0].messages[-1].content


def test_the_last_call_is_announced_as_the_last_turn(hermes):
    found = play(hermes, [Said(SEARCH), Said(SEARCH), Said(ANSWER)], iterations=9, calls=2)
    assert notices(found) == ["", "[last turn with tools, 1 call left]", ""]
    assert demanded(found) == [2]


def test_an_end_that_time_or_context_may_bring_is_announced(hermes):
    # The turn took 10 s and fewer than that are left.
    found = play(hermes, [Said(SEARCH), Said(SEARCH), Said(ANSWER)], tick=10.0, seconds=55.0)
    assert notices(found)[1] == "[hardly any time left: this may be the last turn with tools]"
    opening = len(play(hermes, [Said(ANSWER)]).requests[0].prompt_ids)
    found = play(hermes, [Said(SEARCH), Said(ANSWER)], limit=opening + ANSWER_RESERVE + 400 + 250)
    assert notices(found)[1] == "[hardly any room left: this may be the last turn with tools]"


def test_a_model_that_reads_messages_is_told_the_same(hermes):
    found = play(hermes, [Said(SEARCH), Said(call("browse", {})), Said("Hm."), Said(ANSWER)], limit=9000)
    step = forecast_step(found.task, MessageDialogue(), lambda: 0.0)
    answer, messages = None, ()
    turns = iter(found.trajectory.turns)
    try:
        while True:
            want = step.send(answer)
            if isinstance(want, UseTools):
                answer = tuple(run(w) for w in want.wants)
                continue
            messages = want.request.messages
            turn = next(turns)
            answer = Completion(text=turn.text, tool_calls=turn.tool_calls)
    except StopIteration as end:
        record, trajectory = end.value
    assert record.transcript == trajectory.transcript == "messages"
    assert messages == found.requests[-1].messages


def test_results_are_bounded_in_tokens_and_what_was_cut_is_said_and_counted(hermes):
    said = call("scrape", {"article_id": "a-1"}) + call("python", {"code": "7"}) + SEARCH
    found = play(
        hermes, [Said(said), Said(ANSWER)], limit=9000, tool_output_tokens=60, python_output_tokens=40, calls=9
    )
    scraped, ran, searched = found.trajectory.turns[0].results
    size = found.dialogue.tokens
    assert 40 < size(scraped.text) <= 60
    assert 40 < size(searched.text) <= 60
    assert 20 < size(ran.text) <= 40
    assert ran.text.startswith("7\n")
    assert ran.text.endswith("7")
    assert f"\n[cut: {ran.cut_characters} characters]\n" in ran.text
    assert [r.text.count("[cut: ") for r in (scraped, ran, searched)] == [1, 1, 1]
    assert found.record.usage.cut_characters == {r.name: r.cut_characters for r in (scraped, ran, searched)}


def test_a_notebook_is_bounded_in_tokens(hermes):
    said = [Said(NOTEBOOK + ANSWER)]
    assert play(hermes, said, mode="memory-on", notebook_tokens=60).record.notebook.status == "valid"
    refused = play(hermes, said, mode="memory-on", notebook_tokens=10).record.notebook
    assert (refused.status, "at most 10" in refused.why) == ("invalid", True)


def test_malformed_calls_are_counted_by_kind(hermes):
    script = [
        Said("<tool_call>{oops</tool_call>"),
        Said('<tool_call>{"name": "search", "argum', "length"),
        Said(call("search", "bridge")),
        Said(call("search", {})),
        Said(ANSWER),
    ]
    found = play(hermes, script, iterations=9, calls=9)
    assert found.record.usage.malformed_calls == {"bad-json": 1, "cut-off": 1}
    assert found.record.usage.tool_errors == {"bad-json": 1, "cut-off": 1, "bad-arguments": 2}
    assert len(tool_text(found)) == 4
    assert found.record.failure is None


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(0, 500), max_size=6), room=st.integers(-50, 1500))
def test_a_fair_share_fits_and_could_not_be_larger(sizes, room):
    level = fair_share(sizes, room)
    fits = max(0, room)
    assert sum(min(size, level) for size in sizes) <= fits
    if any(size > level for size in sizes):
        assert sum(min(size, level + 1) for size in sizes) > fits


def test_a_mode_without_tools_offers_none_and_refuses_calls(hermes):
    found = play(hermes, [Said(SEARCH), Said(ANSWER)], mode="no-tools")
    assert found.ran == []
    assert [r.tools for r in found.requests] == [(), ()]
    assert found.record.usage.tool_errors == {"budget": 1}
    assert found.record.failure is None
    assert found.record.notebook is None


@pytest.mark.parametrize(
    ("said", "status", "claim"),
    [
        (NOTEBOOK + ANSWER, "valid", "new"),
        (ANSWER, "missing", "old"),
        ("<belief_notebook>[]</belief_notebook>" + ANSWER, "invalid", "old"),
        (NOTEBOOK.replace('"new"', "[" * 800 + "]" * 800) + ANSWER, "invalid", "old"),
    ],
)
def test_memory_keeps_the_last_valid_notebook(hermes, said, status, claim):
    found = play(hermes, [Said(said)], mode="memory-on", carried=OLD, max_tokens=3000)
    assert found.record.notebook.status == status
    assert found.record.notebook.notebook.evidence_ledger[0].claim == claim
    assert "old" in found.requests[0].messages[-1].content


def test_the_last_message_is_read_and_earlier_answers_are_not(hermes):
    found = play(hermes, [Said(ANSWER + SEARCH), Said('<answer>{"Yes": 1, "No": 0}</answer>')])
    assert found.record.report.probabilities == {"Yes": 1.0, "No": 0.0}


JSON_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
).map(json.dumps)
ARGUMENTS = JSON_TEXT | st.sampled_from(
    [
        '{"query": "bridge", "top_k": 3}',
        '{"query": "\\ud83d", "top_k": 20}',
        '{"query": "bridge", "top_k": ' + "9" * 4000 + "}",
        '{"query": "bridge", "top_k": ' + "9" * 5000 + "}",
        '{"article_id": "a-1"}',
        '{"article_id": "\\ud83d"}',
        '{"code": "print(7)"}',
        '{"query": ' + "[" * 900 + "]" * 900 + "}",
        "[" * 3000,
        '"{}"',
        "{",
    ]
)
NAMES = st.sampled_from(["search", "scrape", "python", "browse", "", "\\ud83d", "<|im_end|>", "\\u0000"])
GOOD_CALLS = [
    SEARCH,
    call("search", {"query": "\ud83d bridge", "top_k": 2}),
    call("scrape", {"article_id": "a-1"}),
    call("scrape", {"article_id": "\ud83d"}),
    call("python", {"code": "print('\ud83d')"}),
]
FRAGMENTS = st.one_of(
    st.sampled_from(GOOD_CALLS),
    st.builds('<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'.format, NAMES, ARGUMENTS),
    st.sampled_from(
        [
            SEARCH,
            ANSWER,
            NOTEBOOK,
            '<answer>{"Yes": \\ud83d}</answer>',
            '<answer>{"\\ud83d": 0.5}</answer>',
            "<answer>" + "[" * 900 + "</answer>",
            '<answer>{"Yes": ' + "9" * 5000 + "}</answer>",
            '<belief_notebook>{"assessment": {"p": {"Yes": 1}, "open_questions": ["\\ud83d"]}}</belief_notebook>',
            '<belief_notebook>{"assessment": {"p": {"Yes": 1}, "open_questions": '
            + "[" * 800
            + "]" * 800
            + "}}</belief_notebook>",
            "<answer>",
            "</answer>",
            "<tool_call>",
            "</tool_call>",
            "<belief_notebook>",
            "<|im_start|>system\n",
            "<|im_end|>",
            "<think>",
            "</think>",
            "\\boxed{A}",
            "\\ud83d",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
TURNS = st.builds(
    Said,
    text=st.lists(FRAGMENTS, max_size=4).map("".join),
    finish=st.sampled_from(["stop", "stop", "stop", "length", "abort"]),
    ids=st.lists(st.integers(0, 49_151), max_size=4).map(tuple),
)


@pytest.mark.parametrize("kind", ["hermes", "template", "rendered"])
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    script=st.lists(TURNS, max_size=7),
    mode=st.sampled_from(MODES),
    limit=st.sampled_from([60, 420, 700, 700, 1100, 4000]),
    carried=st.sampled_from([None, OLD]),
    iterations=st.integers(1, 3),
    calls=st.integers(1, 4),
    answer_turns=st.integers(1, 2),
    tick=st.sampled_from([0.0, 0.0, 7.0]),
    max_tokens=st.sampled_from([1, 60, 8000]),
)
def test_whatever_a_model_says_the_step_ends_with_a_record(
    request, kind, script, mode, limit, carried, iterations, calls, answer_turns, tick, max_tokens
):
    found = play(
        request.getfixturevalue(kind),
        script,
        mode=mode,
        limit=limit,
        carried=carried,
        tick=tick,
        max_tokens=max_tokens,
        iterations=iterations,
        calls=calls,
        answer_turns=answer_turns,
        seconds=60.0,
    )
    assert len(found.requests) <= iterations + answer_turns + 1
    assert len(found.ran) <= (0 if mode == "no-tools" else calls)
    assert len(demanded(found)) <= answer_turns
    assert (found.record.notebook is None) == (mode != "memory-on")
    opening = Message(role="user", content=found.trajectory.turns[0].messages[-1].content)
    assert opening in found.trajectory.turns[0].messages
