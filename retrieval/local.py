"""LocalSearcher: the whole index searched in this process. The same answers as the pool, without Ray."""

import datetime as dt

from cluster.failures import SettingsError
from retrieval.article import Article, Hit
from retrieval.encoder import Encoder
from retrieval.library import Library
from retrieval.manifest import EncoderIdentity
from retrieval.scan import Query, search_shards


class LocalSearcher:
    """Implements `Searcher`. Searches block the event loop: for tests and tools, not for a run."""

    def __init__(self, library: Library, encoder: Encoder, snippet_characters: int = 280) -> None:
        """Opens every shard. Raises DataError for a damaged one, SettingsError for another encoder than the index's."""
        require_encoder(library.manifest.encoder, encoder.name, encoder.fingerprint)
        self._encoder = encoder
        self._shards = library.load()
        self._snippet_characters = snippet_characters

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """See `Searcher`."""
        vector = self._encoder.encode([query])[0]
        return tuple(
            search_shards(self._shards, [Query(vector, first_day, cutoff, top_k)], self._snippet_characters)[0]
        )

    async def fetch(self, article_id: str) -> Article | None:
        """See `Searcher`."""
        found = (shard.fetch(article_id) for shard in self._shards.values())
        return next((article for article in found if article is not None), None)


def require_encoder(built_with: EncoderIdentity, name: str, fingerprint: str) -> None:
    """Raises SettingsError unless queries are encoded by what encoded the articles."""
    if built_with.fingerprint != fingerprint:
        raise SettingsError(
            f"the index was built with encoder {built_with.name} ({built_with.fingerprint[:12]}), but index.encoder is "
            f"{name} ({fingerprint[:12]}); change the setting or build the index again"
        )
