"""What elastic-refit uses of vLLM that is private, or differs between versions: all of it, and nowhere else.

Versions 0.32 and 0.33 are known (:data:`~elastic_refit.engines.vllm_terms.KNOWN_VERSIONS`). The tests run on 0.32;
0.33 has no build for CPUs, and was compared with it in its source: the layerwise reload is the same, and a request that
comes during a pause is queued by 0.32 and turned away by 0.33 (unless the pause keeps requests), so nobody is let
through to a paused engine. What must never happen here: a version that nobody has looked at, driven as if it were one
of these.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models import utils as models
from vllm.platforms import current_platform

__all__ = [
    "begin_reload",
    "continued_load",
    "end_update",
    "finish_reload",
    "quantised_dtypes",
    "register_backend",
    "repack_experts",
    "roll_reload_back",
    "rounded",
    "shut_down",
    "unfed_layers",
]

_LOOK = "_get_tied_embedding_params"
_looking = threading.Lock()
_PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WEIGHTS = ("weight", "weight_packed")


def register_backend(name: str, kind: type[WeightTransferEngine[Any, Any]]) -> None:
    """Make a weight-transfer backend known in this process; repeatable, which vLLM's own call is not."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, kind)


def shut_down(llm: Any) -> None:
    """End an ``AsyncLLM`` on its own loop, and the sockets that vLLM itself leaves to the garbage collector."""
    context = llm.engine_core.resources.ctx
    llm.shutdown()
    context.destroy(linger=0)


# -- the layerwise reload: which layers have all their weights, and which wait with their old tensors put aside


def begin_reload(model: torch.nn.Module) -> None:
    """From here on ``model.load_weights`` fills layers anew, each when its last tensor has come."""
    layerwise.initialize_layerwise_reload(model)


def rounded(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors`` with the digits that a fresh load into a model of ``dtype`` would keep.

    On a CPU vLLM keeps the biases of linear layers in float32 once they are loaded, and a reload writes to those: a
    trainer's float32 bias would be more exact than in any fresh engine.
    """
    for name, tensor in tensors:
        is_kept_wide = current_platform.is_cpu() and name.endswith(".bias") and tensor.is_floating_point()
        yield name, tensor.to(dtype) if is_kept_wide else tensor


@contextmanager
def continued_load(ties: dict[int, dict[str, str]]) -> Iterator[None]:
    """Let ``model.load_weights`` inside, which gets a part of the weights, go on where the last part ended.

    vLLM 0.32 begins every load by looking through all modules for tied embeddings: a tenth of an update that comes in
    sixteen parts. What the first part finds is kept in ``ties``, so that all act on it as a whole load would.
    """
    with _looking:
        look: Any = getattr(models, _LOOK, None)  # another version may look in another way

        def known(module: torch.nn.Module) -> dict[str, str]:
            if id(module) not in ties:
                ties[id(module)] = look(module)
            return ties[id(module)]

        with patch.object(models, _LOOK, known, create=True), disable_mtp_completeness_check():
            yield


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    layerwise.finalize_layerwise_reload(model, model_config)


def roll_reload_back(model: Any) -> None:
    """Put back the tensors of every layer that is not complete; those that are keep the new ones."""
    for _, layer, info in _waiting(model):
        layerwise._place_kernel_tensors(layer, info)
        info.reset()
    model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()


def quantised_dtypes(model: torch.nn.Module) -> dict[torch.dtype, str]:
    """The types in which a checkpoint of this model has weights that are no plain numbers, each with a parameter.

    Empty where the engine itself quantises what it is given.
    """
    return {
        tensor.dtype: f"{layer_name}.{name}"
        for layer_name, layer in model.named_modules()
        if isinstance(layer, LinearBase)
        for name, tensor in layerwise.get_layerwise_info(layer).restore_metadata[0].items()
        if name.endswith(_WEIGHTS) and tensor.dtype not in _PLAIN
    }


def unfed_layers(model: torch.nn.Module) -> list[str]:
    """Layers that got none, or not all, of their weights: the update was not of this model.

    vLLM itself would keep the old weights of the first kind with a log line, and finish the second kind with
    uninitialised memory.
    """
    waiting = {name: (layer, info) for name, layer, info in _waiting(model)}
    short = {
        name: info.kernel_tensors[0]
        for name, (layer, info) in waiting.items()
        if info.kernel_tensors[0] and _is_short(layer, info)
    }
    if not short:
        return []
    fed: set[int] = set()
    for name, layer in model.named_modules():
        if name not in short:
            parameters = waiting[name][1].kernel_tensors[0] if name in waiting else layer._parameters
            fed |= {tensor.data_ptr() for tensor in parameters.values() if tensor is not None}
    fed.discard(0)  # parameters that a CPU kernel packed away have no memory
    # A tied output head gets its weight through the embedding.
    return [name for name, own in short.items() if any(tensor.data_ptr() not in fed for tensor in own.values())]


def repack_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs experts when it loads them first, and after a reload leaves them as they came.

    Its kernel then multiplies by weights in the wrong order, and nothing says so: only the logits are wrong.
    """
    for layer in model.modules() if current_platform.is_cpu() else ():
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if "w13_weight" in layer._parameters and isinstance(method, UnquantizedFusedMoEMethod) and kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def end_update(worker: Any) -> None:
    """Have the worker believe that no update is open."""
    worker.weight_transfer_engine.reset_weight_update_target()
    worker._weight_update_active = False


def _waiting(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            yield name, layer, info


def _is_short(layer: torch.nn.Module, info: Any) -> bool:
    """Only linear layers must be full: elsewhere there is padding, or a scale that a checkpoint may lack."""
    if is_deferred_attention_layer(layer) or not info.load_numel_total:
        return False
    if info.load_numel == 0:
        return True
    if not isinstance(layer, LinearBase):
        return False
    is_plain = isinstance(layer.quant_method, UnquantizedLinearMethod)
    return bool(info.load_numel < info.load_numel_total) if is_plain else _lacks_a_part(info)


def _lacks_a_part(info: Any) -> bool:
    """Whether a parameter of a quantised linear layer got fewer parts than another: without a scale it is noise.

    What is about its inputs, or about the order of its columns, a checkpoint may leave out.
    """
    parts = Counter(name for name, _ in info.loaded_weights)
    needed = [name for name in info.restore_metadata[0] if not name.startswith("input_") and "g_idx" not in name]
    return any(parts[name] < max(parts.values()) for name in needed)
