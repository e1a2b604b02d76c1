"""Families of chat models: by what their template writes, which of vLLM's parsers reads their turns.

A family is told by its template alone, never by a model's name: fine-tuned models are renamed, their template stays.
"""

from cluster.record import Record


class Family(Record):
    """How one kind of model writes a call and a thought."""

    name: str
    signs: tuple[str, ...]
    """Texts that all stand in the template of such a model."""
    tool_parser: str
    """vLLM's registered name."""
    thought_end: str = "</think>"
    """Text that stands in the template if the model reasons."""
    reasoning_parser: str = ""
    """vLLM's registered name; empty where the family does not reason."""


FAMILIES = (
    Family(
        name="gpt-oss",
        signs=("<|channel|>", "<|call|>"),
        tool_parser="openai",
        thought_end="analysis",
        reasoning_parser="openai_gptoss",
    ),
    Family(
        name="DeepSeek V3, R1",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        tool_parser="deepseek_v3",
        reasoning_parser="deepseek_r1",
    ),
    # Its own reasoning parser asks the request whether the model was to think; the turn says so as well.
    Family(
        name="DeepSeek V3.1",
        signs=("<｜tool▁calls▁begin｜>",),
        tool_parser="deepseek_v31",
        reasoning_parser="deepseek_r1",
    ),
    Family(
        name="Mistral",
        signs=("[TOOL_CALLS]",),
        tool_parser="mistral",
        thought_end="[/THINK]",
        reasoning_parser="mistral",
    ),
    Family(name="GLM 4.5 to 4.7", signs=("<arg_key>",), tool_parser="glm45", reasoning_parser="glm45"),
    Family(
        name="Qwen3 Coder, Qwen3.5, Nemotron 3",
        signs=("<function=", "<tool_call>"),
        tool_parser="qwen3_coder",
        reasoning_parser="qwen3",
    ),
    Family(
        name="Qwen2.5, Qwen3, Hermes",
        signs=("<tool_call>", "arguments"),
        tool_parser="hermes",
        reasoning_parser="qwen3",
    ),
    Family(
        name="Muse Glimmer",
        signs=("<atem:function_calls>",),
        tool_parser="muse_glimmer",
        thought_end="to=self",
        reasoning_parser="muse_glimmer",
    ),
    Family(name="LFM2", signs=("<|tool_call_start|>",), tool_parser="lfm2"),
    Family(name="Gemma 4", signs=("<|tool_call>call:",), tool_parser="gemma4"),
    Family(name="Llama 3.1 to 3.3", signs=('{"name": ', '"parameters": '), tool_parser="llama3_json"),
)
"""The first whose signs are all there is the template's."""


def family_of(template: str) -> Family | None:
    """The family of a chat template, or None for one that is not known here."""
    return next((f for f in FAMILIES if all(sign in template for sign in f.signs)), None)


def chosen_parsers(template: str, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """(tool-call parser, reasoning parser) for a template, where `auto` stands for the family's own.

    A template of no known family is taken to write calls as Hermes does and not to reason.
    """
    family = family_of(template)
    if tool_parser == "auto":
        tool_parser = family.tool_parser if family else "hermes"
    if reasoning_parser == "auto":
        reasoning_parser = family.reasoning_parser if family and family.thought_end in template else ""
    return tool_parser, reasoning_parser
