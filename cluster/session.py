"""The Ray session of a process: joins a running cluster or starts a local one, and ends only what it started.

Inside a submitted job Ray itself names the cluster by RAY_ADDRESS, so the same call serves a laptop and a cluster. A
local session never joins a cluster that merely happens to run on this machine.
"""

import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from cluster.config import RaySettings
from cluster.failures import InfrastructureError, SettingsError
from cluster.resources import Amounts, shortage

log = logging.getLogger(__name__)

WORKER_ENVIRONMENT = {
    # Forked tokenizers would warn once per process.
    "TOKENIZERS_PARALLELISM": "false",
    # Whatever a worker needs was prepared before; looking it up on the internet could only hang or change a run.
    "HF_HUB_OFFLINE": "1",
}
"""What every worker of a run sees, besides the environment of its node."""

CONNECT_TIMEOUT_S = 10.0
"""How long a named cluster may take to accept a connection."""


class Session:
    """A connection to Ray, usable as a context manager."""

    def __init__(self, *, address: str, local: bool, connected_here: bool, logs: Path | None) -> None:
        self.address = address
        """Where the cluster's control service listens."""
        self.local = local
        """Whether this session started the cluster."""
        self.logs = logs
        """Ray's log folder on this machine, where it is known."""
        self._connected_here = connected_here

    def nodes(self) -> list[Amounts]:
        """The total resources of every live node."""
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Leaves the cluster, and ends it if this session started it; safe to call twice."""
        if self._connected_here and ray.is_initialized():
            ray.shutdown()
        self._connected_here = False

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_session(settings: RaySettings) -> Session:
    """Joins the cluster of `ray.address` or RAY_ADDRESS, else starts a local one with `ray.cpus` cores.

    In a process that is connected already the same connection is used and left open. Raises InfrastructureError
    where a named cluster does not answer.
    """
    if ray.is_initialized():
        return Session(address=_connected_address(), local=False, connected_here=False, logs=None)
    address = settings.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {
        "logging_level": logging.WARNING,
        "log_to_driver": False,
        "configure_logging": False,
        "runtime_env": {"env_vars": _worker_environment()},
    }
    if address:
        return _join(address, options)
    # "local": without it Ray would look for any cluster that runs on this machine.
    context = ray.init(address="local", num_cpus=settings.cpus, include_dashboard=False, **options)
    logs = Path(context.address_info["session_dir"]) / "logs"
    log.info("started a local Ray session; its logs are in %s", logs)
    return Session(address=context.address_info["gcs_address"], local=True, connected_here=True, logs=logs)


def require(session: Session, bundles: Sequence[Amounts], what: str) -> None:
    """Raises SettingsError, naming what is asked, there and missing, if the idle cluster could not hold `bundles`.

    `what` says in whose name they are asked (`the engine pool`) and opens the message.
    """
    if (lack := shortage(bundles, session.nodes())) is not None:
        raise SettingsError(
            f"{what} does not fit: {lack}. Lower engine.replicas, engine.cpus or engine.gpus, or use a larger cluster"
            + ("; a local session takes its cores from ray.cpus" if session.local else "")
        )


def _join(address: str, options: dict[str, Any]) -> Session:
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "//" not in host:
        # Ray itself tries an address where nothing listens for minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise InfrastructureError(
                "cluster-not-reached",
                f"nothing answers at {address} (from ray.address or RAY_ADDRESS): {error}. Is the cluster running, and "
                "is this the port of its control service (6379 by default), not of its dashboard?",
            ) from error
    try:
        context = ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfrastructureError(
            "cluster-not-reached",
            f"no Ray cluster could be joined at {address!r} (from ray.address or RAY_ADDRESS): {error}. Do both sides run "
            "the same Ray and Python versions and agree on RAY_AUTH_MODE and its token?",
        ) from error
    joined = context.address_info["gcs_address"]
    log.info("joined the Ray cluster at %s", joined)
    return Session(address=joined, local=False, connected_here=True, logs=None)


def _worker_environment() -> dict[str, str]:
    """WORKER_ENVIRONMENT without what the submitted job sets itself: Ray refuses a variable that is set twice."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    taken = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in taken}


def _connected_address() -> str:
    return str(ray.get_runtime_context().gcs_address)
