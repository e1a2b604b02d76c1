"""Same model, other numbers: told from headers alone."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from cluster.checkpoint_shape import incomplete, lost_tensors, same_shape
from cluster.failures import DataError


@pytest.fixture
def folder(tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    (one / "config.json").write_text(json.dumps({"layers": 1, "transformers_version": "5"}))
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, one / "model.safetensors", {"format": "pt"})
    shutil.copytree(one, tmp_path / "other")
    return tmp_path


def test_other_numbers_and_another_split_into_files_are_the_same_shape(folder):
    save_file({"a": torch.ones(2, 3)}, folder / "other" / "model.safetensors")
    save_file({"b": torch.ones(4)}, folder / "other" / "more.safetensors")
    (folder / "other" / "config.json").write_text(json.dumps({"layers": 1, "transformers_version": "4"}))
    assert same_shape(folder / "one", folder / "other")


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "c": torch.zeros(4)},
        {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
        {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)},
    ],
)
def test_other_tensors_are_another_shape(folder, tensors):
    save_file(tensors, folder / "other" / "model.safetensors")
    assert not same_shape(folder / "one", folder / "other")


def test_another_configuration_is_another_shape(folder):
    (folder / "other" / "config.json").write_text(json.dumps({"layers": 2}))
    assert not same_shape(folder / "one", folder / "other")


def test_without_headers_nothing_can_be_told(folder):
    for name in ("one", "other"):
        (folder / name / "model.safetensors").unlink()
    assert not same_shape(folder / "one", folder / "other")


def test_a_file_cut_short_anywhere_is_noticed(folder):
    file = folder / "one" / "model.safetensors"
    whole = file.read_bytes()
    assert incomplete(folder / "one") == ""
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert "cut short" in incomplete(folder / "one"), length


@pytest.mark.parametrize("header", [b"\xff\xfe{", b"[1]", b'{"a": {"shape": [1]}}', b'{"a": 3}'])
def test_a_file_that_is_no_safetensors_is_named(folder, header):
    file = folder / "one" / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    for read in (incomplete, lambda one: lost_tensors(one, folder / "other"), lambda one: same_shape(one, one)):
        with pytest.raises(DataError, match=r"one/model\.safetensors is not what its name says"):
            read(folder / "one")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_cannot_be_read_is_named(folder, name):
    (folder / "one" / name).write_text("{")
    with pytest.raises(DataError, match=name):
        incomplete(folder / "one") or same_shape(folder / "one", folder / "other")


def test_a_tensor_that_the_index_names_and_no_file_holds_is_noticed(folder):
    index = folder / "one" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "c": "gone.safetensors"}}))
    assert incomplete(folder / "one") == "1 tensor(s) that its index names are in no file: c"


def test_a_checkpoint_that_lacks_tensors_of_its_own_configuration_is_noticed(folder):
    save_file({"a": torch.zeros(2, 3)}, folder / "other" / "model.safetensors")
    assert lost_tensors(folder / "one", folder / "other") == "1 tensor(s) of this configuration are missing: b"
    assert lost_tensors(folder / "other", folder / "one") == ""
    (folder / "other" / "config.json").write_text(json.dumps({"layers": 2}))
    assert lost_tensors(folder / "one", folder / "other") == ""
