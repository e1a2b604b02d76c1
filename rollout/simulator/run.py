"""Simulates the run that a seed describes, through all lives of its driver, and checks what it leaves behind."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.record import Record
from rollout.simulator.check import check_ledger
from rollout.simulator.clock import Broken, Stuck, VirtualLoop
from rollout.simulator.faults import Faults
from rollout.simulator.life import Life
from rollout.simulator.mirror import SimulatedMirror, SimulatedStore
from rollout.simulator.scenario import Scenario, draw_scenario
from rollout.simulator.store import SimulatedDisk, wall_clock
from rollout.simulator.trace import Trace
from rollout.simulator.words import WordFormat
from rollout.wants import HaltReason

MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory: a simulated disk decides itself what survives, and a real one would only be waited for."""
LIVES_AT_MOST = 60
"""A run that needs more goes in circles."""
PATIENCE_SECONDS = 8_000.0
"""How long a run may go on after its last fault."""


class Simulated(Record):
    """What became of one seed."""

    seed: int
    broken: str
    """The first broken promise; empty if all were kept."""
    lives: int
    """Of the driver."""
    seconds: float
    """Virtual."""
    forecasts: int
    recorded: int
    ended: HaltReason | None
    events: int
    digest: str
    """Of the trace: two runs of a seed must agree."""
    faults: dict[str, int]
    """Injected, by kind."""


def simulate(seed: int, print_line: Callable[[str], None] | None = None, folder: Path | None = None) -> Simulated:
    """Run a seed. `print_line` gets the trace line by line; the ledger's file is made in `folder` for a while (None: in
    memory, where the system has such a place)."""
    if folder is None and os.access(MEMORY, os.W_OK):
        folder = MEMORY
    scenario = draw_scenario(seed)
    now = 0.0
    trace = Trace(lambda: now, print_line)
    faults = Faults(str(seed), trace, scenario.calm_s)
    with tempfile.TemporaryDirectory(prefix="simulated-", dir=folder) as made:
        disk = SimulatedDisk(Path(made), faults, wall_clock(trace.clock))
        disk.create(scenario.keys)
        chat = WordFormat()
        store = SimulatedStore(faults) if scenario.mirrored else None
        chance = random.Random(f"{seed}/lives")
        broken, life, lives = "", None, 0
        try:
            while True:
                lives += 1
                mirror = SimulatedMirror(Path(made), store, faults) if store is not None else None
                life, now = _live(lives - 1, scenario, disk, chat, faults, trace, now, chance, mirror)
                if life.halt is not None and life.halt.reason not in ("stopped", "fatal"):
                    break
                if lives >= LIVES_AT_MOST:
                    raise Broken(f"the driver has had {lives} lives; the last ended with {life.halt or life.error}")
                now += chance.uniform(1, 60)
                if store is not None and mirror is not None and faults.strikes("disk-lost"):
                    disk.lose(store.parts(), mirror.shipped_to)
            check_ledger(disk, scenario, chat, life.halt.reason)
        except (Broken, Stuck) as fault:
            broken = str(fault)
            trace.note(f"BROKEN {broken}")
        finally:
            disk.crash()
        recorded = len(disk.acknowledged)
    return Simulated(
        seed=seed,
        broken=broken,
        lives=lives,
        seconds=trace.clock(),
        forecasts=len(scenario.keys),
        recorded=recorded,
        ended=life.halt.reason if life and life.halt else None,
        events=trace.events,
        digest=trace.digest,
        faults=dict(sorted(trace.faults.items())),
    )


def _live(
    number: int,
    scenario: Scenario,
    disk: SimulatedDisk,
    chat: WordFormat,
    faults: Faults,
    trace: Trace,
    now: float,
    chance: random.Random,
    mirror: SimulatedMirror | None,
) -> tuple[Life, float]:
    """One life of the driver; when it ended."""
    loop = VirtualLoop(now, max(now, scenario.calm_s) + PATIENCE_SECONDS)
    trace.clock = loop.time
    trace.note(f"life {number + 1}")
    life = Life(number, scenario, disk, chat, faults, trace, loop, mirror)
    try:
        if number < scenario.lives and faults.strikes("killed"):
            loop.kill_at = now + chance.expovariate(1 / chance.choice((10, 40, 200)))
        if not loop.run_killable(life.run()):
            trace.note("killed")
    finally:
        ended = loop.time()
        for process in list(life.network.processes.values()):
            process.alive = False
        disk.crash()
        loop.bury()
        trace.clock = lambda: ended
    return life, ended
