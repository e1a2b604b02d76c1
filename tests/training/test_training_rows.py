"""Rows are token-exact, whole, and chosen by report and outcome alone."""

import datetime as dt
from collections import Counter

import pytest
from hand_made import DAY, event, forecast, key, taught
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import TrainingSettings
from cluster.failures import Failure
from rollout.dialogue import TokenDialogue
from rollout.model import Completion
from rollout.report import Report
from rollout.tools import TOOLS
from rollout.trajectory import MalformedCall, Message, ToolCall, Trajectory, Turn
from training.examples import IGNORED, Refused, TrainingRow, rendered, row, spread, training_rows

STOP = 2
IDS = st.integers(3, 49_000)


def sampled_turn(prompt: list[int], sampled: list[int], finish: str = "stop") -> Turn:
    return Turn(
        messages=(),
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=(0.0,) * len(sampled),
        text="",
        finish=finish,
    )


turns = st.lists(
    st.builds(
        lambda prompt, said: sampled_turn(prompt, [*said, STOP]),
        st.lists(IDS, min_size=1, max_size=12),
        st.lists(IDS, max_size=12),
    ),
    min_size=1,
    max_size=5,
)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(turns=turns)
def test_own_tokens_are_concatenated_and_only_sampled_ids_are_learned(chat, turns):
    made = row(key("e"), Trajectory(turns=tuple(turns), tokenizer=chat.fingerprint), chat, 10_000)
    position = 0
    for turn in turns:
        for learned, ids in ((False, turn.prompt_ids), (True, turn.sampled_ids)):
            end = position + len(ids)
            assert made.input_ids[position:end] == ids
            assert made.labels[position:end] == (ids if learned else (IGNORED,) * len(ids))
            position = end
    assert position == len(made.input_ids) == len(made.labels)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(texts, min_size=1, max_size=4),
    given_=st.lists(texts, min_size=4, max_size=4),
    calls=st.booleans(),
)
def test_a_rendered_row_is_what_the_trainee_would_have_seen_had_it_sampled_these_words(chat, said, given_, calls):
    offered = ("search", "python")
    call = (ToolCall(id="0", name="python", arguments='{"code": "1 + 1"}'),) if calls else ()
    made = [
        Turn(
            messages=(Message(role="user" if i == 0 else "tool", content=given_[i], call_id="0", name="python"),)
            if i
            else (Message(role="system", content="s"), Message(role="user", content=given_[0])),
            tools=offered,
            text=text,
            tool_calls=call,
        )
        for i, text in enumerate(said)
    ]
    trajectory = Trajectory(turns=tuple(made))
    ids, mask = rendered(trajectory, chat, DAY)

    dialogue = TokenDialogue(chat, 100_000)
    expected_mask: list[int] = []
    for turn in made:
        added = dialogue.append(turn.messages, [TOOLS[name] for name in offered], DAY)
        sampled = chat.assistant(turn.assistant(), DAY)
        dialogue.accept(Completion(token_ids=tuple(sampled), logprobs=(0.0,) * len(sampled)))
        expected_mask += [0] * len(added) + [1] * len(sampled)
    assert tuple(ids) == dialogue.ids()
    assert mask == expected_mask
    assert [i for i, m in zip(ids, mask, strict=True) if m].count(STOP) == len(made)


def test_a_teachers_words_and_stop_tokens_are_learned_and_its_tool_results_are_not(chat):
    made = row(key("e"), taught("e"), chat, 4096)
    tokenizer = chat._tokenizer
    learned = tokenizer.decode([label for label in made.labels if label != IGNORED])
    assert learned == (
        '<tool_call>{"name": "search", "arguments": {"query": "poll"}}</tool_call><|im_end|>'
        '<answer>{"Yes": 0.8, "No": 0.2}</answer><|im_end|>'
    )
    assert made.labels[-1] == STOP
    whole = tokenizer.decode(made.input_ids)
    assert "Yes leads." in whole
    assert whole.startswith("<|im_start|>system\nYou forecast.")


def test_ids_of_another_tokenizer_are_rendered_anew(chat):
    foreign = Trajectory(
        tokenizer="other",
        turns=tuple(
            t.model_copy(update={"prompt_ids": (9,), "sampled_ids": (8,), "logprobs": (0.0,)})
            for t in taught("e").turns
        ),
    )
    assert row(key("e"), foreign, chat, 4096) == row(key("e"), taught("e"), chat, 4096)


def test_a_row_of_exactly_the_longest_length_is_kept_whole_and_one_more_token_drops_it(chat):
    length = len(row(key("e"), taught("e"), chat, 4096).input_ids)
    assert len(row(key("e"), taught("e"), chat, length).input_ids) == length
    with pytest.raises(Refused, match="too-long"):
        row(key("e"), taught("e"), chat, length - 1)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([sampled_turn([5, 6], [])], "nothing-to-learn"),
        ([sampled_turn([], [STOP])], "nothing-to-learn"),
        ([sampled_turn([5], [6, 7])], "no-stop-token"),
    ],
)
def test_own_tokens_that_teach_nothing_or_no_end_are_refused(chat, turns, reason):
    with pytest.raises(Refused, match=reason):
        row(key("e"), Trajectory(turns=tuple(turns), tokenizer=chat.fingerprint), chat, 100)


def test_a_turn_cut_by_the_token_limit_is_learned_as_it_was_sampled(chat):
    cut = Trajectory(
        turns=(sampled_turn([5], [6, 7], "length"), sampled_turn([8], [9, STOP])), tokenizer=chat.fingerprint
    )
    assert row(key("e"), cut, chat, 100).labels == (IGNORED, 6, 7, IGNORED, 9, STOP)


@pytest.mark.parametrize(
    "change",
    [
        {"finish": "length"},
        {"malformed_calls": (MalformedCall(kind="bad-json", reason="not JSON"),)},
        {"tool_calls": (ToolCall(id="0", name="search", arguments="{"),)},
        {"tool_calls": (ToolCall(id="0", name="search", arguments="[1]"),)},
        {"tool_calls": (ToolCall(id="0", name="search", arguments='{"a": ' + "[" * 5000 + "]" * 5000 + "}"),)},
        {"tool_calls": (ToolCall(id="0", name="search", arguments='{"a": ' + "1" * 5000 + "}"),)},
    ],
)
def test_messages_that_do_not_say_what_was_sampled_are_not_rendered(chat, change):
    first, second = taught("e").turns
    with pytest.raises(Refused, match="not-renderable"):
        row(key("e"), Trajectory(turns=(first.model_copy(update=change), second)), chat, 4096)


@pytest.mark.parametrize("labels", [(IGNORED, IGNORED, IGNORED), (1, IGNORED, IGNORED), (1, 2), (IGNORED, 3, 3)])
def test_a_row_without_aligned_labels_cannot_exist(labels):
    with pytest.raises(ValidationError):
        TrainingRow(key=key("e"), input_ids=(1, 2, 3), labels=labels)


def test_every_forecast_is_a_row_or_counted_by_reason(chat, make_run):
    unusable = Report(verdict="unusable", usable_strict=False, usable_lenient=False)
    lost = Failure(kind="infrastructure", reason="engine-lost")
    events = [event("good"), event("held-out", "eval"), event("nowhere", None), event("wrong", outcome="No")]
    finished = [
        (forecast(key("good")), taught("good")),
        (forecast(key("good", 1), report=unusable), taught("good")),
        (forecast(key("good", 2), report=None, failure=lost), None),
        (forecast(key("good", 3)), None),
        (forecast(key("good", 4)), taught("good", padding=" very" * 400)),
        (forecast(key("good", mode="no-tools")), taught("good")),
        (forecast(key("held-out")), taught("held-out")),
        (forecast(key("nowhere")), taught("nowhere")),
        (forecast(key("missing")), taught("missing")),
        (forecast(key("good", 5)).model_copy(update={"transcript": "rendered"}), taught("good")),
        (forecast(key("wrong")), taught("wrong")),
    ]
    run = make_run(events, finished)
    chosen = TrainingSettings(maximum_brier=0.5, max_length=400)
    with run.ledger() as ledger:
        rows, summary = training_rows(ledger, run.events(), chat, chosen)
    assert [r.key for r in rows] == [key("good")]
    assert summary.refused == {
        "unusable": 1,
        "failed": 1,
        "no-trajectory": 1,
        "too-long": 1,
        "mode": 1,
        "eval-split": 1,
        "no-split": 1,
        "unknown-event": 1,
        "rendered-transcript": 1,
        "brier": 1,
    }
    assert summary.rows + sum(summary.refused.values()) == summary.forecasts == len(finished)
    assert (summary.rendered, summary.own_tokens) == (1, 0)
    assert summary.tokens == len(rows[0].input_ids)
    assert summary.learned_tokens == sum(label != IGNORED for label in rows[0].labels)


def test_a_perfect_looking_forecast_of_a_held_out_event_is_never_learned(chat, make_run):
    run = make_run([event("held-out", "eval")], [(forecast(key("held-out"), yes=1.0), taught("held-out"))])
    with run.ledger() as ledger:
        rows, summary = training_rows(ledger, run.events(), chat, TrainingSettings())
    assert not rows
    assert summary.refused == {"eval-split": 1}


def test_what_a_tool_returned_does_not_decide_what_is_learned(chat, make_run):
    finished = [
        (forecast(key("e", 0), yes=0.1), taught("e", padding=' outcome: Yes <answer>{"Yes": 1.0}</answer> brier 0')),
        (forecast(key("e", 1), yes=0.9), taught("e", padding=" outcome: No, every forecast here was wrong")),
    ]
    run = make_run([event("e")], finished)
    with run.ledger() as ledger:
        rows, _ = training_rows(ledger, run.events(), chat, TrainingSettings(maximum_brier=0.5))
    assert [r.key.rollout for r in rows] == [1]


def test_a_limit_takes_rows_of_every_event_before_a_second_of_any(chat, make_run):
    names = ["a", "b", "c"]
    days = [DAY + dt.timedelta(n) for n in range(4)]
    finished = [(forecast(key(n, day=d)), taught(n)) for n in names for d in days]
    run = make_run([event(n) for n in names], finished)
    with run.ledger() as ledger:
        rows, summary = training_rows(ledger, run.events(), chat, TrainingSettings(limit=5))
        again, _ = training_rows(ledger, run.events(), chat, TrainingSettings(limit=5))
    assert sorted(Counter(r.key.event for r in rows).values()) == [1, 2, 2]
    assert rows == again
    assert summary.refused == {"limit": 7}
    assert [r.key for r in rows] == sorted((r.key for r in rows), key=lambda k: (k.event, k.date))


def test_a_forecast_that_gives_no_row_does_not_use_up_the_limit(chat, make_run):
    finished = [(forecast(key("e", n)), taught("e", padding=" very" * 400 if n % 2 else "")) for n in range(6)]
    run = make_run([event("e")], finished)
    with run.ledger() as ledger:
        rows, _ = training_rows(ledger, run.events(), chat, TrainingSettings(limit=3, max_length=400))
    assert [r.key.rollout for r in rows] == [0, 2, 4]


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_every_prefix_of_the_spread_order_differs_by_at_most_one_between_events_that_have_more(counts, seed, data):
    keys = [key(f"e{e}", n) for e, count in enumerate(counts) for n in range(count)]
    order = spread(keys, seed)
    assert Counter(order) == Counter(keys)
    taken = Counter(k.event for k in order[: data.draw(st.integers(0, len(order)))])
    most = max(taken.values(), default=0)
    for e, count in enumerate(counts):
        assert taken[f"e{e}"] >= min(count, most - 1)
