"""What a simulated model says: anything that a real one might, drawn from a seed.

It reads nothing but the context it is given, like a model, and calls tools well and badly, answers well and badly, writes
notebooks or forgets them, and talks on until it is cut.
"""

import json
import random
import re
from collections.abc import Sequence

from cluster.record import Record
from rollout.simulator.words import END, WordFormat, spoken_call

OPTIONS = ("Yes", "No")

_ARTICLE = re.compile(r"\[(a-\d+)\]")


class Temper(Record):
    """How a model tends to behave: probabilities."""

    calls: float
    """That a turn uses tools, where they are offered."""
    wrong: float
    """That a call, an answer or a notebook is malformed."""
    silent: float
    """That a turn says nothing of use."""
    endless: float
    """That a turn goes on until it is cut."""
    several: float
    """That one more call follows."""


def draw_temper(chance: random.Random) -> Temper:
    """From obedient to hopeless."""
    return Temper(
        calls=chance.choice((0.0, 0.7, 0.9, 0.97)),
        wrong=chance.choice((0.0, 0.02, 0.2)),
        silent=chance.choice((0.0, 0.02, 0.2)),
        endless=chance.choice((0.0, 0.02, 0.2)),
        several=chance.choice((0.0, 0.3, 0.6)),
    )


class ScriptedSampler:
    """Continues a context."""

    def __init__(self, chat: WordFormat, temper: Temper) -> None:
        self._chat = chat
        self._temper = temper
        self._said = 0

    def sample(self, ids: Sequence[int], max_tokens: int, chance: random.Random) -> tuple[tuple[int, ...], str]:
        """(sampled ids with the stop token unless cut, `stop` or `length`)."""
        self._said += 1
        context = self._chat.decode(ids)
        spoken = self._chat.encode(self._turn(context, chance))
        if chance.random() < self._temper.endless:
            spoken = (spoken + self._chat.encode("and so on ") * (1 + max_tokens // 6))[: max_tokens + 1]
        spoken.append(END)
        if len(spoken) > max_tokens:
            return tuple(spoken[:max_tokens]), "length"
        return tuple(spoken), "stop"

    def _turn(self, context: str, chance: random.Random) -> str:
        temper = self._temper
        if chance.random() < temper.silent:
            return chance.choice(("", "I wonder.", "<answer>", "</tool_call>", "<belief_notebook>{}"))
        offered = context.startswith("tools ") and "No more tools" not in context
        if chance.random() < (temper.calls if offered else temper.calls * temper.wrong):
            said = self._call(context, chance)
            while chance.random() < temper.several:
                said += self._call(context, chance)
            return said
        return self._answer(chance) + (self._notebook(chance) if "belief_notebook" in context else "")

    def _call(self, context: str, chance: random.Random) -> str:
        if chance.random() < self._temper.wrong:
            return chance.choice(
                (
                    spoken_call("search", '{"query": "x", "until": "2040-01-01"}'),
                    spoken_call("search", '{"query": '),
                    spoken_call("browse", '{"url": "x"}'),
                    spoken_call("scrape", '{"article_id": "a-999"}'),
                    spoken_call("python", '"print(1)"'),
                    "<tool_call>nothing</tool_call>",
                )
            )
        seen = _ARTICLE.findall(context)
        name = chance.choice(("search", "scrape", "scrape", "python") if seen else ("search", "search", "python"))
        if name == "search":
            return spoken_call("search", json.dumps({"query": f"bridge {self._said}", "top_k": chance.randint(1, 3)}))
        if name == "scrape":
            return spoken_call("scrape", json.dumps({"article_id": chance.choice(seen)}))
        return spoken_call("python", json.dumps({"code": f"print({self._said})"}))

    def _answer(self, chance: random.Random) -> str:
        if chance.random() < self._temper.wrong:
            return chance.choice(("<answer>{}</answer>", '<answer>{"Yes": "likely"}</answer>', "Probably."))
        p = round(chance.random(), 3)
        return f"<answer>{json.dumps({OPTIONS[0]: p, OPTIONS[1]: round(1 - p, 3)})}</answer>"

    def _notebook(self, chance: random.Random) -> str:
        if chance.random() < self._temper.wrong:
            return chance.choice(("", "<belief_notebook>{}</belief_notebook>", "<belief_notebook>{"))
        # The number makes every notebook of a run a different one, so that a chain that carries a wrong one is seen.
        entry = {"claim": f"heard {self._said}", "supports": ["Yes"]}
        notebook = {"assessment": {"p": {"Yes": round(chance.random(), 3)}}, "evidence_ledger": [entry]}
        return f"<belief_notebook>{json.dumps(notebook)}</belief_notebook>"
