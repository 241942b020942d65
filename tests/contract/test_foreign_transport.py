"""A transport of another distribution, found by its entry point, carries refits like our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_refit.communicators.tcp import TcpBackend
from elastic_refit.config import RunConfig, load_config
from elastic_refit.core.ids import ShardId
from elastic_refit.core.messages import Committed, Received
from elastic_refit.errors import ConfigError
from elastic_refit.transports.registry import TRANSPORTS, build_transport, load_transport
from tests.refit_group import Group, Weights, digests_sent

SPOOL = '''
"""Buckets travel as files in a folder that every rank can read."""

import os, tempfile, time
import torch
from elastic_refit.transports.base import WeightTransport, take_bucket

FOLDER = tempfile.mkdtemp()

class SpoolTransport(WeightTransport):
    name = "spool"

    def reconcile_communicator(self, membership, group, *, timeout_s):
        return None

    def prepare(self, pinned, start_bucket):
        pass

    def send(self, context, order, pinned):
        for bucket, layout in enumerate(order.manifest.buckets):
            buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
            pinned.pack(bucket, buffer)
            torch.save(buffer, f"{FOLDER}/draft")
            os.replace(f"{FOLDER}/draft", f"{FOLDER}/{order.version}.{bucket}")
        return pinned.all_digests()

    def receive(self, context, order, update, feed):
        for bucket in range(order.manifest.num_buckets):
            while not os.path.exists(path := f"{FOLDER}/{order.version}.{bucket}"):
                time.sleep(0.001)
            take_bucket(context, bucket, torch.load(path), update=update, feed=feed)
        return tuple(update.digests)

    def close(self):
        pass
'''


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution as ``pip`` would leave it: a module, and metadata with its entry points."""
    (tmp_path / "spool_transport.py").write_text(SPOOL)
    about = tmp_path / "spool_transport-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: spool-transport\nVersion: 1.0\n")
    offers = {"spool": "SpoolTransport", "broken": "Missing", "odd": "FOLDER"}
    lines = [f"{name} = spool_transport:{what}" for name, what in offers.items()]
    (about / "entry_points.txt").write_text("\n".join(["[elastic_refit.transports]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_another_distribution_adds_a_transport_in_under_forty_lines(spool: None) -> None:
    assert len(SPOOL.strip().splitlines()) < 40
    name = load_config(None, ["refit.transport=spool"], model=RunConfig).refit.transport
    group = Group(shards=2, transport=lambda backend: build_transport(name, backend))
    for epoch, version in ((1, 1), (1, 2), (2, 3)):
        if version != 2:
            membership = group.build(epoch, [0, 1])
        group.weights = Weights(version)
        answers, _ = group.transfer(membership, version)
        digests = digests_sent(answers)
        for shard in range(2):
            assert answers[ShardId(shard)] == Received(digests)
            assert group.commit(shard, epoch, version, digests) == Committed(version)
            assert group.holds_all(shard)
    group.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "transport 'broken' cannot be loaded: .*has no attribute 'Missing'"),
        ("odd", "transport 'odd' is spool_transport:FOLDER, which is no WeightTransport"),
        ("rdma", "transport 'rdma' is unknown; use one of broadcast, broken, odd, spool"),
    ],
)
def test_a_transport_that_cannot_be_had_is_refused_with_the_reason(spool: None, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_transport(name, TcpBackend())


def test_a_config_that_names_an_unknown_transport_is_refused_when_it_is_read() -> None:
    with pytest.raises(ConfigError, match=r"refit\.transport.*'rdma' is unknown; use one of broadcast"):
        load_config(None, ["refit.transport=rdma"], model=RunConfig)


def test_each_of_our_own_transports_is_what_its_name_says() -> None:
    assert {load_transport(name).name for name in TRANSPORTS} == set(TRANSPORTS)
