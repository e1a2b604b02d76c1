"""What the endpoint's settings refuse: browsing, secrets, and what cannot work."""

import pytest

from cluster.config import EndpointSettings, dump_settings, load_settings
from cluster.endpoint.browsing import body_fault, browsing_shown
from cluster.failures import SettingsError

GOOD = ["model.kind=endpoint", "endpoint.base_url=https://api.example.com/v1", "endpoint.model=m-1"]


@pytest.mark.parametrize(
    "override",
    [
        "endpoint.model=vendor/m-1:online",
        "endpoint.model=vendor/M-1:ONLINE",
        "endpoint.model=gpt-4o-search-preview",
        "endpoint.model=vendor/sonar-pro",
        "endpoint.extra_body={plugins: [{id: web}]}",
        "endpoint.extra_body={web_search_options: {}}",
        "endpoint.extra_body={provider: {web_search: true}}",
        "endpoint.extra_body={enable_search: true}",
        "endpoint.extra_body={tools: [{type: web_search}]}",
        "endpoint.extra_body={tool_choice: required}",
        "endpoint.extra_body={models: [other]}",
        "endpoint.extra_body={messages: []}",
        "endpoint.extra_body={api_key: sk-secret}",
        "endpoint.key_env=[sk-secret]",
        "endpoint.key_env=['sk secret']",
        "endpoint.base_url=https://user:secret@api.example.com/v1",
        "endpoint.base_url=https://api.example.com/v1?key=secret",
        "endpoint.base_url=api.example.com",
        "endpoint.base_url=https://api.example.com/v1/chat/completions",
    ],
)
def test_settings_that_browse_or_hold_a_secret_are_refused_without_repeating_it(override):
    with pytest.raises(SettingsError) as error:
        load_settings([], [*GOOD, override])
    assert "secret" not in str(error.value)
    assert str(error.value).count("\n") == 1


@pytest.mark.parametrize("missing", ["endpoint.base_url", "endpoint.model"])
def test_an_endpoint_needs_an_address_and_a_model(missing):
    with pytest.raises(SettingsError, match=rf"{missing} must be set"):
        load_settings([], [o for o in GOOD if not o.startswith(missing)])


def test_a_bound_on_cost_needs_a_price():
    with pytest.raises(SettingsError, match=r"run\.max_cost needs endpoint\.price"):
        load_settings([], [*GOOD, "run.max_cost=5"])
    load_settings([], [*GOOD, "run.max_cost=5", "endpoint.price={input: 1, output: 2}"])


def test_the_endpoints_model_names_the_run():
    assert load_settings([], GOOD).label == "m-1"
    assert load_settings([], [*GOOD, "model.name=mine"]).label == "mine"


def test_no_secret_can_stand_in_saved_settings(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    saved = dump_settings(load_settings([], [*GOOD, "endpoint.key_env=[MY_KEY]"]))
    assert "MY_KEY" in saved
    assert "sk-secret" not in saved


def test_a_final_body_may_offer_our_tools_only():
    ours = {"type": "function", "function": {"name": "search"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "web_search plugins"}], "tools": [ours]}
    assert body_fault(body, {"search"}) == ""
    for foreign in (
        {"type": "web_search"},
        {"type": "function", "function": {"name": "browse"}},
        {"googleSearch": {}},
        "web",
    ):
        assert "not one of ours" in body_fault(body | {"tools": [ours, foreign]}, {"search"})
    assert body_fault(body | {"plugins": []}, {"search"})
    assert body_fault(body | {"model": "m:online"}, {"search"})


def test_a_query_about_web_search_is_not_taken_for_browsing():
    message = {"role": "assistant", "content": "plugins web_search", "annotations": [], "citations": None}
    assert browsing_shown({"choices": [{"message": message}], "usage": {"prompt_tokens": 3}}) == ""
    assert browsing_shown({"choices": [{"message": message | {"annotations": [{"type": "url_citation"}]}}]})
    assert browsing_shown({"choices": [], "citations": ["https://x"]})
    assert browsing_shown({"choices": [], "usage": {"server_tool_use": {"web_search_requests": 0}}}) == ""


def test_defaults_ask_for_nothing_that_browses():
    assert EndpointSettings().extra_body == {}
