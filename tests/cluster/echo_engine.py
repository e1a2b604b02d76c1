"""A small engine for tests of the pool itself: a real actor that answers a prompt with the prompt's own ids, as slowly as it is told.

The number of tokens asked is its time in hundredths of a second. Where it finds a file `broken` in its model's folder it does not load
it, and where it finds `unreadable` it cannot read it.
"""

import asyncio
from pathlib import Path

import ray
from ray.exceptions import RayError

from cluster.adapters import AdapterError
from cluster.call import EngineFacts, EngineFigures, EngineOutput, ids_digest
from cluster.failures import DataError, InfrastructureError


class EchoEngine:
    def __init__(self, path, weights, settings, sampling, seed):
        self._load(path, weights)
        self._adapters = {}
        self._running = {}
        self._generated = 0
        self._stopped = asyncio.Event()

    def _load(self, path, weights):
        if (Path(path) / "broken").exists():
            raise InfrastructureError("reload-failed", f"{path} is broken")
        if (Path(path) / "unreadable").exists():
            raise DataError(f"{path}/model.safetensors is not what its name says")
        self._weights = weights

    async def facts(self):
        node = ray.get_runtime_context().get_node_id()
        return EngineFacts(weights=self._weights, max_model_len=100, vocabulary=100, node=node, start_seconds=0.0)

    async def figures(self):
        return EngineFigures(
            running=len(self._running),
            waiting=0,
            kv_cache_use=0.1,
            preemptions=0,
            generated_tokens=self._generated,
            age_s=0.0,
        )

    async def unfinished(self):
        return len(self._running)

    async def generate(self, call):
        self._running[call.request_id] = asyncio.current_task(), call.caller
        try:
            await asyncio.sleep(call.max_tokens / 100)
        except asyncio.CancelledError:
            raise InfrastructureError("engine-aborted", "it was aborted") from None
        finally:
            del self._running[call.request_id]
        self._generated += len(call.ids)
        weights = self._adapters[call.adapter] if call.adapter else self._weights
        return EngineOutput(
            token_ids=call.ids,
            logprobs=(0.0,) * len(call.ids),
            finish="stop",
            cached_tokens=0,
            prompt_digest=ids_digest(call.ids),
            weights=weights,
            seconds=0.0,
        )

    async def abort(self, request_id):
        if request_id in self._running:
            self._running[request_id][0].cancel()

    async def watch(self, caller, alive):
        try:
            await alive[0]
        except RayError:
            for request_id, (_, owner) in list(self._running.items()):
                if owner == caller:
                    await self.abort(request_id)

    async def until_stopped(self):
        await self._stopped.wait()

    async def load_adapter(self, name, path):
        if not Path(path).is_dir():
            raise AdapterError(f"{path} is not an adapter folder")
        self._adapters[name] = f"{self._weights}+{name}"
        return self._adapters[name]

    async def unload_adapter(self, name):
        del self._adapters[name]

    async def adapters(self):
        return dict(self._adapters)

    async def reload(self, path, weights):
        assert not self._running, "an engine is reloaded only when it is empty"
        self._load(path, weights)
        self._adapters.clear()
        return self._weights

    async def shutdown(self):
        self._stopped.set()
