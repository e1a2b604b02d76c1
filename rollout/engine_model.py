"""The engine pool as a Model: ids in, ids out."""

from cluster.call import ids_digest
from cluster.pool import EngineClient
from rollout.model import Completion, SampleRequest


class EngineModel:
    """Samples from the pool; calls of one session go to one engine while it lives."""

    def __init__(self, client: EngineClient, stop_ids: tuple[int, ...], turn_s: float) -> None:
        """`turn_s`: seconds that one call may take at its engine."""
        self._client = client
        self._stop_ids = stop_ids
        self._turn_s = turn_s

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises InfrastructureError when the attempt must be repeated elsewhere: `engine-time-out` past the turn's deadline.

        That the engine saw exactly the transcript's ids is checked on every call; a difference is a bug and raises RuntimeError.
        """
        output, engine = await self._client.generate(
            request.session, request.prompt_ids, request.max_tokens, self._stop_ids, timeout_s=self._turn_s
        )
        if output.prompt_digest != ids_digest(request.prompt_ids):
            raise RuntimeError(f"{engine} saw another prompt than the transcript of {request.session} holds")
        return Completion(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish=output.finish,
            cached_tokens=output.cached_tokens,
            seconds=output.seconds,
            engine=engine,
            weights=output.weights,
        )

    async def release(self, session: str) -> None:
        """The engine forgets the session's pin."""
        await self._client.release(session)
