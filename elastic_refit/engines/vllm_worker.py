"""The part of elastic-refit that lives in vLLM's worker process: the weight-transfer backend and the RPC extension.

What it uses of vLLM's private parts is in :mod:`elastic_refit.engines.vllm_api`. vLLM finds the backend by the
``vllm.general_plugins`` entry point, or because the engine names the extension class, which imports this module.

What must never happen here: a worker RPC of ours raises (with several ranks every later answer would be off by one);
an update is finished that is not whole; a layer is left on the meta device when the update is over.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from elastic_refit.core.manifest import Manifest
from elastic_refit.engines import vllm_api
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.engines.update import UpdateLedger
from elastic_refit.engines.vllm_terms import OWNER_VARIABLE, require_known
from elastic_refit.errors import PlanMismatch, TransportError
from elastic_refit.processes import exit_with
from elastic_refit.transports.packing import dtype_name

__all__ = [
    "BACKEND",
    "ElasticRefitTransfer",
    "ElasticRefitWorkerExtension",
    "VllmReceiver",
    "WorkerOutcome",
    "assume_version",
    "register",
]

BACKEND = "elastic_refit"
_is_watched: list[bool] = []
"""Holds something once this process watches the one that it must not outlive."""


def register() -> None:
    """Make the backend known to vLLM in this process. The ``vllm.general_plugins`` entry point; repeatable.

    A process that vLLM has started for an engine of ours ends with the one that asked for the engine.
    """
    vllm_api.register_backend(BACKEND, ElasticRefitTransfer)
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and int(owner) != os.getpid() and not _is_watched:
        # An EngineCore whose caller died while it started was seen to stay for good.
        _is_watched.append(True)
        exit_with(int(owner))


@dataclass
class ManifestInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped
    """What every later update moves: ``Manifest.to_dict()``."""

    manifest: dict[str, Any]


@dataclass
class TensorsInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped
    """Whole tensors by their checkpoint names. They must live in the worker's process and are given away."""

    tensors: Sequence[tuple[str, torch.Tensor]]


class ElasticRefitTransfer(WeightTransferEngine[ManifestInfo, TensorsInfo]):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's weight-transfer lifecycle over layerwise reload, with what the stock backends lack: completeness and
    rollback.

    vLLM calls the ``*_weight_update`` methods; between them anybody in this process may ``feed``.
    """

    init_info_cls = ManifestInfo
    update_info_cls = TensorsInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_known(vllm.__version__)
        super().__init__(*args, **kwargs)
        self.update = UpdateLedger(version=0)
        self._manifest: Manifest | None = None
        self._ties: dict[int, dict[str, str]] = {}
        """What vLLM has found out about the open update's model."""

    def init_transfer_engine(self, init_info: ManifestInfo) -> None:
        self._manifest = Manifest.from_dict(init_info.manifest)

    def start_weight_update(self) -> None:
        if self._manifest is None:
            raise PlanMismatch("no manifest: init_weight_transfer_engine comes before the first update")
        self._require_quantised(self._manifest)
        self.update.open(self._manifest)
        self._ties.clear()
        try:
            vllm_api.begin_reload(self.model)
        except BaseException:
            self.rollback()
            raise

    def feed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors. vLLM keeps references to them until their layer is complete."""
        with self.update.taking(name for name, _ in tensors), vllm_api.continued_load(self._ties):
            self.model.load_weights(vllm_api.rounded(tensors, self.model_config.dtype))

    def receive_weights(self, update_info: TensorsInfo) -> None:
        self.feed(update_info.tensors)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The stock chunk. After an error the worker calls the update over, so its traces must go at once.

        Unlike the base class it does not synchronise an accelerator, which a CPU build lacks; finishing does.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.rollback()
            raise

    def finish_weight_update(self) -> None:
        """Raises TransportError if a tensor is missing; the update then stays open and vLLM labels nothing."""
        self.update.require_complete()
        unfed = vllm_api.unfed_layers(self.model)
        if unfed:
            raise TransportError(f"the manifest has not all weights of {unfed[0]}", layers=tuple(unfed))
        vllm_api.finish_reload(self.model, self.model_config)
        vllm_api.repack_experts(self.model)
        self._repack_embeddings()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.update.close()

    def rollback(self) -> None:
        """Put back the tensors of every layer that is not complete; a no-op if no update is open."""
        if not self.update.is_open:
            return
        vllm_api.roll_reload_back(self.model)
        self._repack_embeddings()
        self.update.close()

    def shutdown(self) -> None:
        self._manifest = None

    def _require_quantised(self, manifest: Manifest) -> None:
        """vLLM would round plain weights to whole numbers to fit them into int8, and serve those.

        Raises:
            PlanMismatch: the model holds quantised weights and ``manifest`` has none.
        """
        pushed = {spec.dtype for spec in manifest.tensors}
        for dtype, where in vllm_api.quantised_dtypes(self.model).items():
            if dtype_name(dtype) not in pushed:
                raise PlanMismatch(f"{where} is {dtype_name(dtype)}, and nothing that is pushed is: quantise it before")

    def _repack_embeddings(self) -> None:
        """On CPU a tied output head multiplies by a packed copy of the embedding, which layerwise reload forgets.

        Nothing else shows it: the parameters and their checksums are right, only the logits are old.
        """
        if current_platform.is_cpu():
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)


class VllmReceiver(WeightReceiver):
    """The receiver protocol on one vLLM worker. It holds no state of its own: a new one goes on where the last was."""

    def __init__(self, worker: Any) -> None:
        self.rank = int(worker.rank)
        self._worker = worker
        self._transfer: ElasticRefitTransfer = worker.weight_transfer_engine

    def begin(self, manifest: Manifest) -> None:
        self._transfer.update.require_closed()
        self._transfer.init_transfer_engine(ManifestInfo(manifest.to_dict()))
        self._worker.start_weight_update()

    def feed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self._worker.vllm_config):
            self._transfer.feed(tensors)

    def finish(self, version: int) -> None:
        self._worker.finish_weight_update()
        self._transfer.update.version = version

    def rollback(self) -> None:
        with set_current_vllm_config(self._worker.vllm_config):
            self._transfer.rollback()
        vllm_api.end_update(self._worker)

    def assume_version(self, version: int) -> None:
        """Call the weights that are loaded ``version``."""
        self._transfer.update.version = version


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """What one worker answers. ``version`` and ``update_open`` are the state after the call, whatever came of it.

    ``number`` is the call's: where a worker RPC of somebody else raised, vLLM may hand out an older call's answer.
    """

    value: Any
    error: BaseException | None
    version: int
    update_open: bool
    number: int = 0


class ElasticRefitWorkerExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``; reached by ``collective_rpc``."""

    weight_transfer_engine: ElasticRefitTransfer

    def elastic_refit_call(self, function: Callable[[WeightReceiver], Any]) -> WorkerOutcome:
        """Run ``function`` with this worker's receiver. Never raises: the error is in the outcome."""
        value, failure = None, None
        try:
            value = function(VllmReceiver(self))
        except BaseException as error:  # noqa: BLE001 - an interrupt too: the caller must learn what state it left
            failure = error
        update = self.weight_transfer_engine.update
        return WorkerOutcome(value=value, error=failure, version=update.version, update_open=update.is_open)

    def elastic_refit_run(self, blob: bytes, number: int) -> bytes:
        """As :meth:`elastic_refit_call`, for a caller in another process: by pickle, as whole blobs.

        vLLM would change the types of what is nested in arguments and results.
        """
        try:
            outcome = replace(self.elastic_refit_call(pickle.loads(blob)), number=number)
            answer = pickle.dumps(outcome)
            if outcome.error is not None:
                pickle.loads(answer)
            return answer
        except Exception as error:  # noqa: BLE001 - what cannot travel is told as what can
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            update = self.weight_transfer_engine.update
            return pickle.dumps(WorkerOutcome(None, failure, update.version, update.is_open, number))


def assume_version(version: int, receiver: WeightReceiver) -> None:
    """The weights that were loaded at start are ``version``."""
    assert isinstance(receiver, VllmReceiver), "for a worker of vLLM's"
    receiver.assume_version(version)


register()
