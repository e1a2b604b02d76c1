"""Drives a step's state machine with asyncio: samples from a model, runs tools, returns the record."""

import asyncio

from cluster.failures import InfrastructureError
from rollout.model import Completion, Model, SampleRequest
from rollout.record import ForecastRecord
from rollout.step import Answer, Sample, StepGenerator
from rollout.tools import ToolRunner
from rollout.trajectory import Trajectory


async def drive(
    step: StepGenerator, model: Model, tools: ToolRunner | None, session: str, last: bool, turn_s: float
) -> tuple[ForecastRecord, Trajectory]:
    """Run one step to its end; a model call that takes longer than `turn_s` seconds fails the attempt.

    `session` is kept for the chain's next step and given up after its `last`. It is given up as well when the attempt
    fails or is cancelled: what is tried again is to go elsewhere. Raises InfrastructureError when the attempt must be repeated.
    """
    keep = False
    try:
        want = next(step)
        while True:
            answer: Answer
            if isinstance(want, Sample):
                answer = await _sample(model, want.request, turn_s)
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


async def _sample(model: Model, request: SampleRequest, turn_s: float) -> Completion:
    """Raises InfrastructureError `engine-time-out` after `turn_s` seconds; the call is cancelled then."""
    try:
        async with asyncio.timeout(turn_s) as deadline:
            return await model.sample(request)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise InfrastructureError(
            "engine-time-out", f"no answer to {request.session} within {turn_s:g} s (rollout.deadlines.turn_s)"
        ) from None
