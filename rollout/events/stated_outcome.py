"""Texts that state how their own event ended.

Sources serve a question as it reads today, and some authors write the settlement into it ("Therefore, resolving YES").
Such a text gives the outcome away at every forecast date. A statement is in the past or progressive tense; criteria speak
in the present, the future or under a condition, and are left alone, as are sentences about other questions. News that is
pasted into a text without a word on the settlement is not seen here.
"""

import re
from collections.abc import Iterable, Iterator

from rollout.events.event import normalized_label

_SENTENCE = re.compile(r"([^.!?\n()\[\]]+)([.!?\n()\[\]]|$)")
_MARKUP = re.compile(r"[*_\"]+")
_CONDITION = re.compile(
    r"\b(if|iff|unless|when|whenever|whether|once|until|would|will|shall|should|could|might|can|must|to be|in case"
    r"|in the event|otherwise|provided|assuming|suppose|either|else)\b|'ll\b"
)
_CONDITION_BEHIND = re.compile(r"\W*(if|iff|unless|when|whenever|once|in|should|otherwise|provided|only|assuming)\b")

_START = r"(?:^|[:;,–—] ?| - )(?:(?:so|and|thus|hence|therefore|accordingly|edit|update)\b[ :,]*)*"
_AUTHOR = r"(?:i|we|mods?|admins?|moderators?)"
_OWN = r"(?:it|this|(?:this|the) (?:market|question|event|poll|bet))"
_DONE = r"(?:'ve| have| has| had| was| got| is now| is being)?(?: now| just| already| been)* resolved"
_DOING = r"(?:'m|'re|'s| am| are| is)(?: now| just| hereby)* resolving"
_AS = r"(?: (?:it|this|the|market|question))*(?: (?:to|as|in favou?r of))?[ :,'-]+"


def stated_outcome(texts: Iterable[str], options: Iterable[str]) -> str | None:
    """The first sentence that says how the event was settled, or None. `options` are the event's labels."""
    labels = {normalized_label(o) for o in options} | {"yes", "no", "n/a", "positively", "negatively"}
    label = "(?:" + "|".join(re.escape(one) for one in sorted(labels, key=len, reverse=True)) + r")(?!\w)"
    statement = re.compile(
        rf"{_START}(?:(?:market |question )?resolved|resolving){_AS}{label}"
        rf"|(?:^|\W)(?:{_AUTHOR}|{_OWN})(?:{_DONE}|{_DOING}){_AS}{label}"
        rf"|(?:^|\W){_OWN} has(?: now| just| already)* been (?:resolved|settled)\b"
    )
    for sentence in (s for text in texts for s in _assertions(text)):
        plain = _MARKUP.sub("", normalized_label(sentence))
        found = statement.search(plain)
        if found and not _CONDITION.search(plain[: found.end()]) and not _CONDITION_BEHIND.match(plain[found.end() :]):
            return sentence
    return None


def _assertions(text: str) -> Iterator[str]:
    """Sentences that are no questions; brackets and line ends part them too."""
    return (m[1].strip() for m in _SENTENCE.finditer(text) if m[2] != "?")
