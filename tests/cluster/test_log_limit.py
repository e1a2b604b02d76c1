"""A failure that repeats itself prints once with a count, and no line is lost uncounted."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from cluster.log_limit import LogLimit


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def limited(interval=60.0):
    logger = logging.getLogger("tests.log_limit")
    lines, now = Lines(), [0.0]
    logger.handlers = [lines]
    return LogLimit(logger, interval, lambda: now[0]), lines, now


def test_a_kind_prints_once_and_again_after_the_interval_with_the_count_since():
    limit, lines, now = limited()
    for second in range(0, 121):
        now[0] = float(second)
        limit.warning("engine-lost", "step %d lost its engine", second)
    assert lines.said == [
        "step 0 lost its engine",
        "step 60 lost its engine (engine-lost: 60 in 60 s)",
        "step 120 lost its engine (engine-lost: 60 in 60 s)",
    ]


def test_one_kind_does_not_silence_another():
    limit, lines, _ = limited()
    limit.warning("engine-lost", "a")
    limit.error("tool-lost", "b")
    assert lines.said == ["a", "b"]


def test_what_was_counted_is_said_at_the_end_once():
    limit, lines, _ = limited()
    for _ in range(4):
        limit.warning("engine-lost", "a")
    limit.flush()
    limit.flush()
    assert lines.said == ["a", "engine-lost: 3 more"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 50))))
def test_printed_and_counted_lines_are_all_lines(steps):
    limit, lines, now = limited(10.0)
    for kind, wait in steps:
        now[0] += wait
        limit.warning(kind, "line")
    limit.flush()
    said = 0
    for line in lines.said:
        if "more" in line:
            said += int(line.split()[1])
        elif "(" in line:
            said += int(line.split(": ")[1].split()[0])
        else:
            said += 1
    assert said == len(steps)
