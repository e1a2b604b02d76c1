"""Reciprocal rank fusion: one ranking out of several that were made by different scores.

An article earns 1 / (k + rank) in every ranking that names it (Cormack, Clarke and Büttcher, SIGIR 2009), so scores of
different scales never meet. It only reorders what it is given: it cannot show what no ranking showed.
"""

from collections.abc import Iterable, Sequence

from retrieval.article import Hit
from retrieval.scan import merge

RANK_CONSTANT = 60
"""k of the formula; the value of its paper and of Forecast-Dojo A.2."""


def fuse(rankings: Iterable[Sequence[Hit]], k: int) -> list[Hit]:
    """The best `k` articles of all rankings, each best first; a hit's score becomes its fused one.

    Ties go to the newer day, then to the lower id.
    """
    earned: dict[str, float] = {}
    hits: dict[str, Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            hits.setdefault(hit.article_id, hit)
            earned[hit.article_id] = earned.get(hit.article_id, 0.0) + 1 / (RANK_CONSTANT + rank)
    return merge((hit.model_copy(update={"score": earned[i]}) for i, hit in hits.items()), k)
