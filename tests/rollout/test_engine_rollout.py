"""Real engines on Ray: the transcript is what the engine saw, a time-out leaves nothing running, a dead replica loses nothing.

One pool of two small engines serves the whole module.
"""

import asyncio
import importlib.util
from pathlib import Path

import pytest
import ray

from cluster.config import RaySettings, load_settings
from cluster.failures import InfrastructureError
from cluster.home import model_path
from cluster.pool import EnginePool
from cluster.session import start_session
from retrieval.build import build_from_settings
from retrieval.encoder import open_encoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from rollout.coordinator import Coordinator
from rollout.events.world import make_world, write_settings
from rollout.lease import Lease
from rollout.ledger import Ledger
from rollout.limits import Limits
from rollout.packed import unpack_trajectory
from rollout.plan import make_plan
from rollout.record import ForecastRecord
from rollout.wants import Commit, Start
from rollout.worker import Questions, RolloutWorker
from rollout.write_off import WriteOffs
from tests.cluster.lora import make_adapter

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    if not model_path("smollm2-135m").is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    folder = tmp_path_factory.mktemp("engines")
    made = make_world(folder / "world", 5, 3, 40, 4.0)
    overrides = [
        "index.encoder=hashing",
        f"run.directory={folder / 'run'}",
        "events.limit=1",
        "events.schedule.maximum=3",
        "rollout.prompt=compact",
        "rollout.budget.iterations=2",
        "sampling.max_tokens=48",
        "engine.replicas=2",
        "engine.cpus=0.5",
        "engine.threads=1",
        "engine.kv_cache_gib=1",
        "engine.max_model_len=1024",
        "engine.restarts=1",
        "engine.adapters=1",
        "rollout.check_share=1.0",
    ]
    settings = load_settings([write_settings(folder / "world", made)], overrides)
    build_from_settings(settings)
    return make_plan(settings)


@pytest.fixture(scope="module")
def pool(plan):
    s = plan.settings
    with (
        start_session(RaySettings(cpus=2)),
        EnginePool(plan.model, s.engine, s.sampling, 7, 30.0) as started,
    ):
        yield started


class Recorder:
    """An engine client that notes what was asked and answered, per session."""

    def __init__(self, client):
        self._client = client
        self.facts = client.facts
        self.calls = {}

    async def generate(self, session, ids, max_tokens, stop_ids, timeout_s):
        output, engine = await self._client.generate(session, ids, max_tokens, stop_ids, timeout_s=timeout_s)
        self.calls.setdefault(session, []).append((tuple(ids), output.token_ids, engine))
        return output, engine

    async def release(self, session):
        await self._client.release(session)


def run_all(plan, keys, worker, ledger):
    """These forecasts of a plan, to the last record; none may fail."""
    write_off = WriteOffs({e.id: e.options for e in plan.events}, "compact", plan.weights)
    coordinator = Coordinator(keys, {}, Limits.of(plan.settings), write_off)
    coordinator.joined(1, len(keys))

    async def story():
        while coordinator.halted is None:
            wants = coordinator.next(0.0)
            for want in wants:
                if isinstance(want, Commit):
                    ledger.commit(want.batch)
                    coordinator.committed(p.key for p in want.batch)
            leases = [want.lease for want in wants if isinstance(want, Start)]
            for outcome in await asyncio.gather(*map(worker.run, leases)):
                assert outcome.failure is None, outcome.failure
                assert coordinator.outcome(outcome, 0.0)

    asyncio.run(story())


def test_the_transcript_is_exactly_what_the_engine_saw_and_said(plan, pool, tmp_path):
    recorder = Recorder(pool.client())
    library = Library.open(plan.settings.index.directory)
    searcher = LocalSearcher(library, open_encoder("hashing", 8))
    questions = Questions.of(plan.events, plan.settings)
    worker = RolloutWorker(plan.settings, recorder, searcher, questions)
    with Ledger.create(tmp_path / "ledger.sqlite", plan.keys) as ledger:
        run_all(plan, plan.keys, worker, ledger)
        records = list(ledger.records())
        assert [r.key for r in records] == list(plan.keys)
        assert {r.key.mode for r in records} == {"no-tools", "memory-free", "memory-on"}
        expected, sampled = [], []
        for record in records:
            trajectory = ledger.trajectory(record.key)
            ids = []
            for turn in trajectory.turns:
                ids += turn.prompt_ids
                expected.append((tuple(ids), turn.sampled_ids, turn.engine))
                ids += turn.sampled_ids
                sampled.append(turn)
            assert ids == trajectory.token_ids()
            assert sum(trajectory.mask()) == record.usage.output_tokens > 0
    seen = [call for calls in recorder.calls.values() for call in calls]
    assert sorted(seen) == sorted(expected)
    assert all(p <= 0 for turn in sampled for p in turn.logprobs)
    assert all(len({engine for _, _, engine in calls}) == 1 for calls in recorder.calls.values()), "a session moved"
    assert len({engine for _, _, engine in seen}) == 2, "one engine idles"


def test_an_abandoned_step_and_an_overdue_turn_leave_nothing_running_at_the_engines(plan, pool):
    """The whole way down: the coordinator's word to the worker, its step's call, the pool, the engine."""
    deadlines = plan.settings.rollout.deadlines.model_copy(update={"turn_s": 0.3})
    long = plan.settings.model_copy(update={"sampling": plan.settings.sampling.model_copy(update={"max_tokens": 900})})
    short = long.model_copy(update={"rollout": long.rollout.model_copy(update={"deadlines": deadlines})})
    key = next(k for k in plan.keys if k.mode == "no-tools")
    lease = Lease(number=1, key=key, attempt=1, carried=None, last=True)

    async def unfinished():
        return sum([await handle.unfinished.remote() for handle in pool.handles().values()])

    async def until(running):
        async with asyncio.timeout(60):
            while bool(await unfinished()) != running:
                await asyncio.sleep(0.02)

    async def story():
        questions = Questions.of(plan.events, plan.settings)
        abandoning = RolloutWorker(long, pool.client(), None, questions)
        await abandoning.take([lease], [])
        await until(running=True)
        await abandoning.take([], [lease.number])
        await until(running=False)
        (abandoned,) = await abandoning.results(60.0)
        overdue = await RolloutWorker(short, pool.client(), None, questions).run(lease)
        await until(running=False)
        return abandoned.failure.reason, overdue.failure.reason

    assert asyncio.run(story()) == ("abandoned", "engine-time-out")


def test_a_chat_that_cannot_append_is_rendered_anew_and_every_prompt_is_kept_as_sent(plan, pool, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(plan.settings.model.path))
    bundled = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates/qwen2_5.jinja"
    tokenizer.chat_template = bundled.read_text() + "{{ messages | length }}:"
    tokenizer.save_pretrained(tmp_path)
    model = plan.settings.model.model_copy(update={"path": str(tmp_path), "transcript": "rendered"})
    settings = plan.settings.model_copy(update={"model": model})
    recorder = Recorder(pool.client())
    searcher = LocalSearcher(Library.open(plan.settings.index.directory), open_encoder("hashing", 8))
    worker = RolloutWorker(settings, recorder, searcher, Questions.of(plan.events, settings))
    keys = [k for k in plan.keys if k.mode == "memory-free"]

    async def run_all():
        leases = [Lease(number=i, key=key, attempt=1, carried=None, last=True) for i, key in enumerate(keys)]
        return await asyncio.gather(*map(worker.run, leases))

    outcomes = asyncio.run(run_all())
    assert [o.failure for o in outcomes] == [None] * len(keys)
    sent = []
    for outcome in outcomes:
        trajectory = unpack_trajectory(outcome.packed.trajectory)
        assert (
            trajectory.transcript == ForecastRecord.model_validate_json(outcome.packed.record).transcript == "rendered"
        )
        sent += [(t.prompt_ids, t.sampled_ids, t.engine) for t in trajectory.turns]
    assert sorted(sent) == sorted(call for calls in recorder.calls.values() for call in calls)
    assert len(sent) > len(keys), "some step took a second turn"


def gaps(model, ids, sampled, logprobs):
    """How far the log-probabilities of sampled ids are from those that a model of transformers gives them."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *sampled]])).logits[0, len(ids) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1)[range(len(sampled)), list(sampled)]
    return (expected - torch.tensor(logprobs)).abs()


def transformers_model(plan):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path(plan.settings.model.path), dtype=torch.bfloat16)


def test_logprobs_are_those_that_transformers_gives_the_sampled_ids(plan, pool):
    ids = list(range(300, 420))
    output, _ = asyncio.run(pool.client().generate("logprobs", ids, 16, []))
    assert output.token_ids
    found = gaps(transformers_model(plan), ids, output.token_ids, output.logprobs)
    # bfloat16 in two implementations: they agree to a few hundredths of a nat, now and then a tenth or two.
    assert found.mean() < 0.15, found
    assert found.max() < 0.8, found


def mean_gap(model, turns):
    found = [gaps(model, t.prompt_ids, t.sampled_ids, t.logprobs) for t in turns]
    return sum(float(f.sum()) for f in found) / sum(map(len, found))


def test_a_run_with_an_adapter_is_sampled_by_it_and_every_record_says_so(plan, pool, tmp_path):
    from peft import PeftModel

    adapter = make_adapter(model_path(plan.settings.model.path), tmp_path / "tuned", 1)
    model = plan.settings.model.model_copy(update={"adapter": adapter})
    tuned = make_plan(plan.settings.model_copy(update={"model": model}))
    keys = [k for k in tuned.keys if k.mode == "no-tools"]
    pool.swap(tuned.model)
    try:
        worker = RolloutWorker(tuned.settings, pool.client(), None, Questions.of(tuned.events, tuned.settings))
        with Ledger.create(tmp_path / "ledger.sqlite", tuned.keys) as ledger:
            run_all(tuned, keys, worker, ledger)
            forecasts = list(ledger.forecasts())
    finally:
        pool.swap(plan.model)
    assert [(r.key, r.key.model) for r, _ in forecasts] == [(k, "tuned") for k in keys]
    assert tuned.weights != plan.weights
    assert (
        {r.weights for r, _ in forecasts} == {t.weights for _, made in forecasts for t in made.turns} == {tuned.weights}
    )
    turns = [turn for _, made in forecasts for turn in made.turns[:1]]
    base = transformers_model(plan)
    untuned = mean_gap(base, turns)
    own = mean_gap(PeftModel.from_pretrained(base, adapter), turns)
    assert own < 0.15
    assert untuned > 3 * own
    assert asyncio.run(pool.client().generate("back", [5, 6, 7], 1, []))[0].weights == plan.weights


def test_a_request_that_does_not_fit_is_cut_at_nothing_and_the_engine_lives(pool):
    client = pool.client()
    output, _ = asyncio.run(client.generate("long", list(range(1100)), 8, []))
    assert (output.token_ids, output.finish) == ((), "length")
    output, _ = asyncio.run(client.generate("short", list(range(100, 140)), 4, []))
    assert output.token_ids


def test_a_killed_replica_costs_its_calls_and_is_started_again(pool):
    client = pool.client()

    async def story():
        first, name = await client.generate("s", list(range(100, 160)), 4, [])
        victim = int(name.split("-")[1].split(".")[0])
        ray.kill(pool.handles()[victim])
        with pytest.raises(InfrastructureError, match="engine-lost"):
            await client.generate("s", list(range(100, 160)), 4, [])
        elsewhere = (await client.generate("s", list(range(100, 160)), 4, []))[1]
        assert not elsewhere.startswith(f"engine-{victim}.")
        for attempt in range(400):
            # New sessions each time: one that was answered stays with its engine.
            names = {(await client.generate(f"probe-{attempt}-{i}", [5, 6, 7], 1, []))[1] for i in range(2)}
            if f"engine-{victim}.2" in names:
                return first
            await asyncio.sleep(0.5)
        raise AssertionError("the dead replica never came back")

    asyncio.run(story())
