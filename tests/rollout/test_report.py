import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.events.event import EventPrompt
from rollout.report import Report, option_letter, parse_report


def prompt(*options: str, multi: bool = False) -> EventPrompt:
    return EventPrompt(
        id="e",
        question="Will it?",
        criteria="",
        background="",
        options=options or ("YES", "NO"),
        selection="multi" if multi else "single",
        deadline=None,
    )


def strict(body: str, *options: str) -> Report:
    return parse_report(f"So: <answer>{body}</answer>", prompt(*options), "strict")


def lenient(body: str, *options: str) -> Report:
    return parse_report(f"So: <answer>{body}</answer>", prompt(*options), "lenient")


def test_a_plain_answer_is_taken_as_written():
    report = strict('{"YES": 0.63, "NO": 0.37}')
    assert report.verdict == "ok"
    assert report.probabilities == pytest.approx({"YES": 0.63, "NO": 0.37})
    assert report.usable_strict
    assert report.usable_lenient


def test_the_last_complete_answer_counts():
    text = '<answer>{"YES": 1, "NO": 0}</answer> or <answer>{"YES": 0.2, "NO": 0.8}</answer> then <answer>{"YES": 0.9'
    assert parse_report(text, prompt(), "strict").probabilities == {"YES": 0.2, "NO": 0.8}


def test_a_stray_closing_tag_does_not_hide_the_answer():
    text = 'in <answer> tags: <answer>{"YES": 0.2, "NO": 0.8}</answer> done </answer>'
    assert parse_report(text, prompt(), "strict").probabilities == {"YES": 0.2, "NO": 0.8}


def test_text_without_an_answer_is_unusable_and_says_so():
    report = parse_report("I think so.", prompt(), "lenient")
    assert (report.verdict, report.usable_strict, report.usable_lenient) == ("unusable", False, False)
    assert "no complete" in report.why


def test_negatives_are_clipped_and_the_positive_mass_normalized():
    report = strict('{"A": -0.5, "B": 0.2, "C": 0.6}', "A", "B", "C")
    assert report.verdict == "repaired"
    assert report.probabilities == pytest.approx({"A": 0.0, "B": 0.25, "C": 0.75})


def test_whole_percentages_normalize():
    report = strict('{"YES": 63, "NO": 37}')
    assert report.verdict == "repaired"
    assert report.probabilities == pytest.approx({"YES": 0.63, "NO": 0.37})


def test_a_label_that_is_no_option_keeps_its_mass():
    report = strict('{"YES": 0.5, "No": 0.5}')
    assert report.probabilities == {"YES": 0.5, "No": 0.5}
    assert report.remainder == '"No"'


@pytest.mark.parametrize(
    "value", ["true", "Infinity", "-Infinity", "1e999", "NaN", '"0.5"', "null", "[0.5]", "1" + "0" * 400, "9" * 6000]
)
def test_what_is_not_a_finite_number_refuses_the_report_under_both_policies(value):
    report = strict(f'{{"YES": {value}, "NO": 0.5}}')
    assert report.verdict == "unusable"
    assert report.probabilities == {}
    assert not report.usable_strict
    assert not report.usable_lenient


@pytest.mark.parametrize(
    "body", ["", "{}", '{"YES": 0, "NO": 0}', '{"YES": -1}', "[0.5, 0.5]", "0.5", '{"YES": 0.5} ok']
)
def test_an_answer_without_positive_mass_by_label_is_unusable(body):
    assert strict(body).verdict == "unusable"


def test_a_repeated_key_is_refused_and_named():
    report = lenient('{"YES": 0.5, "YES": 0.6, "NO": 0.1}')
    assert report.verdict == "unusable"
    assert '"YES" is repeated' in report.why


def test_values_near_the_ends_of_the_float_range_normalize():
    assert strict('{"YES": 1e308, "NO": 1e308}').probabilities == {"YES": 0.5, "NO": 0.5}
    assert strict('{"YES": 5e-324, "NO": 5e-324}').probabilities == {"YES": 0.5, "NO": 0.5}


@pytest.mark.parametrize(
    "body",
    [
        '{"YES": 0.63, "NO": 0.37,}',
        '{"YES": "63%", "NO": "37 %"}',
        '```json\n{"YES": 0.63, "NO": 0.37}\n```',
        '{"YES": "63%", "NO": 0.37 , }',
    ],
)
def test_small_slips_are_mended_only_by_the_lenient_policy(body):
    assert strict(body).verdict == "unusable"
    assert not strict(body).usable_strict
    assert strict(body).usable_lenient
    assert lenient(body).verdict == "repaired"
    assert lenient(body).probabilities == pytest.approx({"YES": 0.63, "NO": 0.37})


def test_labels_match_after_normalization_only_leniently():
    body = '{"yes ": 0.6, "Rock ‘n’ roll — no": 0.4}'
    assert lenient(body, "YES", "Rock 'n' roll - no").probabilities == {"YES": 0.6, "Rock 'n' roll - no": 0.4}
    assert strict(body, "YES", "Rock 'n' roll - no").probabilities == {"yes ": 0.6, "Rock ‘n’ roll — no": 0.4}


def test_two_labels_of_one_meaning_are_refused():
    report = lenient('{"YES": 0.6, "Yes": 0.3, "NO": 0.1}')
    assert report.verdict == "unusable"
    assert report.usable_strict


def test_percent_strings_beside_numbers_above_one_are_refused():
    assert lenient('{"YES": "63%", "NO": 37}').verdict == "unusable"


def test_commas_inside_labels_survive_mending():
    body = '{"a, }": 0.5, "b\\", ]": 0.5,}'
    assert lenient(body, "a, }", 'b", ]').probabilities == {"a, }": 0.5, 'b", ]': 0.5}


def test_a_lone_surrogate_cannot_break_the_record():
    report = strict('{"\\ud800": 0.5, "NO": 0.5}')
    assert report.model_dump_json()
    assert sum(report.probabilities.values()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" + "[" * 1_000_000 + "</answer>",
        "<answer>" * 150_000,
        "<answer>" + '{"' + '\\"' * 500_000 + "</answer>",
        "<answer>" + ", " * 400_000 + "</answer>",
        "\\boxed{" * 150_000,
        "\\boxed{" + "A," * 400_000 + "}",
        "\\boxed{" + "{" * 900_000,
    ],
)
def test_megabytes_of_nonsense_are_unusable_and_quick(text):
    for event in (prompt(), prompt(multi=True)):
        assert parse_report(text, event, "lenient").verdict == "unusable"


def test_a_boxed_set_is_read_by_letter_or_label_in_option_order():
    event = prompt("Ann", "Bo", "Cy, jr.", multi=True)
    for text in ("\\boxed{C, A}", "\\boxed{Cy, jr., Ann}", "first \\boxed{B}, no: \\boxed{A,Cy, jr.}"):
        report = parse_report(text, event, "strict")
        assert (report.verdict, report.answers, report.probabilities) == ("ok", ("Ann", "Cy, jr."), {})


def test_a_boxed_set_with_an_unknown_member_is_unusable():
    report = parse_report("\\boxed{A, D}", prompt("Ann", "Bo", multi=True), "lenient")
    assert report.verdict == "unusable"
    assert '"D"' in report.why
    assert parse_report("\\boxed{}", prompt("Ann", "Bo", multi=True), "lenient").verdict == "unusable"


def test_a_lower_case_letter_is_a_slip():
    event = prompt("Ann", "Bo", multi=True)
    assert parse_report("\\boxed{b}", event, "strict").verdict == "unusable"
    assert parse_report("\\boxed{b}", event, "lenient").answers == ("Bo",)


def test_letters_go_on_after_z():
    assert [option_letter(i) for i in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]


_JSONISH = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["YES", "NO", "x"]) | st.text(), inner),
    max_leaves=6,
)
_TEXT = st.text(st.characters(exclude_categories=[])) | st.text('<>/answer{}"\\boxed,:0.5e-9%YESNO ')


@given(
    text=_TEXT
    | _TEXT.map(lambda t: f"<answer>{t}</answer>")
    | _JSONISH.map(lambda v: f"<answer>{json.dumps(v)}</answer>")
)
@pytest.mark.parametrize("policy", ["strict", "lenient"])
@pytest.mark.parametrize("multi", [False, True])
def test_no_text_breaks_the_parser_and_every_usable_report_is_a_distribution(policy, multi, text):
    report = parse_report(text, prompt(multi=multi), policy)
    assert Report.model_validate_json(report.model_dump_json()) == report
    if report.verdict == "unusable":
        assert not report.probabilities
        assert not report.answers
        assert report.why
    elif multi:
        assert report.answers
        assert set(report.answers) <= {"YES", "NO"}
    else:
        assert all(math.isfinite(p) and p >= 0 for p in report.probabilities.values())
        assert math.fsum(report.probabilities.values()) == pytest.approx(1)


@given(
    st.dictionaries(
        st.sampled_from(["YES", "NO", "other"]), st.floats(allow_nan=False, allow_infinity=False), min_size=1
    )
)
def test_any_object_of_finite_numbers_with_positive_mass_is_usable(values):
    report = strict(json.dumps(values))
    assert (report.verdict != "unusable") == any(v > 0 for v in values.values())
    if report.usable_strict:
        assert math.fsum(report.probabilities.values()) == pytest.approx(1)
        assert set(report.probabilities) == set(values)
