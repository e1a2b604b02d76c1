"""A rollout worker: a Ray actor that drives many leased steps at once.

It holds the clients of the pools, the sandbox and the chat format, and no run state: when it dies, its leases return to
the coordinator and another one runs them.
"""

import datetime as dt
import logging
import platform
import traceback
from collections.abc import Mapping

from cluster.clock import utc_now
from cluster.config import Settings
from cluster.endpoint.client import EndpointClient, RemoteGate
from cluster.failures import Failure, InfrastructureError, SettingsError
from cluster.home import model_path
from cluster.pool import EngineClient
from cluster.record import Record
from retrieval.view import DatedView, Searcher
from rollout.audit import WitnessedModel, check_transcript, is_checked
from rollout.chat import ChatFormat, load_chat, load_rendered
from rollout.coordinator import Lease
from rollout.dialogue import Dialogue, MessageDialogue, TokenDialogue
from rollout.driver import drive, monotonic
from rollout.endpoint_model import EndpointModel, endpoint_weights
from rollout.engine_model import EngineModel
from rollout.events.event import Belief, EventPrompt
from rollout.forecasters import MarketForecaster, ReaderForecaster, UniformForecaster
from rollout.model import Model
from rollout.record import ForecastRecord
from rollout.rendered import RenderedDialogue, RenderedFormat
from rollout.sandbox import Sandbox
from rollout.step import StepTask, forecast_step
from rollout.tools import ToolRunner
from rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)


class StepOutcome(Record):
    """What became of one lease: a record, or a failure of the attempt."""

    lease: Lease
    record: ForecastRecord | None = None
    trajectory: Trajectory | None = None
    failure: Failure | None = None
    """Infrastructure (to be repeated) or a bug of ours (to be recorded and told loudly)."""


class RolloutWorker:
    """Made a Ray actor by the run; `run` is called many times at once."""

    def __init__(
        self,
        settings: Settings,
        engines: EngineClient | RemoteGate | None,
        searcher: Searcher | None,
        sandbox: str = "",
    ) -> None:
        """`engines` leads to our engines or to an endpoint; None for rule-based forecasters.
        `sandbox` is the manifest's description of the Python tool's cell; empty where it is not to be checked."""
        self._settings = settings
        self._searcher = searcher
        self._sandbox = Sandbox(settings.rollout.python)
        self._fault = sandbox_fault(sandbox, self._sandbox.describe(), platform.node())
        self._engines = engines
        self._chat: ChatFormat | RenderedFormat | None = None
        self._model: Model | None = None

    async def ready(self) -> bool:
        """Answers once the worker can take leases.

        Raises SettingsError if its sandbox is not the manifest's or the model has no chat format.
        """
        if self._fault:
            raise SettingsError(self._fault)
        self._prepare()
        return True

    def _prepare(self) -> None:
        """Load what the model needs, once; a worker that replaces a dead one is first asked to run."""
        chosen = self._settings.model
        if self._model is not None or chosen.kind == "market":
            return
        if isinstance(self._engines, RemoteGate):
            endpoint = self._settings.endpoint
            client = EndpointClient(self._engines, endpoint, self._settings.sampling, utc_now)
            self._model = EndpointModel(client, endpoint_weights(endpoint.base_url, endpoint.model))
        elif self._engines is not None:
            weights = self._engines.facts.weights
            folder = model_path(chosen.path)
            parsers = (chosen.tool_parser, chosen.reasoning_parser, weights)
            rendered = chosen.transcript == "rendered"
            self._chat = load_rendered(folder, *parsers) if rendered else load_chat(folder, chosen.chat, *parsers)
            self._model = EngineModel(self._engines, self._chat.stop_ids)
        elif chosen.kind == "reader":
            self._model = ReaderForecaster(chosen.reader_searches, chosen.reader_top_k, chosen.reader_scrapes)
        else:
            self._model = UniformForecaster()

    async def run(
        self, lease: Lease, event: EventPrompt, beliefs: Mapping[dt.date, Belief] | None = None
    ) -> StepOutcome:
        """Run one step. Never raises: what goes wrong is in the outcome.

        `beliefs` are the event's market beliefs, given to the `market` reference and to no other model.
        """
        try:
            self._prepare()
            model = self._model or MarketForecaster({event.id: beliefs or {}})
            record, trajectory = await self._run(lease, event, model)
        except InfrastructureError as error:
            failure = Failure(kind="infrastructure", reason=error.reason, detail=error.detail)
            return StepOutcome(lease=lease, failure=failure)
        except Exception as error:  # noqa: BLE001 - a bug of ours is recorded with its traceback; other steps go on
            detail = traceback.format_exc()
            logger.error("a step failed by a bug of ours, %s:\n%s", lease.key, detail)
            return StepOutcome(lease=lease, failure=Failure(kind="bug", reason=type(error).__name__, detail=detail))
        record = record.model_copy(update={"attempts": lease.attempt})
        return StepOutcome(lease=lease, record=record, trajectory=trajectory)

    async def _run(self, lease: Lease, event: EventPrompt, model: Model) -> tuple[ForecastRecord, Trajectory]:
        settings = self._settings.rollout
        task = StepTask(
            key=lease.key,
            event=event,
            carried=lease.carried,
            variant=settings.prompt,
            policy=settings.parse,
            budget=settings.budget,
            retrieval=self._settings.retrieval,
            max_tokens=self._settings.sampling.max_tokens,
        )
        step = forecast_step(task, self._dialogue(), monotonic)
        tools, release = self._tools(lease), task.session if lease.last else None
        if not is_checked(lease.key, settings.check_share):
            return await drive(step, model, tools, release)
        witness = WitnessedModel(model)
        record, trajectory = await drive(step, witness, tools, release)
        check_transcript(trajectory, witness.exchanges, self._chat, lease.key.date)
        return record, trajectory

    def _dialogue(self) -> Dialogue:
        limit = self._settings.engine.max_model_len
        if self._chat is None:
            return MessageDialogue()
        if isinstance(self._chat, RenderedFormat):
            return RenderedDialogue(self._chat, limit)
        return TokenDialogue(self._chat, limit)

    def _tools(self, lease: Lease) -> ToolRunner | None:
        """The step's own tools: its view's cutoff is fixed here, from the key, and nowhere else."""
        if self._searcher is None or lease.key.mode == "no-tools":
            return None
        if self._fault:
            raise InfrastructureError("other-sandbox", self._fault)
        lag = dt.timedelta(days=self._settings.retrieval.cutoff_lag_days)
        view = DatedView(self._searcher, lease.key.date - lag, self._settings.retrieval.first_day)
        return ToolRunner(view, self._sandbox, lease.key.date, self._settings.rollout)


def sandbox_fault(expected: str, found: str, node: str) -> str:
    """What is wrong if a node's sandbox is not the one of the manifest; empty if nothing is, or nothing is expected."""
    if expected in ("", found):
        return ""
    return (
        f"the Python tool's cell on node {node} is not the one of the run's manifest: here {found!r}, there {expected!r}; "
        "install the same on every node, or set rollout.python.isolation to what all of them have"
    )
