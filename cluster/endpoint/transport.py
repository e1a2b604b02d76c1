"""Requests over HTTP with the `openai` client: an answer, or the fault that stands for whatever went wrong.

The client's own retries are off. Every wait has a deadline: to connect, to the first part of an answer, between parts, and
for the whole. A request that is given up closes its connection, by which servers notice that nobody listens any more.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI, AsyncStream, RequestOptions

from cluster.config import EndpointSettings, ServerSettings
from cluster.endpoint.answer import Answer, Assembly, EndpointFault
from cluster.endpoint.fault import Fault, of_body, of_status, retry_after_seconds, words_of

CHAT, EMBEDDINGS = "/chat/completions", "/embeddings"


class Transport:
    """The connections of one process to one server."""

    def __init__(self, settings: ServerSettings, now: Callable[[], dt.datetime]) -> None:
        """`now` is the wall clock, for a `Retry-After` date from a server that sends no `Date`."""
        self._server, self._now = settings, now
        self._client = AsyncOpenAI(
            api_key="set for each request",
            base_url=settings.base_url,
            max_retries=0,
            timeout=openai.Timeout(None, connect=settings.connect_timeout_s),
            # A redirect could lead a key or a conversation elsewhere.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    async def post(self, path: str, key: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole answer to one request. Raises EndpointFault."""
        async with self.deadline():
            return await self.whole(path, key, body)

    async def whole(self, path: str, key: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of one request; to be asked for inside `deadline`."""
        return json_object(await self._client.post(path, cast_to=object, body=body, options=_options(key)))

    @contextlib.asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Whatever goes wrong inside, the deadline of a whole call included, is an EndpointFault."""
        try:
            async with asyncio.timeout(self._server.call_timeout_s):
                yield
        except TimeoutError:
            raise _fault("network", "the server fell silent, or took too long, and was given up") from None
        except openai.APIStatusError as error:
            raise EndpointFault(self._status(error)) from None
        except openai.APIConnectionError as error:
            raise _fault("network", f"{error} {error.__cause__ or ''}".strip()) from None
        except openai.APIError as error:
            raise EndpointFault(of_body(error.body)) from None
        except (ValueError, UnicodeError, RecursionError) as error:
            raise _fault("malformed", f"{type(error).__name__}: {error}"[:500]) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _status(self, error: openai.APIStatusError) -> Fault:
        said = words_of(error.body) if isinstance(error.body, Mapping) else error.message
        wait = retry_after_seconds(error.response.headers, self._now())
        return of_status(error.status_code, said, wait)


class ChatTransport(Transport):
    """Chat completions, streamed or whole."""

    def __init__(self, settings: EndpointSettings, now: Callable[[], dt.datetime]) -> None:
        super().__init__(settings, now)
        self._settings = settings

    async def send(self, key: str, body: Mapping[str, Any]) -> Answer:
        """Raises EndpointFault."""
        async with self.deadline():
            return await (self._streamed(key, body) if body.get("stream") else self._whole(key, body))

    async def _streamed(self, key: str, body: Mapping[str, Any]) -> Answer:
        parts = Assembly()
        async with asyncio.timeout(self._settings.first_token_timeout_s) as deadline:
            stream = await self._client.post(
                CHAT, cast_to=object, body=body, options=_options(key), stream=True, stream_cls=AsyncStream[object]
            )
            async with stream:
                async for part in stream:
                    deadline.reschedule(asyncio.get_running_loop().time() + self._settings.chunk_timeout_s)
                    parts.add(json_object(part))
        return parts.answer(streamed=True)

    async def _whole(self, key: str, body: Mapping[str, Any]) -> Answer:
        parts = Assembly()
        async with asyncio.timeout(self._settings.first_token_timeout_s):
            parts.add(await self.whole(CHAT, key, body))
        return parts.answer(streamed=False)


def json_object(part: object) -> Mapping[str, Any]:
    """The part if it is an object. Raises EndpointFault."""
    if not isinstance(part, Mapping):
        raise EndpointFault(Fault(kind="malformed", detail=f"not a JSON object: {str(part)[:200]!r}"))
    return part


def _options(key: str) -> RequestOptions:
    """The key, if there is one, and nothing that the launcher's environment holds for another server."""
    return {
        "headers": {
            "Authorization": f"Bearer {key}" if key else openai.Omit(),
            "OpenAI-Organization": openai.Omit(),
            "OpenAI-Project": openai.Omit(),
        }
    }


def _fault(kind: Any, detail: str) -> EndpointFault:
    return EndpointFault(Fault(kind=kind, detail=detail))
