"""Routing among replicas, as a state machine under any order of events."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retrieval.replicas import Replicas

COUNT, CALLS = 3, 2
LINES = ("search", "fetch")
REPLICAS = st.integers(0, COUNT - 1)


def test_ties_rotate_so_that_no_replica_gets_all_lone_queries() -> None:
    replicas = Replicas(3, 1)
    chosen = []
    for _ in range(6):
        replica = replicas.choose("search")
        assert replica is not None
        replicas.sent(replica, "search", 1)
        replicas.ended(replica, "search", 1)
        chosen.append(replica)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_the_replica_with_the_fewest_queries_is_chosen_and_a_full_one_never() -> None:
    replicas = Replicas(2, 2)
    replicas.sent(0, "search", 5)
    replicas.sent(1, "search", 1)
    replicas.sent(1, "search", 1)
    assert replicas.choose("search") == 0
    assert replicas.choose("fetch") == 1, "a call of another line finds room"
    replicas.sent(0, "search", 5)
    assert replicas.choose("search") is None
    replicas.ended(1, "search", 1)
    assert replicas.choose("search") == 1


def test_a_group_has_a_fault_only_when_nobody_is_left() -> None:
    replicas = Replicas(2, 1)
    replicas.give_up(0, "its disk")
    assert (replicas.fault, replicas.choose("search")) == (None, 1)
    assert replicas.lost(1)
    assert (replicas.fault, replicas.choose("search")) == (None, None)
    replicas.back(0)
    assert replicas.choose("search") is None, "what is gone does not come back"
    replicas.give_up(1, "restarts are spent")
    assert replicas.fault == "its disk; restarts are spent"


class AnyOrder(RuleBasedStateMachine):
    """Calls, losses and returns in any order, beside a plain account of what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = Replicas(COUNT, CALLS)
        self.under_way: list[tuple[int, str, int]] = []
        self.asking: set[int] = set()
        """Lost replicas that somebody has to ask about."""
        self.gone: set[int] = set()

    def held(self, replica: int, line: str) -> int:
        return sum((r, each) == (replica, line) for r, each, _ in self.under_way)

    @rule(line=st.sampled_from(LINES), requests=st.integers(1, 9))
    def send(self, line: str, requests: int) -> None:
        replica = self.replicas.choose(line)
        open_ = [r for r in range(COUNT) if r not in self.asking | self.gone and self.held(r, line) < CALLS]
        if replica is None:
            assert not open_
            return
        assert replica in open_
        assert self.replicas.outstanding(replica) == min(self.replicas.outstanding(r) for r in open_)
        self.replicas.sent(replica, line, requests)
        self.under_way.append((replica, line, requests))

    @precondition(lambda self: self.under_way)
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        self.replicas.ended(*self.under_way.pop(number % len(self.under_way)))

    @rule(replica=REPLICAS)
    def lose(self, replica: int) -> None:
        news = self.replicas.lost(replica)
        assert news == (replica not in self.asking | self.gone), "each loss is asked about once"
        if news:
            self.asking.add(replica)

    @precondition(lambda self: self.asking)
    @rule(number=st.integers(0, 99), comes_back=st.booleans())
    def settle(self, number: int, comes_back: bool) -> None:
        replica = sorted(self.asking)[number % len(self.asking)]
        self.asking.discard(replica)
        if comes_back:
            self.replicas.back(replica)
        else:
            self.replicas.give_up(replica, f"replica {replica}")
            self.gone.add(replica)

    @rule(replica=REPLICAS)
    def turn_out_to_be_damaged(self, replica: int) -> None:
        self.replicas.give_up(replica, f"replica {replica}")
        self.gone.add(replica)
        self.asking.discard(replica)

    @invariant()
    def the_account_agrees(self) -> None:
        for replica in range(COUNT):
            assert self.replicas.outstanding(replica) == sum(n for r, _, n in self.under_way if r == replica)
            states = {"gone": replica in self.gone, "down": replica in self.asking}
            assert states.get(self.replicas.states[replica], replica not in self.gone | self.asking)
            others = set(range(COUNT)) - {replica} - self.gone - self.asking
            assert self.replicas.others_open(replica) == bool(others)
        assert (self.replicas.fault is not None) == (len(self.gone) == COUNT)


TestAnyOrder = AnyOrder.TestCase
