"""Glue: refuses, with names and numbers, what could only fail or go wrong silently later."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel.layout import ParallelLayout
from lightning_parallel.strategies import _compat
from lightning_parallel.strategies.gradient_readers import backward_handles_gradients
from lightning_parallel.strategies.surroundings import SECOND_PACKAGE

__all__ = [
    "refuse_callbacks",
    "refuse_data",
    "refuse_embeddings",
    "refuse_loggers",
    "refuse_module",
    "refuse_objects",
    "refuse_options",
    "refuse_shared_memory",
]

_WRAPPER_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def refuse_options(options: Mapping[str, Any], owner: type, known: Iterable[str]) -> None:
    """Raises ValueError for options that Lightning's DDPStrategy would hand to a wrapper that does not exist here.

    Args:
        options: options besides the strategy's own.
        owner: the strategy.
        known: the strategy's own options.
    """
    allowed = set(inspect.signature(DDPStrategy.__init__).parameters) - {"self", "kwargs", *_WRAPPER_OPTIONS}
    # LightningCLI hands over the defaults of every option that a parent class or its wrapper has.
    wrapper = inspect.signature(DistributedDataParallel.__init__).parameters
    defaults = {**{name: p.default for name, p in wrapper.items()}, **dict.fromkeys(_WRAPPER_OPTIONS)}
    given = [name for name, value in options.items() if name not in defaults or value != defaults[name]]
    unknown = next((name for name in given if name not in allowed), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, sorted({*known, *allowed}), 1)
        hint = f"did you mean {close[0]}?" if close else "no module is wrapped, so leave out options for a wrapper"
        raise ValueError(f"{owner.__name__} has no option {unknown!r}; {hint}")


def refuse_objects(trainer: Trainer) -> None:
    """Raises ValueError if a part of the run comes from the other Lightning package."""
    strategy = trainer.strategy
    parts: dict[str, list[Any]] = {
        "LightningModule": [trainer.lightning_module],
        "LightningDataModule": [getattr(trainer, "datamodule", None)],
        "Callback": list(getattr(trainer, "callbacks", [])),
        "Logger": list(trainer.loggers),
        "Profiler": [getattr(trainer, "profiler", None)],
        "plugin": [strategy.precision_plugin, strategy.checkpoint_io, getattr(strategy, "cluster_environment", None)],
    }
    for role, objects in parts.items():
        for found in objects:
            if any(cls.__module__.partition(".")[0] == SECOND_PACKAGE for cls in type(found).__mro__):
                raise ValueError(
                    f"the {role} {type(found).__name__} comes from {SECOND_PACKAGE}, a second package whose classes "
                    "are not those of lightning; import it from lightning.pytorch"
                )


def refuse_module(
    module: LightningModule, layout: ParallelLayout, micro_batches: int, evaluation_micro_batches: int
) -> None:
    """Raises ValueError if the module cannot be divided, or its steps cannot run in a pipeline or on micro-batches.

    Args:
        module: the user's module.
        layout: sizes of the dimensions.
        micro_batches: parts of a training batch.
        evaluation_micro_batches: parts of a batch in evaluation.
    """
    name = type(module).__name__
    lazy = next((key for key, p in module.named_parameters() if nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(
            f"{name} has a lazy layer with {lazy} of unknown shape; run it once on a batch before the trainer"
        )
    scripted = next((key for key, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None and layout.tensor * layout.pipeline > 1:
        raise ValueError(
            f"{scripted} is a module of TorchScript, whose parameters {layout.tensor * layout.pipeline} tensor and "
            "pipeline ranks cannot divide; use block.compile(), or script it after the training, or use "
            "tensor_parallel_size=1 and pipeline_parallel_size=1"
        )
    if layout.pipeline > 1 and _compat.is_compiled(module):
        raise ValueError(
            f"torch.compile({name}) made one graph of the steps, which a pipeline of {layout.pipeline} stages divides; "
            "compile the blocks instead (block.compile()), or use pipeline_parallel_size=1"
        )
    hooked = next((key for key, p in module.named_parameters() if p._post_accumulate_grad_hooks), None)
    if hooked is not None and micro_batches * layout.data > 1:
        raise ValueError(
            f"{hooked} has a hook of register_post_accumulate_grad_hook, which would run once for each of "
            f"{micro_batches} micro-batches and {layout.data} replicas, on sums that are not complete; change "
            "gradients in on_before_optimizer_step, or use micro_batches=1 and one replica"
        )
    _refuse_gradients_in_backward(module, layout, micro_batches)
    if layout.pipeline > 1 and not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, which works with pipeline_parallel_size=1 only "
            f"(got {layout.pipeline}): in a pipeline one call of training_step sees one micro-batch on one "
            f"stage. Use pipeline_parallel_size=1 and tensor_parallel_size={layout.tensor}"
        )
    if micro_batches > 1 and not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, whose steps cannot be split into "
            f"micro_batches={micro_batches}; use micro_batches=1 and accumulate gradients in training_step"
        )
    for step in _STEPS:
        parts = micro_batches if step == "training_step" else evaluation_micro_batches
        takes_iterator = is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)
        if takes_iterator and (layout.pipeline > 1 or parts > 1):
            raise ValueError(
                f"{name}.{step} takes dataloader_iter, whose batches cannot be shared by "
                f"{layout.pipeline} stages or split into {parts} micro-batches; let it take batch and batch_idx, or "
                "use pipeline_parallel_size=1 and 1 micro-batch"
            )


def _refuse_gradients_in_backward(module: LightningModule, layout: ParallelLayout, micro_batches: int) -> None:
    if layout.world_size * micro_batches > 1 and backward_handles_gradients(module):
        raise ValueError(
            f"{type(module).__name__}.backward reads or changes gradients, which are those of one of {micro_batches} "
            f"micro-batches and one of {layout.world_size} ranks there, and not complete; do that in "
            "on_before_optimizer_step, and leave loss.backward() to the hook backward"
        )


def refuse_embeddings(module: nn.Module, replicas: int, micro_batches: int) -> None:
    """Raises ValueError for embeddings whose step depends on all samples of the batch.

    Args:
        module: the user's module.
        replicas: that see parts of a batch.
        micro_batches: parts of a replica's batch.
    """
    for name, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if child.max_norm is not None and replicas > 1:
            raise ValueError(
                f"{name} has max_norm={child.max_norm}, which rescales the rows that a batch uses while it runs, so "
                f"that the weights of {replicas} replicas would drift apart; use max_norm=None and rescale all rows in "
                "on_train_batch_start (torch.renorm), or one replica"
            )
        if child.scale_grad_by_freq and child.weight.requires_grad and replicas * micro_batches > 1:
            raise ValueError(
                f"{name} has scale_grad_by_freq=True, which counts words in a whole batch, of which {replicas} "
                f"replicas with {micro_batches} micro-batches see parts; use scale_grad_by_freq=False, or one of each"
            )


def refuse_callbacks(trainer: Trainer, ranks: int) -> None:
    """Raises ValueError for a callback that puts other parameters into the module while it trains.

    Args:
        trainer: the trainer.
        ranks: ranks that share one copy of the parameters.
    """
    if ranks > 1 and any(isinstance(callback, ModelPruning) for callback in getattr(trainer, "callbacks", [])):
        raise ValueError(
            f"ModelPruning replaces parameters of the module while it trains, but {ranks} ranks share them; prune "
            "after training, or train with replicas only (tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage "
            "below 3)"
        )


def refuse_loggers(trainer: Trainer, ranks: int) -> None:
    """Raises ValueError for a logger that would run the model on the first rank alone.

    Args:
        trainer: the trainer.
        ranks: ranks that share one copy of the parameters.
    """
    if ranks > 1 and trainer.lightning_module.example_input_array is not None and _compat.draws_graph(trainer):
        raise ValueError(
            f"a logger with log_graph=True runs the model on the first rank alone, but {ranks} ranks share it; use "
            "log_graph=False, or draw the graph of a plain module before training"
        )


def refuse_data(loader: DataLoader[Any], replicas: int) -> None:
    """Raises ValueError if some replica would have no training sample of its own."""
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != replicas:
        return
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    if samples < replicas:
        raise ValueError(
            f"the training data has {samples} samples, too few for {replicas} data replicas; use at most {samples} "
            "replicas (fewer devices, or more tensor or pipeline ranks) or more samples"
        )


def refuse_shared_memory(module: nn.Module) -> None:
    """Raises ValueError if different parameters share elements, which would be apart once each rank has its part.

    Views of one memory that do not overlap (the weights of a recurrent layer) are fine.
    """
    by_memory: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, p in module.named_parameters():
        if not p.is_meta and p.numel() > 0:
            first, size = int(p.storage_offset()), p.element_size()
            last = first + sum((length - 1) * step for length, step in zip(p.shape, p.stride(), strict=True))
            span = (first * size, (last + 1) * size, name, p)
            by_memory.setdefault(p.untyped_storage().data_ptr(), []).append(span)
    for held in by_memory.values():
        held.sort(key=lambda span: span[:2])
        open_spans: list[tuple[int, int, str, nn.Parameter]] = []
        for first, last, name, p in held:
            open_spans = [span for span in open_spans if span[1] > first]
            for _, _, other, q in open_spans:
                if _share_elements(q, p):
                    raise ValueError(
                        f"parameters {other} and {name} share memory, but each gets its own when ranks divide the "
                        "model; give both names the same nn.Parameter, or clone() one of them"
                    )
            open_spans.append((first, last, name, p))


def _share_elements(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether two views of one memory, whose spans overlap, have bytes in common (columns of a matrix have none)."""
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(one, marks).fill_(True)
    return bool(_bytes_of(other, marks).any())


def _bytes_of(parameter: nn.Parameter, memory: Tensor) -> Tensor:
    """Where the bytes of a view lie in its memory."""
    size = parameter.element_size()
    strides = (*(step * size for step in parameter.stride()), 1)
    return memory.as_strided((*parameter.shape, size), strides, parameter.storage_offset() * size)
