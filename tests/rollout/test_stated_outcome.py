"""Texts that give their own outcome away."""

import pytest

from rollout.events.stated_outcome import stated_outcome

OPTIONS = ("YES", "NO")


@pytest.mark.parametrize(
    "text",
    [
        # summer2024, de1c32fc
        "US President Joe Biden was expected to meet Monday afternoon with his national security team.\n\n"
        "Therefore, resolving YES",
        "Resolves YES if it rains.\n\nEdit: resolved NO.",
        "UPDATE: Resolving as **NO**, thanks everyone!",
        "Resolved YES after the AP called the race",
        "[RESOLVED: YES] Will it rain?",
        "This market was resolved to “No”.",
        "This question has been resolved.",
        "It has now been settled; see the comments.",
        "The final score is in, so this resolved NO.",
        "I've resolved this market to YES.",
        "I am resolving this as NO, see the comments",
        "On May 3 mods resolved it to N/A.",
        "Market resolved: NO",
        "The question is now resolved positively.",
    ],
)
def test_a_text_that_says_how_it_ended_is_seen(text: str) -> None:
    assert stated_outcome(["Will it?", text], OPTIONS) is not None


@pytest.mark.parametrize(
    "text",
    [
        # summer2024, in order: a0a672cf, 5c4be2d5, 49a0f79f, 9c25508a, 905dce47, 12769531, e04685d7, 2dd19631, a3ffbb70,
        # 3793b31e, c4a44a46, a4d6343a, a60efde2, 9276ae78, 262f26c7, 0dd24ad8, e486ebc0
        "It shall not be deemed resolved by a “wildcat” or “Catalan” style of referendum",
        "Otherwise, the question will be resolved as **NO**.",
        "If these criteria are not met by market close, this market resolves NO.",
        "If I finish early, this market will be resolved YES.",
        "I will do my best to resolve this market on time, if it hasn’t been resolved by 5pm EST time on August 9th",
        "(This market - https://manifold.markets/dreev/will-an-llm-be-able-to-solve-confus - has resolved YES)",
        "this market will err towards resolving NO.",
        "I will probably wait until the 24th, resolving at the absolute latest by midnight on the 26th.",
        'if particle reach to 0 then it will be immediately resolved to "No"',
        "Resolved by poll after market close",
        "Markets are resolved according to these rules, which are subject to change.",
        "This question has a 75% chance of resolving YES",
        "Will I encounter Issue Number 1 when I resolve this market?",
        "Resolves no, the only question is when",
        "This market will be resolved as N/A if President Joe Biden does not drop out",
        "Trustworthy-ish users are encouraged to resolve this market before then if the outcome is known",
        "Made this before I realized resolving NA is no longer an option.",
        "Resolved YES if it rains, resolved NO otherwise.",
        "Resolved NO in any other case.",
        "Once the result is official, this market is resolved YES.",
        "When it rains: resolving YES.",
        "This resolves YES. All other outcomes resolve NO.",
        "Has this been resolved NO?",
        "Last year's market resolved YES.",
        "The dispute has been resolved.",
        "This will be resolved YES at noon.",
    ],
)
def test_criteria_conditions_and_other_questions_are_left_alone(text: str) -> None:
    assert stated_outcome([text], OPTIONS) is None


def test_an_event_names_its_own_options() -> None:
    text = "Update: resolved to Ada Lovelace."
    assert stated_outcome([text], ("Ada  lovelace", "Other")) == "Update: resolved to Ada Lovelace"
    assert stated_outcome([text], OPTIONS) is None
