"""A real engine: what it was asked not to do any more it does not do, what it serves it names, and a bad call costs nothing.

One small engine serves the whole module, started from a process whose launcher has set everything that could mislead it.
"""

import asyncio
import contextlib
import itertools
import shutil
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.torch import load_file, save_file

from cluster.adapters import AdapterError, with_adapter
from cluster.call import EngineCall
from cluster.caller import Caller
from cluster.config import EngineSettings, RaySettings, SamplingSettings
from cluster.engine import EngineActor
from cluster.engine_shape import actor_options, replica_bundles, replica_strategy
from cluster.failures import InfrastructureError
from cluster.fingerprint import weights_hash
from cluster.home import model_path
from cluster.session import start_session
from tests.cluster.lora import make_adapter

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

LAUNCHER = {
    "OMP_NUM_THREADS": "97",
    "MKL_NUM_THREADS": "97",
    "CUDA_VISIBLE_DEVICES": "5",
    "SLURM_NTASKS": "64",
    "MASTER_ADDR": "10.255.255.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "WORLD_SIZE": "64",
    "VLLM_HOST_IP": "10.255.255.1",
    "VLLM_CPU_OMP_THREADS_BIND": "97-98",
}
SETTINGS = EngineSettings(
    cpus=0.5, threads=2, kv_cache_gib=1, max_model_len=1024, adapters=2, adapter_rank=8, drain_timeout_s=3
)
BASE = model_path("smollm2-135m")
NUMBERS = itertools.count()
LONG = 900
"""Tokens that take far longer to sample than any test here waits."""


def call(first, length=150, max_tokens=4, **more):
    ids = tuple(range(first, first + length))
    more = {"request_id": f"call-{next(NUMBERS)}", "timeout_s": 120.0} | more
    return EngineCall(ids=ids, max_tokens=max_tokens, **more)


@pytest.fixture(scope="module")
def engine():
    if not BASE.is_dir():
        pytest.skip("SmolLM2 is not prepared; run `make setup`")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LAUNCHER.items():
            patch.setenv(name, value)
        with start_session(RaySettings(cpus=2)):
            group = placement_group(replica_bundles(SETTINGS), replica_strategy(SETTINGS))
            actor = ray.remote(EngineActor).options(**actor_options(SETTINGS, group))
            handle = actor.remote(str(BASE), weights_hash(BASE), SETTINGS, SamplingSettings(), 7)
            ray.get(handle.facts.remote())
            yield handle
            ray.get(handle.shutdown.remote())
            remove_placement_group(group)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return make_adapter(BASE, tmp_path_factory.mktemp("adapters") / "first", 1)


def until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def unfinished(engine):
    return ray.get(engine.unfinished.remote())


def vllm_processes():
    """Those of this session: other engines may run on this machine."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("VLLM::" in word for word in child.cmdline()):
                found.append(child)
    return found


def test_the_engine_has_started_and_none_of_the_launchers_words_reached_its_processes(engine):
    said = [f"{name}={value}" for name, value in LAUNCHER.items()]
    own = vllm_processes()
    assert own
    for process in own:
        environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert not [word for word in said if word in environment]
        assert "OMP_NUM_THREADS=2" in environment


def test_figures_follow_the_work(engine):
    before = ray.get(engine.figures.remote())
    assert (before.running, before.waiting, before.kv_cache_use) == (0, 0, 0.0)
    answers = [engine.generate.remote(call(1000 + i, max_tokens=12)) for i in range(3)]
    until(lambda: ray.get(engine.figures.remote()).running == 3)
    assert 0 < ray.get(engine.figures.remote()).kv_cache_use < 1
    sampled = sum(len(output.token_ids) for output in ray.get(answers))
    after = ray.get(engine.figures.remote())
    assert after.generated_tokens - before.generated_tokens == sampled
    assert (after.running, after.waiting, after.preemptions) == (0, 0, 0)


def test_a_call_past_its_deadline_is_not_running_any_more(engine):
    with pytest.raises(InfrastructureError, match="engine-time-out"):
        ray.get(engine.generate.remote(call(2000, max_tokens=LONG, timeout_s=1.0)))
    assert unfinished(engine) == 0


def test_a_call_that_is_cancelled_where_it_is_awaited_is_aborted_at_the_engine(engine):
    async def story():
        caller = Caller()
        tasks = [asyncio.create_task(caller.generate(engine, call(3000 + i, max_tokens=LONG))) for i in range(3)]
        short = asyncio.create_task(caller.generate(engine, call(3100, max_tokens=6)))
        while await engine.unfinished.remote() < 4:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        # What nobody cancelled goes on to its end.
        assert (await short).token_ids

    asyncio.run(story())
    until(lambda: unfinished(engine) == 0, seconds=10)


def test_an_abort_that_overtakes_its_call_still_counts(engine):
    late = call(3500, max_tokens=LONG)
    ray.get(engine.abort.remote(late.request_id))
    with pytest.raises(InfrastructureError, match="engine-aborted"):
        ray.get(engine.generate.remote(late))
    assert unfinished(engine) == 0


def test_the_calls_of_a_killed_process_are_aborted_and_those_of_others_go_on(engine):
    class Worker:
        def __init__(self, engine):
            self._engine, self._caller = engine, Caller()

        async def ask(self, asked):
            return await self._caller.generate(self._engine, asked)

    worker = ray.remote(Worker).options(num_cpus=0, max_concurrency=10).remote(engine)
    lost = [worker.ask.remote(call(4000 + i, max_tokens=LONG)) for i in range(3)]
    other = engine.generate.remote(call(4100, max_tokens=LONG))
    until(lambda: unfinished(engine) == 4)
    ray.kill(worker)
    until(lambda: unfinished(engine) == 1, seconds=30)
    assert not ray.wait([other], timeout=0)[0]
    ray.cancel(other)
    until(lambda: unfinished(engine) == 0, seconds=10)
    del lost


def test_an_overlong_context_is_an_answer_and_what_does_not_fit_is_cut(engine):
    for length in (1024, 1500):
        output = ray.get(engine.generate.remote(call(100, length=length)))
        assert (output.token_ids, output.logprobs, output.finish) == ((), (), "length")
    output = ray.get(engine.generate.remote(call(100, length=1020, max_tokens=500)))
    assert 1 <= len(output.token_ids) <= 4


def test_malformed_calls_are_refused_one_by_one_and_the_engine_serves_on(engine):
    good = engine.generate.remote(call(5000, max_tokens=6))
    for bad, why in [
        (call(100, length=0), "no prompt ids"),
        (call(49_100), "vocabulary holds 0 to 49151"),
        (call(-5), "prompt ids from -5"),
        (call(100, max_tokens=0), "asks for 0 tokens"),
        (call(100, stop_ids=(10**9,)), "stop ids"),
    ]:
        with pytest.raises(ValueError, match=why):
            ray.get(engine.generate.remote(bad))
    with pytest.raises(InfrastructureError, match="no-adapter"):
        ray.get(engine.generate.remote(call(100, adapter="unheard-of")))
    assert ray.get(good).token_ids
    assert unfinished(engine) == 0


def test_base_and_adapter_are_served_side_by_side_each_under_its_name_and_with_its_own_cache(engine, adapter):
    base = weights_hash(BASE)
    named = ray.get(engine.load_adapter.remote("first", str(adapter)))
    assert named == with_adapter(base, weights_hash(adapter)) != base
    assert ray.get(engine.adapters.remote()) == {"first": named}
    # One call each of the same prompt, twice: only the second finds its prefix in the cache.
    prompt = {"length": 300, "max_tokens": 1}
    both = [call(6000, **prompt), call(6000, adapter="first", **prompt)]
    fresh = ray.get([engine.generate.remote(c) for c in both])
    again = ray.get([engine.generate.remote(c.model_copy(update={"request_id": c.request_id + "b"})) for c in both])
    assert [o.weights for o in fresh + again] == [base, named] * 2
    assert [o.cached_tokens for o in fresh] == [0, 0]
    assert all(o.cached_tokens >= 256 for o in again)


def test_the_adapters_log_probabilities_are_those_that_peft_gives_them(engine, adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ray.get(engine.load_adapter.remote("first", str(adapter)))
    asked = call(7000, length=60, max_tokens=12, adapter="first")
    output = ray.get(engine.generate.remote(asked))
    ids = torch.tensor([[*asked.ids, *output.token_ids]])
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)

    def logprobs(model):
        with torch.no_grad():
            logits = model(ids).logits[0, len(asked.ids) - 1 : -1].float()
        return torch.log_softmax(logits, -1)[range(len(output.token_ids)), list(output.token_ids)]

    sampled = torch.tensor(output.logprobs)
    plain = (logprobs(base) - sampled).abs().mean()
    adapted = (logprobs(PeftModel.from_pretrained(base, adapter)) - sampled).abs().mean()
    assert adapted < 0.2, (adapted, plain)
    assert plain > 3 * adapted, "the adapter makes no difference"


def test_adapters_that_cannot_be_loaded_are_refused_with_the_reason_and_what_was_there_stays(engine, adapter, tmp_path):
    ray.get(engine.load_adapter.remote("first", str(adapter)))
    before = ray.get(engine.adapters.remote())
    weights = load_file(adapter / "adapter_model.safetensors")

    def broken(name, tensors, **config):
        folder = tmp_path / name
        shutil.copytree(adapter, folder)
        text = (folder / "adapter_config.json").read_text()
        for key, value in config.items():
            text = text.replace(f'"{key}": 8', f'"{key}": {value}')
        (folder / "adapter_config.json").write_text(text)
        save_file(tensors, folder / "adapter_model.safetensors")
        return str(folder)

    renamed = {k.replace("q_proj", "query"): v for k, v in weights.items()}
    for path, why in [
        (str(tmp_path), "not an adapter folder"),
        (broken("rank", weights, r=64), "rank"),
        (broken("renamed", renamed), "query"),
    ]:
        for name in ("second", "first"):
            with pytest.raises(AdapterError, match=why):
                ray.get(engine.load_adapter.remote(name, path))
    assert ray.get(engine.adapters.remote()) == before
    output = ray.get(engine.generate.remote(call(8000, adapter="first")))
    assert output.weights == before["first"]


def test_new_bytes_under_a_name_replace_it_when_its_calls_have_ended(engine, adapter, tmp_path):
    first = ray.get(engine.load_adapter.remote("first", str(adapter)))
    running = engine.generate.remote(call(9000, max_tokens=12, adapter="first"))
    until(lambda: unfinished(engine) == 1)
    change = engine.load_adapter.remote("first", str(make_adapter(BASE, tmp_path / "second", 2)))
    assert ray.get(running).weights == first
    second = ray.get(change)
    assert second != first
    assert ray.get(engine.generate.remote(call(9000, adapter="first"))).weights == second
    ray.get(engine.unload_adapter.remote("first"))
    assert ray.get(engine.adapters.remote()) == {}


def other_checkpoint(folder, change):
    shutil.copytree(BASE, folder)
    weights = {name: change(name, tensor) for name, tensor in load_file(BASE / "model.safetensors").items()}
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})
    return str(folder), weights_hash(folder)


def test_other_full_weights_take_over_and_what_runs_too_long_is_given_up(engine, adapter, tmp_path):
    old = weights_hash(BASE)
    path, new = other_checkpoint(tmp_path / "other", lambda _, tensor: tensor * 1.05)
    with pytest.raises(InfrastructureError, match="other-weights"):
        ray.get(engine.reload.remote(path, "0" * 64))
    ray.get(engine.load_adapter.remote("first", str(adapter)))
    prompt = {"length": 300, "max_tokens": 1}
    assert ray.get(engine.generate.remote(call(10_000, **prompt))).weights == old
    running = engine.generate.remote(call(10_500, max_tokens=LONG))
    until(lambda: unfinished(engine) == 1)
    change = engine.reload.remote(path, new)
    with pytest.raises(InfrastructureError, match=r"engine-aborted: it ran on for 3 s when weights were to change"):
        ray.get(running)
    meanwhile = engine.generate.remote(call(10_000, **prompt))
    assert ray.get(change) == new
    output = ray.get(meanwhile)
    assert (output.weights, output.cached_tokens) == (new, 0)
    assert ray.get(engine.facts.remote()).weights == new
    assert ray.get(engine.adapters.remote()) == {}


def test_weights_read_in_place_sample_as_transformers_does_with_them(engine, tmp_path):
    from transformers import AutoModelForCausalLM

    path, new = other_checkpoint(tmp_path / "scaled", lambda name, t: t * (1.2 if "mlp" in name else 1.0))
    ray.get(engine.reload.remote(path, new))
    # Many tokens: in half precision a few of them may differ by more than the weights do.
    asked = call(300, length=60, max_tokens=64)
    output = ray.get(engine.generate.remote(asked))
    assert output.weights == new
    ids = torch.tensor([[*asked.ids, *output.token_ids]])

    def gap(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(ids).logits[0, len(asked.ids) - 1 : -1].float()
        found = torch.log_softmax(logits, -1)[range(len(output.token_ids)), list(output.token_ids)]
        return float((found - torch.tensor(output.logprobs)).abs().mean())

    assert gap(path) < 0.2
    assert gap(BASE) > 3 * gap(path)


def test_weights_that_cannot_be_served_are_refused_with_the_reason_and_the_old_ones_serve_on(engine, tmp_path):
    old = ray.get(engine.facts.remote()).weights
    lacking = other_checkpoint(tmp_path / "lacking", lambda name, t: None if "layers.7.mlp" in name else t)
    with pytest.raises(InfrastructureError, match=r"reload-failed: .*3 tensor.*missing: model\.layers\.7\.mlp"):
        ray.get(engine.reload.remote(*lacking))
    foreign, _ = other_checkpoint(tmp_path / "foreign", lambda _, t: t)
    config = (BASE / "config.json").read_text().replace("LlamaForCausalLM", "NoSuchModel")
    (tmp_path / "foreign" / "config.json").write_text(config)
    with pytest.raises(InfrastructureError, match=r"(?s)reload-failed: vLLM cannot serve .*foreign: .*NoSuchModel"):
        ray.get(engine.reload.remote(foreign, weights_hash(tmp_path / "foreign")))
    assert ray.get(engine.generate.remote(call(200))).weights == old


def test_when_vllms_process_dies_its_calls_are_lost_by_name_and_the_engine_says_so(engine):
    running = engine.generate.remote(call(11_000, max_tokens=LONG))
    until(lambda: unfinished(engine) == 1)
    for process in vllm_processes():
        process.kill()
    with pytest.raises(InfrastructureError, match="engine-lost"):
        ray.get(running)
    with pytest.raises(InfrastructureError, match="engine-lost"):
        ray.get(engine.figures.remote())
    with pytest.raises(InfrastructureError, match="engine-lost"):
        ray.get(engine.generate.remote(call(12_000)))
