"""What must hold of the ledger that a simulated run leaves behind."""

import datetime as dt
from collections.abc import Sequence

from rollout.episode import chains
from rollout.record import ForecastKey, ForecastRecord
from rollout.simulator.clock import Broken
from rollout.simulator.faults import MARKER
from rollout.simulator.scenario import Scenario
from rollout.simulator.store import SimulatedDisk, short
from rollout.simulator.tools import day_of
from rollout.simulator.watch import record_of
from rollout.simulator.words import WordFormat
from rollout.trajectory import Trajectory
from rollout.wants import HaltReason

NOTE_TOKENS = 40
"""What a result may say beside itself: that it was cut, and what is left."""


def check_ledger(disk: SimulatedDisk, scenario: Scenario, chat: WordFormat, ended: HaltReason) -> None:
    """Raises Broken that names the first broken promise."""
    with disk.read() as ledger:
        records = {r.key: r for r in ledger.records()}
        _require(tuple(ledger.scheduled()) == scenario.keys, "the schedule has changed")
        _require(ledger.counts() == (len(scenario.keys), len(records)), "a key has two records")
        for key, text in disk.acknowledged.items():
            _require(key in records, f"{short(key)} was acknowledged and is lost")
            _require(records[key] == record_of(text), f"{short(key)} is not what was acknowledged first")
        open_keys = [k for k in scenario.keys if k not in records]
        _require(ended != "complete" or not open_keys, f"complete, but {len(open_keys)} forecasts have no record")
        for key, record in records.items():
            trajectory = ledger.trajectory(key)
            if trajectory is not None:
                _check_step(record, trajectory, scenario, chat)
            _require(
                record.failure is not None or trajectory is not None, f"{short(key)} is a report without a trajectory"
            )
            _require(
                (record.report is None) <= (record.failure is not None), f"{short(key)} has neither report nor failure"
            )
            most = scenario.settings.rollout.attempts
            _require(1 <= record.attempts <= most, f"{short(key)} took {record.attempts} of {most} attempts")
        for chain in chains(scenario.keys):
            _check_chain(chain.keys, records)
        spent = ledger.spent()[1]
        kinds = [r.failure.kind for r in records.values() if r.failure is not None]
        limits = scenario.settings
        if ended == "max-cost":
            _require(limits.run.max_cost is not None and scenario.token_price > 0, f"stopped for its cost of {spent}")
        if ended == "bugs":
            _require(kinds.count("bug") > limits.rollout.bugs, f"stopped for {kinds.count('bug')} bugs")
        if ended == "data-failures":
            _require(
                kinds.count("data") > limits.rollout.data_failures, f"stopped for {kinds.count('data')} data failures"
            )


def _check_step(record: ForecastRecord, trajectory: Trajectory, scenario: Scenario, chat: WordFormat) -> None:
    key, settings = record.key, scenario.settings
    name = short(key)
    budget = settings.rollout.budget
    iterations, calls = budget.resolved
    turns = trajectory.turns
    offered = sum(bool(turn.tools) for turn in turns)
    ran = [r for turn in turns for r in turn.results if r.error != "budget"]
    asked = [c for turn in turns for c in turn.tool_calls]
    malformed = sum(len(turn.malformed_calls) for turn in turns)
    _require(offered <= iterations + 1, f"{name} was offered tools {offered} times of {iterations}")
    _require(len(ran) <= calls + malformed, f"{name} ran {len(ran)} calls of {calls}")
    _require(len(turns) <= iterations + budget.answer_turns + 1, f"{name} took {len(turns)} turns")
    _require(len(ran) <= len(asked) + malformed, f"{name} has more results than calls")
    _require(len(trajectory.token_ids()) <= settings.engine.max_model_len, f"{name} is longer than the context")
    cutoff = key.date - dt.timedelta(days=settings.retrieval.cutoff_lag_days)
    for article in trajectory.shown():
        _require(article.day == day_of(article.article_id), f"{name} was shown an article under another day")
        _require(article.day <= cutoff, f"{name} was shown an article of {article.day}")
    for message in trajectory.messages():
        _require(MARKER not in message.content, f"{name} was shown an error of the infrastructure")
    for turn in turns:
        for result in turn.results:
            most = budget.python_output_tokens if result.name == "python" else budget.tool_output_tokens
            shown = chat.tokens(result.text)
            _require(shown <= most + NOTE_TOKENS, f"{name} was shown a result of {shown} tokens, at most {most}")
    if record.failure is not None:
        _require(record.failure.kind == "model", f"{name} has a trajectory and failed of {record.failure.reason}")


def _check_chain(keys: Sequence[ForecastKey], records: dict[ForecastKey, ForecastRecord]) -> None:
    """The stored dates are a beginning of the chain, and every notebook is the last valid one."""
    stored = [k in records for k in keys]
    _require(stored == sorted(stored, reverse=True), f"{short(keys[0])}: later dates are stored before earlier ones")
    if keys[0].mode != "memory-on":
        return
    carried = None
    for key in keys:
        if key not in records:
            break
        state = records[key].notebook
        _require(state is not None, f"{short(key)} leaves no notebook")
        if state is not None and state.status == "valid":
            carried = state.notebook
        _require(state is None or state.notebook == carried, f"{short(key)} carries another notebook on")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)
