"""A synthetic world: events, dated articles and market beliefs whose best possible forecasts are known.

Each event's options have strengths that walk at random; the strongest on the closing day is the outcome. Surveys measure
all strengths of one event with error and are published the same day; the best public forecast of a day is then a Kalman
filter over the surveys published by that day. The market also sees a private measurement every day, so it knows more.
One seed gives the same bytes in every process: each event and each day draws from a source of its own, so that planting a
fault changes nothing else.
"""

import datetime as dt
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from cluster.config import SplitWindow
from cluster.failures import DataError, SettingsError
from cluster.record import Record
from retrieval.article import Article
from rollout.events import prose
from rollout.events.contest import FIRST_DAY, PRIVATE_ERROR, PROCESS, Contest, day_of, instant
from rollout.events.event import Belief
from rollout.events.kalman import Process

Fault = Literal["duplicate", "future-text", "no-date", "sibling"]
FAULTS: tuple[Fault, ...] = ("duplicate", "future-text", "no-date", "sibling")

SURVEY_SHARE = 0.75
"""Of the daily articles; the others belong to no event."""
TRAIN_SHARE = 0.6
CROSSING_EVERY = 20
"""One event in so many lives across the boundary of the two windows, so that a split has something to drop."""
SHORTEST_LIFE, LONGEST_LIFE = 20, 40
CROSSING_LIFE = 12
FEWEST_DAYS = 30
"""With fewer, the eval window is too short for events with a schedule."""
FAULTS_PER_EVENT = 0.1


class PlantedFault(Record):
    """Where a fault was planted."""

    fault: Fault
    event: str
    article: str = ""
    """The article that carries it; empty where the event's own text does."""
    other: str = ""
    """What it repeats or gives away: an article (`duplicate`) or an event (`sibling`)."""


class World(Record):
    """A world's parameters and what was made of them; stored as `world.json`."""

    seed: int
    events: int = Field(ge=1)
    days: int = Field(ge=FEWEST_DAYS)
    articles_per_day: float = Field(ge=0)
    faults: tuple[Fault, ...] = ()
    process: Process = PROCESS
    private_error: float = PRIVATE_ERROR
    train: SplitWindow
    eval: SplitWindow
    """Windows for a temporal split of about 60 to 40."""
    planted: tuple[PlantedFault, ...] = ()
    articles: int = 0
    surveys: int = 0


class FloorForecast(Record):
    """The best possible public forecast of an event on a day."""

    event: str
    date: dt.date
    probabilities: Belief


class _Page(Record):
    minute: int
    """Since the world began."""
    title: str
    text: str
    outlet: str
    contest: int | None = None
    """Index of the event it surveys."""


def make_world(
    out: Path, seed: int, events: int, days: int, articles_per_day: float, faults: Iterable[str] = frozenset()
) -> World:
    """Writes `events.jsonl`, `articles.jsonl`, `floor.jsonl` and `world.json` into `out`, and returns the last.

    `days` is the length of the world and `articles_per_day` the mean over it; pages that state an outcome come on top.
    Raises SettingsError for impossible parameters and DataError if `out` holds another world.
    """
    world = _parameters(seed, events, days, articles_per_day, faults)
    _refuse_another_world(out, world)
    names = prose.Names(random.Random(f"{seed}/names"))
    outlets = [f"{names.new()} {kind}" for kind in ("Institute", "Post", "Review", "Wire")]
    places = [names.new() for _ in range(30)]
    contests = _contests(world, names)
    pages = _daily_pages(world, contests, outlets, places)
    pages += [_decision_page(c, outlets[i % len(outlets)]) for i, c in enumerate(contests)]
    pages.sort(key=lambda p: (p.minute, p.title))
    articles = [_article(f"a{i}", page) for i, page in enumerate(pages, 1)]
    surveyed = [
        (article, page.contest) for article, page in zip(articles, pages, strict=True) if page.contest is not None
    ]
    surveys = len(surveyed)

    backgrounds = {c.id: prose.process_text(PROCESS, day_of(c.opened)) for c in contests}
    rows = [a.model_dump(mode="json", exclude={"day"}) for a in articles]
    planted: list[PlantedFault] = []
    for fault in world.faults:
        source = random.Random(f"{seed}/{fault}")
        for _ in range(max(1, round(events * FAULTS_PER_EVENT))):
            if fault == "sibling":
                planted.append(_plant_sibling(source, contests, backgrounds))
            else:
                found, added = _plant_page(fault, source, contests, articles, surveyed, len(planted) + 1)
                planted.append(found)
                rows += added
    rows.sort(key=lambda row: (row.get("published", ""), row["id"]))

    world = world.model_copy(update={"planted": tuple(planted), "articles": len(rows), "surveys": surveys})
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "events.jsonl", (c.event(backgrounds[c.id]).model_dump(mode="json") for c in contests))
    _write(out / "articles.jsonl", rows)
    _write(out / "floor.jsonl", (f.model_dump(mode="json") for c in contests for f in _floor(c)))
    (out / "world.json").write_text(json.dumps(world.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return world


def write_settings(out: Path, world: World) -> Path:
    """Writes `out/settings.yaml`, which names the world's files, an index beside them and the split; returns its path."""
    settings = {
        "events": {
            "path": str(out / "events.jsonl"),
            "floor": str(out / "floor.jsonl"),
            "train": world.train.model_dump(),
            "eval": world.eval.model_dump(),
        },
        "articles": {
            "path": str(out / "articles.jsonl"),
            "first_year": world.train.start.year,
            "last_year": world.eval.end.year,
        },
        "index": {"directory": str(out / "index")},
    }
    file = out / "settings.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return file


def _parameters(seed: int, events: int, days: int, articles_per_day: float, faults: Iterable[str]) -> World:
    chosen = frozenset(faults)
    if unknown := sorted(chosen - set(FAULTS)):
        raise SettingsError(f"unknown fault {unknown[0]!r}; known: {', '.join(FAULTS)}")
    if events < 1 or days < FEWEST_DAYS or articles_per_day < 0:
        raise SettingsError(
            f"a world of {events} events, {days} days and {articles_per_day} articles a day cannot be made; "
            f"it takes at least 1 event, {FEWEST_DAYS} days and 0 articles"
        )
    if "sibling" in chosen and events < 2:
        raise SettingsError("the fault 'sibling' takes at least 2 events")
    boundary = day_of(round(days * TRAIN_SHARE))
    return World(
        seed=seed,
        events=events,
        days=days,
        articles_per_day=articles_per_day,
        faults=tuple(f for f in FAULTS if f in chosen),
        train=SplitWindow(start=FIRST_DAY, end=boundary),
        eval=SplitWindow(start=boundary, end=day_of(days)),
    )


def _refuse_another_world(out: Path, world: World) -> None:
    made = {"planted", "articles", "surveys"}
    description = out / "world.json"
    if not description.exists():
        return
    if (
        json.loads(description.read_text(encoding="utf-8")).items()
        >= world.model_dump(mode="json", exclude=made).items()
    ):
        return
    raise DataError(f"{out} holds a world with other parameters; remove it or choose another --out")


def _contests(world: World, names: prose.Names) -> list[Contest]:
    crossing = world.events // CROSSING_EVERY
    in_train = round((world.events - crossing) * TRAIN_SHARE)
    boundary = (world.train.end - FIRST_DAY).days
    width = len(str(world.events))
    contests = []
    for number in range(world.events):
        source = random.Random(f"{world.seed}/event/{number}/life")
        if number < in_train:
            life = _life(source, 0, boundary)
        elif number < in_train + crossing:
            opened = boundary - source.randint(1, CROSSING_LIFE - 1)
            life = (opened, min(opened + CROSSING_LIFE, world.days - 1))
        else:
            life = _life(source, boundary, world.days)
        contests.append(Contest(f"{world.seed}/event/{number}", f"e{number + 1:0{width}d}", life, names))
    return contests


def _life(source: random.Random, first: int, end: int) -> tuple[int, int]:
    """(opening, closing) day numbers with first <= opening and closing < end."""
    longest = min(LONGEST_LIFE, end - first - 1)
    length = source.randint(min(SHORTEST_LIFE, longest), longest)
    opened = source.randint(first, end - 1 - length)
    return opened, opened + length


def _daily_pages(
    world: World, contests: Sequence[Contest], outlets: Sequence[str], places: Sequence[str]
) -> list[_Page]:
    pages = []
    for day in range(world.days):
        source = random.Random(f"{world.seed}/day/{day}")
        whole = int(world.articles_per_day)
        for _ in range(whole + (source.random() < world.articles_per_day - whole)):
            outlet, minute = source.choice(outlets), day * 1440 + source.randrange(1440)
            waiting = [i for i, c in enumerate(contests) if c.opened <= day < c.closed and day not in c.surveys]
            if waiting and source.random() < SURVEY_SHARE:
                # The one of two that has been silent for longer: random, but no event is forgotten for weeks.
                pair = (source.choice(waiting), source.choice(waiting))
                index = max(pair, key=lambda i: contests[i].silence(day))
                contest = contests[index]
                values = contest.measure(day, source)
                title, text = prose.survey(source, contest.name, outlet, day_of(day), contest.options, values)
                pages.append(_Page(minute=minute, title=title, text=text, outlet=outlet, contest=index))
            else:
                title, text = prose.distractor(source, places)
                pages.append(_Page(minute=minute, title=title, text=text, outlet=outlet))
    return pages


def _decision_page(contest: Contest, outlet: str) -> _Page:
    day = contest.closed + 1
    title, text = prose.decision(contest.name, contest.winner, day_of(day))
    return _Page(minute=day * 1440 + 8 * 60, title=title, text=text, outlet=outlet)


def _article(article_id: str, page: _Page) -> Article:
    host = page.outlet.lower().replace(" ", "-")
    return Article(
        id=article_id,
        url=f"https://{host}.example/{article_id}",
        title=page.title,
        summary="",
        text=page.text,
        published=instant(0, page.minute),
        date_source="published",
        source=page.outlet,
    )


def _plant_sibling(source: random.Random, contests: Sequence[Contest], backgrounds: dict[str, str]) -> PlantedFault:
    teller, told = source.sample(contests, 2)
    backgrounds[teller.id] += prose.sibling(told.name, told.winner)
    return PlantedFault(fault="sibling", event=teller.id, other=told.id)


def _plant_page(
    fault: Fault,
    source: random.Random,
    contests: Sequence[Contest],
    articles: Sequence[Article],
    surveyed: Sequence[tuple[Article, int]],
    number: int,
) -> tuple[PlantedFault, list[dict[str, Any]]]:
    """The fault and the rows it adds. A duplicate comes twice: as the same row, and as a copy under another address."""
    if fault == "duplicate" and surveyed:
        article, contest = source.choice(surveyed)
        original = article.model_dump(mode="json", exclude={"day"})
        later = (article.published + dt.timedelta(hours=12)).isoformat().replace("+00:00", "Z")
        copy = original | {"id": f"x{number}", "url": f"https://copy.example/x{number}", "published": later}
        planted = PlantedFault(fault=fault, event=contests[contest].id, article=f"x{number}", other=article.id)
        return planted, [original, copy]
    chosen = source.choice(contests)
    day = source.randrange(chosen.opened, chosen.closed - 1)
    title, text = prose.decision(chosen.name, chosen.winner, day_of(chosen.closed + 1))
    page = _Page(minute=day * 1440 + 600, title=title, text=text, outlet=articles[0].source)
    row = _article(f"x{number}", page).model_dump(mode="json", exclude={"day"})
    if fault == "no-date":
        del row["published"]
    return PlantedFault(fault=fault, event=chosen.id, article=f"x{number}"), [row]


def _floor(contest: Contest) -> Iterable[FloorForecast]:
    for day, ps in contest.floor().items():
        probabilities = {o: round(p, 6) for o, p in zip(contest.options, ps, strict=True)}
        yield FloorForecast(event=contest.id, date=day_of(day), probabilities=probabilities)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
