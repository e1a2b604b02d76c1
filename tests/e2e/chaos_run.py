"""One sitting of a chaos run, in a process of its own: `pastcast rollout --resume` whose model calls a tool in every turn.

A small untrained model would never call one, and then nothing would be asked of the shard actors. At the end it says what
the engines still work on, before they are ended.
"""

import json
import sys
from pathlib import Path

import ray

import rollout.execute
from cluster.config import load_settings
from cluster.pool import EnginePool
from rollout.execute import execute
from rollout.plan import make_plan
from rollout.worker import RolloutWorker
from scripts.bench.scripted import AlwaysCalls


class CallingWorker(RolloutWorker):
    def _prepare(self):
        super()._prepare()
        if not isinstance(self._chat, AlwaysCalls):
            self._chat = AlwaysCalls(self._chat)


def main(settings_file: Path, said: Path) -> None:
    settings = load_settings([settings_file])
    rollout.execute.RolloutWorker = CallingWorker
    stop = EnginePool.stop
    left = []

    def stop_and_say(pool):
        left.append(ray.get([engine.unfinished.remote() for engine in pool.handles().values()]))
        stop(pool)

    EnginePool.stop = stop_and_say
    summary = execute(make_plan(settings), resume=True, report=lambda _: None)
    said.write_text(json.dumps({"unfinished": left, "retried": summary.retried, "ended": summary.ended}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
