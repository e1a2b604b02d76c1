"""LocalSearcher: the whole index searched in this process. The same answers as the pool, without Ray."""

import datetime as dt

from cluster.config import SearchSettings
from cluster.failures import SettingsError
from retrieval.article import Article, Hit
from retrieval.encoder import Encoder, encode_queries, encoder_facts
from retrieval.lexical import LexicalQuery
from retrieval.library import Library
from retrieval.manifest import EncoderFacts
from retrieval.modes import ranked
from retrieval.scan import Query, WordCount, WordQuery, count_words, search_shards, search_words

_DENSE = SearchSettings()


class LocalSearcher:
    """Implements `Searcher`. Searches block the event loop: for tests and tools, not for a run."""

    def __init__(
        self,
        library: Library,
        encoder: Encoder | None,
        snippet_characters: int = 280,
        search: SearchSettings = _DENSE,
    ) -> None:
        """Opens every shard. `encoder` may be None in mode `lexical`.

        Raises DataError for a damaged shard, SettingsError for another encoder than the index's, none where one is needed, or an
        index without what the mode reads.
        """
        library.require_mode(search)
        if encoder is not None:
            require_encoder(library.manifest.encoder, encoder_facts(encoder))
        elif search.mode != "lexical":
            raise SettingsError(f"search.mode {search.mode} ranks by vectors, and needs the encoder of the index")
        self._encoder = encoder
        self._shards = library.load()
        self._snippet_characters = snippet_characters
        self._search = search

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """See `Searcher`."""
        return await ranked(self._search, self, query, first_day, cutoff, top_k)

    async def by_vector(self, query: str, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """See `Rankings`."""
        if self._encoder is None:
            raise SettingsError("this searcher was made without an encoder, and ranks by words alone")
        vector = encode_queries(self._encoder, [query])[0]
        return search_shards(self._shards, [Query(vector, first_day, cutoff, k)], self._snippet_characters)[0]

    async def by_words(self, words: LexicalQuery, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """See `Rankings`."""
        counted = count_words(self._shards, WordCount(words, first_day, cutoff))
        return search_words(self._shards, WordQuery(words, counted, first_day, cutoff, k), self._snippet_characters)

    async def fetch(self, article_id: str) -> Article | None:
        """See `Searcher`."""
        found = (shard.fetch(article_id) for shard in self._shards.values())
        return next((article for article in found if article is not None), None)


def require_encoder(built_with: EncoderFacts, found: EncoderFacts) -> None:
    """Raises SettingsError unless queries are encoded by what encoded the articles, with the instruction that the index names."""
    if (built_with.fingerprint, built_with.dimension) != (found.fingerprint, found.dimension):
        raise SettingsError(
            f"the index was built with encoder {built_with.name} ({built_with.fingerprint[:12]}, {built_with.dimension} dimensions), "
            f"but index.encoder is {found.name} ({found.fingerprint[:12]}, {found.dimension} dimensions); change the setting or "
            "build the index again"
        )
    if built_with.query_template != found.query_template:
        raise SettingsError(
            f"the index says that queries are encoded as {built_with.query_template!r}, but encoder.instruction makes them "
            f"{found.query_template!r}; change the setting, or run `pastcast index build`, which encodes nothing again"
        )
