"""A second look at a finished step: its transcript against what the model was really sent and really said.

The step keeps its transcript as it goes; this compares the finished one with the calls as they crossed the model's
interface, renders what can be rendered once more, and parses every turn again. Tests do it for every step, a run for a
sample of them; a difference is a bug of ours, never of the model.
"""

import datetime as dt
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from rollout.chat import ChatFormat
from rollout.model import Completion, Model, SampleRequest
from rollout.record import ForecastKey
from rollout.rendered import RenderedFormat
from rollout.tools import TOOLS
from rollout.trajectory import Trajectory, Turn


class BrokenTranscript(Exception):
    """A transcript is not what the model saw and said: a bug of ours. Says every difference."""


class Exchange(NamedTuple):
    """One call of a model."""

    sent: SampleRequest
    said: Completion


class WitnessedModel:
    """A model whose answered calls are kept for one step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.exchanges: list[Exchange] = []

    async def sample(self, request: SampleRequest) -> Completion:
        """As the model answers. Raises InfrastructureError when the attempt must be repeated elsewhere."""
        completion = await self._model.sample(request)
        self.exchanges.append(Exchange(request, completion))
        return completion

    async def release(self, session: str) -> None:
        """The session has ended."""
        await self._model.release(session)


def is_checked(key: ForecastKey, share: float) -> bool:
    """Whether this step belongs to the sample: decided by its key alone, so that a retry or a resume decides the same."""
    digest = hashlib.sha256(key.model_dump_json().encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def check_transcript(
    trajectory: Trajectory,
    exchanges: Sequence[Exchange],
    chat: ChatFormat | RenderedFormat | None,
    today: dt.date,
) -> None:
    """Raises BrokenTranscript that lists what is wrong. `chat` is None for models that read messages."""
    found = faults(trajectory, exchanges, chat, today)
    if found:
        raise BrokenTranscript("the transcript is not what the model saw and said: " + "; ".join(found))


def faults(
    trajectory: Trajectory,
    exchanges: Sequence[Exchange],
    chat: ChatFormat | RenderedFormat | None,
    today: dt.date,
) -> list[str]:
    """Every difference, by turn; empty for a sound transcript."""
    turns = trajectory.turns
    # A prompt that did not fit is a turn that was never sent.
    if len(turns) - len(exchanges) not in (0, 1) or (len(turns) > len(exchanges) and turns[-1].sampled_ids):
        return [f"{len(turns)} turns for {len(exchanges)} calls"]
    found: list[str] = []
    context: tuple[int, ...] = ()
    for number, (turn, (sent, said)) in enumerate(zip(turns, exchanges, strict=False)):
        prompt = turn.prompt_ids if trajectory.transcript == "rendered" else context + turn.prompt_ids
        differs = {
            "prompt ids": sent.prompt_ids != prompt,
            "sampled ids": said.token_ids != turn.sampled_ids,
            "log-probabilities": said.logprobs != turn.logprobs,
            "alignment": len(turn.logprobs) != len(turn.sampled_ids),
            "a positive or unreal log-probability": not all(math.isfinite(p) and p <= 0.001 for p in turn.logprobs),
            "finish": said.finish != turn.finish,
            "messages": sent.messages[len(sent.messages) - len(turn.messages) :] != turn.messages,
            "tools": sent.tools != turn.tools,
            "what the turn says": chat is not None and not _says(turn, chat, number),
            "its rendering": not _rendered_so(turn, sent, context, chat, today),
        }
        found += [f"turn {number}: {name}" for name, wrong in differs.items() if wrong]
        context = prompt + turn.sampled_ids
    for number, (turn, later) in enumerate(itertools.pairwise(turns)):
        told = [m.content for m in later.messages if m.role == "tool"]
        if len(told) != len(turn.results) or not all(
            t.startswith(r.text) for t, r in zip(told, turn.results, strict=True)
        ):
            found.append(f"turn {number}: results")
    return found + _mask_faults(trajectory)


def _mask_faults(trajectory: Trajectory) -> list[str]:
    if trajectory.transcript == "rendered":
        return []
    ids, mask = trajectory.token_ids(), trajectory.mask()
    sampled = [i for turn in trajectory.turns for i in turn.sampled_ids]
    sound = len(mask) == len(ids) and [i for i, m in zip(ids, mask, strict=True) if m] == sampled
    return [] if sound else ["the mask does not mark what was sampled"]


def _says(turn: Turn, chat: ChatFormat | RenderedFormat, number: int) -> bool:
    parsed = chat.parse(turn.sampled_ids).numbered(number)
    return (parsed.text, parsed.reasoning, parsed.tool_calls, parsed.malformed) == (
        turn.text,
        turn.reasoning,
        turn.tool_calls,
        turn.malformed_calls,
    )


def _rendered_so(
    turn: Turn,
    sent: SampleRequest,
    context: Sequence[int],
    chat: ChatFormat | RenderedFormat | None,
    today: dt.date,
) -> bool:
    # A chat that is rendered anew holds earlier turns as its dialogue wrote them down, which no record repeats.
    if chat is None or isinstance(chat, RenderedFormat):
        return True
    if context:
        return list(turn.prompt_ids) == chat.extend(turn.messages, context[-1], today)
    return list(turn.prompt_ids) == chat.open(sent.messages, [TOOLS[name] for name in turn.tools], today)
