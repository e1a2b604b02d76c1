import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.encoder import HashingEncoder, encoder_facts
from retrieval.mask import Vectors
from retrieval.query_cache import QueryCache

ENCODER = HashingEncoder(8)
FACTS = encoder_facts(ENCODER)
OTHER = encoder_facts(HashingEncoder(8, "Find: {query}"))


class Asked:
    """Encodes for real, remembers what for, and can be made to wait or fail."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.fails = 0

    def encode(self, text: str) -> Callable[[], Awaitable[Vectors]]:
        async def run() -> Vectors:
            self.texts.append(text)
            await self.go.wait()
            if self.fails:
                self.fails -= 1
                raise RuntimeError("no encoder")
            return ENCODER.encode([text])[0]

        return run


@given(st.lists(st.sampled_from("abcdef"), max_size=60), st.integers(0, 4))
def test_a_vector_is_always_that_of_its_text_and_no_more_are_kept_than_allowed(texts: list[str], entries: int) -> None:
    async def run() -> None:
        cache, asked = QueryCache(entries), Asked()
        recent: list[str] = []
        for text in texts:
            before = len(asked.texts)
            vector = await cache.vector(FACTS, text, asked.encode(text))
            np.testing.assert_array_equal(vector, ENCODER.encode([text])[0])
            assert (len(asked.texts) == before) == (text in recent)
            recent = [*(t for t in recent if t != text), text][-entries:] if entries else []
            assert len(cache) == len(recent) <= entries
        assert cache.hits + cache.misses == len(texts)
        assert cache.misses == len(asked.texts)

    asyncio.run(run())


def test_equal_texts_that_come_together_are_encoded_once() -> None:
    async def run() -> None:
        cache, asked = QueryCache(4), Asked()
        asked.go.clear()
        calls = [asyncio.ensure_future(cache.vector(FACTS, t, asked.encode(t))) for t in ("a", "b", "a", "a")]
        await asyncio.sleep(0)
        asked.go.set()
        vectors = await asyncio.gather(*calls)
        assert sorted(asked.texts) == ["a", "b"]
        assert (cache.hits, cache.misses) == (2, 2)
        np.testing.assert_array_equal(vectors[0], vectors[3])

    asyncio.run(run())


def test_who_asked_first_may_give_up_and_the_others_still_get_their_answer() -> None:
    async def run() -> None:
        cache, asked = QueryCache(4), Asked()
        asked.go.clear()
        first = asyncio.ensure_future(cache.vector(FACTS, "a", asked.encode("a")))
        second = asyncio.ensure_future(cache.vector(FACTS, "a", asked.encode("a")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        asked.go.set()
        np.testing.assert_array_equal(await second, ENCODER.encode(["a"])[0])
        assert asked.texts == ["a"]

    asyncio.run(run())


def test_a_failure_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def run() -> None:
        cache, asked = QueryCache(4), Asked()
        asked.fails = 1
        calls = [cache.vector(FACTS, "a", asked.encode("a")) for _ in range(3)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(f) for f in failed] == ["no encoder"] * 3
        np.testing.assert_array_equal(await cache.vector(FACTS, "a", asked.encode("a")), ENCODER.encode(["a"])[0])
        assert asked.texts == ["a", "a"]

    asyncio.run(run())


def test_another_instruction_is_another_vector() -> None:
    async def run() -> None:
        cache, asked = QueryCache(4), Asked()
        await cache.vector(FACTS, "a", asked.encode("a"))
        await cache.vector(OTHER, "a", asked.encode("Find: a"))
        assert asked.texts == ["a", "Find: a"]

    asyncio.run(run())


def test_nobody_can_change_a_vector_that_is_kept() -> None:
    async def run() -> None:
        cache, asked = QueryCache(4), Asked()
        await cache.vector(FACTS, "a", asked.encode("a"))
        kept = await cache.vector(FACTS, "a", asked.encode("a"))
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 7

    asyncio.run(run())
