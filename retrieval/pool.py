"""RetrievalPool: the index served by Ray actors, as the driver holds it.

The months are dealt among groups, each group is held by as many replicas as asked for, on different nodes where there are
several, and one more actor encodes queries, unless articles are ranked by words alone. An actor that dies is started again, on
another node if its own is lost; `GroupCaller` says what becomes of its queries. The answers are those of `LocalSearcher`, up to
the last bits of a query vector that a sentence encoder gives in another batch.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.cluster_nodes import free_by_node
from cluster.config import RetrievalSettings, SearchSettings, Settings
from cluster.failures import InfrastructureError, PastcastError
from retrieval.build import index_kind
from retrieval.client import CallRules, RetrievalClient, ShardGroup
from retrieval.encoder import located
from retrieval.encoder_server import EncoderServer
from retrieval.library import Library
from retrieval.local import require_encoder
from retrieval.manifest import Manifest
from retrieval.placing import actor_resources, deal, lay, shard_bytes
from retrieval.remote_index import open_index
from retrieval.scan import Span
from retrieval.shard_metrics import ShardFigures
from retrieval.shard_server import Serving, ShardServer

_log = logging.getLogger(__name__)

_NODE = "ray.io/node-id"
"""The label by which Ray tells nodes apart."""

_ANSWERS_AT_ONCE = 10_000
"""Of a shard actor: calls that wait at its door take no thread, and `ready` and `figures` must not wait behind them."""


class RetrievalPool:
    """The actors that one process started."""

    def __init__(
        self,
        encoder: Any,
        groups: tuple[ShardGroup, ...],
        rules: CallRules,
        search: SearchSettings,
        manifest: Manifest,
    ) -> None:
        """`encoder`: Ray actor handle of an EncoderServer; None for mode `lexical` and where clients are only asked by vector."""
        self._encoder = encoder
        self._groups = groups
        self._rules = rules
        self._search = search
        self.manifest = manifest
        self.processes: tuple[int, ...] = ()
        """Ids of the processes that held the shards when the pool became ready: group after group, replica after replica."""

    def client(self, rules: CallRules | None = None) -> RetrievalClient:
        """A searcher over these actors. `rules`: others than the settings'."""
        return RetrievalClient(self._encoder, self._groups, rules or self._rules, self._search)

    def figures(self) -> tuple[ShardFigures, ...]:
        """Of every shard actor, in the order of `processes`. Raises Ray's errors where one is down."""
        figures: list[ShardFigures] = ray.get([handle.figures.remote() for handle in self._shards])
        return tuple(figures)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when all shards are open and the encoder is loaded and is the index's.

        Raises InfrastructureError if that takes longer, DataError for a damaged shard, SettingsError for a wrong encoder.
        """
        handles = self._actors
        try:
            said = ray.get([h.ready.remote() for h in handles], timeout=timeout_s)
        except GetTimeoutError as error:
            raise InfrastructureError(
                "retrieval-start",
                f"{len(handles)} retrieval actors are not up after {timeout_s:g} s; free in the session: "
                f"{ray.available_resources()}; lower retrieval.shard_actors, retrieval.replicas or retrieval.actor_cpus, add CPUs, or "
                "raise retrieval.start_timeout_s where shards are read or fetched for long",
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                raise error.cause from error
            raise
        except RayError as error:
            raise InfrastructureError("retrieval-start", f"{type(error).__name__}: {error}") from error
        shards = len(self._shards)
        self.processes = tuple(said[:shards])
        for facts in said[shards:]:
            require_encoder(self.manifest.encoder, facts)

    def close(self) -> None:
        """End the actors of this pool, and nothing else."""
        for handle in self._actors:
            ray.kill(handle)

    @property
    def _actors(self) -> list[Any]:
        return self._shards if self._encoder is None else [*self._shards, self._encoder]

    @property
    def _shards(self) -> list[Any]:
        return [handle for group in self._groups for handle in group.handles]


def start_retrieval_pool(settings: Settings) -> RetrievalPool:
    """Serve the index in the Ray session that this process has joined. Every node must see `index.directory`, or fetches into
    it what it serves of `index.source`.

    Raises DataError for a missing or damaged index, SettingsError for another encoder or kind than the index's or an index without what
    `search.mode` reads, InfrastructureError if the actors do not start in time.
    """
    if not ray.is_initialized():
        raise InfrastructureError("retrieval-start", "there is no Ray session; start or join one first")
    library = open_index(settings.index)
    library.require_kind(index_kind(settings.index))
    library.require_mode(settings.search)
    if settings.search.mode == "lexical":
        return start_pool(library, settings, None)
    place = located(settings.index.encoder, settings.encoder)
    options = _life(settings.retrieval) | {"num_gpus": settings.encoder.gpus}
    encoder = ray.remote(EncoderServer).options(**options).remote(place, settings.index.batch_size, settings.encoder)
    return start_pool(library, settings, encoder)


def start_pool(library: Library, settings: Settings, encoder: Any) -> RetrievalPool:
    """Start shard actors for this index beside an encoder's actor, and wait until all are ready. Raises as `start_retrieval_pool` does.

    `encoder`: None for mode `lexical` and where clients are only asked by vector.
    """
    retrieval, manifest = settings.retrieval, library.manifest
    rules = CallRules(
        timeout_s=retrieval.request_timeout_s,
        silence_s=retrieval.silence_s,
        batch=retrieval.batch,
        encoder_batch=settings.index.batch_size,
    )
    servings = [
        Serving(
            index=library.fingerprint,
            directory=settings.index.directory.resolve(),
            source=settings.index.source,
            shards=tuple(shard for shard in manifest.shards if shard.month in months),
            group=group,
            snippet_characters=retrieval.snippet_characters,
            device=retrieval.device,
            batch=retrieval.batch,
            linger_s=retrieval.linger_s,
            queue=retrieval.queue,
        )
        for group, months in enumerate(deal(manifest.shards, retrieval.shard_actors))
    ]
    groups = tuple(_start_groups(servings, retrieval))
    pool = RetrievalPool(encoder, groups, rules, settings.search, manifest)
    with ExitStack() as undo:
        undo.callback(pool.close)
        pool.wait_until_ready(retrieval.start_timeout_s)
        undo.pop_all()
    _log.info(
        "retrieval: %d articles of %d months in %d groups on %d actors",
        library.rows,
        len(manifest.shards),
        len(groups),
        len(pool.processes),
    )
    return pool


def _start_groups(servings: Sequence[Serving], retrieval: RetrievalSettings) -> list[ShardGroup]:
    sizes = [sum(shard_bytes(shard) for shard in serving.shards) for serving in servings]
    laid = lay(sizes, retrieval.replicas, actor_resources(retrieval), free_by_node())
    groups = []
    for serving, nodes in zip(servings, laid, strict=True):
        handles = []
        for replica, node in enumerate(nodes):
            options = {
                **_life(retrieval),
                **_wishes(node, {other for other in nodes if other not in (None, node)}),
                "num_gpus": retrieval.actor_gpus,
                "max_concurrency": _ANSWERS_AT_ONCE,
            }
            mine = serving.model_copy(update={"replica": replica})
            handles.append(ray.remote(ShardServer).options(**options).remote(mine))
        groups.append(ShardGroup(tuple(handles), Span.of(serving.shards)))
    return groups


def _wishes(node: str | None, others: Collection[str]) -> dict[str, Any]:
    """The planned node; else one without the group's other replicas; else any. Wishes are heard at every start anew, so that an actor
    whose node is lost or full moves; what is pinned or lies in a placement group would wait for it."""
    if node is None:
        return {}
    apart = [{_NODE: f"!in({','.join(sorted(others))})"}] if others else []
    return {"label_selector": {_NODE: node}, "fallback_strategy": [{"label_selector": w} for w in (*apart, {})]}


def _life(retrieval: RetrievalSettings) -> dict[str, Any]:
    """No retries by Ray: a call that waited for a dead actor could not go to another one."""
    return {"num_cpus": retrieval.actor_cpus, "max_restarts": retrieval.restarts, "max_task_retries": 0}
