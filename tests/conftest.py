"""What all tests share: properties are judged by what they find, not by how long a busy machine takes; and a test that
does not say that it needs Ray leaves none behind."""

import pytest
import ray
from hypothesis import settings

settings.register_profile("pastcast", deadline=None)
settings.load_profile("pastcast")


@pytest.fixture(autouse=True)
def no_session_by_accident(request):
    """Ray starts a session by itself where one is asked for anything; the tests after it would stand in that session."""
    before = ray.is_initialized()
    yield
    if (
        not before
        and ray.is_initialized()
        and not {"ray", "vllm", "e2e"} & {m.name for m in request.node.iter_markers()}
    ):
        ray.shutdown()
        pytest.fail("this test has started a Ray session; mark it `ray`, or do not ask Ray for anything")


@pytest.fixture
def session_ends():
    """For a test whose code starts a session by itself."""
    yield
    ray.shutdown()
