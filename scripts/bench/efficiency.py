"""Engine efficiency: tokens per second of a real rollout over those of the same engine given the same calls in one plain batch.

The plain batch holds every call of the rollout, with its whole prompt and its number of tokens, in the order of turns,
all asked at once: no tools, no coordination, no transcript. The prefix cache is emptied before each measurement, and
rollouts and batches alternate, so that what else the machine does falls on both.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray

from cluster.call import EngineCall, EngineOutput
from cluster.record import Record
from cluster.session import start_session
from scripts.bench.rollouts import BLOCK, Sample, plan_of, pool_of, roll, scripted_settings
from scripts.bench.scripted import ScriptedWorker


class Efficiency(Record):
    """One duration of tools."""

    tool_ms: int
    ratio: float
    """Median over the rounds."""
    ratios: tuple[float, ...]
    rollout_tokens_per_second: float
    """Median over the rounds, as is the next."""
    batch_tokens_per_second: float
    steps: int
    concurrency: int
    reused: float
    """Share of the rollout's reusable prompt tokens that came from the prefix cache."""
    batch_reused: float
    """The same of the plain batch: where it is smaller, a rollout can be the faster one."""


def measure_efficiency(
    folder: Path, tool_ms: Sequence[int], steps: int, concurrency: int, rounds: int, say: Callable[[str], None]
) -> list[Efficiency]:
    """One engine on all cores of this machine; TOKENS at most are decoded for each step and turn."""
    overrides = [
        f"rollout.concurrency={concurrency}",
        f"engine.options={{block_size: {BLOCK}, max_num_seqs: {concurrency}}}",
    ]
    settings = scripted_settings(folder, steps, overrides)
    plan, weights = plan_of(settings)
    keys = plan.keys[:steps]
    ratios: dict[int, list[float]] = {ms: [] for ms in tool_ms}
    rates: dict[int, list[tuple[float, float]]] = {ms: [] for ms in tool_ms}
    reused: dict[int, list[tuple[float, float]]] = {ms: [] for ms in tool_ms}
    with start_session(settings.ray), pool_of(settings, weights) as pool:
        engines, (engine,) = pool.client(), pool.handles().values()

        def hire(seconds: float, questions: Any) -> Any:
            actor = ray.remote(ScriptedWorker).options(num_cpus=settings.ray.worker_cpus, max_concurrency=100)
            return actor.remote(settings, engines, questions, seconds)

        warm = roll(plan, keys[:concurrency], partial(hire, 0.0), folder / "warm.sqlite")
        say(f"warm: {warm.tokens / warm.seconds:.0f} tokens/s")
        for round_ in range(rounds):
            for ms in tool_ms:
                ray.get(engine.forget_prefixes.remote())
                file = folder / f"{round_}-{ms}.sqlite"
                rolled = roll(plan, keys, partial(hire, ms / 1000), file)
                ray.get(engine.forget_prefixes.remote())
                batch, seconds = asyncio.run(_batch(engine, rolled.samples))
                ours = rolled.tokens / rolled.seconds
                theirs = sum(len(o.token_ids) for o in batch) / seconds
                ratios[ms].append(ours / theirs)
                rates[ms].append((ours, theirs))
                reused[ms].append((_share(rolled.samples), _share(rolled.samples, [o.cached_tokens for o in batch])))
                say(f"round {round_ + 1}, tools of {ms} ms: {ours:.0f} of {theirs:.0f} tokens/s")
    return [
        Efficiency(
            tool_ms=ms,
            ratio=median(ratios[ms]),
            ratios=tuple(ratios[ms]),
            rollout_tokens_per_second=median(ours for ours, _ in rates[ms]),
            batch_tokens_per_second=median(theirs for _, theirs in rates[ms]),
            steps=len(keys),
            concurrency=concurrency,
            reused=median(ours for ours, _ in reused[ms]),
            batch_reused=median(theirs for _, theirs in reused[ms]),
        )
        for ms in tool_ms
    ]


async def _batch(engine: Any, samples: Sequence[Sample]) -> tuple[list[EngineOutput], float]:
    """Their outputs, and the seconds of all calls asked at once."""
    began = time.monotonic()
    calls = [
        EngineCall(request_id=uuid.uuid4().hex, ids=s.context, max_tokens=s.sampled, timeout_s=3600.0) for s in samples
    ]
    outputs: list[EngineOutput] = await asyncio.gather(*(engine.generate.remote(call) for call in calls))
    return outputs, time.monotonic() - began


def _share(samples: Sequence[Sample], cached: Sequence[int] | None = None) -> float:
    """Of the reusable prompt tokens. `cached`: one count per sample, if not its own."""
    reusable = sum(s.reusable for s in samples)
    counts = [s.cached for s in samples] if cached is None else cached
    return sum(min(c, s.reusable) for c, s in zip(counts, samples, strict=True)) / reusable if reusable else 0.0
