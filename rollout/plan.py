"""From settings to a plan: which events, which dates, which forecasts, and the hashes of all that goes in.

Nothing is started here; `--dry-run` prints a plan.
"""

import datetime as dt
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.config import RetrievalSettings, Settings
from cluster.endpoint.prices import TokenCount, price
from cluster.failures import DataError, SettingsError
from cluster.home import model_path
from cluster.record import Record
from cluster.weights import Weights, read_weights
from retrieval.build import index_kind
from retrieval.corpus.rows import Loaded, QuarantinedRow
from retrieval.library import Library
from retrieval.modes import described
from retrieval.remote_index import open_index
from rollout.endpoint_model import endpoint_weights
from rollout.episode import Schedule, schedule
from rollout.events.dates import TOO_FEW_DAYS, forecast_dates
from rollout.events.deadline import hide_moved_deadlines
from rollout.events.event import Belief, Event
from rollout.events.load import load_events
from rollout.events.split import split_events
from rollout.manifest import Manifest, content_hashes, make_manifest
from rollout.prompts import prompt_hash
from rollout.run import QUARANTINE_FILE, read_floor
from rollout.sandbox import Sandbox
from rollout.share import share_of

logger = logging.getLogger(__name__)

PROMPT_TOKENS = {"full": 2500, "compact": 450}
"""A rough prompt length by variant, for the estimate alone."""
TURNS_GUESSED = 4
"""Model calls that a step with tools is guessed to make, for the estimate alone."""


class Plan(Record):
    """Everything a run will do."""

    settings: Settings
    events: tuple[Event, ...]
    keys: Schedule
    quarantined: dict[str, int]
    """Rows of the events file by reason."""
    unused_rows: tuple[QuarantinedRow, ...]
    """The same rows by number, for the run's quarantine."""
    naive_times: int
    hidden_deadlines: int
    """Deadlines that are not shown because their source moves them."""
    dropped: dict[str, int]
    """Good events that are not run, by reason."""
    model: Weights | None
    """What the engines serve; None for endpoints and rule-based forecasters."""
    manifest: Manifest

    @property
    def weights(self) -> str:
        """What names the model's weights in records; empty for rule-based forecasters."""
        return _weights(self.settings, self.model)

    @property
    def episodes(self) -> int:
        """Chains and single steps count one by event, mode and rollout."""
        return len({(k.event, k.mode, k.rollout) for k in self.keys})

    @property
    def tokens(self) -> int:
        """A rough estimate of input plus output tokens."""
        count = self._count()
        return count.input + count.output

    @property
    def cost(self) -> float | None:
        """A rough estimate in US dollars, as if nothing were cached; None where no price is known."""
        prices = self.settings.endpoint.price
        return None if self.settings.model.kind != "endpoint" or prices is None else price(self._count(), prices)

    def _count(self) -> TokenCount:
        prompt, said = PROMPT_TOKENS[self.settings.rollout.prompt], self.settings.sampling.max_tokens
        turns = sum(1 if k.mode == "no-tools" else TURNS_GUESSED for k in self.keys)
        return TokenCount(input=turns * prompt, output=turns * said)

    def floor(self) -> dict[tuple[str, dt.date], Belief]:
        """The world's best possible forecasts for the plan's events."""
        path = self.settings.events.floor
        if path is None:
            return {}
        wanted = {(k.event, k.date) for k in self.keys}
        return {key: p for key, p in read_floor(path).items() if key in wanted}


def uses_tools(settings: Settings) -> bool:
    """Whether any step of the run may call a tool."""
    return settings.model.kind in ("vllm", "endpoint", "reader") and set(settings.rollout.modes) != {"no-tools"}


def first_forecast_day(retrieval: RetrievalSettings, first_article_day: dt.date | None) -> dt.date | None:
    """The first day whose cutoff leaves an article to be seen; None without any bound."""
    days = [d for d in (first_article_day, retrieval.first_day) if d is not None]
    return max(days) + dt.timedelta(days=retrieval.cutoff_lag_days) if days else None


def make_plan(settings: Settings) -> Plan:
    """Load, filter, split, date and schedule; writes nothing. Raises SettingsError or DataError that say what to do.

    Forecast dates do not depend on the model, so that runs over the same events and index stay aligned.
    """
    loaded, unused = _load(settings)
    records: Sequence[Event] = loaded.records
    hidden = 0
    if settings.events.deadlines_move:
        records, hidden = hide_moved_deadlines(records, settings.events.deadlines_move)
    split = split_events(records, settings.events.train, settings.events.eval, settings.events.limit)
    dropped = Counter(split.dropped)
    index = settings.index
    library = open_index(index) if index.source is not None or index.directory.exists() else None
    if library is None and uses_tools(settings):
        raise SettingsError(
            f"no index at {settings.index.directory}; run `pastcast index build` with the same settings"
        )
    if library is None:
        logger.warning(
            "no index at %s: forecast dates are chosen without it and may differ from those of runs that have one",
            settings.index.directory,
        )
    if library is not None:
        library.require_kind(index_kind(settings.index))
        library.require_mode(settings.search)
    activity = library.activity() if library else {}
    first_day = first_forecast_day(settings.retrieval, library.first_day if library else None)
    dates: dict[str, tuple[dt.date, ...]] = {}
    events: list[Event] = []
    for event in split.events:
        if event.split not in settings.rollout.splits:
            dropped["other-split"] += 1
            continue
        days = forecast_dates(event, activity, first_day, settings.events.schedule)
        if not days:
            dropped[TOO_FEW_DAYS] += 1
            continue
        dates[event.id] = days
        events.append(event)
    if settings.run.share is not None:
        mine = share_of(events, settings.run.share)
        dropped["other-share"] += len(events) - len(mine)
        events = mine
        dates = {e.id: dates[e.id] for e in events}
    if not events:
        raise DataError(
            f"no event of {settings.events.path} can be forecast: {len(loaded.records)} loaded, quarantined "
            f"{loaded.quarantined}, dropped {dict(dropped)}; check events.train, events.eval, rollout.splits and run.share"
        )
    label = settings.label
    keys = schedule(label, dates, settings.rollout.modes, settings.rollout.count)
    model: Weights | None = None
    if settings.model.kind == "vllm":
        folder = model_path(settings.model.path)
        if not folder.is_dir():
            raise SettingsError(f"model.path {settings.model.path} is neither prepared nor a folder; run `make setup`")
        model = read_weights(folder, settings.model.adapter)
    weights = _weights(settings, model)
    inputs = _inputs(settings, events, keys, library, weights)
    return Plan(
        settings=settings,
        events=tuple(events),
        keys=keys,
        quarantined=loaded.quarantined,
        unused_rows=unused,
        naive_times=loaded.naive_times,
        hidden_deadlines=hidden,
        dropped=dict(dropped),
        model=model,
        manifest=make_manifest(settings, inputs),
    )


def _weights(settings: Settings, model: Weights | None) -> str:
    """The fingerprint of our own model, its adapter included, or an endpoint's model and address."""
    if settings.model.kind == "endpoint":
        return endpoint_weights(settings.endpoint.base_url, settings.endpoint.model)
    return model.fingerprint if model else ""


def _load(settings: Settings) -> tuple[Loaded[Event], tuple[QuarantinedRow, ...]]:
    """The events and the rows that gave none. A run's own quarantine is not touched: the plan may yet be refused."""
    with tempfile.TemporaryDirectory(prefix="pastcast-") as folder:
        loaded = load_events(settings.events, Path(folder))
        file = Path(folder) / QUARANTINE_FILE
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return loaded, tuple(QuarantinedRow.model_validate_json(line) for line in lines)


def _inputs(
    settings: Settings, events: list[Event], keys: Schedule, library: Library | None, weights: str
) -> Mapping[str, str]:
    prompts = {f"prompt.{m}": prompt_hash(m, settings.rollout.prompt) for m in settings.rollout.modes}
    return {
        **content_hashes(events, keys),
        "index": library.fingerprint if library else "",
        "search": described(library.manifest, settings.search) if library else "",
        "weights": weights,
        "sandbox": Sandbox(settings.rollout.python).describe() if uses_tools(settings) else "",
        **prompts,
    }
