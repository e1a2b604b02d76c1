"""A name means one set of bytes, and the slots never overflow."""

import pytest

from cluster.adapters import AdapterError, AdapterShelf, check_adapter, with_adapter
from cluster.failures import SettingsError
from cluster.weights import read_weights


def test_numbers_are_never_used_twice():
    shelf = AdapterShelf(1)
    numbers = []
    for files in ("f1", "f2", "f3"):
        adapter = shelf.prepare("a", "/a", files)
        numbers.append(adapter.number)
        shelf.put(adapter)
        if files == "f2":
            shelf.drop("a")
    assert numbers == [1, 2, 3]
    assert shelf.fingerprints("base") == {"a": with_adapter("base", "f3")}


def test_a_full_shelf_says_what_is_on_it_and_which_setting_decides():
    shelf = AdapterShelf(1)
    shelf.put(shelf.prepare("a", "/a", "f"))
    with pytest.raises(AdapterError, match=r"'b' does not fit: engine\.adapters=1 and loaded are a"):
        shelf.prepare("b", "/b", "f")
    with pytest.raises(AdapterError, match="no adapter 'b' is loaded here; loaded: a"):
        shelf.get("b")


def test_the_fingerprint_is_that_of_base_and_adapter_together():
    pairs = [("b1", ""), ("b1", "f1"), ("b1", "f2"), ("b2", "f1")]
    assert len({with_adapter(*p) for p in pairs}) == 4
    assert with_adapter("b1", "") == "b1"


def test_folders_that_cannot_be_what_they_should_be_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(SettingsError, match=r"not a model folder.*model\.path"):
        read_weights(tmp_path, None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(SettingsError, match=r"model\.safetensors is cut short.*save the model again"):
        read_weights(tmp_path, None)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"model\.adapter: .*no adapter_model\.safetensors"):
        read_weights(tmp_path, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"w")
    check_adapter(tmp_path / "adapter")
    both, alone = read_weights(tmp_path, tmp_path / "adapter"), read_weights(tmp_path, None)
    assert (both.adapter, alone.adapter) == ("adapter", "")
    assert both.fingerprint != alone.fingerprint == alone.base == both.base
