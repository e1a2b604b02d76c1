"""An engine's figures are true also when its scheduler has stopped to speak."""

from types import SimpleNamespace

from cluster.figures import FiguresLog


def test_figures_age_while_there_is_work_and_are_zero_when_there_is_none():
    now = [100.0]
    log = FiguresLog(lambda: now[0])
    state = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    log.record(state, SimpleNamespace(num_preempted_reqs=1, num_generation_tokens=7))
    log.record(None, SimpleNamespace(num_preempted_reqs=0, num_generation_tokens=5), mm_cache_stats=None, engine_idx=0)
    now[0] = 104.0
    busy = log.figures(unfinished=9)
    assert (busy.running, busy.waiting, busy.kv_cache_use, busy.age_s) == (3, 6, 0.5, 4.0)
    idle = log.figures(unfinished=0)
    assert (idle.running, idle.waiting, idle.kv_cache_use, idle.age_s) == (0, 0, 0.0, 0.0)
    assert (idle.preemptions, idle.generated_tokens) == (1, 12)
