"""Equal probabilities for every option, at once and without tools."""

from rollout.forecasters.answer import as_json, report, uniform
from rollout.model import Completion, SampleRequest


class UniformForecaster:
    """Says that it knows nothing."""

    async def sample(self, request: SampleRequest) -> Completion:
        """The report."""
        return Completion(text=report(request, "No view.", as_json(uniform(request.event.options))))

    async def release(self, session: str) -> None:
        """Nothing is kept."""
