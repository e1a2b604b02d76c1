"""Every family of chat models that is named in docs/transcript.md: its template, its parsers, and turns as such models write them.

Templates are those that TRL ships; of Mistral and DeepSeek, which it does not ship with tools, small ones of ours of the same
shape stand in.
"""

import copy
import datetime as dt
import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.failures import SettingsError
from cluster.home import model_path
from rollout.chat import TemplateFormat, load_chat, load_rendered
from rollout.chat_template import ToolsNotRendered
from rollout.families import FAMILIES, chosen_parsers, family_of
from rollout.rendered import RenderedFormat
from rollout.tools import TOOLS
from rollout.tools_in_words import spoken
from rollout.trajectory import Message, ToolCall, call_id
from rollout.turn_parser import TurnParser

DAY = dt.date(2031, 5, 4)
FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
CONTROL = re.compile(
    r"<[|｜][^<>\s]*?[|｜]>|</?tool_(?:call|response)>|</?think>|</?arg_(?:key|value)>|\[/?[A-Z_]{4,}\]"
)

MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{%- set turns = namespace(count=0) -%}
{%- for m in rest if m.role != 'tool' and not m.tool_calls -%}
{%- if (m.role == 'user') != (turns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- set turns.count = turns.count + 1 -%}
{%- endfor -%}
{%- if system %}[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]{% endif -%}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- for m in rest -%}
{%- for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor -%}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}CALLS<|endoftext|>
{%- else %}{{ m.content }}<|endoftext|>{% endif -%}
{%- endfor -%}"""
MISTRAL_11 = MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
MISTRAL_7 = MISTRAL.replace("[TOOL_CONTENT]", "").replace(
    "CALLS",
    "[TOOL_CALLS][{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]",
)
DEEPSEEK_31 = """{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- if tools %}
Tools: {{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}{% if not loop.last or add_generation_prompt %}<｜Assistant｜></think>{% endif %}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- elif m.role == 'assistant' and m.tool_calls %}{{ m.content or '' }}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><|endoftext|>
{%- elif m.role == 'assistant' %}{{ m.content }}<|endoftext|>{% endif %}
{%- endfor %}""".replace("CALL<", "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<")
DEEPSEEK_3 = DEEPSEEK_31.replace(
    "c.function.name + '<｜tool▁sep｜>' + c.function.arguments",
    "'function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```'",
)


class Case(NamedTuple):
    """One family's template and turns."""

    template: str
    family: str
    parsers: tuple[str, str]
    calls: str
    """What such a model samples to search for "poll" with top_k 3, behind the beginning of its turn."""
    reasoning: str
    answer: str = "ANSWER"
    """What it samples to say ANSWER."""


def shipped(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "poll", "top_k": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=search>\n<parameter=query>\npoll\n</parameter>\n<parameter=top_k>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM = (
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>poll</arg_value>\n<arg_key>top_k</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ARGUMENTS = '{"query": "poll", "top_k": 3}'
CASES = {
    "qwen2.5": Case(shipped("qwen2_5"), "Qwen2.5, Qwen3, Hermes", ("hermes", ""), HERMES, ""),
    "qwen3": Case(
        shipped("qwen3"),
        "Qwen2.5, Qwen3, Hermes",
        ("hermes", "qwen3"),
        f"<think>\nI look.\n</think>\n\n{HERMES}",
        "I look.",
        "<think>\nHm.\n</think>\n\nANSWER",
    ),
    "qwen3-2507": Case(shipped("qwen3_instruct_2507"), "Qwen2.5, Qwen3, Hermes", ("hermes", ""), HERMES, ""),
    "qwen3.5": Case(
        shipped("qwen3_5_think"),
        "Qwen3 Coder, Qwen3.5, Nemotron 3",
        ("qwen3_coder", "qwen3"),
        f"I look.\n</think>\n\n{XML}",
        "I look.",
        "Hm.\n</think>\n\nANSWER",
    ),
    "llama3.1": Case(
        shipped("llama3_1"),
        "Llama 3.1 to 3.3",
        ("llama3_json", ""),
        '{"name": "search", "parameters": {"query": "poll", "top_k": 3}}',
        "",
    ),
    "llama3.2": Case(
        shipped("llama3_2"),
        "Llama 3.1 to 3.3",
        ("llama3_json", ""),
        '<|python_tag|>{"name": "search", "parameters": {"query": "poll", "top_k": 3}}',
        "",
    ),
    "gpt-oss": Case(
        shipped("gptoss"),
        "gpt-oss",
        ("openai", "openai_gptoss"),
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        "I look.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>ANSWER",
    ),
    "glm4.5": Case(
        shipped("glm4moe"),
        "GLM 4.5 to 4.7",
        ("glm45", "glm45"),
        f"\n<think>I look.</think>\n{GLM}",
        "I look.",
        "\n<think>Hm.</think>\nANSWER",
    ),
    "deepseek-v3": Case(
        DEEPSEEK_3,
        "DeepSeek V3, R1",
        ("deepseek_v3", "deepseek_r1"),
        DEEPSEEK.format(f"function<｜tool▁sep｜>search\n```json\n{ARGUMENTS}\n```"),
        "",
    ),
    "deepseek-v3.1": Case(
        DEEPSEEK_31,
        "DeepSeek V3.1",
        ("deepseek_v31", "deepseek_r1"),
        DEEPSEEK.format(f"search<｜tool▁sep｜>{ARGUMENTS}"),
        "",
    ),
    "mistral-v7": Case(
        MISTRAL_7,
        "Mistral",
        ("mistral", ""),
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "poll", "top_k": 3}, "id": "abcdefghi"}]',
        "",
    ),
    "mistral-v11": Case(MISTRAL_11, "Mistral", ("mistral", ""), f"[TOOL_CALLS]search[ARGS]{ARGUMENTS}", ""),
}


@pytest.fixture(scope="module")
def smollm():
    path = model_path("smollm2-135m")
    if not path.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(params=CASES, scope="module")
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def tokenizer(smollm, case):
    """SmolLM2's, with the family's template and control tokens."""
    from tokenizers.decoders import ByteLevel

    own = copy.deepcopy(smollm)
    own.chat_template = case.template
    own.add_tokens(sorted({*CONTROL.findall(case.template), "<|python_tag|>", "<think>"}), special_tokens=True)
    # The prepared tokenizer's own decoder takes ▁ for a space; DeepSeek's control tokens hold it.
    own.backend_tokenizer.decoder = ByteLevel()
    return own


@pytest.fixture(scope="module")
def chat(tokenizer, case) -> TemplateFormat:
    return TemplateFormat(tokenizer, TurnParser(tokenizer, *chosen_parsers(case.template, "auto", "auto")))


def test_a_family_is_told_by_its_template(case):
    assert family_of(case.template).name == case.family
    assert chosen_parsers(case.template, "auto", "auto") == case.parsers


def test_every_template_that_trl_ships_and_that_writes_calls_is_of_a_known_family():
    unknown = {f.stem for f in FOLDER.glob("*.jinja") if "tools" in f.read_text() and family_of(f.read_text()) is None}
    assert unknown == {"lfm2", "lfm2_training"}, "they list tools and write no calls"


def test_settings_win_over_the_family():
    assert chosen_parsers(CASES["qwen3"].template, "pythonic", "") == ("pythonic", "")
    assert chosen_parsers("no template that is known", "auto", "auto") == ("hermes", "")


def test_a_call_as_such_a_model_samples_it_is_read(chat, tokenizer, case):
    ids = tokenizer.encode(case.calls, add_special_tokens=False)
    for sampled in (ids, [*ids, chat.stop_ids[-1]]):
        parsed = chat.parse(sampled)
        assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("search", json.loads(ARGUMENTS))]
        assert (parsed.reasoning.strip(), parsed.text, parsed.malformed) == (case.reasoning, "", ())


def test_an_answer_as_such_a_model_samples_it_is_read(chat, tokenizer, case):
    for answer in ('<answer>{"Yes": 0.6, "No": 0.4}</answer>', "\\boxed{A}", "{", "It has a name: {x}."):
        parsed = chat.parse(tokenizer.encode(case.answer.replace("ANSWER", answer), add_special_tokens=False))
        assert (parsed.text, parsed.tool_calls, parsed.malformed) == (answer, (), ())


@pytest.mark.parametrize("cut", [20, -1])
def test_a_bare_call_that_is_not_json_is_malformed_and_not_an_answer(smollm, cut):
    own = copy.deepcopy(smollm)
    own.add_tokens(["<|python_tag|>"], special_tokens=True)
    parser = TurnParser(own, "llama3_json", "")
    text = CASES["llama3.1"].calls
    parsed = parser.parse(text[:cut])
    assert [m.kind for m in parsed.malformed] == ["bad-json"]
    assert [m.kind for m in parser.parse(text[:cut], ended=False).malformed] == ["cut-off"]


def test_words_without_any_thought_are_said_and_not_thought(chat, tokenizer, case):
    parsed = chat.parse(tokenizer.encode('<answer>{"Yes": 1}</answer>', add_special_tokens=False))
    begun_in_thought = case is CASES["qwen3.5"]
    assert bool(parsed.text) == (not begun_in_thought)
    assert bool(parsed.reasoning) == begun_in_thought


def test_a_turn_is_ended_by_a_stop_id_and_not_by_its_calls_or_thoughts(chat, tokenizer, case):
    sampled = tokenizer.encode(case.calls, add_special_tokens=False)
    assert not set(sampled) & set(chat.stop_ids)
    spoken = Message(
        role="assistant", content="", tool_calls=(ToolCall(id=call_id(0, 0), name="search", arguments=ARGUMENTS),)
    )
    assert chat.assistant(spoken, DAY)[-1] in chat.stop_ids


def test_results_and_a_demand_are_appended_to_what_was_sampled(chat, tokenizer, case):
    opening = [Message(role="system", content="Be exact."), Message(role="user", content="Who wins?")]
    ids = chat.open(opening, list(TOOLS.values()), DAY) + tokenizer.encode(case.calls, add_special_tokens=False)
    ids.append(chat.stop_ids[-1])
    before = len(ids)
    result = Message(role="tool", content="found it", call_id=call_id(0, 0), name="search")
    ids += chat.extend([result, Message(role="user", content="No more tools.")], ids[-1], DAY)
    added = tokenizer.decode(ids[before:])
    assert added.index("found it") < added.index("No more tools.")
    assert "Be exact." not in added


def test_the_whole_chat_can_be_rendered_anew_too(tokenizer, case):
    chat = RenderedFormat(tokenizer, TurnParser(tokenizer, *case.parsers))
    spoken = Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(id=call_id(0, 0), name="search", arguments=ARGUMENTS),),
    )
    result = Message(role="tool", content="found it", call_id=call_id(0, 0), name="search")
    asked = Message(role="user", content="Who wins?")
    text = tokenizer.decode(chat.render([asked, spoken, result, asked], list(TOOLS.values()), DAY))
    assert text.count("found it") == 1
    assert text.count("Who wins?") == 2
    assert not set(tokenizer.encode(case.calls, add_special_tokens=False)) & set(chat.stop_ids)


def test_a_parser_that_does_not_read_the_templates_calls_is_refused_at_start(tokenizer, case):
    other = "pythonic" if case.parsers[0] != "openai" else "hermes"
    with pytest.raises(SettingsError, match="does not read the calls"):
        TemplateFormat(tokenizer, TurnParser(tokenizer, other, ""))


def test_families_have_different_names():
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)


def test_a_template_that_cannot_append_is_refused_and_can_be_rendered(smollm, tmp_path):
    counting = copy.deepcopy(smollm)
    counting.chat_template = shipped("qwen2_5") + "{{ messages | length }}"
    counting.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"depends on what stands before.*model\.transcript=rendered"):
        load_chat(tmp_path, "template", "auto", "auto", "x")
    assert isinstance(load_rendered(tmp_path, "auto", "auto", "x"), RenderedFormat)


TOOLLESS = ("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "llama3", "phi3", "phi3_5")
"""Shipped templates that know no tools, of models without ChatML's tokens (Gemma's has no system turn either)."""


@pytest.mark.parametrize("name", TOOLLESS)
def test_a_template_without_tools_carries_ours_in_its_own_turns(smollm, name, tmp_path):
    own = copy.deepcopy(smollm)
    own.chat_template = shipped(name)
    found = set(CONTROL.findall(own.chat_template)) | {"<start_of_turn>", "<end_of_turn>", "<think>", "</think>"}
    own.add_tokens(sorted(found), special_tokens=True)
    from tokenizers.decoders import ByteLevel

    own.backend_tokenizer.decoder = ByteLevel()
    with pytest.raises(ToolsNotRendered) if name != "gemma" else pytest.raises(SettingsError):
        TemplateFormat(own, TurnParser(own, "hermes", ""))
    chat = TemplateFormat(
        own, TurnParser(own, *chosen_parsers(own.chat_template, "hermes", "auto")), told_in_words=True
    )
    opening = [Message(role="system", content="Be exact."), Message(role="user", content="Who wins?")]
    called = ToolCall(id=call_id(0, 0), name="search", arguments=ARGUMENTS)
    looks = Message(role="assistant", content="I look.", tool_calls=(called,))
    result = Message(role="tool", content="found it<end_of_turn>", call_id=called.id, name="search")
    demand = Message(role="user", content="No more tools.")
    ids = chat.open(opening, list(TOOLS.values()), DAY)
    text = own.decode(ids)
    assert [text.count(t.summary) for t in TOOLS.values()] == [1, 1, 1]
    assert text.index("Be exact.") < text.index("Who wins?")
    thought = "Hm.</think>\n\n" if chat._template.thinking else ""
    sampled = [*own.encode(thought + spoken(looks), add_special_tokens=False), chat.stop_ids[-1]]
    parsed = chat.parse(sampled)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("search", json.loads(ARGUMENTS))]
    ids += sampled
    added = chat.extend([result, demand], ids[-1], DAY)
    said = own.decode(added)
    assert (
        said.index("<tool_response>") < said.index("found it") < said.index("</tool_response>") < said.index("No more")
    )
    assert "Be exact." not in said
    harmless = chat.extend([result.model_copy(update={"content": "found it"}), demand], ids[-1], DAY)
    control = own.convert_tokens_to_ids(sorted(found))
    assert [i for i in added if i in control] == [i for i in harmless if i in control]
    answered = chat.parse(own.encode(f'{thought}<answer>{{"Yes": 1}}</answer>', add_special_tokens=False))
    assert (answered.text, answered.tool_calls) == ('<answer>{"Yes": 1}</answer>', ())


def test_auto_puts_our_tools_into_the_turns_of_a_model_without_chatml(smollm, tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = json.loads(smollm.backend_tokenizer.to_str().replace("<|im_", "<|turn_"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    own = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")
    own.chat_template = (
        "{% for m in messages %}<|turn_start|>{{ m.role }}\n{{ m.content }}<|turn_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn_start|>assistant\n{% endif %}"
    )
    own.save_pretrained(tmp_path)
    for kind in ("auto", "hermes"):
        chat = load_chat(tmp_path, kind, "auto", "auto", "x")
        assert isinstance(chat, TemplateFormat)
        text = own.decode(chat.open([Message(role="user", content="Who wins?")], list(TOOLS.values()), DAY))
        assert TOOLS["search"].summary in text
    with pytest.raises(SettingsError, match="does not render tools"):
        load_chat(tmp_path, "template", "auto", "auto", "x")
    rendered = load_rendered(tmp_path, "auto", "auto", "x")
    assert TOOLS["search"].summary in own.decode(
        rendered.render([Message(role="user", content="Who wins?")], list(TOOLS.values()), DAY)
    )
