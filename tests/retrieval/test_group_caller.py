"""Calls to replicas that die, hang and come back, in virtual time: everybody is answered once and rightly, or told why."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from cluster.failures import DataError, InfrastructureError
from retrieval.group_caller import CALLS, GroupCaller
from rollout.simulator.clock import VirtualLoop

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    loop = VirtualLoop(0.0, 10_000.0)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Method:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call


def remote_error(cause: Exception) -> Exception:
    """As Ray raises what a method raised."""
    return RayTaskError("search", "", cause).as_instanceof_cause()


class Actor:
    """A replica as Ray shows it: doubles numbers, each call in a second; what it holds is lost when it dies."""

    def __init__(self, deaths: Sequence[tuple[float, float]] = (), restarts: int = 99) -> None:
        """`deaths`: moments and how long it then takes to come back."""
        self.deaths, self.restarts = sorted(deaths), restarts
        self.holding = self.most = 0
        self.calls: list[list[int]] = []
        self.search, self.ready = Method(self._search), Method(self._ready)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        died = [at for at, _ in self.deaths if at <= now]
        if len(died) > self.restarts:
            raise ActorDiedError
        if any(at <= now < at + down for at, down in self.deaths):
            raise ActorUnavailableError("restarting", None)

    async def _ready(self) -> int:
        self._check()
        return 1

    async def _search(self, requests: list[int], seconds: float) -> list[int | Exception]:
        self._check()
        began = asyncio.get_running_loop().time()
        self.holding += 1
        self.most = max(self.most, self.holding)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.holding -= 1
        if any(began < at <= began + 1.0 for at, _ in self.deaths):
            raise ActorUnavailableError("died", None)
        self.calls.append(list(requests))
        return [ValueError("odd") if r < 0 else 2 * r for r in requests]


async def ask_all(
    actors: Sequence[Any], arrivals: Sequence[float], within_s: float, silence_s: float = 30.0, largest: int = 4
) -> list[Any]:
    loop = asyncio.get_running_loop()
    caller = GroupCaller("months", actors, largest, silence_s)

    async def one(number: int, at: float) -> Any:
        await asyncio.sleep(at)
        async with asyncio.timeout(within_s):
            return await caller.ask("search", number, loop.time() + within_s)

    return await asyncio.gather(*(one(i, at) for i, at in enumerate(arrivals)), return_exceptions=True)


deaths = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5)), max_size=3)


@given(
    st.lists(deaths, min_size=1, max_size=3),
    st.lists(st.floats(0, 30), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_whoever_dies_everybody_gets_his_own_answer(
    scripts: list[list[tuple[float, float]]], arrivals: list[float], largest: int
) -> None:
    actors = [Actor(script) for script in scripts]
    answers = run(ask_all(actors, arrivals, within_s=500.0, largest=largest))
    assert answers == [2 * i for i in range(len(arrivals))]
    assert all(actor.most <= CALLS for actor in actors)
    assert all(len(call) <= largest for actor in actors for call in actor.calls)
    assert sorted(r for actor in actors for call in actor.calls for r in call) == list(range(len(arrivals)))


def test_the_queries_of_a_dead_replica_go_to_another_one_at_once() -> None:
    async def timed() -> tuple[list[Any], float]:
        answers = await ask_all([Actor([(0.5, 100.0)]), Actor()], [0.0] * 8, within_s=50.0)
        return answers, asyncio.get_running_loop().time()

    answers, took = run(timed())
    assert answers == [2 * i for i in range(8)]
    assert took == pytest.approx(2.0), "a second that was lost, and a second at the other replica"


def test_requests_of_one_moment_travel_together_and_later_ones_wait_in_order() -> None:
    actor = Actor()
    run(ask_all([actor], [0.0] * 3 + [0.1] * 2 + [0.2, 0.21, 0.22, 0.23, 0.24, 0.25], within_s=50.0))
    assert [sorted(call) for call in actor.calls[:2]] + actor.calls[2:] == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10]]


def test_a_request_at_fault_fails_alone() -> None:
    async def ask() -> list[Any]:
        loop = asyncio.get_running_loop()
        caller = GroupCaller("months", [Actor()], 8, 30.0)
        asking = [caller.ask("search", request, loop.time() + 9) for request in (1, -1, 3)]
        return await asyncio.gather(*asking, return_exceptions=True)

    one, error, six = run(ask())
    assert (one, six) == (2, 6)
    assert isinstance(error, ValueError)


def test_a_caller_that_gives_up_leaves_the_line() -> None:
    actor = Actor([(0.5, 20.0)])
    answers = run(ask_all([actor], [0.0, 0.0, 19.0], within_s=5.0))
    assert [type(a) for a in answers] == [TimeoutError, TimeoutError, int]
    assert actor.calls == [[2]], "nothing is sent that nobody waits for"


def test_a_replica_that_is_silent_is_passed_over_where_another_one_can_answer() -> None:
    class Silent(Actor):
        async def _search(self, requests: list[int], seconds: float) -> list[int | Exception]:
            await asyncio.sleep(1e6)
            return []

    answers = run(ask_all([Silent(), Actor()], [0.0] * 16, within_s=60.0, silence_s=10.0))
    assert answers == [2 * i for i in range(16)]
    alone = run(ask_all([Silent()], [0.0], within_s=60.0, silence_s=10.0))
    assert isinstance(alone[0], TimeoutError)


def test_a_group_of_which_nobody_comes_back_says_so_and_does_not_wait_for_the_deadline() -> None:
    async def timed() -> tuple[list[Any], float]:
        answers = await ask_all([Actor([(0.5, 1.0)], restarts=0)], [0.0, 0.7], within_s=900.0)
        return answers, asyncio.get_running_loop().time()

    answers, took = run(timed())
    assert [str(a) for a in answers] == [f"retrieval-gone: months: {answers[0].detail.removeprefix('months: ')}"] * 2
    assert isinstance(answers[0], InfrastructureError)
    assert took < 10.0


def test_a_damaged_replica_is_not_asked_again_and_the_last_one_is_named() -> None:
    class Damaged(Actor):
        async def _search(self, requests: list[int], seconds: float) -> list[int | Exception]:
            self.calls.append(requests)
            raise remote_error(DataError("2024-06/vectors.npy has changed"))

    damaged, sound = Damaged(), Actor()
    assert run(ask_all([damaged, sound], [0.0, 2.0, 4.0, 6.0], within_s=60.0)) == [0, 2, 4, 6]
    assert len(damaged.calls) == 1
    [error] = run(ask_all([Damaged()], [0.0], within_s=60.0))
    assert isinstance(error, InfrastructureError)
    assert str(error) == "retrieval-gone: months: 2024-06/vectors.npy has changed"


def test_a_bug_in_a_replica_is_loud() -> None:
    class Buggy(Actor):
        async def _search(self, requests: list[int], seconds: float) -> list[int | Exception]:
            raise remote_error(KeyError("row"))

    [error] = run(ask_all([Buggy()], [0.0], within_s=60.0))
    assert isinstance(error, KeyError)
