import asyncio
import threading
from collections.abc import Sequence

import pytest

from retrieval.batching import QueueDrain


def test_requests_that_queue_up_are_answered_together_and_in_place() -> None:
    sizes: list[int] = []
    gate = threading.Event()

    def double(requests: Sequence[int]) -> list[int]:
        sizes.append(len(requests))
        gate.wait()
        return [2 * r for r in requests]

    async def main() -> list[int]:
        drain = QueueDrain(double, largest=8)
        first = asyncio.create_task(drain.submit(0))
        while not sizes:
            await asyncio.sleep(0)
        rest = [asyncio.create_task(drain.submit(i)) for i in range(1, 20)]
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(first, *rest)

    assert asyncio.run(main()) == [2 * i for i in range(20)]
    assert sizes == [1, 8, 8, 3]


def test_a_request_that_fails_does_not_fail_its_neighbours() -> None:
    def divide(requests: Sequence[int]) -> list[float]:
        return [1 / r for r in requests]

    async def main() -> list[float | BaseException]:
        drain = QueueDrain(divide)
        answers = await asyncio.gather(*(drain.submit(i) for i in (1, 0, 2)), return_exceptions=True)
        return [*answers, await drain.submit(4)]

    one, error, half, quarter = asyncio.run(main())
    assert (one, half, quarter) == (1, 0.5, 0.25)
    assert isinstance(error, ZeroDivisionError)


def test_a_request_whose_caller_gave_up_is_not_worked_on() -> None:
    seen: list[int] = []
    gate = threading.Event()

    def note(requests: Sequence[int]) -> list[int]:
        seen.extend(requests)
        gate.wait()
        return list(requests)

    async def main() -> None:
        drain = QueueDrain(note)
        first = asyncio.create_task(drain.submit(1))
        while not seen:
            await asyncio.sleep(0)
        given_up, kept = asyncio.create_task(drain.submit(2)), asyncio.create_task(drain.submit(3))
        await asyncio.sleep(0)
        given_up.cancel()
        gate.set()
        assert [await first, await kept] == [1, 3]
        with pytest.raises(asyncio.CancelledError):
            await given_up

    asyncio.run(main())
    assert seen == [1, 3]


def test_callers_that_ask_again_and_again_stay_together() -> None:
    sizes: list[int] = []
    gate = threading.Event()

    def note(requests: Sequence[int]) -> list[int]:
        sizes.append(len(requests))
        gate.wait()
        return list(requests)

    async def main() -> None:
        drain = QueueDrain(note, largest=8, linger_s=1e6)

        async def caller(number: int, times: int) -> None:
            for _ in range(times):
                await drain.submit(number)
                for _ in range(5 * number):
                    await asyncio.sleep(0)  # each takes another while to come back

        callers = [asyncio.create_task(caller(0, 5))]
        while not sizes:
            await asyncio.sleep(0)
        callers += [asyncio.create_task(caller(i, 4)) for i in range(1, 5)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*callers)

    asyncio.run(main())
    assert sizes == [1, 5, 5, 5, 5]


def test_a_lone_request_does_not_linger() -> None:
    async def main() -> list[int]:
        drain = QueueDrain(lambda requests: list(requests), linger_s=1e6)
        return [await drain.submit(i) for i in range(3)]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [0, 1, 2]


def test_who_lingers_goes_on_when_the_others_do_not_come() -> None:
    async def main() -> list[int]:
        drain = QueueDrain(lambda requests: list(requests), linger_s=0.01)
        await asyncio.gather(*(drain.submit(i) for i in range(4)))
        return [await drain.submit(9)]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [9]
