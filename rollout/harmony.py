"""The turns of gpt-oss: several messages in one, each with a channel and perhaps a recipient, read from their text.

vLLM's own reader of this format works on the ids of one vocabulary that it downloads when it is first used; an engine's
node need not reach any network, so the text is read here.
"""

import re
from typing import NamedTuple

_MESSAGE = re.compile(
    r"(?P<header>(?:(?!<\|message\|>).)*)<\|message\|>(?P<body>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")


class HarmonyTurn(NamedTuple):
    """What a turn says."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """(name, arguments as written)."""


def read_turn(text: str) -> HarmonyTurn:
    """Analysis is reasoning, a message with a recipient is a call, everything else is said. Never raises."""
    said: list[str] = []
    thought: list[str] = []
    calls: list[tuple[str, str]] = []
    end = 0
    for message in _MESSAGE.finditer(text):
        end = message.end()
        channel = _CHANNEL.search(message["header"])
        if recipient := _RECIPIENT.search(message["header"]):
            calls.append((recipient[1].removeprefix("functions."), message["body"].strip()))
        elif channel and channel[1] == "analysis":
            thought.append(message["body"])
        else:
            said.append(message["body"])
    # A turn that was cut inside a header has said nothing by it.
    if end == 0 and not text.startswith("<|channel|>"):
        said.append(text)
    return HarmonyTurn("\n".join(said).strip(), "\n".join(thought).strip(), tuple(calls))
