"""What `pastcast index stats` shows a person."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrieval.stats import IndexStats

SOURCES = ("published", "modified", "crawled")


def index_page(stats: IndexStats) -> RenderableType:
    """A table of months, and below it what holds for the whole index."""
    table = Table(title=str(stats.directory), title_justify="left")
    table.add_column("month")
    for name in ("articles", "days", *SOURCES):
        table.add_column(name, justify="right")
    for month in stats.months:
        counts = [month.articles, month.days, *(month.date_sources.get(source, 0) for source in SOURCES)]
        table.add_row(month.month, *map(str, counts))
    table.add_section()
    days = sum(month.days for month in stats.months)
    total = [stats.articles, days, *(stats.date_sources.get(source, 0) for source in SOURCES)]
    table.add_row("all", *map(str, total))
    rows = stats.articles + sum(stats.quarantined.values())
    below = [
        f"encoder {stats.encoder} ({stats.dimension} dimensions), {stats.search}, index {stats.fingerprint[:12]}",
        f"{stats.without_date} of {rows} rows had no date that could be read ({stats.share_without_date:.1%})",
    ]
    if stats.quarantined:
        reasons = ", ".join(f"{count} {reason}" for reason, count in stats.quarantined.items())
        below.append(f"rows not used: {reasons}")
    return Group(table, *(Text(line) for line in below))
