"""The walk through the textbook questions answers them as textbooks do, with numbers."""

from __future__ import annotations

import sys

from tests.harness.process import ROOT

# The examples are scripts beside the package, not part of it.
sys.path.insert(0, str(ROOT / "examples"))

from textbook_questions import QUESTIONS, answer


def test_each_question_is_answered_with_its_reason() -> None:
    small, large, single = (" ".join(answer(question)) for question in QUESTIONS)
    assert small.startswith("tensor 1 x pipeline 1 x data 64, ZeRO-1")
    assert "1.25e+12 tokens take 3.7 days on 64 GPUs" in small, "within the week"
    assert "Data parallel over 64 GPUs: the whole model fits on one GPU" in small
    assert "ZeRO-2 with offload fits, beside tensor 8 x pipeline 1 x data 1" in large
    assert "Without offloading it needs at least 2 nodes: tensor 8 x pipeline 2" in large
    assert single.startswith("tensor 1 x pipeline 1 x data 1, ZeRO-3 with offload to cpu")
    assert "it needs 194 GiB of host memory per node" in single
