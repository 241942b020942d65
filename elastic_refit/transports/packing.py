"""Bytes of buckets: from named tensors into a packed buffer, and back into tensors an engine may keep.

Every byte goes where the manifest says and nowhere else. What must never happen here: a tensor handed out that shares
memory with a buffer somebody writes to again, a bucket taken twice or out of order, a tensor that is nearly right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic_refit.core.manifest import TensorSpec
from elastic_refit.errors import PlanMismatch

if TYPE_CHECKING:
    from elastic_refit.core.manifest import Bucket, Manifest, Piece

__all__ = ["BucketUnpacker", "byte_view", "dtype_name", "fresh_buffer", "pack_bucket", "tensor_specs"]


def tensor_specs(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """What a manifest says of these tensors, in their order; reads no data, so ``meta`` tensors will do."""
    return [
        TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.numel() * tensor.element_size())
        for name, tensor in named_tensors
    ]


def fresh_buffer(bucket: Bucket, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised memory for one bucket. Nobody reuses it: what is unpacked from it may be kept for ever."""
    return torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)


def byte_view(buffer: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, writable and without a copy; keeps the tensor's memory alive."""
    return buffer.numpy().data


def pack_bucket(bucket: Bucket, manifest: Manifest, *, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Write ``bucket`` into ``out`` (uint8, at least the bucket's size, any device), padding zeroed.

    A source that is not contiguous is copied whole once for each bucket that it lies in.

    Raises:
        PlanMismatch: a tensor is missing or is not the one that the manifest describes, or ``out`` is too small.
    """
    if out.dtype != torch.uint8 or out.dim() != 1 or out.numel() < bucket.size_bytes:
        raise PlanMismatch(f"a bucket of {bucket.size_bytes} bytes does not fit into {out.dtype}{tuple(out.shape)}")
    end = 0
    for piece in bucket.pieces:
        source = _source_bytes(manifest.tensors[piece.tensor], tensors)
        out[end : piece.bucket_offset].zero_()
        end = piece.bucket_offset + piece.size_bytes
        out[piece.bucket_offset : end].copy_(source[piece.tensor_offset : piece.tensor_offset + piece.size_bytes])


class BucketUnpacker:
    """Turns the buckets of one update back into tensors. Buckets come in order, each exactly once.

    It outlives an aborted attempt: a retry goes on with ``next_bucket``. One thread uses it.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Raises PlanMismatch if a tensor's shape, dtype and size contradict each other or torch lacks its dtype."""
        self._manifest = manifest
        self._dtypes = [_checked_dtype(spec) for spec in manifest.tensors]
        self._partial: dict[int, torch.Tensor] = {}
        self._next = 0

    @property
    def next_bucket(self) -> int:
        """The bucket that must come next; ``num_buckets`` when all have come."""
        return self._next

    def unpack(self, index: int, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Take bucket ``index`` and return the tensors that it completes, in the manifest's order.

        A tensor that lies in one bucket is a view into ``buffer``, which the caller therefore gives away; one that
        was split has memory of its own. Tensors without bytes come with the first bucket.

        Raises:
            PlanMismatch: it is not ``next_bucket``, or ``buffer`` has another size; nothing was taken.
        """
        bucket = self._expect(index, buffer)
        done = [number for number, spec in enumerate(self._manifest.tensors) if index == 0 and not spec.size_bytes]
        storage = {number: buffer.new_empty(0) for number in done}
        for piece in bucket.pieces:
            whole = self._take(piece, buffer[piece.bucket_offset : piece.bucket_offset + piece.size_bytes])
            if whole is not None:
                storage[piece.tensor] = whole
        self._next += 1
        return [self._tensor(number, storage[number]) for number in sorted(storage)]

    def _expect(self, index: int, buffer: torch.Tensor) -> Bucket:
        if index != self._next or index >= self._manifest.num_buckets:
            raise PlanMismatch(
                f"bucket {index} came where bucket {self._next} of {self._manifest.num_buckets} was expected",
                bucket=index,
                expected=self._next,
            )
        bucket = self._manifest.buckets[index]
        if buffer.dtype != torch.uint8 or buffer.shape != (bucket.size_bytes,):
            raise PlanMismatch(
                f"bucket {index} is {bucket.size_bytes} bytes in the manifest and came as "
                f"{buffer.dtype}{tuple(buffer.shape)}",
                bucket=index,
            )
        return bucket

    def _take(self, piece: Piece, data: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor's bytes if ``piece`` completes it."""
        size = self._manifest.tensors[piece.tensor].size_bytes
        if piece.size_bytes == size:
            return data
        if piece.tensor_offset == 0:
            self._partial[piece.tensor] = data.new_empty(size)
        end = piece.tensor_offset + piece.size_bytes
        self._partial[piece.tensor][piece.tensor_offset : end].copy_(data)
        return self._partial.pop(piece.tensor) if end == size else None

    def _tensor(self, number: int, data: torch.Tensor) -> tuple[str, torch.Tensor]:
        spec = self._manifest.tensors[number]
        return spec.name, data.view(self._dtypes[number]).view(spec.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """What a manifest calls it."""
    return str(dtype).removeprefix("torch.")


def _checked_dtype(spec: TensorSpec) -> torch.dtype:
    dtype: Any = getattr(torch, spec.dtype, None)  # whatever torch calls by this name
    if not isinstance(dtype, torch.dtype):
        raise PlanMismatch(f"{spec.name}: this torch has no dtype {spec.dtype!r}", tensor=spec.name)
    size = torch.Size(spec.shape).numel() * dtype.itemsize
    if size != spec.size_bytes:
        raise PlanMismatch(
            f"{spec.name}: {spec.dtype}{spec.shape} is {size} bytes and not {spec.size_bytes}", tensor=spec.name
        )
    return dtype


def _source_bytes(spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors.get(spec.name)
    if tensor is None or dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
        found = "nothing" if tensor is None else f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}"
        raise PlanMismatch(
            f"the manifest says {spec.name} is {spec.dtype}{spec.shape}; the sender holds {found}", tensor=spec.name
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One element is contiguous whatever its stride says, and a view as bytes looks at the stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
