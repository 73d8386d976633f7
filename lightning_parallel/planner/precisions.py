"""Pure: the Trainer's ``precision`` under which a strategy keeps the states that were planned."""

from __future__ import annotations

from lightning_parallel.planner.job import Candidate, TrainingJob

__all__ = ["keeps_masters", "precision_flag", "precision_note"]

_WIDE = {"fp32": "32-true", "tf32": "32-true"}
_NARROW = {"fp16": "16", "bf16": "bf16"}


def keeps_masters(split: Candidate) -> bool:
    """Whether the strategies here step 32-bit copies of 16-bit weights: they do where something is sharded."""
    return split.zero_stage > 0 and (split.data * split.context > 1 or split.offload != "none")


def precision_flag(job: TrainingJob, split: Candidate, strategy: str) -> str:
    """The Trainer's name of the job's precision, for the ``strategy`` of that class.

    ZeRO here and DeepSpeed keep 16-bit weights with 32-bit copies under "bf16-true", FSDP shards 32-bit weights and
    gathers 16-bit ones under "bf16-mixed", and where nothing is sharded "bf16-mixed" has 32-bit weights only. 8 and 4
    bit run through Transformer Engine, from 16-bit weights.
    """
    if job.precision in _WIDE:
        return _WIDE[job.precision]
    if job.precision not in _NARROW:
        return "transformer-engine"
    copies = job.master_bytes > 0 and strategy != "FSDPStrategy" and keeps_masters(split)
    return f"{_NARROW[job.precision]}-{'true' if copies or job.states == 'true' else 'mixed'}"


def precision_note(job: TrainingJob, split: Candidate) -> str:
    """Where the Trainer's precision keeps other states than the plan counts, or needs a word; empty otherwise."""
    if job.states == "autocast" and job.narrow and job.precision not in _NARROW:
        return "transformer-engine keeps 16-bit weights, not the 32-bit ones counted here; --states mixed plans them."
    if not job.master_bytes:
        return ""
    if not keeps_masters(split):
        if job.precision in _NARROW:
            return (
                f"Where nothing is sharded, {precision_flag(job, split, '')} has 32-bit weights and gradients instead "
                "of 16-bit ones with 32-bit copies: no larger states, but activations that --states autocast plans."
            )
        return (
            "Where nothing is sharded, transformer-engine keeps 16-bit weights without the 32-bit copies that are "
            "counted here; --states true plans that."
        )
    if job.precision == "fp16":
        return "16-true does not scale the loss; 16-mixed does, which --states autocast plans."
    return ""
