"""A cut stage without processes: what it says when the step needs more than this stage has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.cut import StageCut
from lightning_parallel.pipeline.placeholder import PipelineCutError
from lightning_parallel.pipeline.planning import observe_step, plan_pipeline
from lightning_parallel.pipeline.trace import CutPlan


def stage_of(root: nn.Sequential, stage: int) -> StageCut:
    """One of two stages, whose cut is applied."""
    owners = {name: (int(name[0]),) for name, _ in root.named_parameters()}
    cut = StageCut(root, CutPlan(("0", "1"), ((0, 1), (1, 2)), owners), stage, torch.device("cpu"))
    cut.apply()
    return cut


class Remembers(nn.Module):
    """Stores a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.extra = x.square().mean()
        return x


def test_what_a_foreign_block_stores_on_itself_is_missed_clearly() -> None:
    root = nn.Sequential(Remembers(), Remembers())
    cut = stage_of(root, 1)

    def step() -> torch.Tensor:
        return root(torch.ones(3, 2)).mean() + sum(block.extra for block in root)  # type: ignore[misc]

    with pytest.raises(PipelineCutError, match="no attribute 'extra'.*exists only on the stage that runs it"):
        cut.run(step, torch.ones(3, 2))
    cut.restore()


def test_a_batch_that_is_skipped_is_named() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PipelineCutError, match="the step returned None on stage 0 without running 0; every batch must"):
        stage_of(root, 0).run(lambda: None)


def test_a_second_pass_in_one_step_is_refused_and_one_in_the_next_step_is_not() -> None:
    """The stage before ran only the first: its value would be taken for that of the second."""
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cut, x = stage_of(root, 1), torch.ones(3, 2)
    for _ in range(2):
        assert cut.run(lambda: root(x).mean(), x).output is not None
    with pytest.raises(PipelineCutError, match="the step ran 0 after 1, but .* once per step"):
        cut.run(lambda: root(x).mean() + root(-x).mean(), x)
    assert cut.run(lambda: root(x).mean(), x).output is not None


def test_a_block_that_recomputes_itself_within_the_step_has_not_run_twice() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cut, x = stage_of(root, 1), torch.ones(3, 2)

    def step() -> torch.Tensor:
        hidden = root[0](x).requires_grad_()
        loss = checkpoint(root[1], hidden, use_reentrant=False).square().mean()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().mean()

    assert cut.run(step, torch.ones(3, 2)).output.requires_grad


class Padded(nn.Module):
    """Torch's encoder, which in evaluation leaves padding out of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.tok(tokens), src_key_padding_mask=tokens == 0)[tokens != 0]


def test_padded_sequences_stay_padded_between_stages() -> None:
    root, tokens = Padded().eval(), torch.tensor([[1, 2, 3], [4, 1, 0]])
    blocks = ("encoder.layers.0", "encoder.layers.1")
    with torch.inference_mode():
        expected = root(tokens)
        trace = observe_step(root, blocks, lambda model, batch: model(batch), tokens, {})
        plan = plan_pipeline(root, blocks, trace, 2)
        received = None
        for stage in range(2):
            cut = StageCut(root, plan, stage, torch.device("cpu"))
            cut.apply()
            result = cut.run(lambda: root(tokens), received)
            cut.restore()
            received = result.boundary
        assert root.encoder.use_nested_tensor
    torch.testing.assert_close(result.output, expected)
