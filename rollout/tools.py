"""The three tools of a step: what a model is told about them, what a call asks for, and what it is answered.

`read_call` decides and the renderers write, without effects; `ToolRunner` alone acts. A wrong call is answered with a
message that says what was wrong; it is never an exception. No tool takes a date. What a model is shown is bounded (here in
characters, by the step in tokens), and what was cut is said in the text and counted.
"""

import datetime as dt
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cluster.clock import monotonic
from cluster.config import RetrievalSettings, RolloutSettings
from cluster.record import Record
from retrieval.article import Article, Hit
from retrieval.view import DatedView, NotReturned
from rollout.report import plain_text
from rollout.sandbox import CellResult, Sandbox
from rollout.trajectory import MalformedCall, ShownArticle, ToolCall, ToolResult

QUERY_CHARACTERS = 2_000
"""A longer query would be cut unseen by any encoder."""
CODE_CHARACTERS = 100_000
NOTE_TOKENS = 12
"""Room for the note that says what was cut."""
_CHARACTERS_PER_TOKEN = 6
"""No more than this for each token of its bound is taken from an article: so much text seldom fits, and a step that counts
tokens is not to count those of a whole book."""
_LONGEST_TOKEN = 32
_NOTE = re.compile(r"\n\[cut: \d+ more characters\]\Z")

ToolName = Literal["search", "scrape", "python"]


class ToolSchema(Record):
    """A tool as a model is told of it."""

    name: ToolName
    summary: str
    """One line for small models."""
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments object."""

    def as_function(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible servers take a function."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Search(Record):
    """Wants the articles that answer a query best."""

    call_id: str
    query: str
    top_k: int


class Read(Record):
    """Wants the text of one article."""

    call_id: str
    article_id: str


class RunPython(Record):
    """Wants code to be run."""

    call_id: str
    code: str


ToolWant = Search | Read | RunPython


def _schema(name: ToolName, summary: str, description: str, **arguments: dict[str, Any]) -> ToolSchema:
    properties = {k: {n: v for n, v in spec.items() if n != "optional"} for k, spec in arguments.items()}
    required = [k for k, spec in arguments.items() if not spec.get("optional")]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ToolSchema(name=name, summary=summary, description=description, parameters=parameters)


TOOLS: dict[str, ToolSchema] = {
    schema.name: schema
    for schema in (
        _schema(
            "search",
            "search(query, top_k): dated articles, best first; top_k may be left out",
            "Finds the articles of the corpus that are most relevant to a query, best first. Each result gives id, title, "
            "publication day, score, URL and a short snippet.",
            query={"type": "string", "description": "What to look for: names, places, exact phrases."},
            top_k={"type": "integer", "minimum": 1, "description": "How many articles; optional.", "optional": True},
        ),
        _schema(
            "scrape",
            "scrape(article_id): the full text of an article that search returned",
            "Opens one article in full. Only ids that your own searches returned can be opened.",
            article_id={"type": "string", "description": "An id, copied exactly from a search result."},
        ),
        _schema(
            "python",
            "python(code): runs a script and shows what it prints",
            "Runs a Python script in a fresh interpreter with numpy, pandas and scipy, without network or files, for a few "
            "seconds. Returns what it prints, the value of a bare last expression, and any error. Nothing is kept between calls.",
            code={"type": "string", "description": "A complete script, with the numbers it needs written in."},
        ),
    )
}


def read_call(call: ToolCall, offered: Sequence[str], retrieval: RetrievalSettings) -> ToolWant | ToolResult:
    """What a call wants, or the answer that says what is wrong with it. Never raises."""
    if call.name not in offered:
        known = f"The tools are: {', '.join(offered)}." if offered else "No tools are offered now."
        return _wrong(call, "unknown-tool", f"There is no tool named {_quote(call.name)} here. {known}")
    schema = TOOLS[call.name]
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        return _wrong(call, "bad-json", f"The arguments of {call.name} are not valid JSON: {reason}.")
    fault = _fault(schema, arguments)
    if fault:
        return _wrong(call, "bad-arguments", f"{fault} Usage: {schema.summary}.")
    if call.name == "search":
        return _search(call, arguments, retrieval)
    if call.name == "scrape":
        return Read(call_id=call.id, article_id=plain_text(arguments["article_id"]))
    if len(arguments["code"]) > CODE_CHARACTERS:
        return _wrong(call, "bad-arguments", f"The code is longer than {CODE_CHARACTERS} characters.")
    return RunPython(call_id=call.id, code=plain_text(arguments["code"]))


def search_result(want: Search, hits: Sequence[Hit], limit: int) -> ToolResult:
    """The hits as text, two lines each. Hits of which nothing fits are not listed as shown."""
    if not hits:
        return ToolResult(call_id=want.call_id, name="search", text="No article matches.")
    blocks = [
        f"[{hit.article_id}] {_line(hit.title)} | published {hit.day} | score {_score(hit.score)} | {_line(hit.url)}\n"
        f"{_line(hit.snippet)}"
        for hit in hits
    ]
    text, cut, kept = _bounded("\n\n".join(blocks), limit)
    starts = [sum(len(block) + 2 for block in blocks[:i]) for i in range(len(blocks))]
    shown = [
        ShownArticle(article_id=h.article_id, day=h.day) for h, start in zip(hits, starts, strict=True) if start < kept
    ]
    return ToolResult(call_id=want.call_id, name="search", text=text, shown=tuple(shown), cut_characters=cut)


def read_result(want: Read, article: Article, limit: int) -> ToolResult:
    """One article in full."""
    header = f"[{article.id}] {_line(article.title)} | published {article.day} | {_line(article.url)}"
    text, cut, _ = _bounded(f"{header}\n\n{article.text}", limit)
    shown = (ShownArticle(article_id=article.id, day=article.day),)
    return ToolResult(call_id=want.call_id, name="scrape", text=text, shown=shown, cut_characters=cut)


def not_returned(want: Read) -> ToolResult:
    """The article was not among this step's own search results."""
    return ToolResult(
        call_id=want.call_id,
        name="scrape",
        text=f"No search of yours returned the id {_quote(want.article_id)}. Search first, then copy an id exactly.",
        error="not-returned",
    )


def python_result(want: RunPython, cell: CellResult, limit: int) -> ToolResult:
    """What the code printed, then its errors, then how it ended if not well."""
    parts = [cell.stdout]
    if cell.cut:
        parts.append(f"[cut: {cell.cut} characters of output]")
    parts.append(cell.error)
    if cell.timed_out:
        parts.append("Stopped at the time limit.")
    elif cell.flooded:
        parts.append("Stopped: it printed without end.")
    elif cell.exit_status and not cell.error:
        parts.append(f"Exit status {cell.exit_status}.")
    text = "\n".join(part.removesuffix("\n") for part in parts if part) or "Nothing was printed."
    text, cut, _ = _bounded(text, limit)
    return ToolResult(
        call_id=want.call_id,
        name="python",
        text=text,
        error="time-out" if cell.timed_out else "exit-status" if cell.exit_status else "",
        cut_characters=cell.cut + cut,
    )


def over_budget(call: ToolCall) -> ToolResult:
    """The call came after the budget was spent; nothing was run."""
    return _wrong(call, "budget", "Not run: the budget of tool calls is spent.")


def malformed(call: MalformedCall, result_id: str) -> ToolResult:
    """A call that could not be read at all, so that it has no id of its own and no known tool."""
    text = f"A tool call could not be read: {plain_text(call.reason[:500])}"
    return ToolResult(call_id=result_id, name="tool", text=text, error=call.kind)


def shortened(result: ToolResult, limit: int, tokens: Callable[[str], int]) -> ToolResult:
    """The result within `limit` tokens, with a note that says how many characters are missing.

    Of a program's output the beginning and the end stay, of everything else the beginning. An article whose id is cut off
    is not shown.
    """
    note = _NOTE.search(result.text) if result.cut_characters and result.name != "python" else None
    whole = result.text[: note.start()] if note else result.text
    room = max(0, limit - NOTE_TOKENS)
    if result.name == "python":
        head = beginning(whole, room // 2, tokens)
        tail = beginning(whole[head:][::-1], room // 2, lambda text: tokens(text[::-1]))
        missing = len(whole) - head - tail
        text = f"{whole[:head]}\n[cut: {missing} characters]\n{whole[len(whole) - tail :]}"
        return result.model_copy(update={"text": text, "cut_characters": result.cut_characters + missing})
    kept = beginning(whole, room, tokens)
    cut = result.cut_characters + len(whole) - kept
    return _cut_behind(result, whole[:kept], cut)


def beginning(text: str, limit: int, tokens: Callable[[str], int]) -> int:
    """Characters of a beginning of `text` that takes at most `limit` tokens; nearly the longest one."""
    # A token spells some characters: what is far beyond the limit need not be counted to be cut.
    kept = min(len(text), limit * _LONGEST_TOKEN)
    while kept and (found := tokens(text[:kept])) > limit:
        kept = min(kept - 1, kept * limit // found)
    return kept


def _cut_behind(result: ToolResult, text: str, cut: int) -> ToolResult:
    """The result with this beginning of its text and a note; only articles whose ids stand in it are shown."""
    shown: list[ShownArticle] = []
    end = 0
    for article in result.shown:
        # A line of its own that no title or snippet can hold: they are one line each, and hits are apart by a blank one.
        mark = ("\n\n" if shown else "") + f"[{article.article_id}] "
        start = text.find(mark, end)
        if start < 0:
            break
        shown.append(article)
        end = start + len(mark)
    note = f"\n[cut: {cut} more characters]"
    return result.model_copy(update={"text": text + note, "shown": tuple(shown), "cut_characters": cut})


class ToolRunner:
    """Carries out what a step wants, on its own view and day."""

    def __init__(
        self,
        view: DatedView,
        sandbox: Sandbox,
        date: dt.date,
        limits: RolloutSettings,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`date` is the forecast date that the Python tool's clock shows; `clock` gives seconds from any origin."""
        self._view = view
        self._sandbox = sandbox
        self._date = date
        self._limit = limits.budget.tool_output_tokens * _CHARACTERS_PER_TOKEN
        self._clock = clock

    async def run(self, want: ToolWant) -> ToolResult:
        """The answer to show to the model. Raises InfrastructureError, which no model is ever shown."""
        began = self._clock()
        result = await self._result(want)
        return result.model_copy(update={"seconds": self._clock() - began})

    async def _result(self, want: ToolWant) -> ToolResult:
        if isinstance(want, Search):
            return search_result(want, await self._view.search(want.query, want.top_k), self._limit)
        if isinstance(want, RunPython):
            return python_result(want, await self._sandbox.run(want.code, self._date), self._limit)
        try:
            article = await self._view.read(want.article_id)
        except NotReturned:
            return not_returned(want)
        return read_result(want, article, self._limit)


def _search(call: ToolCall, arguments: dict[str, Any], retrieval: RetrievalSettings) -> Search | ToolResult:
    query = plain_text(arguments["query"]).strip()
    top_k = arguments.get("top_k", retrieval.default_top_k)
    if not query:
        return _wrong(call, "bad-arguments", "The query is empty.")
    if len(query) > QUERY_CHARACTERS:
        return _wrong(call, "bad-arguments", f"The query is longer than {QUERY_CHARACTERS} characters.")
    if not 1 <= top_k <= retrieval.maximum_top_k:
        return _wrong(call, "bad-arguments", f"top_k must be from 1 to {retrieval.maximum_top_k}.")
    return Search(call_id=call.id, query=query, top_k=top_k)


def _fault(schema: ToolSchema, arguments: Any) -> str:
    """What is wrong with the arguments by the tool's schema; empty when nothing is."""
    if not isinstance(arguments, dict):
        return f"The arguments of {schema.name} must be a JSON object."
    properties = schema.parameters["properties"]
    for name in schema.parameters["required"]:
        if name not in arguments:
            return f"{schema.name} needs the argument {name}."
    for name, value in arguments.items():
        if name not in properties:
            return f"{schema.name} has no argument {_quote(name)}."
        wanted = properties[name]["type"]
        # The type itself: a boolean is an int to isinstance.
        if type(value) is not {"string": str, "integer": int}[wanted]:
            return f"The argument {name} of {schema.name} must be a JSON {wanted}."
    return ""


def _wrong(call: ToolCall, error: str, text: str) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, text=plain_text(text), error=error)


def _bounded(text: str, limit: int) -> tuple[str, int, int]:
    """(the text within `limit` characters, characters left out, characters of the original that stayed)."""
    if len(text) <= limit:
        return text, 0, len(text)
    room = max(0, limit - len(f"\n[cut: {len(text)} more characters]"))
    note = f"\n[cut: {len(text) - room} more characters]"
    return (text[:room] + note)[:limit], len(text) - room, room


def _score(score: float) -> str:
    """Fused scores lie around 0.02, a few ten-thousandths apart."""
    return f"{score:.3f}" if abs(score) >= 0.1 else f"{score:.4f}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _quote(name: str) -> str:
    return json.dumps(name[:100], ensure_ascii=False)
