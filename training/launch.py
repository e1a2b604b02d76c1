"""Training in Ray processes of its own: the memory of trainer and engine is the system's again when they end.

A trained model gets the name `training.output` only after a vLLM engine, in another process, has loaded it and agreed
with transformers on what comes next. What fails before leaves nothing under that name.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.config import Settings
from cluster.failures import InfrastructureError, PastcastError, SettingsError
from training.checkpoint import CheckpointSummary, Verification, publish, refuse_existing, verify_checkpoint
from training.progress import Progress, TrainingProgress

POLL_S = 0.5
"""How often progress is asked for."""

_logger = logging.getLogger(__name__)


def launch_sft(run: Path, settings: Settings, progress: Progress) -> CheckpointSummary:
    """Fine-tune on a run, prove that vLLM loads the result, and name it `settings.training.output`.

    Ray must be initialized; `progress` is called in this process. Raises what `train_sft` and `verify_checkpoint`
    raise, and InfrastructureError if no process could be placed or one was lost.
    """
    if not ray.is_initialized():
        raise SettingsError("launch_sft needs a Ray session; start or join one first")
    output = settings.training.output.absolute()
    refuse_existing(output)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"output": output})})
    summary = _train(run.absolute(), settings, progress)
    _logger.info("%s: proving that vLLM loads it", summary.path)
    verification = launch_verification(summary.path, summary.prompts, settings)
    publish(summary.path, output)
    return summary.model_copy(update={"path": output, "verification": verification})


def launch_verification(path: Path, prompts: Sequence[Sequence[int]], settings: Settings) -> Verification:
    """`verify_checkpoint` in a process of its own."""
    # Read by vLLM at import: the engine's core stays in the process that ends with the task.
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    task = ray.remote(max_calls=1, max_retries=0, **_resources(settings, environment))(verify_checkpoint)
    found: Verification = _result(task.remote(path, [list(p) for p in prompts]), settings.engine.start_timeout_s)
    return found


class _Worker:
    """Holds one training and answers how far it is."""

    def __init__(self) -> None:
        self._latest: TrainingProgress | None = None

    def ready(self) -> None:
        """Returns when the process has started."""

    def train(self, run: Path, settings: Settings) -> CheckpointSummary:
        # Imported here: a driver that only launches does not load a trainer.
        from training.sft import train_sft

        return train_sft(run, settings, self._note)

    def latest(self) -> TrainingProgress | None:
        return self._latest

    def _note(self, progress: TrainingProgress) -> None:
        self._latest = progress


def _train(run: Path, settings: Settings, progress: Progress) -> CheckpointSummary:
    worker = ray.remote(max_concurrency=2, **_resources(settings, {}))(_Worker).remote()
    try:
        _result(worker.ready.remote(), settings.ray.placement_timeout_s)
        training = worker.train.remote(run, settings)
        shown: TrainingProgress | None = None
        done: list[Any] = []
        while not done:
            done, _ = ray.wait([training], timeout=POLL_S)
            latest: TrainingProgress | None = _result(worker.latest.remote())
            if latest is not None and latest != shown:
                progress(latest)
                shown = latest
        summary: CheckpointSummary = _result(training)
    finally:
        ray.kill(worker)
    return summary


def _resources(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    """What a process asks of Ray: `training.threads` cores, or all that are free on a node, and `training.gpus`.

    Cores are asked for only as far as they are free, so that a pool of small actors beside it does not block a
    training for ever; the number of threads is rounded up.
    """
    free = max(node.get("CPU", 0.0) for node in available_resources_per_node().values())
    threads = settings.training.threads or max(1, math.ceil(free))
    return {
        "num_cpus": min(float(threads), free) or 1.0,
        "num_gpus": settings.training.gpus,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), **environment}},
    }


def _result(reference: Any, timeout_s: float | None = None) -> Any:
    """The value of a reference, with our own errors unwrapped and lost processes named."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise InfrastructureError(
            "trainer-not-placed",
            f"no answer within {timeout_s:.0f} s; free now: {free}; free some or lower training.threads",
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, PastcastError):
            raise error.cause from error
        raise
    except RayError as error:
        why = f"{type(error).__name__}: {error}; if memory ran out, lower training.batch_size"
        raise InfrastructureError("trainer-lost", why) from error
