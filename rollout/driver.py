"""Drives a step's state machine with asyncio: samples from a model, runs tools, returns the record."""

import time

from rollout.model import Model
from rollout.record import ForecastRecord
from rollout.step import Answer, Sample, StepGenerator
from rollout.tools import ToolRunner
from rollout.trajectory import Trajectory


async def drive(
    step: StepGenerator, model: Model, tools: ToolRunner | None, release: str | None
) -> tuple[ForecastRecord, Trajectory]:
    """Run one step to its end. `release` names the engine session to give up afterwards, if it is to be given up.

    Raises InfrastructureError when the attempt must be repeated elsewhere.
    """
    try:
        want = next(step)
        while True:
            answer: Answer
            if isinstance(want, Sample):
                answer = await model.sample(want.request)
            else:
                if tools is None:
                    raise RuntimeError("a step without tools wants to use one")
                # In order, one after the other: a later read may need what an earlier search returned.
                answer = tuple([await tools.run(w) for w in want.wants])
            want = step.send(answer)
    except StopIteration as end:
        record, trajectory = end.value
        return record, trajectory
    finally:
        step.close()
        if release is not None:
            await model.release(release)


def monotonic() -> float:
    """The clock of real runs, in seconds."""
    return time.monotonic()
