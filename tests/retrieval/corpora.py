"""Small corpora that the retrieval tests share."""

import datetime as dt
import random

from retrieval.article import Article

WORDS = [
    "harbour",
    "ballot",
    "reactor",
    "glacier",
    "tariff",
    "orchard",
    "senate",
    "copper",
    "monsoon",
    "railway",
    "vaccine",
    "lantern",
]
START = dt.datetime(2024, 5, 20, 23, 59, 59, tzinfo=dt.UTC)


def article(
    article_id: str, published: dt.datetime, title: str = "A title", text: str = "", summary: str = ""
) -> Article:
    return Article(
        id=article_id,
        url=f"https://example.org/{article_id}",
        title=title,
        summary=summary,
        text=text,
        published=published,
        date_source="published",
        source="Example",
    )


def corpus(count: int = 120, seed: int = 3, days: int = 60) -> list[Article]:
    """Articles over three months, in no order; several share their words, so that their scores are equal."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        words = draw.sample(WORDS, 3)
        published = START + dt.timedelta(days=draw.randrange(days), seconds=-draw.randrange(86_000))
        made.append(article(f"n{i:03}", published, " ".join(sorted(words)), f"Report: {words[0]}"))
    draw.shuffle(made)
    return made
