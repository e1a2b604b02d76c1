from hypothesis import given
from hypothesis import strategies as st

from cluster.routing import SHED_TOKENS, Router


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
        router.finish(f"s{i}", engine, 10)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3], "ties must not all pin to engine 0"


def test_a_first_call_goes_to_the_engine_with_the_fewest_outstanding_tokens():
    router = Router(range(2))
    busy = router.assign("long", 1000)
    assert router.assign("short", 10) != busy
    assert router.assign("next", 10) != busy


def test_a_dead_engines_sessions_move_and_come_back_only_after_it_is_admitted():
    router = Router(range(2))
    dead = router.assign("s", 10)
    router.remove(dead)
    assert router.assign("s", 10) == 1 - dead
    router.remove(1 - dead)
    assert router.assign("s", 10) is None
    router.admit(dead)
    assert router.assign("s", 10) == dead
    assert router.outstanding(dead) == 10


def test_a_held_engine_keeps_its_sessions_and_gets_new_ones_only_where_none_is_open():
    router = Router(range(2))
    held = router.assign("old", 10)
    router.hold(held)
    assert router.assign("old", 10) == held
    assert [router.assign(f"new{i}", 1000) for i in range(3)] == [1 - held] * 3
    router.close(1 - held)
    assert router.assign("newest", 10) == held


def test_a_closed_engines_running_calls_still_count_until_they_end():
    router = Router(range(2))
    closed = router.assign("s", 10)
    router.close(closed)
    assert router.outstanding(closed) == 10
    assert router.assign("s", 10) == 1 - closed
    router.finish("s", closed, 10)
    assert router.outstanding(closed) == 0
    assert router.outstanding(1 - closed) == 10, "the end of a call at the old engine is not one at the new"


def test_an_engine_far_above_the_mean_sheds_its_new_sessions_and_keeps_its_old_ones():
    router = Router([0])
    for session in ("old", "old", "new"):
        router.assign(session, 1)
        router.finish(session, 0, 1)
    router.assign("flood", SHED_TOKENS + 1)
    router.admit(1)
    assert router.assign("old", 1) == 0
    assert router.assign("new", 1) != 0
    assert router.assign("flood", 1) == 0, "a session with a call running does not move"


def test_a_session_whose_call_failed_goes_elsewhere_where_there_is_an_elsewhere():
    router = Router(range(2))
    home = router.assign("s", 10)
    router.assign("other", 1000)
    router.move("s", home)
    assert router.assign("s", 10) == 1 - home, "however busy it is"
    router.close(home)
    router.move("s", 1 - home)
    assert router.assign("s", 10) == 1 - home


def test_a_session_moves_to_an_engine_that_is_able():
    router = Router(range(3))
    assert router.assign("s", 1, able={2}) == 2
    assert router.assign("s", 1, able={0}) == 0
    assert router.assign("other", 1, able=set()) is None


def test_forgotten_sessions_are_the_ones_that_called_longest_ago_and_none_that_is_running():
    router = Router(range(2), sessions_kept=3)
    running = router.assign("running", 1)
    for i in range(5):
        engine = router.assign(f"s{i}", 1)
        router.finish(f"s{i}", engine, 1)
    assert set(router.sessions) == {"running", "s3", "s4"}
    assert router.sessions["running"] == running


ACTIONS = st.tuples(st.sampled_from("afrmdvhc"), st.integers(0, 5), st.integers(1, 50))


@given(st.lists(ACTIONS, max_size=60))
def test_no_call_goes_to_an_engine_that_does_not_serve_and_what_is_outstanding_is_what_runs(actions):
    router = Router(range(3), sessions_kept=4)
    running, serving = [], {0, 1, 2}
    for action, number, tokens in actions:
        engine = number % 3
        if action == "a":
            chosen = router.assign(f"s{number}", tokens)
            assert (chosen is None) == (not serving)
            if chosen is not None:
                assert chosen in serving
                running.append((f"s{number}", chosen, tokens))
        elif action == "f" and running:
            router.finish(*running.pop())
        elif action == "r":
            router.release(f"s{number}")
        elif action == "m":
            router.move(f"s{number}", engine)
        elif action == "d":
            router.remove(engine)
            running = [call for call in running if call[1] != engine]
        elif action == "v":
            router.admit(engine)
        elif action == "h":
            router.hold(engine)
        elif action == "c":
            router.close(engine)
        if action in "vh":
            serving.add(engine)
        elif action in "dc":
            serving.discard(engine)
        assert router.serving == serving
        assert all(router.outstanding(e) == sum(t for _, c, t in running if c == e) for e in range(3))
        assert set(router.sessions.values()) <= router.serving
    for call in running:
        router.finish(*call)
    assert all(router.outstanding(e) == 0 for e in range(3))
