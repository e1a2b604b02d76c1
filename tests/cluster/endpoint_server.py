"""A real HTTP server that speaks the protocol of chat completions and embeddings, well or badly, as a test tells it to."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


@dataclass
class Asked:
    """One request as it arrived."""

    headers: dict[str, str]
    raw: bytes
    number: int
    """From 0, over all requests of this server."""
    request: web.Request

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def key(self) -> str:
        return self.headers["Authorization"].removeprefix("Bearer ")


Behaviour = Callable[[Asked], Awaitable[web.StreamResponse]]


@dataclass
class EndpointServer:
    """`with EndpointServer(behaviour) as server`: answers at `server.url` until the block ends."""

    behave: Behaviour
    asked: list[Asked] = field(default_factory=list)
    running: int = 0
    most: int = 0
    """Most requests at once."""
    dropped: int = 0
    """Requests whose client went away before the answer was whole."""

    def __enter__(self) -> "EndpointServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> str:
        app = web.Application()
        for path in ("chat/completions", "embeddings"):
            app.router.add_post(f"/v1/{path}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        asked = Asked(dict(request.headers), raw, len(self.asked), request)
        self.asked.append(asked)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.behave(asked)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise
        finally:
            self.running -= 1


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "served-1",
        "choices": [choice],
        **more,
    }


def chunks(
    text: str = "", calls: list[dict[str, Any]] | None = None, finish: str = "", **delta: Any
) -> list[dict[str, Any]]:
    """A stream that says this: text in two parts, the arguments of each call in two."""
    said = [chunk({"role": "assistant", **delta})]
    half = len(text) // 2
    said += [chunk({"content": part}) for part in (text[:half], text[half:]) if part]
    for index, call in enumerate(calls or []):
        arguments = call["arguments"]
        head = {"index": index, "id": call.get("id", f"id{index}"), "type": "function"}
        said.append(chunk({"tool_calls": [head | {"function": {"name": call["name"], "arguments": arguments[:3]}}]}))
        said.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]}))
    said.append(chunk({}, finish or ("tool_calls" if calls else "stop")))
    return said


def whole(
    text: str = "", calls: list[dict[str, Any]] | None = None, finish: str = "", **message: Any
) -> dict[str, Any]:
    """The same in one piece."""
    wire = [
        {"id": c.get("id", f"id{i}"), "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
        for i, c in enumerate(calls or [])
    ]
    said = {"role": "assistant", "content": text or None, **({"tool_calls": wire} if wire else {}), **message}
    choice = {"index": 0, "message": said, "finish_reason": finish or ("tool_calls" if calls else "stop")}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "served-1",
        "choices": [choice],
        "usage": USAGE,
    }


async def stream(asked: Asked, parts: list[Any], gap_s: float = 0.0, done: bool = True) -> web.StreamResponse:
    """Send parts as server-sent events; text is sent as it stands, `gap_s` passes before each part."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(asked.request)
    for part in parts:
        await asyncio.sleep(gap_s)
        await response.write(f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def say(
    asked: Asked, text: str = "", calls: list[dict[str, Any]] | None = None, **said: Any
) -> web.StreamResponse:
    """A good answer, streamed if the request asks for that."""
    if not asked.body.get("stream"):
        return web.json_response(whole(text, calls, **said))
    usage = {"id": "c", "object": "chat.completion.chunk", "model": "served-1", "choices": [], "usage": USAGE}
    return await stream(asked, [*chunks(text, calls, **said), usage | {"system_fingerprint": "fp_7"}])


def fail(status: int, message: str = "", headers: dict[str, str] | None = None, **error: Any) -> web.Response:
    """An error as servers send it."""
    return web.json_response({"error": {"message": message, **error}}, status=status, headers=headers or {})


def scripted(*steps: Callable[[Asked], Any]) -> Behaviour:
    """The first request gets the first step, and so on; the last step answers all that follow."""

    async def behave(asked: Asked) -> web.StreamResponse:
        found = steps[min(asked.number, len(steps) - 1)](asked)
        return await found if asyncio.iscoroutine(found) else found

    return behave
