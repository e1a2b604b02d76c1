"""Chat templates as TRL bundles them, on SmolLM2's tokenizer with the templates' own control tokens added."""

import copy
import datetime as dt
import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest

from cluster.failures import SettingsError
from cluster.home import model_path
from rollout.chat import HermesFormat, TemplateFormat, load_chat
from rollout.chat_template import ToolsNotRendered
from rollout.families import chosen_parsers
from rollout.tools import TOOLS
from rollout.trajectory import Message, ToolCall
from rollout.turn_parser import TurnParser

DAY = dt.date(2031, 5, 4)
FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
CONTROL = re.compile(
    r"<[|｜][^<>\s]*?[|｜]>|<(?:start|end)_of_(?:turn|utterance)>|</?tool_(?:call|response)>|</?think>"
    r"|<\|(?:tool|turn|tool_call|tool_response)>|<(?:tool|turn|tool_call|tool_response)\|>"
)
TOOLLESS = (
    "cohere cohere2 deepseek_r1_distill deepseekv3 gemma3 llama3 phi3 phi3_5 qwen2_5_vl",
    "no place for tools",
    "does not render tools",
)
PICTURES = ("idefics3 smolvlm", "takes content only in parts", "drops the user's message")
PARTS = ("llava_next", "takes content only in parts", "'str object' has no attribute 'text'")
SYSTEMLESS = ("gemma", "refuses a system turn", "System role not supported")
REFUSED = {
    name + suffix: says
    for names, _, says in (TOOLLESS, PICTURES, PARTS, SYSTEMLESS)
    for name in names.split()
    for suffix in ("", "_training")
}
CARRIED = [name for name in TEMPLATES if name not in REFUSED]
REWRITING = {"diffusion_gemma", "gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
REWRITING |= {"diffusion_gemma_training", "gptoss_training", *(n for n in TEMPLATES if n.startswith("nemotron_3"))}
"""They write an earlier turn in another way than it was begun or sampled (most drop its reasoning)."""
SYSTEM, USER = Message(role="system", content="Be exact."), Message(role="user", content="Who wins?")
DEMAND = Message(role="user", content="No more tools. Write the report now.")


def call(number: int, name: str, **arguments: object) -> ToolCall:
    return ToolCall(id=f"0-{number}", name=name, arguments=json.dumps(arguments))


def result(of: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, call_id=of.id, name=of.name)


@pytest.fixture(scope="module")
def smollm():
    path = model_path("smollm2-135m")
    if not path.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    found = sorted({token for source in TEMPLATES.values() for token in CONTROL.findall(source)})
    tokenizer.add_tokens(found, special_tokens=True)
    return tokenizer


def made(tokenizer, source: str) -> TemplateFormat:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = source
    return TemplateFormat(tokenizer, TurnParser(tokenizer, *chosen_parsers(source, "auto", "auto")))


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n in REFUSED])
def test_a_template_that_cannot_say_what_a_step_says_is_refused_with_the_reason(smollm, name):
    with pytest.raises(SettingsError, match=re.escape(REFUSED[name])):
        made(smollm, TEMPLATES[name])


@pytest.mark.parametrize("name", CARRIED)
def test_appending_gives_what_the_template_writes_for_the_whole_conversation(smollm, name):
    chat = made(smollm, TEMPLATES[name])
    tools = list(TOOLS.values())
    first, second, third = call(0, "search", query="poll"), call(1, "python", code="1+1"), call(2, "search", query="b")
    if chat._anchoring == "words":
        pytest.skip("it renders no calls, so its own rendering of this conversation is another one")
    single = chat._anchoring == "call"
    calls = (first,) if single else (first, second)
    results = [result(c, f"found {c.id}") for c in calls]
    rounds = [
        (Message(role="assistant", content="", tool_calls=calls), results),
        (Message(role="assistant", content="", tool_calls=(third,)), [result(third, "more"), DEMAND]),
        (Message(role="assistant", content="It is open."), [DEMAND]),
    ]
    said: list[Message] = [SYSTEM, USER]
    text = prefix = chat.rendered(said, tools, DAY)
    assert smollm.decode(chat.open(said, tools, DAY)) == text
    appends = True
    for spoken, following in rounds:
        ids = chat.assistant(spoken, DAY)
        assert ids[-1] in chat.stop_ids
        extension = chat.extend(following, ids[-1], DAY)
        assert chat.extend(following, 5, DAY)[-len(extension) :] == extension, "a cut turn is closed first"
        said += [spoken, *following]
        whole = chat.rendered(said, tools, DAY)
        appended = smollm.decode(extension)
        assert whole.endswith(appended)
        assert all(m.content in appended for m in following)
        text += smollm.decode(ids) + appended
        appends = appends and whole.startswith(prefix + smollm.decode(ids))
        prefix = whole
        if appends:
            assert text == whole
    assert appends == (name not in REWRITING), "compared as a whole where the template keeps earlier turns as they were"


@pytest.mark.parametrize("name", CARRIED)
def test_no_template_tells_a_model_another_day_than_the_forecast_date(smollm, name):
    chat = made(smollm, TEMPLATES[name])
    spoken = Message(role="assistant", content="It is open.")
    made_ids = [
        chat.open([SYSTEM, USER], list(TOOLS.values()), DAY),
        chat.open([USER], [], DAY),
        chat.extend([DEMAND], None, DAY),
        chat.extend([result(call(0, "search"), "r"), DEMAND], None, DAY),
        chat.assistant(spoken, DAY),
    ]
    text = "\n".join(smollm.decode(ids) for ids in made_ids)
    assert not [form for form in forms(dt.datetime.now(dt.UTC).date()) if form in text]
    assert "26 Jul 2024" not in text
    if re.search(r"strftime_now|date_string|current_date", TEMPLATES[name]):
        assert [form for form in forms(DAY) if form in text]


def forms(day: dt.date) -> list[str]:
    patterns = (
        "%Y-%m-%d",
        "%Y/%m/%d",
        "%d %b %Y",
        "%d %B %Y",
        "%B %d, %Y",
        "%b %d, %Y",
        "%d.%m.%Y",
        "%m/%d/%Y",
        "%d/%m/%Y",
    )
    return [day.strftime(p) for p in (*patterns, "%Y%m%d", "%B %-d, %Y", "%-d %B %Y")]


def test_every_date_a_template_asks_for_is_the_forecast_date(smollm):
    asks = TEMPLATES["qwen2_5"] + "{{ strftime_now('%d|%m|%Y %H:%M') }} {{ date_string }} {{ current_date }}"
    ids = made(smollm, asks).open([USER], [], DAY)
    assert smollm.decode(ids).endswith("04|05|2031 00:00 04 May 2031 2031-05-04")


@pytest.mark.parametrize("name", CARRIED)
def test_text_of_others_holds_no_control_token(smollm, name):
    chat = made(smollm, TEMPLATES[name])
    control = set(smollm.get_added_vocab().values())
    tokens = "".join(t for t in smollm.get_added_vocab() if t.strip())

    def controls(text: str, tool: str) -> list[int]:
        message = Message(role="tool", content=f"r{text}", call_id=text, name=tool)
        return [i for i in chat.extend([message], None, DAY) if i in control]

    assert controls(tokens, f"search{tokens}") == controls("", "search")
    assert controls("qz7anchor7zq", "qz7anchor7zq") == controls("", "search")


def test_arguments_hold_no_control_token_either(smollm):
    chat = made(smollm, TEMPLATES["qwen3"])
    control = set(smollm.get_added_vocab().values())

    def controls(query: str) -> list[int]:
        asked = ToolCall(id="0", name="search", arguments='{"query": "' + query + '"}')
        spoken = Message(role="assistant", content="", tool_calls=(asked,))
        return [i for i in chat.assistant(spoken, DAY) if i in control]

    assert controls("a<|im_end|>") == controls("a\\u003c|im_end|>") == controls("a")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("{{- message.content }}", "{{- 'gone' }}"), "cannot append tool results"),
        (("<|im_", "<|unknown_"), "no control token"),
    ],
)
def test_what_a_template_loses_behind_a_turn_is_found_before_the_first_step(smollm, change, says):
    assert change[0] in TEMPLATES["qwen2_5"]
    with pytest.raises(SettingsError, match=says):
        made(smollm, TEMPLATES["qwen2_5"].replace(*change))


def test_a_template_whose_appended_text_depends_on_the_turn_is_refused(smollm):
    counts = TEMPLATES["qwen2_5"] + "{{ messages | length }}"
    with pytest.raises(SettingsError, match="depends on what stands before"):
        made(smollm, counts)


def test_a_tokenizer_without_an_end_of_text_still_stops(smollm):
    tokenizer = copy.deepcopy(smollm)
    tokenizer.eos_token = None
    chat = made(tokenizer, TEMPLATES["qwen3"])
    assert chat.stop_ids == (smollm.convert_tokens_to_ids("<|im_end|>"),)


def test_auto_takes_our_format_where_the_template_cannot_carry_a_step(smollm, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for name, level in (("gemma", logging.WARNING), ("llama3", logging.INFO)):
        tokenizer = copy.copy(smollm)
        tokenizer.chat_template = TEMPLATES[name]
        tokenizer.save_pretrained(tmp_path / name)
        caplog.clear()
        assert isinstance(load_chat(tmp_path / name, "auto", "hermes", "", "x"), HermesFormat)
        (told,) = [r for r in caplog.records if r.name == "rollout.chat"]
        assert told.levelno == level
        with pytest.raises(SettingsError):
            load_chat(tmp_path / name, "template", "hermes", "", "x")


def test_auto_takes_the_template_that_can(smollm, tmp_path):
    tokenizer = copy.copy(smollm)
    tokenizer.chat_template = TEMPLATES["qwen3"]
    tokenizer.save_pretrained(tmp_path)
    assert isinstance(load_chat(tmp_path, "auto", "hermes", "", "x"), TemplateFormat)


def test_a_template_without_tools_says_so_by_type(smollm):
    with pytest.raises(ToolsNotRendered):
        made(smollm, TEMPLATES["llama3"])
