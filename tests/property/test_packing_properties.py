"""Whatever the model and wherever the buckets cut it: every tensor arrives, once, equal bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_refit.core.manifest import ALIGNMENT_BYTES, build_manifest
from elastic_refit.transports.packing import BucketUnpacker, fresh_buffer, pack_bucket, tensor_specs

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128, torch.float4_e2m1fn_x2),
]
MAX_BYTES = 16


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bytes seen as any dtype, NaNs and all; now and then transposed or strided."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    raw = torch.randint(0, 256, (*shape, MAX_BYTES), dtype=torch.uint8, generator=draw(generators()))
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw[..., : dtype.itemsize].contiguous().view(dtype).view(shape)
    if len(shape) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


def generators() -> st.SearchStrategy[torch.Generator]:
    return st.integers(0, 2**32 - 1).map(torch.Generator().manual_seed)


models = st.lists(tensors(), max_size=8).map(lambda found: {f"layer.{i}": t for i, t in enumerate(found)})
bucket_sizes = st.integers(1, 40).map(lambda units: units * ALIGNMENT_BYTES)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@given(models, bucket_sizes)
def test_every_tensor_arrives_once_and_equal_bit_for_bit(model: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    manifest = build_manifest(tensor_specs(model.items()), bucket_bytes)
    unpacker = BucketUnpacker(manifest)
    arrived: list[tuple[str, torch.Tensor]] = []
    for index, bucket in enumerate(manifest.buckets):
        buffer = fresh_buffer(bucket)
        pack_bucket(bucket, manifest, tensors=model, out=buffer)
        arrived += unpacker.unpack(index, buffer)
    if manifest.num_buckets:
        assert sorted(name for name, _ in arrived) == sorted(model)
    for name, tensor in arrived:
        assert (tensor.dtype, tensor.shape) == (model[name].dtype, model[name].shape)
        assert raw_bytes(tensor) == raw_bytes(model[name])
