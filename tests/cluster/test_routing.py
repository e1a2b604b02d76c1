from hypothesis import given
from hypothesis import strategies as st

from cluster.routing import Router


def test_a_session_stays_with_its_engine():
    router = Router(range(3))
    first = router.assign("s", 100)
    for other in ("a", "b", "c", "d"):
        router.assign(other, 1)
    assert all(router.assign("s", 100) == first for _ in range(5))


def test_equal_sessions_spread_over_all_engines():
    router = Router(range(4))
    chosen = []
    for i in range(8):
        engine = router.assign(f"s{i}", 10)
        chosen.append(engine)
        router.finish(engine, 10)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3], "ties must not all pin to engine 0"


def test_a_first_call_goes_to_the_engine_with_the_fewest_outstanding_tokens():
    router = Router(range(2))
    busy = router.assign("long", 1000)
    assert router.assign("short", 10) != busy
    assert router.assign("next", 10) != busy


def test_a_dead_engines_sessions_move_and_come_back_only_after_revival():
    router = Router(range(2))
    dead = router.assign("s", 10)
    router.died(dead)
    assert router.assign("s", 10) == 1 - dead
    router.died(1 - dead)
    assert router.assign("s", 10) is None
    router.revived(dead)
    assert router.assign("s", 10) == dead
    assert router.outstanding(dead) == 10


@given(st.lists(st.tuples(st.sampled_from("afrdv"), st.integers(0, 5), st.integers(1, 50)), max_size=60))
def test_no_call_goes_to_a_dead_engine_and_outstanding_is_never_negative(actions):
    router = Router(range(3))
    running = []
    for action, number, tokens in actions:
        engine = number % 3
        if action == "a":
            chosen = router.assign(f"s{number}", tokens)
            assert (chosen is None) == (not router.alive)
            if chosen is not None:
                assert chosen in router.alive
                running.append((chosen, tokens))
        elif action == "f" and running:
            router.finish(*running.pop())
        elif action == "r":
            router.release(f"s{number}")
        elif action == "d":
            router.died(engine)
        elif action == "v":
            router.revived(engine)
        assert all(router.outstanding(e) >= 0 for e in range(3))
        assert all(e in router.alive for e in router.sessions.values())
