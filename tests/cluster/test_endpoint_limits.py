"""Keys, rates, retries and the gate over them, on a virtual clock; the gatekeeper's line with a real loop."""

import asyncio
import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import EndpointSettings, PriceSettings
from cluster.endpoint.fault import of_body, of_status, retry_after_seconds
from cluster.endpoint.gate import LEASE_MARGIN_S, SILENCE_S, Delay, Gate, NoKey, Permit, Settlement
from cluster.endpoint.gatekeeper import NO_KEY, Gatekeeper, read_keys
from cluster.endpoint.keys import KeyPool
from cluster.endpoint.prices import TokenCount, price
from cluster.endpoint.rates import WINDOW_S, RateLimit
from cluster.endpoint.retry import Retries
from cluster.failures import InfrastructureError, SettingsError

NOW = dt.datetime(2031, 5, 4, 12, tzinfo=dt.UTC)
COUNTS = st.integers(0, 5_000)


@given(
    requests=st.none() | st.integers(1, 6),
    tokens=st.none() | st.integers(1, 1_000),
    sizes=st.lists(
        st.tuples(st.integers(1, 1_500), st.integers(0, 30), st.none() | st.integers(0, 1_500)), max_size=40
    ),
)
def test_in_no_minute_do_more_requests_or_tokens_start_than_allowed(requests, tokens, sizes):
    limit = RateLimit(requests, tokens)
    now = 0.0
    started: list[tuple[float, int]] = []
    known: dict[int, int] = {}
    for number, (size, pause, true) in enumerate(sizes):
        now += pause
        for _ in range(len(sizes) + 1):
            wait = limit.wait_s(now, size)
            if wait == 0:
                break
            now += wait
        assert limit.wait_s(now, size) == 0, "waiting as long as was asked for must let it start"
        window = [n for n, (at, _) in enumerate(started) if at > now - WINDOW_S]
        if requests is not None:
            assert len(window) < requests
        if tokens is not None and window:
            assert sum(known[n] for n in window) + size <= tokens
        limit.start(number, now, size)
        started.append((now, size))
        known[number] = size
        if true is not None:
            limit.correct(number, true)
            known[number] = true


def test_a_request_larger_than_a_minutes_tokens_starts_in_an_empty_window():
    limit = RateLimit(None, 100)
    assert limit.wait_s(0.0, 500) == 0
    limit.start(1, 0.0, 500)
    assert limit.wait_s(10.0, 1) == pytest.approx(50.0)


@given(st.data())
def test_keys_are_used_evenly_and_never_while_they_may_not_be(data):
    size = data.draw(st.integers(1, 5))
    pool, now = KeyPool(size), 0.0
    rests, refused, running, trial = dict.fromkeys(range(size), 0.0), set(), [], set()
    for _ in range(60):
        now += data.draw(st.floats(0, 20))
        key = pool.pick(now)
        if key is not None:
            assert key not in refused
            assert rests[key] <= now
            assert not (key in trial and key in running), "a key that was limited is tried with one request alone"
            pool.start(key)
            running.append(key)
        else:
            assert all(k in refused or rests[k] > now or (k in trial and k in running) for k in range(size))
        if running and data.draw(st.booleans()):
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pool.end(ended)
            how = data.draw(st.sampled_from(["well", "well", "limited", "refused", "cut"]))
            if how == "well":
                pool.succeed(ended, now)
                if rests[ended] <= now:
                    trial.discard(ended)
            elif how == "limited":
                rests[ended] = max(rests[ended], now + 30)
                trial.add(ended)
                pool.rest(ended, now + 30)
            elif how == "refused":
                refused.add(ended)
                pool.refuse(ended, "401")
        assert pool.spent == (len(refused) == size)


def test_the_least_used_key_serves():
    pool = KeyPool(3)
    for _ in range(9):
        pool.start(pool.pick(0.0))
    assert [pool._keys[i].uses for i in range(3)] == [3, 3, 3]


def gate(keys: int = 1, **settings: object) -> Gate:
    return Gate(keys, EndpointSettings.model_validate(settings))


def test_permits_are_bounded_and_a_dead_workers_permit_runs_out():
    limited = gate(parallel=2, call_timeout_s=100)
    permits = [limited.ask(0.0, 1) for _ in range(2)]
    assert all(isinstance(p, Permit) for p in permits)
    lease = 100 + LEASE_MARGIN_S
    assert limited.ask(1.0, 1) == Delay(lease - 1)
    limited.settle(2.0, permits[0], Settlement(verdict="failed"))
    limited.settle(2.0, permits[0], Settlement(verdict="failed"))
    assert isinstance(limited.ask(2.0, 1), Permit)
    assert isinstance(limited.ask(2.0, 1), Delay)
    assert isinstance(limited.ask(lease, 1), Permit)
    assert limited.running == 2


def test_what_a_silent_worker_holds_is_free_again_and_its_turns_are_skipped():
    limited = gate(parallel=2)
    for holder in ("dead", "alive"):
        limited.hear(0.0, holder)
        assert isinstance(limited.ask(0.0, 1, holder), Permit)
    limited.hear(40.0, "alive")
    assert limited.ask(50.0, 1, "alive") == Delay(SILENCE_S - 50)
    assert isinstance(limited.ask(SILENCE_S, 1, "alive"), Permit)
    assert limited.running == 2
    assert (limited.lives(SILENCE_S, "dead"), limited.lives(SILENCE_S, "alive")) == (False, True)

    async def run() -> int:
        now = [0.0]
        keeper = Gatekeeper(EndpointSettings(parallel=1), lambda: now[0])
        await keeper.open((NO_KEY,))
        await keeper.admit(1, "dead")
        orphans = [asyncio.create_task(keeper.admit(1, "dead")) for _ in range(50)]
        waiting = asyncio.create_task(keeper.admit(1, "alive"))
        await asyncio.sleep(0)
        now[0] = SILENCE_S
        await keeper.hear("alive")
        keeper._changed.set()
        admission = await asyncio.wait_for(waiting, 5)
        lost = await asyncio.gather(*orphans, return_exceptions=True)
        assert {e.reason for e in lost} == {"endpoint-silent"}
        return admission.permit.number

    assert asyncio.run(run()) == 2


def test_a_gate_without_keys_left_says_why():
    two = gate(2)
    for why in ("HTTP 401", "HTTP 403"):
        permit = two.ask(0.0, 1)
        two.settle(0.0, permit, Settlement(verdict="refused", detail=why))
    assert two.ask(0.0, 1) == NoKey(("HTTP 401", "HTTP 403"))


def test_a_limited_key_comes_back_after_its_rest_and_one_request_tries_it():
    one = gate(1)
    permit = one.ask(0.0, 1)
    one.settle(0.0, permit, Settlement(verdict="limited", rest_s=10))
    assert one.ask(1.0, 1) == Delay(9.0)
    trial = one.ask(10.0, 1)
    assert isinstance(trial, Permit)
    assert isinstance(one.ask(10.0, 1), Delay)
    one.settle(11.0, trial, Settlement(verdict="answered"))
    assert [isinstance(one.ask(11.0, 1), Permit) for _ in range(5)] == [True] * 5


def test_rates_hold_over_all_that_ask_and_in_the_order_in_which_they_asked():
    async def run() -> list[int]:
        now = [0.0]
        keeper = Gatekeeper(EndpointSettings(requests_per_minute=2), lambda: now[0])
        await keeper.open((NO_KEY,))
        admitted: list[int] = []

        async def ask(number: int) -> None:
            await keeper.admit(1, "worker")
            admitted.append(number)

        tasks = [asyncio.create_task(ask(i)) for i in range(6)]
        for minute in range(3):
            await asyncio.sleep(0.01)
            assert len(admitted) == 2 * (minute + 1)
            now[0] += WINDOW_S
            await keeper.hear("worker")
            keeper._changed.set()
        await asyncio.gather(*tasks)
        return admitted

    assert asyncio.run(run()) == list(range(6))


def test_a_gatekeeper_whose_keys_all_rest_says_so():
    async def run() -> list[str]:
        now = [0.0]
        keeper = Gatekeeper(EndpointSettings(), lambda: now[0])
        await keeper.open((NO_KEY,))
        said = [(await keeper.view()).paused]
        admission = await keeper.admit(1)
        await keeper.settle(admission.permit, Settlement(verdict="limited", rest_s=30))
        said.append((await keeper.view()).paused)
        now[0] = 30.0
        return [*said, (await keeper.view()).paused]

    before, during, after = asyncio.run(run())
    assert (before, after) == ("", "")
    assert "30 s" in during


def test_whoever_left_the_line_takes_no_turn():
    async def run() -> int:
        keeper = Gatekeeper(EndpointSettings(parallel=1))
        await keeper.open((NO_KEY,))
        first = await keeper.admit(1)
        gone = asyncio.create_task(keeper.admit(1))
        waiting = asyncio.create_task(keeper.admit(1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        await keeper.settle(first.permit, Settlement(verdict="answered"))
        second = await asyncio.wait_for(waiting, 5)
        return second.permit.number - first.permit.number

    assert asyncio.run(run()) == 1


def test_retries_consume_the_sequence_of_their_class():
    retries = Retries(EndpointSettings(network_backoff_s=(1, 2), server_backoff_s=(3,), rate_limit_backoff_s=()))
    assert [retries.wait_s(kind) for kind in ("network", "server", "malformed", "network", "server")] == [
        1,
        3,
        2,
        None,
        None,
    ]
    assert [retries.wait_s(kind) for kind in ("rate-limit", "quota", "auth", "unknown-model", "refused")] == [None] * 5


def test_the_default_sequences_are_table_20s():
    settings = EndpointSettings()
    assert settings.network_backoff_s == (2, 5, 15, 30, 60)
    assert settings.rate_limit_backoff_s == (10, 30, 60, 120, 300)
    assert settings.server_backoff_s == (5, 15, 30, 60, 120)
    assert settings.key_cooldown_s == 60


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Sun, 04 May 2031 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sun, 04 May 2031 11:00:00 GMT"}, 0.0),
        # the server's own clock counts
        ({"retry-after": "Wed, 01 Jan 2020 00:00:09 GMT", "date": "Wed, 01 Jan 2020 00:00:00 GMT"}, 9.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_all_its_shapes(headers, seconds):
    assert retry_after_seconds(headers, NOW) == seconds


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (429, "Rate limit reached", "rate-limit"),
        (429, "insufficient_quota You exceeded your current quota", "quota"),
        (402, "", "quota"),
        (401, "", "auth"),
        (403, "your key may not", "auth"),
        (403, "Input was flagged by moderation", "refused"),
        (400, "Error code DataInspectionFailed: data_inspection_failed", "refused"),
        (400, "This model's maximum context length is 4096 tokens", "context-full"),
        # the paper's order: a refusal is never taken for a malformed request
        (400, "bad request: content_filter", "refused"),
        (400, "bad request", "bad-request"),
        (404, "", "unknown-model"),
        (408, "", "network"),
        (500, "", "server"),
        (529, "overloaded", "server"),
        (418, "", "bad-request"),
    ],
)
def test_statuses_and_words_become_kinds(status, said, kind):
    assert of_status(status, said).kind == kind


def test_an_error_inside_an_answer_has_a_kind_too():
    assert of_body({"code": 429, "message": "x"}).kind == "rate-limit"
    assert of_body({"code": "rate_limit_exceeded"}).kind == "rate-limit"
    assert of_body({"message": "upstream failed"}).kind == "server"
    assert of_body("text").kind == "server"
    assert of_body({"code": "content_filter"}).kind == "refused"


@given(COUNTS, COUNTS, COUNTS)
def test_a_price_is_what_the_tokens_cost(asked, cached, said):
    count = TokenCount(input=asked, cached=cached, output=said)
    full = price(count, PriceSettings(input=3, output=15))
    assert full == pytest.approx((asked * 3 + said * 15) / 1e6)
    assert 0 <= price(count, PriceSettings(input=3, cached=0.3, output=15)) <= full


def test_keys_come_from_the_named_variables_only():
    environment = {"A": "sk-1, sk-2,", "B": "sk-2", "OPENAI_API_KEY": "other"}
    assert [k.get_secret_value() for k in read_keys(["A", "B"], environment)] == ["sk-1", "sk-2"]
    assert read_keys([], environment) == (NO_KEY,)
    assert "sk-1" not in repr(read_keys(["A"], environment))
    for wrong in ("sk 1", "sk-\n1", "sk-ключ"):
        with pytest.raises(SettingsError, match="environment variable A") as error:
            read_keys(["A"], {"A": f"{wrong},sk-2"})
        assert "sk" not in str(error.value)
    for missing in ({}, {"C": " ,"}):
        with pytest.raises(SettingsError, match="environment variable C"):
            read_keys(["C"], missing)


def test_nothing_is_admitted_without_a_key():
    async def run() -> None:
        keeper = Gatekeeper(EndpointSettings())
        await keeper.admit(1)

    with pytest.raises(InfrastructureError, match="endpoint-auth"):
        asyncio.run(run())
