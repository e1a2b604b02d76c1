"""What ends a turn at the engine unasked is a stop id of the transcript too."""

import datetime as dt
import json
import shutil

import pytest
from test_chat import OURS

from cluster.failures import SettingsError
from cluster.home import model_path
from rollout.chat import HermesFormat, TemplateFormat, load_chat, load_rendered
from rollout.rendered import RenderedFormat
from rollout.stops import generation_stops
from rollout.trajectory import Message

DAY = dt.date(2031, 5, 4)
END_OF_TEXT, IM_END = 0, 2
"""SmolLM2's; its tokenizer names the second as its end of text."""


@pytest.fixture
def folder(tmp_path):
    """A model that ends turns by two tokens, as Qwen's do."""
    source = model_path("smollm2-135m")
    if not source.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    for file in (*source.glob("*token*"), *source.glob("vocab*"), *source.glob("merges*"), source / "config.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(OURS)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "made"), [("hermes", HermesFormat), ("template", TemplateFormat), ("rendered", RenderedFormat)]
)
def test_every_end_token_of_the_generation_config_ends_a_turn_and_is_no_text(folder, kind, made):
    parsers = ("hermes", "", "x")
    chat = load_rendered(folder, *parsers) if kind == "rendered" else load_chat(folder, kind, *parsers)
    assert isinstance(chat, made)
    assert set(chat.stop_ids) == {END_OF_TEXT, IM_END}
    whole = load_chat(folder, "hermes", *parsers).assistant(Message(role="assistant", content="It rains."), DAY)
    for end in (END_OF_TEXT, IM_END):
        assert chat.parse([*whole[:-1], end]).text == "It rains."


def test_a_turn_that_ended_by_another_token_is_closed_before_the_next_one(folder):
    chat = load_chat(folder, "hermes", "hermes", "", "x")
    message = [Message(role="user", content="Go on.")]
    assert chat.extend(message, END_OF_TEXT, DAY) == [IM_END, *chat.extend(message, IM_END, DAY)]


@pytest.mark.parametrize(("said", "ids"), [({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": 7}, (7,))])
def test_a_generation_config_may_name_one_end_token_or_none(tmp_path, said, ids):
    assert generation_stops(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert generation_stops(tmp_path) == ids


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": ["</s>"]}'])
def test_a_damaged_generation_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        generation_stops(tmp_path)
