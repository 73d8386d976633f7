"""Glue: ``lightning-parallel plan``: which layouts of a training job fit, how fast they are, and what runs them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parallel.commands.answer import Answer, add_command, amount, count, positive
from lightning_parallel.commands.plan_text import plan_text
from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.config_shapes import shape_from_config, shape_from_file
from lightning_parallel.planner.given import FIXABLE
from lightning_parallel.planner.hardware import GPUS, PRECISIONS, Cluster, Gpu, find_gpu
from lightning_parallel.planner.job import (
    ATTENTIONS,
    KERNELS,
    LOSSES,
    OFFLOADS,
    OPTIMIZERS,
    RECOMPUTES,
    SCHEDULES,
    STATES,
    TrainingJob,
)
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.report import result_data
from lightning_parallel.planner.search import search
from lightning_parallel.planner.typical import typical_shape

if TYPE_CHECKING:
    from lightning_parallel.commands.answer import Subcommands

__all__ = ["add_parser"]

DEFAULT_GPU = "h100-80gb"
_SIZES = {
    "layers": "blocks; needs --hidden and --heads",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "ffn": "width of the MLP; 8/3 of the hidden width, or 4 times with --plain, unless given",
    "vocab": "50257 unless given",
    "kv-heads": "key/value heads; as many as heads unless given",
    "head-dim": "hidden width over heads unless given",
    "seq": "tokens of a sequence; the model's own, or 2048, unless given",
}
# Sizes that the other forms of a model leave open.
_OPEN_SIZES = {"params": {"seq"}, "config": {"seq"}, "module": {"seq", "heads"}}


def add_parser(commands: Subcommands) -> None:
    """Adds ``plan``."""
    parser = add_command(
        commands, "plan", _answer, summary="find the layouts of a training job that fit, fastest first"
    )
    _add_model(parser.add_argument_group("model", "sizes, a parameter count, a transformers configuration or a module"))
    _add_machine(parser.add_argument_group("machines"))
    _add_training(parser.add_argument_group("training"))
    _add_layout(parser.add_argument_group("layout", "each is kept when given, and searched unless it has a default"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--params", type=positive, help="number of parameters, such as 7e9; a Llama-like shape is assumed"
    )
    group.add_argument("--config", help="a transformers config.json, its folder, or a model's name")
    group.add_argument("--module", help="a module to build on the meta device, as package.module:Class")
    for name, text in _SIZES.items():
        group.add_argument(f"--{name}", type=count, help=text)
    group.add_argument(
        "--gated", dest="gated", action="store_true", default=None, help="SwiGLU, RMS norms, no biases (the default)"
    )
    group.add_argument("--plain", dest="gated", action="store_false", help="GPT: two matrices, layer norms, biases")
    group.add_argument("--tied", dest="tied", action="store_true", default=None, help="the head is the embedding")
    group.add_argument(
        "--untied", dest="tied", action="store_false", help="the head is its own matrix (the default of --gated)"
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpu", help=f"{DEFAULT_GPU} unless given; one of {', '.join(GPUS)}")
    group.add_argument("--gpus-per-node", type=count, default=8, help="%(default)s unless given")
    group.add_argument("--nodes", type=count, default=1, help="%(default)s unless given")
    group.add_argument(
        "--internode-gbit",
        type=amount,
        default=0.0,
        help="network bandwidth per GPU in Gbit/s; what is usual for the GPU unless given",
    )
    group.add_argument("--gpu-memory", type=positive, help="GiB, instead of the catalogue's")
    group.add_argument(
        "--gpu-tflops", type=positive, help="dense peak in the chosen precision, instead of the catalogue's"
    )
    group.add_argument("--gpu-bandwidth", type=positive, help="memory bandwidth in GB/s, instead of the catalogue's")
    group.add_argument("--gpu-link", type=positive, help="links inside a node, GB/s in one direction")
    group.add_argument("--host-memory", type=amount, default=0.0, help="GiB per node; taken to suffice unless given")
    group.add_argument("--nvme", type=amount, default=0.0, help="GiB per node; taken to suffice unless given")
    group.add_argument("--price", type=amount, default=0.0, help="of one GPU for one hour, for the cost of --tokens")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of products; %(default)s unless given")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="%(default)s unless given")
    group.add_argument(
        "--states",
        choices=STATES,
        default="mixed",
        help="what is kept beside products in 16 bit; %(default)s unless given",
    )
    group.add_argument("--global-batch", type=count, help="sequences per step; by default one per GPU")
    group.add_argument("--tokens", type=amount, default=0.0, help="of the whole run, for days, GPU-hours and cost")
    group.add_argument(
        "--attention", choices=ATTENTIONS, default="flash", help="eager stores scores; %(default)s unless given"
    )
    group.add_argument(
        "--loss", choices=LOSSES, default="plain", help="fused keeps no logits in 32 bit; %(default)s unless given"
    )
    group.add_argument(
        "--kernels",
        choices=("auto", *KERNELS),
        default="auto",
        help="torch's modules, or hand-written; %(default)s unless given",
    )
    group.add_argument(
        "--dropout", action=argparse.BooleanOptionalAction, default=True, help="of plain blocks; on unless given"
    )
    group.add_argument(
        "--trainable",
        type=positive,
        default=1.0,
        help="part of the parameters that is trained (adapters); all unless given",
    )


def _add_layout(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tp", type=count, dest="tensor", help="ranks of a tensor group")
    group.add_argument("--pp", type=count, dest="pipeline", help="pipeline stages")
    group.add_argument("--dp", type=count, dest="data", help="replicas")
    group.add_argument("--cp", type=count, dest="context", help="ranks that share a sequence; 1 in plans that run here")
    group.add_argument("--micro-batch", type=count, help="sequences of a micro-batch")
    group.add_argument(
        "--zero", type=int, choices=(0, 1, 2, 3), dest="zero_stage", help="what is sharded over replicas"
    )
    group.add_argument("--offload", choices=OFFLOADS, help="where states lie; off the GPU if that is faster")
    group.add_argument(
        "--schedule", choices=SCHEDULES, help="of pipelines, and only these are planned when it is given"
    )
    group.add_argument("--virtual-stages", type=count, help="model chunks of a stage; 1 in plans that run here")
    group.add_argument("--recompute", choices=RECOMPUTES, help="activations that a backward makes anew")
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="tensor groups also share what lies between their layers",
    )
    group.add_argument(
        "--balance",
        choices=("parameters", "even"),
        help="how blocks are spread over stages; by parameters unless given",
    )


def _answer(arguments: argparse.Namespace) -> Answer:
    cluster, kernels = _cluster(arguments), _kernels(arguments)
    job = TrainingJob(
        _shape(arguments),
        cluster,
        arguments.global_batch or cluster.gpus,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
        attention=arguments.attention,
        kernels=kernels,
        states=arguments.states,
        trainable=arguments.trainable,
        dropout=arguments.dropout,
        loss=arguments.loss,
        scatters_sends=kernels == "fused",  # they come with Megatron's pipeline
    )
    fixed = {name: getattr(arguments, name) for name in FIXABLE if getattr(arguments, name) is not None}
    result = search(job, fixed)
    assumed = []
    if arguments.gpu is None:
        assumed.append(f"no --gpu is given: planned for {DEFAULT_GPU}")
    if "pipeline" not in fixed and fixed.keys() & {"schedule", "virtual_stages"}:
        assumed.append("a schedule is given: only pipelines are planned")
    if arguments.price and not arguments.tokens:
        assumed.append("--price tells the cost of a run only with --tokens")
    for kind, option, known in (("offload", "host-memory", cluster.host_gib), ("nvme", "nvme", cluster.nvme_gib)):
        if not known and any(plan.host[kind] for plan in result.plans):
            assumed.append(f"no --{option} is given: whatever is offloaded is taken to find room there")
    data = result_data(result, price=arguments.price, tokens=arguments.tokens)
    data |= {"assumed": assumed, "advice": advice(result)}
    return Answer(data, tuple(plan_text(data)), status=0 if data["plans"] else 1)


def _kernels(arguments: argparse.Namespace) -> str:
    """Products of 8 and 4 bit come with hand-written layers (Transformer Engine); the rest is torch's own."""
    if arguments.kernels != "auto":
        return str(arguments.kernels)
    return "fused" if arguments.precision in ("fp8", "nvfp4") else "plain"


def _shape(arguments: argparse.Namespace) -> ModelShape:
    given = [name for name in ("params", "config", "module", "layers") if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise ValueError("a model is given by one of --params, --config, --module or --layers with the other sizes")
    if given[0] in _OPEN_SIZES:
        _refuse_sizes_beside(given[0], arguments)
    if arguments.config:
        return _configured(arguments.config, arguments.seq or 0)
    if arguments.module:
        # Only this form of a model needs torch.
        try:
            from lightning_parallel.commands.modules import shape_of_module_path
        except ModuleNotFoundError as error:
            raise ValueError(f"--module needs {error.name}; install it, or give the model's sizes") from error

        return shape_of_module_path(arguments.module, heads=arguments.heads or 0, seq=arguments.seq or 0)
    if arguments.params:
        return typical_shape(arguments.params, seq=arguments.seq or 0)
    missing = [f"--{name}" for name in ("hidden", "heads") if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"a model given by --layers also needs {' and '.join(missing)}")
    return _sized(arguments)


def _refuse_sizes_beside(form: str, arguments: argparse.Namespace) -> None:
    """Sizes that this form of a model would have ignored."""
    values = {name: getattr(arguments, name.replace("-", "_")) for name in _SIZES}
    named = [f"--{name}" for name, value in values.items() if value is not None and name not in _OPEN_SIZES[form]]
    for name, kinds in (("gated", ("plain", "gated")), ("tied", ("untied", "tied"))):
        value = getattr(arguments, name)
        if value is not None:
            named.append(f"--{kinds[value]}")
    if named:
        raise ValueError(
            f"--{form} already tells what {' and '.join(named)} would; leave {'them' if len(named) > 1 else 'it'} out, "
            "or give the model by --layers, --hidden and --heads"
        )


def _sized(arguments: argparse.Namespace) -> ModelShape:
    hidden, heads, seq = arguments.hidden, arguments.heads, arguments.seq or 2048
    vocab = arguments.vocab or 50257
    # Heads come last: their width need not be a part of the hidden width.
    if arguments.gated is not False:
        ffn = arguments.ffn or -(-8 * hidden // 3 // 256) * 256
        shape = ModelShape.llama(arguments.layers, hidden, 1, ffn, vocab=vocab, seq=seq)
    else:
        shape = replace(
            ModelShape.gpt(arguments.layers, hidden, 1, vocab=vocab, seq=seq), ffn=arguments.ffn or 4 * hidden
        )
    tied = shape.tied if arguments.tied is None else arguments.tied
    return replace(shape, heads=heads, tied=tied, kv_heads=arguments.kv_heads or 0, head_dim=arguments.head_dim or 0)


def _configured(name: str, seq: int) -> ModelShape:
    path = Path(name)
    if path.exists() or path.suffix == ".json":
        return shape_from_file(path, seq=seq)
    from lightning_parallel.commands.model_names import config_by_name

    return shape_from_config(config_by_name(name), seq=seq)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    gpu: Gpu = find_gpu(arguments.gpu or DEFAULT_GPU)
    changes: dict[str, Any] = {
        "memory_gib": arguments.gpu_memory,
        "hbm_gbps": arguments.gpu_bandwidth,
        "link_gbps": arguments.gpu_link,
        "tflops": _peaks(gpu, arguments.precision, arguments.gpu_tflops) if arguments.gpu_tflops else None,
    }
    changed = {name: value for name, value in changes.items() if value is not None}
    return Cluster(
        replace(gpu, **changed),
        gpus_per_node=arguments.gpus_per_node,
        nodes=arguments.nodes,
        network_gbit=arguments.internode_gbit,
        host_gib=arguments.host_memory,
        nvme_gib=arguments.nvme,
    )


def _peaks(gpu: Gpu, precision: str, given: float) -> dict[str, float]:
    """The catalogue's peaks with one that is given: attention runs in 16 bit beside narrower products, so all scale."""
    scale = given / gpu.tflops.get(precision, given)
    return {**{name: rate * scale for name, rate in gpu.tflops.items()}, precision: given}
