"""The gate: nobody is inside while its closer is alone, and nobody waits for ever."""

import asyncio
import random

import pytest

from cluster.gate import Gate


def test_a_closer_is_alone_behind_its_keys_whatever_the_order_of_arrival():
    inside: set[tuple[str, int]] = set()
    alone: list[str | None] = []
    passed = []

    async def use(gate, number, key, pauses):
        await asyncio.sleep(pauses.random() / 100)
        async with gate.passing(key):
            assert key not in alone
            assert None not in alone
            inside.add((key, number))
            await asyncio.sleep(pauses.random() / 100)
            inside.discard((key, number))
        passed.append(number)

    async def close(gate, number, key, pauses):
        await asyncio.sleep(pauses.random() / 100)
        async with gate.closed(key):
            assert not alone
            assert not [k for k, _ in inside if key in (None, k)]
            alone.append(key)
            await asyncio.sleep(pauses.random() / 100)
            alone.pop()
        passed.append(number)

    async def story(seed):
        gate, pauses = Gate(), random.Random(seed)
        tasks = [use(gate, n, pauses.choice("ab"), pauses) for n in range(40)]
        tasks += [close(gate, n, pauses.choice(["a", "b", None]), pauses) for n in range(40, 50)]
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
        assert sorted(passed) == list(range(50))

    for seed in range(5):
        passed.clear()
        asyncio.run(story(seed))


def test_a_closer_that_gives_up_leaves_the_gate_open():
    async def story():
        gate = Gate()
        async with gate.passing("a"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), gate.closed():
                    raise AssertionError("somebody is inside")
            async with asyncio.timeout(5), gate.passing("b"):
                pass

    asyncio.run(story())


def test_other_keys_pass_while_one_is_closed():
    async def story():
        gate = Gate()
        async with gate.closed("a"), asyncio.timeout(5):
            async with gate.passing("b"):
                pass
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), gate.passing("a"):
                    pass

    asyncio.run(story())
