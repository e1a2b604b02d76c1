"""Runs of the benchmarks: a world, its plan, engines that are shared, and one sitting with workers of the benchmark's own."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.config import Settings, load_settings
from cluster.pool import EnginePool
from cluster.record import Record
from cluster.weights import Weights
from retrieval.build import build_from_settings
from rollout.coordinator import Coordinator
from rollout.crew import Crew
from rollout.events.world import make_world, write_settings
from rollout.ledger import Ledger
from rollout.limits import Limits
from rollout.plan import Plan, make_plan
from rollout.record import ForecastKey
from rollout.sitting import Sitting
from rollout.trajectory import Turn
from rollout.worker import Questions
from rollout.write_off import WriteOffs


def world_settings(folder: Path, events: int, overrides: Sequence[str]) -> Settings:
    """Settings over a small synthetic world and its index, made in `folder`."""
    world = make_world(folder, seed=1, events=events, days=60, articles_per_day=0.5)
    settings = load_settings([write_settings(folder, world)], ["index.encoder=hashing", *overrides])
    build_from_settings(settings, lambda _: None)
    return settings


TURNS = 4
"""Model calls of a step: three with a tool, and the demanded report."""
TOKENS = 32
"""At most per call."""
BLOCK = 128
"""Tokens in one block of the prefix cache."""


def scripted_settings(folder: Path, steps: int, overrides: Sequence[str]) -> Settings:
    """Settings for `steps` steps of TURNS calls each."""
    return world_settings(
        folder,
        events=max(12, steps // 2),
        overrides=[
            "rollout.modes=[memory-free]",
            "rollout.splits=[train, eval]",
            "rollout.prompt=compact",
            f"rollout.count={max(1, steps // 24)}",
            f"rollout.budget.iterations={TURNS - 1}",
            f"sampling.max_tokens={TOKENS}",
            *overrides,
        ],
    )


class Sample(Record):
    """One model call of a rollout."""

    turn: int
    context: tuple[int, ...]
    """The whole prompt."""
    sampled: int
    """Tokens."""
    cached: int
    """Prompt tokens from the prefix cache."""
    reusable: int
    """Prompt tokens that the step's own earlier turns had left in an engine's cache, in whole blocks."""


class Rolled(Record):
    """A finished rollout."""

    seconds: float
    """From the first lease to the last commit."""
    samples: tuple[Sample, ...]
    """By turn, then by step."""

    @property
    def tokens(self) -> int:
        """Sampled."""
        return sum(s.sampled for s in self.samples)


def roll(plan: Plan, keys: Sequence[ForecastKey], hire: Callable[[Any], Any], file: Path) -> Rolled:
    """Run these forecasts with workers that `hire` makes of the questions' reference, and read back what was sampled."""
    settings = plan.settings
    options = {e.id: e.options for e in plan.events}
    write_off = WriteOffs(options, settings.rollout.prompt, plan.weights)
    coordinator = Coordinator(keys, {}, Limits.of(settings), write_off)
    questions = ray.put(Questions.of(plan.events, settings))
    crew = Crew(lambda: hire(questions), settings.rollout.workers, settings.ray.placement_timeout_s)
    with Ledger.create(file, keys) as ledger:
        try:
            said: list[float] = []  # for the first time when the first steps are given to the workers
            sitting = Sitting(
                coordinator,
                crew,
                settings.rollout.concurrency,
                ledger,
                None,
                0.0,
                lambda: said.append(time.monotonic()),
            )
            halt = asyncio.run(sitting.run())
            seconds = time.monotonic() - said[0]
        finally:
            crew.dismiss_all()
        if halt.reason != "complete" or coordinator.retried:
            raise RuntimeError(f"the benchmark's rollout ended with {halt}, {coordinator.retried} attempts repeated")
        samples = [s for key in keys for s in _samples(ledger, key)]
    return Rolled(seconds=seconds, samples=tuple(sorted(samples, key=lambda s: s.turn)))


def _samples(ledger: Ledger, key: ForecastKey) -> list[Sample]:
    trajectory = ledger.trajectory(key)
    if trajectory is None:
        raise RuntimeError(f"{key} left no trajectory")
    samples: list[Sample] = []
    context: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        reusable = _whole_blocks(trajectory.turns[:number])
        context += turn.prompt_ids
        samples.append(
            Sample(
                turn=number,
                context=tuple(context),
                sampled=len(turn.sampled_ids),
                cached=turn.cached_tokens,
                reusable=reusable,
            )
        )
        context += turn.sampled_ids
    return samples


def _whole_blocks(earlier: Sequence[Turn]) -> int:
    """What earlier turns left in the cache: all they showed the engine but the last sampled token, which it never read."""
    length = sum(len(t.prompt_ids) + len(t.sampled_ids) for t in earlier)
    return (length - 1) // BLOCK * BLOCK if earlier else 0


def plan_of(settings: Settings) -> tuple[Plan, Weights]:
    """The plan, and what its engines are to load."""
    plan = make_plan(settings)
    if plan.model is None:
        raise RuntimeError("the benchmark needs model.kind=vllm")
    return plan, plan.model


def pool_of(settings: Settings, weights: Weights) -> EnginePool:
    """The engines of these settings."""
    return EnginePool(weights, settings.engine, settings.sampling, settings.run.seed, settings.ray.placement_timeout_s)
