"""What goes into an engine and what comes out of it: ids and log-probabilities, never text.

A call that no engine could serve is told apart here, before vLLM sees it: vLLM may die of a bad request, and with it
every other call of that engine.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal

from cluster.record import Record


class EngineCall(Record):
    """One request to sample behind `ids`."""

    request_id: str
    """Unique within the run: `abort` names it."""
    ids: tuple[int, ...]
    """The whole context."""
    max_tokens: int
    """Clamped by the engine to the room that its context leaves."""
    stop_ids: tuple[int, ...] = ()
    adapter: str = ""
    """Name of a loaded adapter; empty: the base weights."""
    timeout_s: float
    """After this the request is aborted at the engine, wherever it is: waiting, running, or held back by a reload."""
    caller: str = ""
    """The process that waits for the answer; its calls are aborted when it dies."""


class EngineOutput(Record):
    """What one request produced."""

    token_ids: tuple[int, ...]
    """Sampled ids, including a stop token. Empty, with finish `length`, if the context had no room for one more."""
    logprobs: tuple[float, ...]
    """One per sampled id, nats, under the distribution it was drawn from (after temperature and truncation)."""
    finish: Literal["stop", "length"]
    cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    prompt_digest: str
    """`ids_digest` of the prompt as vLLM reports that it saw it."""
    weights: str
    """Fingerprint of what sampled: the base, or the base with the adapter."""
    seconds: float


class EngineFacts(Record):
    """What an engine says of itself once it can serve."""

    weights: str
    """Fingerprint of the folder it loaded, without any adapter."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocabulary: int
    """Ids are below this."""
    node: str
    """Host name."""
    start_seconds: float


class EngineFigures(Record):
    """How busy an engine is, from vLLM's own scheduler."""

    running: int
    """Requests that are decoded now."""
    waiting: int
    """Requests that have not begun or were preempted."""
    kv_cache_use: float
    """Share of the KV cache in use, from 0 to 1."""
    preemptions: int
    """Since the engine was started."""
    generated_tokens: int
    """Since the engine was started."""
    age_s: float
    """How old running, waiting and kv_cache_use are, seconds."""


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def tokens_allowed(call: EngineCall, max_model_len: int, vocabulary: int) -> int:
    """How many tokens the call may sample; 0 if its context is full or overlong.

    Raises ValueError, a bug of the caller, for a call that makes no sense to any engine.
    """
    if not call.ids:
        raise ValueError(f"call {call.request_id} has no prompt ids; an engine needs at least one")
    if call.max_tokens < 1:
        raise ValueError(f"call {call.request_id} asks for {call.max_tokens} tokens; ask for one or more")
    for what, ids in (("prompt", call.ids), ("stop", call.stop_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            raise ValueError(
                f"call {call.request_id} has {what} ids from {min(ids)} to {max(ids)}, but the model's vocabulary holds "
                f"0 to {vocabulary - 1}: was it tokenized for another model?"
            )
    return max(0, min(call.max_tokens, max_model_len - len(call.ids)))
