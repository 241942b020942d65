"""Packing and unpacking at their edges; that every model survives is a property test."""

from __future__ import annotations

import pytest
import torch

from elastic_refit.core.manifest import Manifest, TensorSpec, build_manifest
from elastic_refit.errors import PlanMismatch
from elastic_refit.transports.digests import digest_bucket
from elastic_refit.transports.packing import (
    BucketUnpacker,
    byte_view,
    fresh_buffer,
    pack_bucket,
    tensor_specs,
)


def packed(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    buffers = [fresh_buffer(bucket) for bucket in manifest.buckets]
    for bucket, buffer in zip(manifest.buckets, buffers, strict=True):
        pack_bucket(bucket, manifest, tensors=tensors, out=buffer)
    return buffers


def three() -> tuple[Manifest, dict[str, torch.Tensor]]:
    """``b`` is split over three buckets, ``empty`` lies nowhere."""
    tensors = {"a": torch.arange(3.0), "empty": torch.empty(0, 4), "b": torch.arange(28.0), "c": torch.tensor(7)}
    return build_manifest(tensor_specs(tensors.items()), 48), tensors


def test_specs_name_shape_dtype_and_size_without_reading_data() -> None:
    tensor = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    assert tensor_specs([("w", tensor)]) == [TensorSpec("w", (3, 5), "bfloat16", 30)]


def test_a_split_tensor_comes_with_its_last_bucket_and_an_empty_one_with_the_first() -> None:
    manifest, tensors = three()
    unpacker = BucketUnpacker(manifest)
    names = [[name for name, _ in unpacker.unpack(i, buffer)] for i, buffer in enumerate(packed(manifest, tensors))]
    assert names == [["a", "empty"], [], ["b", "c"]]


def test_padding_between_pieces_is_zero_so_that_equal_weights_give_equal_digests() -> None:
    manifest, tensors = three()
    first = torch.full((manifest.buckets[0].size_bytes,), 255, dtype=torch.uint8)
    second = torch.full((manifest.buckets[0].size_bytes,), 1, dtype=torch.uint8)
    for out in (first, second):
        pack_bucket(manifest.buckets[0], manifest, tensors=tensors, out=out)
    assert first[12:16].tolist() == [0, 0, 0, 0]
    assert digest_bucket(first) == digest_bucket(second)


def test_a_larger_buffer_is_filled_up_to_the_bucket_and_not_beyond() -> None:
    manifest, tensors = three()
    size = manifest.buckets[0].size_bytes
    out = torch.full((size + 8,), 255, dtype=torch.uint8)
    pack_bucket(manifest.buckets[0], manifest, tensors=tensors, out=out)
    assert out[size:].tolist() == [255] * 8


def test_lazily_conjugated_and_transposed_sources_are_packed_as_they_read() -> None:
    base = torch.complex(torch.arange(6.0), torch.arange(6.0)).reshape(2, 3)
    tensors = {"conj": base.conj(), "imag": base.conj().imag, "transposed": base.t()}
    manifest = build_manifest(tensor_specs(tensors.items()), 1024)
    for name, tensor in BucketUnpacker(manifest).unpack(0, packed(manifest, tensors)[0]):
        assert torch.equal(tensor, tensors[name])


def test_a_strided_view_of_a_single_element_is_packed_like_any_other() -> None:
    tensors = {"one": torch.tensor([7.0, 8.0])[::2], "column": torch.arange(4.0).reshape(4, 1)[1:2].t()}
    manifest = build_manifest(tensor_specs(tensors.items()), 1024)
    whole = dict(BucketUnpacker(manifest).unpack(0, packed(manifest, tensors)[0]))
    assert (whole["one"].tolist(), whole["column"].tolist()) == ([7.0], [[1.0]])


def test_a_tensor_of_one_bucket_is_a_view_of_its_buffer_and_a_split_one_owns_its_memory() -> None:
    manifest, tensors = three()
    buffers = packed(manifest, tensors)
    unpacker = BucketUnpacker(manifest)
    whole = {name: t for i, buffer in enumerate(buffers) for name, t in unpacker.unpack(i, buffer)}
    for buffer in buffers:
        buffer.zero_()
    assert whole["a"].tolist() == [0, 0, 0]
    assert torch.equal(whole["b"], tensors["b"])


def test_buckets_are_taken_in_order_and_each_once() -> None:
    manifest, tensors = three()
    buffers = packed(manifest, tensors)
    unpacker = BucketUnpacker(manifest)
    with pytest.raises(PlanMismatch, match="bucket 1 came where bucket 0 of 3"):
        unpacker.unpack(1, buffers[1])
    unpacker.unpack(0, buffers[0])
    with pytest.raises(PlanMismatch):
        unpacker.unpack(0, buffers[0])
    for index in (1, 2):
        unpacker.unpack(index, buffers[index])
    assert unpacker.next_bucket == 3
    with pytest.raises(PlanMismatch):
        unpacker.unpack(3, buffers[2])


def test_a_refused_bucket_was_not_taken() -> None:
    manifest, tensors = three()
    unpacker = BucketUnpacker(manifest)
    good = packed(manifest, tensors)[0]
    for wrong in (good[:-1], good.to(torch.int16), good.reshape(2, -1)):
        with pytest.raises(PlanMismatch, match="bucket 0 is"):
            unpacker.unpack(0, wrong)
    assert [name for name, _ in unpacker.unpack(0, good)] == ["a", "empty"]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)],
    ids=["length", "dtype", "rank"],
)
def test_a_sender_whose_tensor_is_not_the_manifests_is_refused(tensor: torch.Tensor) -> None:
    manifest, tensors = three()
    with pytest.raises(PlanMismatch, match="says a is"):
        packed(manifest, {**tensors, "a": tensor})


def test_a_sender_without_the_tensor_is_refused() -> None:
    manifest, tensors = three()
    del tensors["a"]
    with pytest.raises(PlanMismatch, match="the sender holds nothing"):
        packed(manifest, tensors)


@pytest.mark.parametrize("out", [torch.empty(8, dtype=torch.uint8), torch.empty(48)], ids=["small", "float"])
def test_a_buffer_that_cannot_hold_the_bucket_is_refused(out: torch.Tensor) -> None:
    manifest, tensors = three()
    with pytest.raises(PlanMismatch, match="does not fit"):
        pack_bucket(manifest.buckets[0], manifest, tensors=tensors, out=out)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TensorSpec("w", (4,), "float31", 16), "no dtype 'float31'"),
        (TensorSpec("w", (4,), "nn", 16), "no dtype 'nn'"),
        (TensorSpec("w", (4,), "float32", 8), "is 16 bytes and not 8"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_before_any_byte(spec: TensorSpec, words: str) -> None:
    with pytest.raises(PlanMismatch, match=words):
        BucketUnpacker(build_manifest([spec], 64))


def test_the_byte_view_writes_into_the_tensor() -> None:
    buffer = torch.zeros(4, dtype=torch.uint8)
    byte_view(buffer)[1:3] = b"\x07\x08"
    assert buffer.tolist() == [0, 7, 8, 0]
