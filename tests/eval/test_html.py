"""The report: complete, self-contained, and inert whatever a model or an article wrote."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ScoreSettings
from eval.html.charts import ticks
from eval.html.page import write_report
from rollout.packed import pack
from rollout.record import ForecastRecord
from rollout.run import RunDirectory
from rollout.trajectory import ToolCall, Trajectory, Turn

RunMaker = Callable[..., Path]
FAST = ScoreSettings(draws=100)
ATTACK = "<script>window.broken = 1</script><img src=x onerror=alert(1)></template></pre>{{ 7 * 7 }}"


class Tags(HTMLParser):
    """Tags with their attributes, and whether every element was closed in order."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.misplaced: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.misplaced.append(tag)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


def report(paths: list[Path], out: Path, **bounds: int) -> str:
    return write_report(paths, out, FAST, **bounds).read_text()


def test_the_page_is_well_formed_and_asks_for_nothing(make_run: RunMaker, tmp_path: Path) -> None:
    tags = parsed(report([make_run()], tmp_path / "out" / "report.html"))
    assert tags.misplaced == []
    assert tags.open == []
    for tag, attributes in tags.found:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("#", "data:,")), (tag, name, value)
    style = (Path(__file__).parents[2] / "eval" / "html" / "report.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_what_articles_questions_and_models_wrote_stays_text(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run(model=ATTACK, question=f"Who wins {ATTACK}?", article=ATTACK)
    page = report([run], tmp_path / "report.html")
    tags = parsed(page)
    assert [t for t, _ in tags.found].count("script") == 1
    assert "img" not in {t for t, _ in tags.found}
    assert tags.misplaced == []
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
    assert "&lt;script&gt;window.broken = 1&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page


def test_only_the_pages_own_script_may_run(make_run: RunMaker, tmp_path: Path) -> None:
    page = report([make_run(events=2)], tmp_path / "report.html")
    policy = next(a["content"] for t, a in parsed(page).found if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert re.search(r"default-src 'none'.*script-src 'sha256-[A-Za-z0-9+/]+=*';", policy)
    assert "unsafe-inline'; script-src" in policy
    assert "unsafe-eval" not in policy


def test_every_link_in_the_page_leads_somewhere(make_run: RunMaker, tmp_path: Path) -> None:
    tags = parsed(report([make_run(), make_run("other", model="teacher")], tmp_path / "report.html", episodes=5))
    ids = [a["id"] for _, a in tags.found if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {(a["href"] or "")[1:] for t, a in tags.found if t == "a"} - {""}
    assert targets <= set(ids)


def test_left_out_episodes_are_counted_on_the_page(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run(events=4)
    full = report([run], tmp_path / "full.html")
    assert "Full pages of 12 of 12 episodes" in full
    assert "left out to keep it quick" not in full
    few = report([run], tmp_path / "few.html", episodes=5)
    assert "Full pages of 5 of 12 episodes are in this file; 7 were left out" in few
    assert few.count('<template id="episode-') == 5
    assert few.count('href="#episode-') == 5
    assert few.count("not in this file") == 7
    small = report([run], tmp_path / "small.html", episode_bytes=1)
    assert "Full pages of 0 of 12 episodes are in this file; 12 were left out" in small


def test_an_episode_shows_what_was_searched_read_computed_and_noted(make_run: RunMaker, tmp_path: Path) -> None:
    page = report([make_run(events=1, modes=("memory-on",))], tmp_path / "report.html")
    for expected in (
        "Veldt council event-0",
        "Council leans to Yes",
        "2025-03-02",
        "up to 2025-03-03, inclusive",
        "x = [0.4, 0.6]\nsum(x)",
        "The first wards lean one way.",
        "Who counts?",
        "none published after its cutoff",
    ):
        assert expected in page


def test_arguments_that_cannot_be_read_are_shown_as_written(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run(events=1, steps=1, modes=("memory-free",), unrecorded=1)
    written = ('{"query": ' + "[" * depth + "]" * depth + "}" for depth in (2, 990, 5000))
    huge = '{"query": ' + "9" * 5000 + "}"
    calls = tuple(ToolCall(id=f"{i}", name="search", arguments=text) for i, text in enumerate((*written, huge)))
    with RunDirectory(run).ledger() as ledger:
        (key,) = ledger.scheduled()
        record = ForecastRecord(key=key, options=("Yes", "No"), report=None, prompt="p")
        ledger.commit([pack(record, Trajectory(turns=(Turn(messages=(), text="", tool_calls=calls),)))])
    page = report([run], tmp_path / "report.html")
    assert "[[]]" in page
    assert "9" * 100 in page


def test_an_article_after_the_cutoff_is_flagged(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run(events=1, modes=("memory-free",))
    settings = (run / "settings.yaml").read_text()
    # With two days of lag the fixture's articles, of the day before, lie beyond the cutoff.
    (run / "settings.yaml").write_text(settings.replace("cutoff_lag_days: 0", "cutoff_lag_days: 2"))
    page = report([run], tmp_path / "report.html")
    assert "published after the cutoff</strong>" in page
    assert "none published after its cutoff" not in page


def test_missing_and_lost_forecasts_are_on_the_page(make_run: RunMaker, tmp_path: Path) -> None:
    page = report([make_run(unrecorded=3, lost=2)], tmp_path / "report.html")
    assert "engine-lost" in page
    assert "the node went away" in page
    assert "<b>5</b>missing or lost, not scored" in page


def test_a_run_with_nothing_recorded_still_has_a_page(make_run: RunMaker, tmp_path: Path) -> None:
    page = report([make_run(events=2, steps=2, unrecorded=12)], tmp_path / "report.html")
    assert "No forecast of a single-answer event is scored yet." in page
    assert parsed(page).misplaced == []


def test_a_run_without_market_and_floor_has_neither_row(make_run: RunMaker, tmp_path: Path) -> None:
    page = report([make_run(beliefs=False, floor=False)], tmp_path / "report.html")
    assert '<tr class="reference"><th scope="row" colspan="2"><span class="swatch uniform">' in page
    assert '<tr class="reference"><th scope="row" colspan="2"><span class="swatch market">' not in page
    assert '<tr class="reference"><th scope="row" colspan="2"><span class="swatch floor">' not in page


@given(st.floats(-5, 5), st.floats(0, 10))
def test_ticks_enclose_what_they_measure(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert found == sorted(found)
    assert found[0] <= low + 1e-6
    assert found[-1] >= low + span - 1e-6
    assert 1 <= len(found) <= 12


@pytest.mark.parametrize("runs", [1, 3])
def test_the_same_ledgers_give_the_same_bytes(make_run: RunMaker, tmp_path: Path, runs: int) -> None:
    paths = [make_run(f"r{i}", events=2) for i in range(runs)]
    assert report(paths, tmp_path / "a.html") == report(paths, tmp_path / "b.html")
