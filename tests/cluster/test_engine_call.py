"""What an engine is asked is judged before vLLM sees it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.call import EngineCall, tokens_allowed

VOCABULARY = 100


def call(ids=(1, 2), max_tokens=5, stop_ids=()):
    return EngineCall(request_id="r", ids=tuple(ids), max_tokens=max_tokens, stop_ids=stop_ids, timeout_s=1.0)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_prompt_and_answer_never_exceed_the_context(length, max_tokens, context):
    allowed = tokens_allowed(call([7] * length, max_tokens), context, VOCABULARY)
    assert 0 <= allowed <= max_tokens
    assert allowed == 0 or length + allowed <= context
    assert allowed == max_tokens or length + allowed >= context


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (call([]), "no prompt ids"),
        (call([1, VOCABULARY]), "vocabulary holds 0 to 99"),
        (call([-1]), "prompt ids from -1"),
        (call(stop_ids=(VOCABULARY,)), "stop ids"),
        (call(max_tokens=0), "asks for 0 tokens"),
    ],
)
def test_a_call_that_no_engine_could_serve_is_refused_with_its_name(bad, why):
    with pytest.raises(ValueError, match=f"call r .*{why}"):
        tokens_allowed(bad, 50, VOCABULARY)
