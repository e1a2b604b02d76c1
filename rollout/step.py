"""One forecast step: a state machine over a model, tools and budgets, without I/O.

It is a generator. It yields what it wants next, a `Sample` or a `UseTools`, and is sent the answer; it returns the
record and the trajectory. Whoever drives it (asyncio on Ray, a trainer, a simulator) does the work and may abandon it:
a step that did not return has no record. Whatever the model does ends in a record; only infrastructure can fail a step,
by its driver not answering.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import get_args

from cluster.config import BudgetSettings, RetrievalSettings
from cluster.failures import Failure
from cluster.record import Record
from rollout.dialogue import Dialogue
from rollout.events.event import EventPrompt
from rollout.model import Completion, SampleRequest
from rollout.notebook import NotebookState, parse_notebook
from rollout.prompts import Scarce, budget_left, demand, prompt_hash, render
from rollout.record import CarriedNotebook, ForecastKey, ForecastRecord, Usage
from rollout.report import ParsePolicy, parse_report
from rollout.tools import NOTE_TOKENS, TOOLS, ToolWant, malformed, over_budget, read_call, shortened
from rollout.trajectory import (
    FinishReason,
    MalformedCall,
    MalformedKind,
    Message,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    call_id,
)

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
        """Its calls are of this session."""
        return self.key.session


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
        self._malformed: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._price = 0.0
        self._detail = ""
        self._round_seconds = 0.0
        """The longest turn so far, its tools included."""

    def run(self) -> StepGenerator:
        task = self._task
        added: Sequence[Message] = render(
            task.event, task.key.date, task.key.mode, task.variant, task.carried, self._iterations, self._calls
        )
        offered = tuple(TOOLS) if self._offering() else ()
        while True:
            began = self._clock()
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
            calls = parsed.tool_calls
            self._count(completion)
            results: tuple[ToolResult, ...] = ()
            told: Sequence[Message] = ()
            goes_on = False
            closed = CLOSED.get(completion.finish, "")
            if (calls or parsed.malformed) and not closed:
                self._iterations -= bool(offered)
                ran = yield from self._use(calls, parsed.malformed, offered)
                self._round_seconds = max(self._round_seconds, self._clock() - began)
                # Tools that were withdrawn stay withdrawn: the demand said so.
                goes_on = bool(offered) and self._offering()
                results, told = self._shown(ran, goes_on)
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
            # Some endpoints want to read their reasoning again; it never leaves the step.
            self._messages.append(turn.assistant().model_copy(update={"reasoning": turn.reasoning}))
            if closed:
                return self._finish(closed if len(self._turns) > 1 or closed != "context-full" else "prompt-too-long")
            if not results and self._answered(parsed.text):
                return self._finish("")
            added = list(told)
            if goes_on:
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
        self, calls: Sequence[ToolCall], unread: Sequence[MalformedCall], offered: tuple[str, ...]
    ) -> Generator[Want, Answer, list[ToolResult]]:
        """One result for each call, in order; what may not run is answered without running."""
        decided: list[ToolWant | ToolResult] = []
        for call in calls:
            if not offered or self._calls == 0:
                decided.append(over_budget(call))
                continue
            self._calls -= 1
            decided.append(read_call(call, offered, self._task.retrieval))
        turn, known = len(self._turns), len(calls)
        decided += [malformed(call, call_id(turn, known + i)) for i, call in enumerate(unread)]
        wants = tuple(d for d in decided if not isinstance(d, ToolResult))
        answers: tuple[ToolResult, ...] = ()
        if wants:
            answer = yield UseTools(wants)
            assert isinstance(answer, tuple)
            answers = answer
        ran = iter(answers)
        results = [d if isinstance(d, ToolResult) else next(ran) for d in decided]
        for result in results:
            self._tool_calls[_counted(result.name)] += 1
            self._totals["tool_milliseconds"] += round(result.seconds * 1000)
            if result.error:
                self._tool_errors[result.error] += 1
            if result.error in get_args(MalformedKind):
                self._malformed[result.error] += 1
        return results

    def _shown(self, results: list[ToolResult], goes_on: bool) -> tuple[tuple[ToolResult, ...], list[Message]]:
        """The results within their bounds, and the messages that tell them; the last one says what is left."""
        longest_notice = budget_left(self._iterations, self._calls, "context") if goes_on else ""
        kept, room = self._fit(results, longest_notice)
        for result in kept:
            if result.cut_characters:
                self._cut[_counted(result.name)] += result.cut_characters
        notice = budget_left(self._iterations, self._calls, self._scarce(room)) if goes_on else ""
        return tuple(kept), _tool_messages([r.text for r in kept], kept, notice)

    def _fit(self, results: list[ToolResult], notice: str) -> tuple[list[ToolResult], int]:
        """Results cut to their own bounds, and the longest of them until all and a report fit the context; and the room that
        they leave, about."""
        budget, tokens = self._task.budget, self._dialogue.tokens
        bounds = [budget.python_output_tokens if r.name == "python" else budget.tool_output_tokens for r in results]
        sizes = [tokens(r.text) for r in results]
        frame = self._dialogue.cost(_tool_messages([""] * len(results), results, notice), self._task.key.date)
        room = self._dialogue.room() - frame
        level = fair_share([min(size, bound) for size, bound in zip(sizes, bounds, strict=True)], room - ANSWER_RESERVE)
        # What is no longer than the note about a cut is not worth one.
        limits = [max(NOTE_TOKENS, min(bound, level)) for bound in bounds]
        kept = [
            result if size <= limit else shortened(result, limit, tokens)
            for result, size, limit in zip(results, sizes, limits, strict=True)
        ]
        return kept, room - sum(min(size, limit) for size, limit in zip(sizes, limits, strict=True))

    def _scarce(self, room: int) -> Scarce:
        """What may end the tools at the next turn although turns and calls are left; `room` is what that turn begins with."""
        if self._task.budget.seconds - (self._clock() - self._began) <= self._round_seconds:
            return "time"
        return "context" if room <= ANSWER_RESERVE + self._task.max_tokens else ""

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
            notebook = parse_notebook(
                said, task.carried, task.event, task.key.date, task.budget.notebook_tokens, self._dialogue.tokens
            )
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
            malformed_calls=dict(self._malformed),
            cut_characters=dict(self._cut),
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
            carried=CarriedNotebook.of(task.carried),
            failure=failure,
            usage=usage,
            prompt=prompt_hash(task.key.mode, task.variant),
            weights=turns[-1].weights,
            transcript=self._dialogue.transcript,
        )
        trajectory = Trajectory(turns=turns, tokenizer=self._dialogue.tokenizer, transcript=self._dialogue.transcript)
        return record, trajectory


def fair_share(sizes: Sequence[int], room: int) -> int:
    """The largest bound with which all sizes, each cut to it, fit `room`; at least 0. Without need to cut, the largest size."""
    left = max(0, room)
    for cut, size in enumerate(sorted(sizes)):
        others = len(sizes) - cut
        if size * others > left:
            return left // others
        left -= size
    return max(sizes, default=0)


def _tool_messages(texts: Sequence[str], results: Sequence[ToolResult], notice: str) -> list[Message]:
    """One message for each result, the last one with the notice below it."""
    told = [
        Message(role="tool", content=t, call_id=r.call_id, name=r.name) for t, r in zip(texts, results, strict=True)
    ]
    if notice:
        told[-1] = told[-1].model_copy(update={"content": f"{told[-1].content}\n{notice}"})
    return told


def _counted(name: str) -> str:
    return name if name in TOOLS else "other"
