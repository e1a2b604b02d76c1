"""One forecast step: a state machine over a model, tools and budgets, without I/O.

It is a generator. It yields what it wants next, a `Sample` or a `UseTools`, and is sent the answer; it returns the
record and the trajectory. Whoever drives it (asyncio on Ray, a trainer, a simulator) does the work and may abandon it:
a step that did not return has no record. Whatever the model does ends in a record; only infrastructure can fail a step,
by its driver not answering.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Sequence

from cluster.config import BudgetSettings, RetrievalSettings
from cluster.failures import Failure
from cluster.record import Record
from rollout.dialogue import Dialogue
from rollout.events.event import EventPrompt
from rollout.model import Completion, SampleRequest
from rollout.notebook import NotebookState, parse_notebook
from rollout.prompts import demand, prompt_hash, render
from rollout.record import ForecastKey, ForecastRecord, Usage
from rollout.report import ParsePolicy, parse_report
from rollout.tools import TOOLS, ToolWant, malformed, over_budget, read_call, shortened
from rollout.trajectory import FinishReason, Message, ToolCall, ToolResult, Trajectory, Turn

CLOSED: dict[FinishReason, str] = {
    "refused": "content-refused",
    "context-full": "context-full",
    "bad-request": "bad-request",
    "browsed": "provider-browsed",
}
"""Ways in which a server ends a conversation for good → the failure's reason, if there is no report to judge."""

ANSWER_RESERVE = 256
"""Tokens of context kept free for the report; when no more are left, tools are withdrawn."""


class StepTask(Record):
    """What a step is to do; everything in it is settled before the step begins."""

    key: ForecastKey
    event: EventPrompt
    carried: NotebookState | None = None
    """memory-on: what the episode's earlier steps left."""
    variant: str
    """Prompt variant."""
    policy: ParsePolicy
    budget: BudgetSettings
    retrieval: RetrievalSettings
    max_tokens: int
    """Per model call."""

    @property
    def session(self) -> str:
        """A chain of one event and rollout is one session, so that its steps share an engine's prefix cache."""
        k = self.key
        return f"{k.event}/{k.mode}/{k.rollout}" + ("" if k.mode == "memory-on" else f"/{k.date}")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Wants a Completion."""

    request: SampleRequest


@dataclasses.dataclass(frozen=True)
class UseTools:
    """Wants one ToolResult for each, in order."""

    wants: tuple[ToolWant, ...]


Want = Sample | UseTools
Answer = Completion | tuple[ToolResult, ...]
StepGenerator = Generator[Want, Answer, tuple[ForecastRecord, Trajectory]]


def forecast_step(task: StepTask, dialogue: Dialogue, clock: Callable[[], float]) -> StepGenerator:
    """Run one step. `clock` gives seconds from any origin; it bounds the step and fills the usage."""
    return _Step(task, dialogue, clock).run()


class _Step:
    def __init__(self, task: StepTask, dialogue: Dialogue, clock: Callable[[], float]) -> None:
        self._task, self._dialogue, self._clock = task, dialogue, clock
        self._began = clock()
        self._iterations, self._calls = task.budget.resolved
        if task.key.mode == "no-tools":
            self._iterations = 0
        self._demands = task.budget.answer_turns
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._tool_calls: Counter[str] = Counter()
        self._tool_errors: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._price = 0.0
        self._detail = ""

    def run(self) -> StepGenerator:
        task = self._task
        notebook = task.carried.notebook if task.carried else None
        added: Sequence[Message] = render(
            task.event, task.key.date, task.key.mode, task.variant, notebook, self._iterations, self._calls
        )
        offered = tuple(TOOLS) if self._offering() else ()
        while True:
            if self._turns and self._dialogue.cost(added, task.key.date) >= self._dialogue.room():
                return self._finish("context-full")
            prompt_ids = self._dialogue.append(added, [TOOLS[name] for name in offered], task.key.date)
            self._messages += added
            room = self._dialogue.room()
            if room < 1:
                return self._finish("prompt-too-long", Turn(messages=tuple(added), prompt_ids=prompt_ids, text=""))
            completion = yield Sample(
                SampleRequest(
                    session=task.session,
                    event=task.event,
                    date=task.key.date,
                    mode=task.key.mode,
                    messages=tuple(self._messages),
                    tools=offered,
                    prompt_ids=self._dialogue.ids(),
                    max_tokens=min(task.max_tokens, room),
                )
            )
            assert isinstance(completion, Completion)
            parsed = self._dialogue.accept(completion)
            calls = tuple(c.model_copy(update={"id": f"{len(self._turns)}-{c.id}"}) for c in parsed.tool_calls)
            self._count(completion)
            results: tuple[ToolResult, ...] = ()
            closed = CLOSED.get(completion.finish, "")
            if (calls or parsed.malformed) and not closed:
                results = yield from self._use(calls, parsed.malformed, offered)
                if offered:
                    self._iterations -= 1
            turn = Turn(
                messages=tuple(added),
                tools=offered,
                prompt_ids=prompt_ids,
                sampled_ids=completion.token_ids,
                logprobs=completion.logprobs,
                text=parsed.text,
                reasoning=parsed.reasoning,
                tool_calls=calls,
                malformed_calls=parsed.malformed,
                results=results,
                finish=completion.finish,
                seconds=completion.seconds,
                cached_tokens=completion.cached_tokens,
                engine=completion.engine,
                weights=completion.weights,
            )
            self._turns.append(turn)
            self._messages.append(turn.assistant())
            if closed:
                return self._finish(closed if len(self._turns) > 1 or closed != "context-full" else "prompt-too-long")
            if not results and self._answered(parsed.text):
                return self._finish("")
            added = [_tool_message(r) for r in results]
            # Tools that were withdrawn stay withdrawn: the demand said so.
            if results and offered and self._offering():
                continue
            if self._demands == 0:
                return self._finish("")
            self._demands -= 1
            offered = ()
            added.append(demand(task.key.mode, self._why(bool(results))))

    def _offering(self) -> bool:
        in_time = self._clock() - self._began < self._task.budget.seconds
        return self._iterations > 0 and self._calls > 0 and in_time and self._dialogue.room() > ANSWER_RESERVE

    def _answered(self, text: str) -> bool:
        """Whether there is a report to judge; a bad one is final too, only its absence earns a demand."""
        usable = parse_report(text, self._task.event, self._task.policy).verdict != "unusable"
        return usable or "<answer>" in text or "\\boxed{" in text

    def _why(self, called: bool) -> str:
        if not called:
            return "no-answer"
        if self._clock() - self._began >= self._task.budget.seconds:
            return "time"
        return "context" if self._dialogue.room() <= ANSWER_RESERVE else "budget"

    def _use(
        self, calls: Sequence[ToolCall], reasons: Sequence[str], offered: tuple[str, ...]
    ) -> Generator[Want, Answer, tuple[ToolResult, ...]]:
        """One result for each call, in order; what may not run is answered without running."""
        decided: list[ToolWant | ToolResult] = []
        for call in calls:
            if not offered or self._calls == 0:
                decided.append(over_budget(call))
                continue
            self._calls -= 1
            decided.append(read_call(call, offered, self._task.retrieval))
        decided += [malformed(reason) for reason in reasons]
        wants = tuple(d for d in decided if not isinstance(d, ToolResult))
        answers: tuple[ToolResult, ...] = ()
        if wants:
            answer = yield UseTools(wants)
            assert isinstance(answer, tuple)
            answers = answer
        ran = iter(answers)
        results: list[ToolResult] = [d if isinstance(d, ToolResult) else next(ran) for d in decided]
        for result in results:
            self._tool_calls[result.name if result.name in TOOLS else "other"] += 1
            self._totals["tool_milliseconds"] += round(result.seconds * 1000)
            if result.error:
                self._tool_errors[result.error] += 1
        return tuple(self._fit(results))

    def _fit(self, results: list[ToolResult]) -> list[ToolResult]:
        """Results cut, longest first, until they and a report fit the context; what was cut is said."""
        room = self._dialogue.room() - ANSWER_RESERVE
        total = self._cost(results)
        alone: dict[int, int] = {}
        while total > room:
            longest = max(range(len(results)), key=lambda i: len(results[i].text))
            result = results[longest]
            if len(result.text) <= len(_CUT):
                break
            if longest not in alone:
                alone[longest] = self._cost([result])
            whole = result.model_copy(update={"text": result.text.removesuffix(_CUT)})
            results[longest] = shortened(whole, (len(result.text) - len(_CUT)) // 2, _CUT)
            # Only what has changed is tokenized again.
            total -= alone[longest]
            alone[longest] = self._cost([results[longest]])
            total += alone[longest]
        return results

    def _cost(self, results: Sequence[ToolResult]) -> int:
        return self._dialogue.cost([_tool_message(r) for r in results], self._task.key.date)

    def _count(self, completion: Completion) -> None:
        context = len(self._dialogue.ids())
        # A model has either the one or the other: ids of ours, or counts of its server.
        self._totals["input"] += context - len(completion.token_ids) + completion.input_tokens
        self._totals["output"] += len(completion.token_ids) + completion.output_tokens
        self._totals["cached"] += completion.cached_tokens
        self._totals["model_milliseconds"] += round(completion.seconds * 1000)
        self._price += completion.price
        self._detail = completion.detail

    def _finish(self, truncated: str, last: Turn | None = None) -> tuple[ForecastRecord, Trajectory]:
        task = self._task
        turns = (*self._turns, last) if last else tuple(self._turns)
        # What a provider looked up knows no cutoff: no report of it is judged, no notebook carried on.
        said = "" if turns[-1].finish == "browsed" else turns[-1].text
        report = parse_report(said, task.event, task.policy)
        notebook = None
        if task.key.mode == "memory-on":
            notebook = parse_notebook(said, task.carried, task.event, task.budget.notebook_characters)
        failure = None
        if report.verdict == "unusable":
            reason = "unusable-answer" if self._answered(said) else "no-answer"
            if turns[-1].finish == "length":
                reason = "output-cut"
            failure = Failure(kind="model", reason=truncated or reason, detail=self._detail or report.why)
        usage = Usage(
            model_calls=len(self._turns),
            tool_calls=dict(self._tool_calls),
            tool_errors=dict(self._tool_errors),
            input_tokens=self._totals["input"],
            cached_tokens=self._totals["cached"],
            output_tokens=self._totals["output"],
            model_seconds=self._totals["model_milliseconds"] / 1000,
            tool_seconds=self._totals["tool_milliseconds"] / 1000,
            seconds=self._clock() - self._began,
            price=self._price,
        )
        record = ForecastRecord(
            key=task.key,
            options=task.event.options,
            report=report,
            notebook=notebook,
            failure=failure,
            usage=usage,
            prompt=prompt_hash(task.key.mode, task.variant),
            weights=turns[-1].weights,
        )
        return record, Trajectory(turns=turns, tokenizer=self._dialogue.tokenizer)


_CUT = "\n[cut: the context is nearly full]"


def _tool_message(result: ToolResult) -> Message:
    return Message(role="tool", content=result.text, call_id=result.call_id, name=result.name)
