"""The three questions that every textbook on distributed training asks, answered by the planner's arithmetic.

    python examples/textbook_questions.py

No GPU, no torch and no weights are needed. Each answer is the planner's own: the layout that it ranks first, what the
fullest rank holds, how long a step takes, and its reasons. Change the numbers to ask a question of your own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.search import search
from lightning_parallel.planner.typical import typical_shape

BYTES_PER_TOKEN = 4  # of English text, by the usual tokenizers
SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Question:
    """What is asked, as a job of the planner; ``tokens`` of the whole run, where its length matters."""

    text: str
    job: TrainingJob
    tokens: float = 0.0


QUESTIONS = (
    Question(
        "A model of 200 million parameters has to read 5 TB of text this week, on 8 nodes of 8 GPUs. How?",
        TrainingJob(typical_shape(200e6), Cluster(find_gpu("a100-80gb"), nodes=8), global_batch=1024),
        tokens=5e12 / BYTES_PER_TOKEN,
    ),
    Question(
        "Does a model of 70 billion parameters train on one node of 8 NVLinked GPUs of 80 GB?",
        TrainingJob(typical_shape(70e9), Cluster(find_gpu("a100-80gb")), global_batch=8),
    ),
    Question(
        "Can 13 billion parameters be fine-tuned on one card of 24 GB?",
        TrainingJob(typical_shape(13e9), Cluster(find_gpu("rtx-4090"), gpus_per_node=1), global_batch=4),
    ),
)


def answer(question: Question) -> Iterator[str]:
    """The lines of an answer: the planner's best layout in numbers, then its reasons."""
    job = question.job
    result = search(job)
    if result.plans:
        best = result.plans[0]
        split, memory = best.split, best.worst.gib()
        zero = f"ZeRO-{split.zero_stage}" + (f" with offload to {split.offload}" if split.offload != "none" else "")
        yield f"tensor {split.tensor} x pipeline {split.pipeline} x data {split.data}, {zero}"
        yield f"{memory['total']:.1f} of {job.cluster.gpu.memory_gib:.1f} GiB of a GPU, {best.time.total:.3g} s a step"
        if question.tokens:
            days = question.tokens / job.tokens * best.time.total / SECONDS_PER_DAY
            yield f"{question.tokens:.3g} tokens take {days:.1f} days on {job.cluster.gpus} GPUs"
    yield from advice(result)


def main() -> None:
    for number, question in enumerate(QUESTIONS, 1):
        print(f"{number}. {question.text}")
        for line in answer(question):
            print(f"   {line}")
        print()


if __name__ == "__main__":
    main()
