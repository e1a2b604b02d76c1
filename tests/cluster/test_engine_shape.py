"""One replica's share of a cluster: what it asks, and how it may lie."""

import pytest
from pydantic import ValidationError

from cluster.config import EngineSettings
from cluster.engine_shape import pool_bundles, replica_bundles, replica_strategy, scattered
from cluster.resources import shortage, total

TWO_NODES = EngineSettings(cpus=4, gpus=8, tensor_parallel=4, pipeline_parallel=2, nodes=2)


@pytest.mark.parametrize(
    ("settings", "bundles", "strategy"),
    [
        (EngineSettings(cpus=2), [{"CPU": 2.0}], "STRICT_PACK"),
        (EngineSettings(cpus=0), [{"CPU": 0.001}], "STRICT_PACK"),
        (EngineSettings(cpus=1, gpus=0.5), [{"CPU": 1.0, "GPU": 0.5}], "STRICT_PACK"),
        (EngineSettings(cpus=1, gpus=4, tensor_parallel=4), [{"CPU": 1.0, "GPU": 4.0}], "STRICT_PACK"),
        (TWO_NODES, [{"CPU": 4.0, "GPU": 1.0}, *[{"GPU": 1.0}] * 7], "PACK"),
    ],
)
def test_a_replica_asks_for_one_bundle_on_a_node_and_one_for_each_rank_over_several(settings, bundles, strategy):
    assert replica_bundles(settings) == bundles
    assert replica_strategy(settings) == strategy


def test_a_pool_asks_for_all_its_replicas_and_the_message_names_what_is_missing():
    settings = EngineSettings(replicas=3, cpus=2, gpus=2, tensor_parallel=2)
    assert total(pool_bundles(settings)) == {"CPU": 6.0, "GPU": 6.0}
    said = shortage(pool_bundles(settings), [{"CPU": 64.0, "GPU": 4.0}])
    assert said is not None
    assert "asked: 6 CPU, 6 GPU in 3 bundle(s)" in said
    assert "missing: 2 GPU" in said


def test_ranks_that_share_layers_must_lie_together():
    assert scattered(["a"] * 4 + ["b"] * 4, TWO_NODES) is None
    assert scattered(["a"] * 8, TWO_NODES) is None
    assert "placed as 5 + 3 on 2 node(s)" in str(scattered(["a"] * 5 + ["b"] * 3, TWO_NODES))
    one_rank_stages = EngineSettings(gpus=4, pipeline_parallel=4, nodes=2)
    assert "2 + 1 + 1 on 3 node(s), but engine.nodes=2" in str(scattered(["a", "a", "b", "c"], one_rank_stages))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"gpus": 2}, "uses one"),
        ({"gpus": 1.5}, "uses one"),
        ({"gpus": 3, "tensor_parallel": 2}, "needs gpus=2"),
        ({"gpus": 3, "pipeline_parallel": 3, "nodes": 2}, "cannot be spread evenly over nodes=2"),
        ({"pipeline_parallel": 2, "nodes": 2}, "needs GPUs"),
        ({"options": {"max_loras": 4}}, r"options\.max_loras is decided by engine\.adapters"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_with_what_to_do(wrong, why):
    with pytest.raises(ValidationError, match=why):
        EngineSettings(**wrong)
