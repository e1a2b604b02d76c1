"""Drives a step's state machine with asyncio: samples from a model, runs tools, returns the record."""

from rollout.model import Model
from rollout.record import ForecastRecord
from rollout.step import Answer, Sample, StepGenerator
from rollout.tools import ToolRunner
from rollout.trajectory import Trajectory


async def drive(
    step: StepGenerator, model: Model, tools: ToolRunner | None, session: str, last: bool
) -> tuple[ForecastRecord, Trajectory]:
    """Run one step to its end.

    `session` is kept for the chain's next step and given up after its `last`. It is given up as well when the attempt
    fails or is cancelled: what is tried again is to go elsewhere. Raises InfrastructureError when the attempt must be repeated.
    """
    keep = False
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
        keep = not last
        return record, trajectory
    finally:
        step.close()
        if not keep:
            await model.release(session)
