"""A rollout worker: a Ray actor that drives many leased steps at once.

It holds the clients of the pools, the sandbox, the chat format and the events as agents may see them, and no run state:
when it dies, its leases return to the coordinator and another one runs them. Leases come and outcomes go in batches, and
what a lease leaves is packed here, so that the driver's cost of a forecast stays small.
"""

import asyncio
import datetime as dt
import logging
import platform
from collections.abc import Mapping, Sequence

from pydantic_core import PydanticSerializationError
from ray.exceptions import RayError, RayTaskError

from cluster.clock import monotonic, utc_now
from cluster.config import Settings
from cluster.endpoint.client import EndpointClient, RemoteGate
from cluster.failures import Failure, InfrastructureError, PastcastError, SettingsError, failure_of
from cluster.home import model_path
from cluster.pool import EngineClient
from cluster.record import Record
from retrieval.view import DatedView, Searcher
from rollout.audit import WitnessedModel, check_transcript, is_checked
from rollout.chat import ChatFormat, load_chat, load_rendered
from rollout.dialogue import Dialogue, MessageDialogue, TokenDialogue
from rollout.driver import drive
from rollout.endpoint_model import EndpointModel, endpoint_weights
from rollout.engine_model import EngineModel
from rollout.events.event import Belief, Event, EventPrompt
from rollout.forecasters import MarketForecaster, ReaderForecaster, UniformForecaster
from rollout.lease import Lease, StepOutcome
from rollout.model import Model
from rollout.packed import pack
from rollout.priced import PricedModel
from rollout.rendered import RenderedDialogue, RenderedFormat
from rollout.sandbox import Sandbox
from rollout.step import StepTask, forecast_step
from rollout.tools import ToolRunner

logger = logging.getLogger(__name__)

OUTCOMES_AT_ONCE = 200
"""In one answer: more would keep the driver's loop busy for long."""


class Questions(Record):
    """What workers are given of the events."""

    prompts: Mapping[str, EventPrompt]
    """By event id."""
    beliefs: Mapping[str, Mapping[dt.date, Belief]]
    """Market beliefs by event id: for the `market` reference, empty for every other model."""

    @classmethod
    def of(cls, events: Sequence[Event], settings: Settings) -> "Questions":
        """As the model of these settings may see them."""
        shown = events if settings.model.kind == "market" else ()
        return cls(prompts={e.id: e.prompt() for e in events}, beliefs={e.id: e.beliefs for e in shown})


class RolloutWorker:
    """Made a Ray actor by the run."""

    def __init__(
        self,
        settings: Settings,
        engines: EngineClient | RemoteGate | None,
        searcher: Searcher | None,
        questions: Questions,
        sandbox: str = "",
    ) -> None:
        """`engines` leads to our engines or to an endpoint; None for rule-based forecasters.
        `sandbox` is the manifest's description of the Python tool's cell; empty where it is not to be checked."""
        self._settings = settings
        self._searcher = searcher
        self._questions = questions
        self._sandbox = self._cells()
        self._fault = sandbox_fault(sandbox, self._sandbox.describe(), platform.node())
        self._engines = engines
        self._chat: ChatFormat | RenderedFormat | None = None
        self._model: Model | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._abandoned: set[int] = set()
        """Leases that had not begun when they were abandoned, or had ended."""
        self._outcomes: list[StepOutcome] = []
        self._news = asyncio.Event()

    def _cells(self) -> Sandbox:
        return Sandbox(self._settings.rollout.python)

    async def ready(self) -> bool:
        """Answers once the worker can take leases.

        Raises SettingsError if its sandbox is not the manifest's or the model has no chat format.
        """
        if self._fault:
            raise SettingsError(self._fault)
        self._prepare()
        return True

    async def take(self, leases: Sequence[Lease], abandoned: Sequence[int]) -> None:
        """Begin these steps, and end those of the leases numbered `abandoned`, also if they have not arrived yet.

        Each lease that began has one outcome in `results`.
        """
        for number in abandoned:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            else:
                # Ray does not keep the order of an actor's calls.
                self._abandoned.add(number)
        for lease in leases:
            if lease.number not in self._abandoned:
                self._tasks[lease.number] = asyncio.create_task(self._keep(lease))

    async def results(self, patience_s: float) -> list[StepOutcome]:
        """Outcomes as soon as there are any; none after `patience_s` seconds, which says that the worker lives."""
        if not self._outcomes:
            self._news.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        sent, self._outcomes = self._outcomes[:OUTCOMES_AT_ONCE], self._outcomes[OUTCOMES_AT_ONCE:]
        return sent

    async def run(self, lease: Lease) -> StepOutcome:
        """Run one step. Whatever goes wrong is in the outcome; if it is cancelled, that it was abandoned and what it cost."""
        began = monotonic()
        meter: PricedModel | None = None
        try:
            self._prepare()
            meter = PricedModel(self._model or MarketForecaster(self._questions.beliefs))
            outcome = await self._run(lease, meter)
            return outcome.model_copy(update={"seconds": monotonic() - began})
        except asyncio.CancelledError:
            failure = Failure(kind="infrastructure", reason="abandoned")
        except RayError as error:
            # A task's error carries its own cause; any other says that an actor or its node is gone.
            gone = not isinstance(error, RayTaskError | PastcastError)
            failure = failure_of(InfrastructureError("actor-lost", f"{error!r}") if gone else error)
        except Exception as error:  # noqa: BLE001 - the taxonomy decides; a bug of ours is recorded, other steps go on
            failure = failure_of(error)
        price = meter.price if meter is not None else 0.0
        return StepOutcome(lease=lease.number, failure=failure, seconds=monotonic() - began, price=price)

    async def _run(self, lease: Lease, model: Model) -> StepOutcome:
        settings = self._settings.rollout
        task = StepTask(
            key=lease.key,
            event=self._questions.prompts[lease.key.event],
            carried=lease.carried,
            variant=settings.prompt,
            policy=settings.parse,
            budget=settings.budget,
            retrieval=self._settings.retrieval,
            max_tokens=self._settings.sampling.max_tokens,
        )
        step = forecast_step(task, self._dialogue(), monotonic)
        witness = WitnessedModel(model) if is_checked(lease.key, settings.check_share) else None
        record, trajectory = await drive(step, witness or model, self._tools(lease), task.session, lease.last)
        if witness is not None:
            check_transcript(trajectory, witness.exchanges, self._chat, lease.key.date)
        record = record.model_copy(update={"attempts": lease.attempt})
        try:
            return StepOutcome(lease=lease.number, packed=pack(record, trajectory))
        except PydanticSerializationError as error:
            failure = Failure(kind="bug", reason="not-storable", detail=repr(error))
            return StepOutcome(lease=lease.number, failure=failure, price=record.usage.price)

    async def _keep(self, lease: Lease) -> None:
        """Run the lease and hold its outcome until it is asked for."""
        outcome = await self.run(lease)
        del self._tasks[lease.number]
        self._outcomes.append(outcome)
        self._news.set()

    def _prepare(self) -> None:
        """Load what the model needs, once; a worker that replaces a dead one is first asked to run."""
        chosen = self._settings.model
        if self._model is not None or chosen.kind == "market":
            return
        if isinstance(self._engines, RemoteGate):
            endpoint = self._settings.endpoint
            client = EndpointClient(self._engines, endpoint, self._settings.sampling, utc_now)
            weights = endpoint_weights(endpoint.base_url, endpoint.model)
            self._model = EndpointModel(client, weights, endpoint.reasoning_field)
        elif self._engines is not None:
            weights = self._engines.facts.weights
            folder = model_path(chosen.path)
            parsers = (chosen.tool_parser, chosen.reasoning_parser, weights)
            rendered = chosen.transcript == "rendered"
            self._chat = load_rendered(folder, *parsers) if rendered else load_chat(folder, chosen.chat, *parsers)
            self._model = EngineModel(self._engines, self._chat.stop_ids, self._settings.rollout.deadlines.turn_s)
        elif chosen.kind == "reader":
            self._model = ReaderForecaster(chosen.reader_searches, chosen.reader_top_k, chosen.reader_scrapes)
        else:
            self._model = UniformForecaster()

    def _dialogue(self) -> Dialogue:
        limit = self._settings.engine.max_model_len
        if self._chat is None:
            return MessageDialogue(
                self._settings.endpoint.context_tokens if isinstance(self._engines, RemoteGate) else None
            )
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
