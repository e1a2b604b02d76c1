"""The requests of a pool: those that wait for an engine, and those that have one. A pure class; the router says which engine."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from cluster.routing import Router

TICKET_GRACE_S = 60.0
"""A granted ticket this long past its call's time-out has lost its caller: the engine itself has ended the call by then."""


@dataclass(frozen=True)
class Ticket:
    """One request."""

    session: str
    tokens: int
    """Prompt plus room for the answer."""
    adapter: str
    caller: str
    engine: int = -1
    """-1 while it waits."""
    until: float = float("inf")
    """When a granted one is given up."""


class Tickets:
    """Tickets by name, in order."""

    def __init__(self) -> None:
        self.router = Router()
        self.waiting: dict[str, Ticket] = {}
        """Not yet answered."""
        self.granted: dict[str, Ticket] = {}
        """Those whose end has not been said."""

    def add(self, name: str, ticket: Ticket) -> None:
        """A request waits. Raises RuntimeError if its ticket is in use."""
        if name in self.waiting or name in self.granted:
            raise RuntimeError(f"ticket {name} is in use")
        self.waiting[name] = ticket

    def grant(self, name: str, able: Container[int] | None, until: float) -> int | None:
        """The engine of a ticket that has waited; None while none of those that are `able` may serve it."""
        ticket = self.waiting[name]
        engine = self.router.assign(ticket.session, ticket.tokens, able)
        if engine is not None:
            del self.waiting[name]
            self.granted[name] = replace(ticket, engine=engine, until=until)
        return engine

    def give_back(self, name: str) -> Ticket | None:
        """A granted ticket whose request is no longer running; None if it is not known (any more)."""
        held = self.granted.pop(name, None)
        if held is not None:
            self.router.finish(held.session, held.engine, held.tokens)
        return held

    def lost(self, engine: int, names: Iterable[str]) -> None:
        """An engine is gone, and these tickets with it."""
        for name in names:
            del self.granted[name]
        self.router.remove(engine)

    def overdue(self, now: float) -> list[str]:
        """Granted tickets that are given up."""
        return [name for name, ticket in self.granted.items() if now > ticket.until]

    def of_caller(self, caller: str) -> list[str]:
        """Waiting and granted ones."""
        return [n for n, t in (*self.waiting.items(), *self.granted.items()) if t.caller == caller]

    def callers(self) -> frozenset[str]:
        """Who waits for an answer now."""
        return frozenset(t.caller for t in (*self.waiting.values(), *self.granted.values()) if t.caller)
