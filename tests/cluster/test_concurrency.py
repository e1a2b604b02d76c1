from hypothesis import given
from hypothesis import strategies as st

from cluster.call import EngineFigures
from cluster.concurrency import CUT, GROW_BELOW, TRIM_ABOVE, Concurrency
from cluster.config import ConcurrencySettings

ONE, TWO = (0, 1), (1, 1)
SETTINGS = ConcurrencySettings(start=20, minimum=4, maximum=100)


def figures(kv=0.1, waiting=0, running=10, preemptions=0):
    return EngineFigures(
        running=running, waiting=waiting, kv_cache_use=kv, preemptions=preemptions, generated_tokens=0, age_s=0.0
    )


def after(seen, serving=(ONE,), in_flight=10_000, times=1, made=None):
    made = made or Concurrency(SETTINGS)
    for _ in range(times):
        made.observe(seen, serving, in_flight)
    return made.limit(1)


def test_it_grows_while_there_is_room_up_to_its_maximum():
    assert after({ONE: figures()}) > 20
    assert after({ONE: figures()}, times=100) == 100


def test_it_does_not_grow_where_the_limit_is_not_reached():
    assert after({ONE: figures()}, in_flight=10, times=10) == 20


def test_the_fullest_engine_decides():
    assert after({ONE: figures(), TWO: figures(kv=GROW_BELOW + 0.01)}, (ONE, TWO)) == 20
    assert after({ONE: figures(), TWO: figures(kv=TRIM_ABOVE + 0.01)}, (ONE, TWO)) < 20


def test_it_stays_when_requests_begin_to_wait_and_is_trimmed_when_many_do():
    assert after({ONE: figures(waiting=5)}) == 20
    assert after({ONE: figures(waiting=15)}) < 20
    assert after({ONE: figures(waiting=15)}, times=100) == 4


def test_a_preemption_cuts_it_once():
    made = Concurrency(SETTINGS)
    assert after({ONE: figures(preemptions=7, kv=0.8)}, made=made) == 20, "what an engine counted before is no news"
    assert after({ONE: figures(preemptions=8, kv=0.8)}, made=made) == int(20 * CUT)
    assert after({ONE: figures(preemptions=8, kv=0.8)}, made=made) == int(20 * CUT)


def test_a_restarted_engine_counts_its_preemptions_anew():
    made = Concurrency(SETTINGS)
    after({ONE: figures(preemptions=7, kv=0.8)}, made=made)
    assert after({(0, 2): figures(preemptions=1, kv=0.8)}, serving=[(0, 2)], made=made) == 20


def test_it_is_frozen_while_the_figures_of_a_serving_engine_are_missing():
    assert after({ONE: figures(kv=0.99, preemptions=3)}, (ONE, TWO), times=5) == 20
    assert after({}, (), times=5) == 20


def test_an_engine_more_is_room_for_as_many_steps_more():
    made = Concurrency(SETTINGS)
    assert (made.limit(0), made.limit(1), made.limit(3)) == (0, 20, 60)


FIGURES = st.builds(
    figures,
    kv=st.floats(0, 1),
    waiting=st.integers(0, 100),
    running=st.integers(0, 100),
    preemptions=st.integers(0, 5),
)


@given(st.lists(st.tuples(FIGURES, st.integers(0, 200)), max_size=80))
def test_the_limit_keeps_its_bounds_and_never_grows_under_pressure(rounds):
    made = Concurrency(SETTINGS)
    for seen, in_flight in rounds:
        before = made.limit(1)
        made.observe({ONE: seen}, [ONE], in_flight)
        assert 4 <= made.limit(1) <= 100
        if seen.kv_cache_use >= GROW_BELOW:
            assert made.limit(1) <= before
