"""What one seed makes of a run: its size, its settings, its model's temper, and how long faults go on."""

import datetime as dt
import random

from cluster.config import Settings
from cluster.record import Record
from rollout.episode import schedule
from rollout.events.event import EventPrompt
from rollout.record import MODES, ForecastKey
from rollout.simulator.script import OPTIONS, Temper, draw_temper
from rollout.simulator.tools import FIRST_DAY

KEYS_AT_MOST = 24
"""Many small worlds find more than few large ones."""


class Scenario(Record):
    """A run before it begins."""

    seed: int
    keys: tuple[ForecastKey, ...]
    settings: Settings
    temper: Temper
    nodes: int
    spare_nodes: int
    """Nodes that join during the run."""
    token_price: float
    """US dollars per sampled token; 0 for our own engines."""
    calm_s: float
    """The virtual second after which nothing is injected any more."""
    mirrored: bool
    retries: bool
    """Whether failures are taken back now and then when the driver starts again."""
    lives: int
    """How often the driver may be killed or stopped, at most."""


def draw_scenario(seed: int) -> Scenario:
    """The same for the same seed, always."""
    chance = random.Random(f"{seed}/scenario")
    modes = [mode for mode in MODES if chance.random() < 0.5] or [chance.choice(MODES)]
    events, rollouts = chance.randint(1, 3), chance.randint(1, 2)
    dates = [FIRST_DAY + dt.timedelta(days=d) for d in sorted(chance.sample(range(3, 30), chance.randint(1, 4)))]
    keys = schedule("simulated", {f"e{n}": dates for n in range(events)}, modes, rollouts)
    replicas = chance.randint(1, 3)
    return Scenario(
        seed=seed,
        keys=tuple(keys[:KEYS_AT_MOST]),
        settings=_settings(chance, replicas),
        temper=draw_temper(chance),
        nodes=replicas - chance.randint(0, replicas // 2),
        spare_nodes=chance.choice((0, 0, 1, 2)),
        token_price=chance.choice((0.0, 0.0, 0.001)),
        calm_s=chance.choice((30.0, 300.0, 3000.0)),
        mirrored=chance.random() < 0.4,
        retries=chance.random() < 0.3,
        lives=chance.choice((0, 1, 3, 6)),
    )


def _settings(chance: random.Random, replicas: int) -> Settings:
    step_s = chance.choice((20.0, 120.0, 900.0))
    start = chance.randint(1, 8)
    return Settings.model_validate(
        {
            "run": {"seed": chance.randrange(2**31), "max_cost": chance.choice((None, None, 0.5, 3.0))},
            "sampling": {"max_tokens": chance.choice((60, 200, 400))},
            "retrieval": {"request_timeout_s": chance.choice((5.0, 60.0)), "cutoff_lag_days": chance.randint(0, 1)},
            "engine": {
                "replicas": replicas,
                "minimum": chance.choice((None, 1, replicas)),
                "maximum": chance.choice((None, replicas + 1)),
                "restarts": chance.randint(0, 4),
                "max_model_len": chance.choice((700, 1500, 6000)),
                "start_timeout_s": 120.0,
                "request_timeout_s": chance.choice((10.0, 60.0, 300.0, 300.0)),
                "drain_timeout_s": chance.choice((5.0, 60.0)),
                "pause_timeout_s": chance.choice((60.0, 3600.0)),
                "concurrency": {"minimum": 1, "start": start, "maximum": start * chance.randint(1, 8)},
            },
            "rollout": {
                "workers": chance.randint(1, 3),
                "concurrency": chance.randint(1, 6),
                "attempts": chance.randint(1, 5),
                "prompt": "compact",
                "check_share": 1.0,
                "parse": chance.choice(("strict", "lenient")),
                "grace_s": chance.choice((0.0, 1.0, 20.0)),
                "deadlines": {
                    "turn_s": chance.choice((15.0, 900.0, 900.0)),
                    "step_s": step_s,
                    "episode_s": step_s * chance.choice((1, 3, 100)),
                },
                "data_failures": chance.choice((0, 2, 1000)),
                "bugs": chance.choice((0, 2, 1000)),
                "python": {"timeout_s": 10.0},
                "budget": {
                    "iterations": chance.randint(1, 5),
                    "calls": chance.randint(1, 6),
                    "answer_turns": chance.randint(1, 2),
                    "seconds": chance.choice((5.0, 60.0, 600.0)),
                    "tool_output_tokens": chance.choice((30, 120, 1000)),
                    "python_output_tokens": chance.choice((10, 100)),
                    "notebook_tokens": chance.choice((20, 2000)),
                },
            },
        }
    )


def event_prompt(event: str) -> EventPrompt:
    """A simulated event."""
    return EventPrompt(
        id=event,
        question=f"Will bridge {event} open?",
        criteria="As announced.",
        background="",
        options=OPTIONS,
        selection="single",
        deadline=None,
    )
