"""The asyncio driver of a step: infrastructure fails the attempt and never informs the model, a cancelled step leaves nothing,
a slow tool holds up nobody else."""

import asyncio
import datetime as dt
import json
import os
from pathlib import Path

import pytest

from cluster.config import BudgetSettings, PythonSettings, RetrievalSettings, RolloutSettings
from cluster.failures import InfrastructureError
from retrieval.view import DatedView
from rollout.dialogue import MessageDialogue
from rollout.driver import drive
from rollout.events.event import EventPrompt
from rollout.model import Completion
from rollout.record import ForecastKey
from rollout.sandbox import Sandbox
from rollout.step import StepTask, forecast_step
from rollout.tools import ToolRunner
from rollout.trajectory import ToolCall

DAY = dt.date(2031, 5, 4)
EVENT = EventPrompt(
    id="e", question="Will it?", criteria="", background="", options=("Yes", "No"), selection="single", deadline=None
)
ANSWER = Completion(text='<answer>{"Yes": 0.6, "No": 0.4}</answer>')


def called(name: str, **arguments: object) -> Completion:
    return Completion(tool_calls=(ToolCall(id="0", name=name, arguments=json.dumps(arguments)),))


class Scripted:
    """A model that says what it is given; a coroutine function is awaited first."""

    def __init__(self, *turns):
        self._turns = list(turns)
        self.requests = []
        self.released = []

    async def sample(self, request):
        self.requests.append(request)
        turn = self._turns.pop(0)
        return turn if isinstance(turn, Completion) else await turn()

    async def release(self, session):
        self.released.append(session)


class Index:
    """A searcher that finds nothing, or fails."""

    def __init__(self, failing=None):
        self._failing = failing

    async def search(self, query, first_day, cutoff, top_k):
        if self._failing:
            raise self._failing
        return ()


def step():
    task = StepTask(
        key=ForecastKey(model="m", event="e", date=DAY, mode="memory-free", rollout=0),
        event=EVENT,
        variant="compact",
        policy="strict",
        budget=BudgetSettings(),
        retrieval=RetrievalSettings(),
        max_tokens=100,
    )
    return forecast_step(task, MessageDialogue(), lambda: 0.0)


def tools(index=None, sandbox=None) -> ToolRunner:
    sandbox = sandbox or Sandbox(PythonSettings(isolation="process"))
    return ToolRunner(DatedView(index or Index(), DAY), sandbox, DAY, RolloutSettings())


def test_a_dead_index_fails_the_attempt_and_the_model_is_not_asked_again():
    model = Scripted(called("search", query="x"), ANSWER)
    running = step()
    with pytest.raises(InfrastructureError, match="shard-lost"):
        asyncio.run(drive(running, model, tools(Index(InfrastructureError("shard-lost", "gone"))), "s", True))
    assert len(model.requests) == 1
    assert model.released == ["s"]
    with pytest.raises(StopIteration):
        next(running)


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/bin/false", "/bin/cat"])
def test_a_cell_that_cannot_start_fails_the_attempt_and_the_model_is_not_asked_again(executable):
    sandbox = Sandbox(PythonSettings(isolation="process", timeout_s=2.0))
    sandbox._runtime = sandbox._runtime.model_copy(update={"executable": executable})
    model = Scripted(called("python", code="1"), ANSWER)
    with pytest.raises(InfrastructureError, match="sandbox"):
        asyncio.run(drive(step(), model, tools(sandbox=sandbox), "s", True))
    assert len(model.requests) == 1


def test_a_time_out_of_the_models_own_code_is_told_to_the_model():
    sandbox = Sandbox(PythonSettings(isolation="process", timeout_s=2.0))
    model = Scripted(called("python", code="while True: pass"), ANSWER)
    record, _ = asyncio.run(drive(step(), model, tools(sandbox=sandbox), "s", True))
    assert record.usage.tool_errors == {"time-out": 1}
    assert "time limit" in model.requests[1].messages[-1].content


def test_a_cancelled_step_closes_its_model_call_and_releases_its_session():
    closed = asyncio.Event()

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def story():
        model = Scripted(endless)
        running = step()
        task = asyncio.create_task(drive(running, model, tools(), "s", True))
        while not model.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed.is_set()
        assert model.released == ["s"]
        with pytest.raises(StopIteration):
            next(running)

    asyncio.run(story())


def test_a_step_that_is_cancelled_in_a_cell_leaves_no_process():
    marker = f"driver-{os.getpid()}"
    code = f"import os\nos.execv('/bin/sleep', ['{marker}', '600'])"

    async def story():
        task = asyncio.create_task(drive(step(), Scripted(called("python", code=code)), tools(), "s", True))
        while not running(marker):
            assert not task.done()
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert not running(marker)


def running(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().split(b"\0")[0] == marker.encode():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_other_steps_go_on_while_slow_cells_run():
    """Two steps wait in cells that sleep; a hundred others take all their turns meanwhile."""
    sandbox = Sandbox(PythonSettings(isolation="process", parallel=2, timeout_s=60.0))

    async def story():
        slow = [
            asyncio.create_task(
                drive(
                    step(),
                    Scripted(called("python", code="import time; time.sleep(2)"), ANSWER),
                    tools(sandbox=sandbox),
                    "s",
                    True,
                )
            )
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        quick = [
            drive(step(), Scripted(*[called("search", query="x")] * 5, ANSWER), tools(sandbox=sandbox), "s", True)
            for _ in range(100)
        ]
        done = await asyncio.gather(*quick)
        assert not any(task.done() for task in slow)
        assert all(record.failure is None for record, _ in [*done, *await asyncio.gather(*slow)])

    asyncio.run(story())


def test_no_more_cells_run_at_once_than_the_bound_and_the_loop_turns_meanwhile():
    marker = f"bound-{os.getpid()}"
    sandbox = Sandbox(PythonSettings(isolation="process", parallel=2, timeout_s=60.0))
    code = f"import subprocess\nsubprocess.run(['{marker}', '0.4'], executable='/bin/sleep')"

    async def story():
        cells = asyncio.gather(*(sandbox.run(code, DAY) for _ in range(5)))
        most = turns = 0
        while not cells.done():
            most = max(most, len(running(marker)))
            turns += 1
            await asyncio.sleep(0.01)
        assert [r.exit_status for r in await cells] == [0] * 5
        assert most == 2
        return turns

    assert asyncio.run(story()) > 20


def test_a_call_that_the_model_abandoned_by_the_cell_bound_is_never_started():
    marker = f"queued-{os.getpid()}"
    sandbox = Sandbox(PythonSettings(isolation="process", parallel=1, timeout_s=60.0))

    async def story():
        first = asyncio.create_task(sandbox.run("import time; time.sleep(1)", DAY))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(sandbox.run(f"import os; os.execv('/bin/sleep', ['{marker}', '600'])", DAY))
        await asyncio.sleep(0.1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await first).exit_status == 0
        assert (await sandbox.run("print(7)", DAY)).stdout == "7\n"
        assert not running(marker)

    asyncio.run(story())
