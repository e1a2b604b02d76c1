"""One request over HTTP with the `openai` client: its answer, or the fault that stands for whatever went wrong.

The client's own retries are off. Every wait has a deadline: to connect, to the first part of the answer, between parts, and
for the whole. A request that is given up closes its connection, by which servers notice that nobody listens any more.
"""

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI, AsyncStream, RequestOptions

from cluster.config import EndpointSettings
from cluster.endpoint.answer import Answer, Assembly, EndpointFault
from cluster.endpoint.fault import Fault, of_body, of_status, retry_after_seconds, words_of

PATH = "/chat/completions"


class Transport:
    """The connections of one worker."""

    def __init__(self, settings: EndpointSettings, now: Callable[[], dt.datetime]) -> None:
        """`now` is the wall clock, for a `Retry-After` date from a server that sends no `Date`."""
        self._settings, self._now = settings, now
        self._client = AsyncOpenAI(
            api_key="set for each request",
            base_url=settings.base_url,
            max_retries=0,
            timeout=openai.Timeout(None, connect=settings.connect_timeout_s),
            # A redirect could lead a key or a conversation elsewhere.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    async def send(self, key: str, body: Mapping[str, Any]) -> Answer:
        """Raises EndpointFault."""
        options: RequestOptions = {"headers": _headers(key)}
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                if body.get("stream"):
                    return await self._streamed(body, options)
                return await self._whole(body, options)
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

    async def _streamed(self, body: Mapping[str, Any], options: RequestOptions) -> Answer:
        parts = Assembly()
        async with asyncio.timeout(self._settings.first_token_timeout_s) as deadline:
            stream = await self._client.post(
                PATH, cast_to=object, body=body, options=options, stream=True, stream_cls=AsyncStream[object]
            )
            async with stream:
                async for part in stream:
                    deadline.reschedule(asyncio.get_running_loop().time() + self._settings.chunk_timeout_s)
                    parts.add(_object(part))
        return parts.answer(streamed=True)

    async def _whole(self, body: Mapping[str, Any], options: RequestOptions) -> Answer:
        parts = Assembly()
        async with asyncio.timeout(self._settings.first_token_timeout_s):
            parts.add(_object(await self._client.post(PATH, cast_to=object, body=body, options=options)))
        return parts.answer(streamed=False)

    def _status(self, error: openai.APIStatusError) -> Fault:
        said = words_of(error.body) if isinstance(error.body, Mapping) else error.message
        wait = retry_after_seconds(error.response.headers, self._now())
        return of_status(error.status_code, said, wait)


def _headers(key: str) -> dict[str, str | openai.Omit]:
    """The key, if there is one, and nothing that the launcher's environment holds for another server."""
    return {
        "Authorization": f"Bearer {key}" if key else openai.Omit(),
        "OpenAI-Organization": openai.Omit(),
        "OpenAI-Project": openai.Omit(),
    }


def _fault(kind: Any, detail: str) -> EndpointFault:
    return EndpointFault(Fault(kind=kind, detail=detail))


def _object(part: object) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise EndpointFault(Fault(kind="malformed", detail=f"not a JSON object: {str(part)[:200]!r}"))
    return part
