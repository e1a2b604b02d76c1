"""A model whose calls are added up, so that a failed attempt's cost is known although it leaves no record."""

from rollout.model import Completion, Model, SampleRequest


class PricedModel:
    """Passes everything on."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.price = 0.0
        """US dollars so far."""

    async def sample(self, request: SampleRequest) -> Completion:
        """As the model's."""
        completion = await self._model.sample(request)
        self.price += completion.price
        return completion

    async def release(self, session: str) -> None:
        """As the model's."""
        await self._model.release(session)
