"""Shards: what they hold, that an interrupted extract goes on, and that nothing foreign is mixed in."""

import json

import pytest
import tiny
import torch

from sparsefinder.edges import edge_counts, gold_edges, head_edges
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.hf import attach
from sparsefinder.patterns.legal import legal_from_mask
from training.extract import MANIFEST, extract, make_manifest, read_layer, read_manifest, shard_name

LENGTHS = [12, 12, 12, 7, 12]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    teacher = tiny.teacher(tmp_path_factory.mktemp("teacher"))
    scale = torch.tensor([[1.0, 0.5, 2.0, 1.0], [1.0, 1.0, 0.7, 1.5]])
    return teacher, attach(teacher.model, alpha=1.5, head_scale=scale)


@pytest.fixture(scope="module")
def chunks():
    return tiny.token_ids(LENGTHS)


def write(opened, chunks, folder, **changes):
    manifest = make_manifest(*opened, chunks, split="train", shard_size=2, seed=0, **changes)
    return extract(*opened, chunks, folder, manifest)


@pytest.fixture(scope="module")
def folder(opened, chunks, tmp_path_factory):
    path = tmp_path_factory.mktemp("shards")
    assert write(opened, chunks, path) == 3
    return path


def test_shards_hold_what_the_layer_computes(opened, chunks, folder):
    manifest = read_manifest(folder)
    assert (manifest["instances"], manifest["tokens"], manifest["layers"], manifest["heads"]) == (5, 12, 2, 4)
    seen = []
    teacher, attached = opened
    ids = torch.tensor([chunks[3]])
    with torch.no_grad(), attached.using("dense", observe=seen.append):
        teacher.model(input_ids=ids, attention_mask=torch.ones_like(ids))
    for layer in range(2):
        data = read_layer(folder, layer)
        assert data.q.shape == (5, 4, 12, 8)
        assert data.mask.sum(-1).tolist() == LENGTHS
        assert not data.causal
        torch.testing.assert_close(data.scale, attached.head_scale[layer] * 8**-0.5)
        torch.testing.assert_close(data.q[3, :, :7], seen[layer].q[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(data.k[3, :, :7], seen[layer].k[0], atol=1e-5, rtol=1e-5)


def test_gold_edges_are_those_of_the_saved_queries_and_keys(folder):
    data = read_layer(folder, 1)
    expected = gold_edges(data.q, data.k, legal_from_mask(data.mask), data.alpha, data.scale)
    assert torch.equal(edge_counts(data.edges), edge_counts(expected))
    for b in range(5):
        for h in range(4):
            assert torch.equal(head_edges(data.edges, b, h), head_edges(expected, b, h))


def test_an_interrupted_extract_goes_on_where_it_stopped(opened, chunks, folder, tmp_path):
    manifest = make_manifest(*opened, chunks, split="train", shard_size=2, seed=0)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(*opened, chunks, tmp_path, manifest, stop)
    with pytest.raises(DataError, match="1 are missing"):
        read_manifest(tmp_path)
    before = (tmp_path / shard_name(0)).stat().st_mtime_ns
    assert extract(*opened, chunks, tmp_path, manifest) == 1
    assert (tmp_path / shard_name(0)).stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, *map(shard_name, range(3))]
    for number in range(3):
        assert (tmp_path / shard_name(number)).read_bytes() == (folder / shard_name(number)).read_bytes()


def test_ctrl_c_inside_a_shard_leaves_no_piece_of_it(opened, chunks, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.extract.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(opened, chunks, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_another_configuration_is_refused_and_nothing_is_lost(opened, chunks, folder):
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ConfigError, match=r"another configuration \(instances differ\).*delete the folder"):
        write(opened, chunks[:4], folder)
    with pytest.raises(ConfigError, match="text_sha256"):
        write(opened, chunks, folder, text_sha256="other")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_is_no_split_is_said(opened, chunks, folder, tmp_path):
    with pytest.raises(DataError, match="run `sparsefinder-train extract` first"):
        read_manifest(tmp_path / "nothing")
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="JSON"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(DataError, match="schema_version 1"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="at least one chunk"):
        extract(*opened, [], tmp_path, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can be written"):
        write(opened, chunks, tmp_path / "file")


def test_a_damaged_shard_is_named(opened, chunks, tmp_path):
    write(opened, chunks, tmp_path)
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"shard-00001.safetensors: damaged, delete it"):
        read_layer(tmp_path, 0)
