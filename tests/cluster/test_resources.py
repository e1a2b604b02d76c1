"""What a demand lacks is computed before Ray is asked."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.resources import amounts, lacking, misfits, rooms, shortage, total

BUNDLES = st.lists(
    st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(1, 8).map(float), min_size=1), min_size=1
)


def test_a_shortage_names_what_is_asked_there_and_missing() -> None:
    text = shortage([{"CPU": 3.0}, {"CPU": 4.0, "GPU": 1.0}], [{"CPU": 2.0, "memory": 9e9}])
    assert text is not None
    assert "asked: 7 CPU, 1 GPU in 2 bundle(s)" in text
    assert "has 2 CPU, 0 GPU on 1 node(s)" in text
    assert "missing: 5 CPU, 1 GPU" in text


def test_a_bundle_does_not_span_nodes() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0}]
    assert misfits([{"CPU": 5.0}, {"CPU": 3.0}], nodes) == [{"CPU": 5.0}]
    assert "5 CPU fits no single node; nodes have: 4 CPU" in str(shortage([{"CPU": 5.0}], nodes))
    assert shortage([{"CPU": 4.0}, {"CPU": 4.0}], nodes) is None


def test_fractions_of_a_core_add_up_without_a_false_shortage() -> None:
    assert shortage([{"CPU": 0.1}] * 30, [{"CPU": 3.0}]) is None


def test_resources_that_ray_adds_for_itself_are_not_shown() -> None:
    assert amounts({"CPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0, "object_store_memory": 1e9}) == "2 CPU"


@given(BUNDLES)
def test_a_node_as_large_as_all_bundles_together_never_lacks_anything(bundles: list[dict[str, float]]) -> None:
    assert shortage(bundles, [total(bundles)]) is None


@given(BUNDLES)
def test_what_is_lacking_is_exactly_what_would_fill_the_gap(bundles: list[dict[str, float]]) -> None:
    asked = total(bundles)
    present = {"CPU": 3.0}
    filled = total([present, lacking(asked, present)])
    assert all(filled[name] >= amount for name, amount in asked.items())
    assert all(filled[name] == amount for name, amount in asked.items() if amount > present.get(name, 0.0))


def test_rooms_count_whole_replicas_and_no_bundle_spans_nodes() -> None:
    nodes = [{"CPU": 5.0, "GPU": 2.0}, {"CPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert rooms([{"CPU": 2.0}], nodes, 10) == 3
    assert rooms([{"CPU": 2.0, "GPU": 1.0}], nodes, 10) == 3
    assert rooms([{"CPU": 1.0, "GPU": 1.0}, {"GPU": 1.0}], nodes, 10) == 1
    assert rooms([{"CPU": 0.5}], nodes, 4) == 4
    assert rooms([{"CPU": 6.0}], nodes, 10) == 0


@given(BUNDLES, st.integers(0, 5))
def test_a_node_as_large_as_so_many_replicas_has_room_for_them(bundles: list[dict[str, float]], count: int) -> None:
    node = {name: count * amount for name, amount in total(bundles).items()}
    assert rooms(bundles, [node], 10) == count
