"""The report of a forecast step: parsed probabilities or answer set, and how they were obtained.

Parsing never raises, whatever the model wrote. Both policies read every output, so that their usable shares can be
compared; the chosen one decides what is scored. A report of which one number cannot be read is refused as a whole:
dropping that entry would move its mass to the others and forecast something the model did not say.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cluster.record import Record
from rollout.events.event import EventPrompt, normalized_label

Verdict = Literal["ok", "repaired", "unusable"]
ParsePolicy = Literal["strict", "lenient"]

_ANSWER_TAG = re.compile(r"<(/?)answer>")
_ANSWER_TAG_ANY_CASE = re.compile(r"<(/?)answer>", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*%\s*")
_FENCE = re.compile(r"```[A-Za-z]*\s*(.*?)\s*```", re.DOTALL)
_SUM_TOLERANCE = 1e-6
"""A sum this near to one was meant as one: the verdict stays `ok`."""
_QUOTED_CHARACTERS = 2_000
"""Bound on what a report quotes of an answer."""
_LENIENT_CHARACTERS = 1_000_000
"""Longer answers are not searched for slips: nobody wrote them by mistake."""


class Report(Record):
    """What a step reported."""

    probabilities: dict[str, float] = {}
    """By reported label, not negative, summing to one; empty when unusable or for a discrete answer. Labels that are no
    option keep their mass and absent options have none (Forecast-Dojo B.3)."""
    answers: tuple[str, ...] = ()
    """The discrete answer set in option order, where the event asks for one."""
    remainder: str = ""
    """What stood in the answer and was not understood."""
    verdict: Verdict
    """`ok`: taken as written. `repaired`: clipped, normalized or matched leniently. `unusable`: scored by the fallback."""
    why: str = ""
    usable_strict: bool
    """Whether the strict policy accepts this output."""
    usable_lenient: bool
    """Whether the lenient policy accepts this output."""


class _Refused(Exception):
    """The answer cannot be used; `remainder` is the part that was not understood."""

    def __init__(self, why: str, remainder: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.remainder = remainder


class _Accepted(Record):
    probabilities: dict[str, float] = {}
    answers: tuple[str, ...] = ()
    remainder: str = ""
    repairs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_report(text: str, event: EventPrompt, policy: ParsePolicy) -> Report:
    """The report in a model's final text.

    `single` events: the last complete `<answer>{...}</answer>`, a JSON object of probabilities by label (Forecast-Dojo
    B.3: exact labels, negatives clipped, positive mass normalized). `multi` events: the last `\\boxed{A, C}`, letters in
    option order or labels. `lenient` also takes trailing commas, percent strings, a code fence, tags in any case, and
    labels that are equal after `normalized_label`. Never raises.
    """
    outcomes: dict[ParsePolicy, _Accepted | _Refused] = {}
    for each in ("strict", "lenient"):
        read = _read_answers if event.selection == "multi" else _read_probabilities
        try:
            outcomes[each] = read(text, event.options, each == "lenient")
        except _Refused as refused:
            outcomes[each] = refused
    chosen = outcomes[policy]
    usable_strict = isinstance(outcomes["strict"], _Accepted)
    usable_lenient = isinstance(outcomes["lenient"], _Accepted)
    if isinstance(chosen, _Refused):
        return Report(
            remainder=_quoted(chosen.remainder),
            verdict="unusable",
            why=_quoted(chosen.why),
            usable_strict=usable_strict,
            usable_lenient=usable_lenient,
        )
    return Report(
        probabilities=chosen.probabilities,
        answers=chosen.answers,
        remainder=_quoted(chosen.remainder),
        verdict="repaired" if chosen.repairs else "ok",
        why=_quoted("; ".join(chosen.repairs + chosen.notes)),
        usable_strict=usable_strict,
        usable_lenient=usable_lenient,
    )


def option_letter(index: int) -> str:
    """The letter of an option by its position: A to Z, then AA, AB and so on."""
    letters = ""
    index += 1
    while index > 0:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def strict_json(text: str) -> Any:
    """The JSON value of a text. Raises ValueError for anything else, also for a repeated key and for `NaN` and `Infinity`.

    Whole numbers come back as floats, so that one with a thousand digits is infinite and not an error of its own.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, parse_int=float, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def plain_text(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_probabilities(text: str, options: Sequence[str], lenient: bool) -> _Accepted:
    body = _last_answer(text, lenient)
    if body is None:
        raise _Refused("no complete <answer>...</answer>")
    value, repairs = _load(body, lenient)
    if not isinstance(value, dict):
        raise _Refused(f"the answer is a JSON {_json_type(value)}, not an object of probabilities by label", body)
    numbers, number_repairs = _numbers(value, lenient, body)
    numbers, label_repairs = _labelled(numbers, options, lenient, body)
    repairs += number_repairs + label_repairs
    if any(v < 0 for v in numbers.values()):
        repairs.append("negative values clipped to zero")
        numbers = {label: max(v, 0.0) for label, v in numbers.items()}
    largest = max(numbers.values(), default=0.0)
    if largest <= 0:
        raise _Refused("no positive probability", body)
    # Divided by the largest first: the sum of two values near 1e308 would be infinite.
    scaled = {label: v / largest for label, v in numbers.items()}
    total = math.fsum(scaled.values())
    if abs(total * largest - 1) > _SUM_TOLERANCE:
        repairs.append(f"values sum to {total * largest:.6g}, normalized")
    foreign = [label for label in scaled if label not in options]
    return _Accepted(
        probabilities={label: v / total + 0.0 for label, v in scaled.items()},
        remainder=", ".join(json.dumps(label, ensure_ascii=False) for label in foreign),
        repairs=tuple(repairs),
        notes=(f"{len(foreign)} label(s) that are no option keep their mass",) if foreign else (),
    )


def _last_answer(text: str, lenient: bool) -> str | None:
    """What stands in the last complete tag: an opening tag and the first closing one after it."""
    last, opened = None, None
    for tag in (_ANSWER_TAG_ANY_CASE if lenient else _ANSWER_TAG).finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            last, opened = text[opened : tag.start()], None
    return last


def _load(body: str, lenient: bool) -> tuple[Any, list[str]]:
    try:
        return strict_json(body), []
    except ValueError as error:
        if not lenient or len(body) > _LENIENT_CHARACTERS:
            raise _Refused(f"the answer is not strict JSON: {error}", body) from None
    repairs = []
    mended = body.strip()
    if fence := _FENCE.fullmatch(mended):
        mended = fence[1]
        repairs.append("code fence removed")
    without = _without_trailing_commas(mended)
    if without != mended:
        repairs.append("trailing commas removed")
    try:
        return strict_json(without), repairs
    except ValueError as error:
        raise _Refused(f"the answer is not JSON: {error}", body) from None


def _without_trailing_commas(text: str) -> str:
    """The text without commas that only white space separates from a closing bracket; strings are left alone."""
    kept: list[str] = []
    comma: int | None = None
    quoted = escaped = False
    for character in text:
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
        elif character in "}]":
            if comma is not None:
                kept[comma] = ""
            comma = None
        elif character == ",":
            comma = len(kept)
        elif not character.isspace():
            comma = None
            quoted = character == '"'
        kept.append(character)
    return "".join(kept)


def _numbers(value: dict[str, Any], lenient: bool, body: str) -> tuple[dict[str, float], list[str]]:
    numbers: dict[str, float] = {}
    percent: list[str] = []
    for label, raw in value.items():
        if isinstance(raw, str) and lenient and (match := _PERCENT.fullmatch(raw)):
            numbers[label] = float(match[1]) / 100
            percent.append(label)
        elif not isinstance(raw, float):
            raise _Refused(f"the value of {_label(label)} is a JSON {_json_type(raw)}, not a number", body)
        elif not math.isfinite(raw):
            raise _Refused(f"the value of {_label(label)} is not finite", body)
        else:
            numbers[label] = raw
    if percent and any(numbers[label] > 1 for label in numbers.keys() - set(percent)):
        raise _Refused("percent strings stand beside bare numbers above one", body)
    return numbers, ["percent strings read as numbers"] if percent else []


def _labelled(
    numbers: dict[str, float], options: Sequence[str], lenient: bool, body: str
) -> tuple[dict[str, float], list[str]]:
    """The numbers under the options they mean; labels that mean none stay as they are."""
    by_meaning = {normalized_label(option): option for option in options}
    found: dict[str, float] = {}
    matched: list[str] = []
    for raw, number in numbers.items():
        label = plain_text(raw)
        if lenient and label not in options and (option := by_meaning.get(normalized_label(label))) is not None:
            label = option
            matched.append(option)
        if label in found:
            raise _Refused(f"two labels mean {_label(label)}", body)
        found[label] = number
    return found, [f"labels matched leniently: {', '.join(map(_label, matched))}"] if matched else []


def _read_answers(text: str, options: Sequence[str], lenient: bool) -> _Accepted:
    payload = _last_boxed(text)
    if payload is None:
        raise _Refused("no complete \\boxed{...}")
    exact = {option_letter(i): option for i, option in enumerate(options)} | {option: option for option in options}
    loose = {normalized_label(name): option for name, option in exact.items()} if lenient else {}
    most_pieces = 1 + max(option.count(",") for option in options)
    pieces = payload.split(",")
    found: dict[str, None] = {}
    repeated = False
    start = 0
    while start < len(pieces):
        # A label may hold commas: the longest run of pieces that is an option wins.
        for end in range(min(len(pieces), start + most_pieces), start, -1):
            if (option := _named(",".join(pieces[start:end]).strip(), exact, loose)) is not None:
                break
        else:
            raise _Refused(f"{_label(pieces[start].strip())} is neither an option nor the letter of one", payload)
        repeated = repeated or option in found
        found[option] = None
        start = end
    return _Accepted(
        answers=tuple(o for o in options if o in found), repairs=("an option was named twice",) if repeated else ()
    )


def _named(token: str, exact: Mapping[str, str], loose: Mapping[str, str]) -> str | None:
    return exact.get(token) or (loose.get(normalized_label(token)) if loose else None)


def _last_boxed(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}`; braces inside must balance."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 1
        first = start + len("\\boxed{")
        for position in range(first, min(end, first + _LENIENT_CHARACTERS)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[first:position]
        # Searching on before this one keeps the scan linear: what was not closed by here is not looked at again.
        end = start
    return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_label(repeated)} is repeated")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _label(label: str) -> str:
    """A label as an error quotes it."""
    return json.dumps(label[:80], ensure_ascii=False)


def _quoted(text: str) -> str:
    return plain_text(text[:_QUOTED_CHARACTERS])
