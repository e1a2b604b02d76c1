"""A run's status as Ray metrics, so that Prometheus and the Ray dashboard show it beside the cluster's own.

Made in the driver once Ray is up. Every metric carries the tag `run`, the beginning of the run's fingerprint; Ray
exports it with its prefix, as `ray_pastcast_…`.
"""

from typing import get_args

import ray
from ray.util.metrics import Counter, Gauge

from cluster.pool_view import EngineState
from rollout.status import RunStatus

_GAUGES = {
    "pastcast_forecasts_scheduled": "Forecasts that the run will have made when it is complete.",
    "pastcast_forecasts_done": "Forecasts that are in the ledger.",
    "pastcast_steps_running": "Forecast steps that run now.",
    "pastcast_forecasts_per_second": "Forecasts recorded a second, over the last five minutes.",
    "pastcast_tokens_per_second": "Sampled tokens a second, over the last five minutes.",
    "pastcast_price_dollars": "US dollars that the run has cost, earlier sittings included.",
    "pastcast_steps_limit": "Steps that the engine pool takes at once.",
    "pastcast_paused": "1 while the engine pool takes no new step.",
    "pastcast_mirror_lag_seconds": "Age of the oldest record that is not in the mirror.",
    "pastcast_mirror_unshipped": "Changes of the ledger that are not in the mirror.",
    "pastcast_mirror_unreachable": "1 while nothing can be shipped to the mirror.",
}
_COUNTERS = {
    "pastcast_forecasts_recorded_total": "Forecasts recorded in this sitting.",
    "pastcast_output_tokens_total": "Tokens sampled in this sitting.",
    "pastcast_attempts_repeated_total": "Attempts that infrastructure failed and that were queued again.",
}
_ENGINE_GAUGES = {
    "pastcast_engine_sessions": "Sessions pinned to the engine.",
    "pastcast_engine_outstanding_tokens": "Tokens of the requests that the router gave it.",
    "pastcast_engine_running": "Requests that the engine decodes.",
    "pastcast_engine_waiting": "Requests that the engine has not begun.",
    "pastcast_engine_kv_cache_use": "Share of its KV cache in use, from 0 to 1.",
    "pastcast_engine_restarts": "How often it was started again.",
}


class RunMetrics:
    """Publishes statuses of one run."""

    def __init__(self, fingerprint: str) -> None:
        self._run = {"run": fingerprint[:12]}
        self._gauges = {n: Gauge(n, description=d, tag_keys=("run",)) for n, d in _GAUGES.items()}
        self._counters = {n: Counter(n, description=d, tag_keys=("run",)) for n, d in _COUNTERS.items()}
        self._engines = {
            n: Gauge(n, description=d, tag_keys=("run", "engine", "node")) for n, d in _ENGINE_GAUGES.items()
        }
        self._states = Gauge("pastcast_engines", description="Engines by state.", tag_keys=("run", "state"))
        self._failures = Gauge(
            "pastcast_failures", description="Records that are failures, by reason.", tag_keys=("run", "reason")
        )
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self._reasons: set[str] = set()
        self._seen: dict[tuple[str, str], None] = {}
        """Engines that were published, by number and node."""

    def publish(self, status: RunStatus) -> None:
        """Set every metric to what the status says."""
        mirror = status.mirror
        values: dict[str, float] = {
            "pastcast_forecasts_scheduled": status.scheduled,
            "pastcast_forecasts_done": status.done,
            "pastcast_steps_running": status.running,
            "pastcast_forecasts_per_second": status.per_second,
            "pastcast_tokens_per_second": status.tokens_per_second,
            "pastcast_price_dollars": status.price,
            "pastcast_steps_limit": status.limit or 0,
            "pastcast_paused": bool(status.paused),
            "pastcast_mirror_lag_seconds": mirror.lag_s if mirror else 0.0,
            "pastcast_mirror_unshipped": mirror.unshipped if mirror else 0,
            "pastcast_mirror_unreachable": bool(mirror and mirror.fault),
        }
        for name, value in values.items():
            self._gauges[name].set(float(value), self._run)
        sums = {
            "pastcast_forecasts_recorded_total": status.done_now,
            "pastcast_output_tokens_total": status.output_tokens,
            "pastcast_attempts_repeated_total": status.retried,
        }
        for name, total in sums.items():
            if total > self._counted[name]:
                self._counters[name].inc(total - self._counted[name], self._run)
                self._counted[name] = total
        # A reason that a retry took back falls to zero; a gauge that is not set keeps its last value.
        self._reasons |= status.failures.keys()
        for reason in self._reasons:
            self._failures.set(float(status.failures.get(reason, 0)), {**self._run, "reason": reason})
        for state in get_args(EngineState):
            count = sum(e.state == state for e in status.engines)
            self._states.set(float(count), {**self._run, "state": state})
        engines = {(str(e.engine), e.node): e for e in status.engines}
        self._seen |= dict.fromkeys(engines)
        for number, node in self._seen:
            # One that has left does nothing: else it would be seen to work for ever.
            engine = engines.get((number, node))
            tags = {**self._run, "engine": number, "node": node}
            for name, gauge in self._engines.items():
                gauge.set(float(getattr(engine, name.removeprefix("pastcast_engine_"))) if engine else 0.0, tags)


def metrics_address() -> str:
    """Where this process's node serves the metrics of this process."""
    mine = ray.get_runtime_context().get_node_id()
    node = next(n for n in ray.nodes() if n["NodeID"] == mine)
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
