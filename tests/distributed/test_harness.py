"""The harness itself: what it returns, and how quickly and clearly it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from tests.glue.oracle import QUIET
from tests.harness import Ranks, RanksFailed, RanksHung, WorkerPool, run_python


def sum_over_ranks(rank: int, world_size: int, scale: float) -> tuple[int, int, torch.Tensor]:
    value = torch.full((3,), scale * (rank + 1), requires_grad=True)
    total = value.detach().clone()
    dist.all_reduce(total)
    return rank, world_size, total


def return_tied_parameters(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3) + rank)
    return {"a": weight, "b": weight, "view": weight[:, 1:]}


def wait_for_nobody(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.recv(torch.empty(1), src=0)


def fit_once(rank: int, world_size: int) -> None:
    """A Trainer that ends sets every signal handler back, also those that Python does not know about."""
    Trainer(accelerator="cpu", devices=1, fast_dev_run=True, logger=False).fit(BoringModel())


def hang_with_child(rank: int, world_size: int, pid_file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pid_file.write_text(str(child.pid))
    child.wait()


KEPT: list[dist.ProcessGroup] = []


def keep_groups(rank: int, world_size: int) -> int:
    """As a library does that holds its groups for good: their threads stay awake in this process."""
    KEPT.extend(dist.new_group() for _ in range(5))
    return os.getpid()


def raise_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise KeyError("missing head")
    dist.recv(torch.empty(1), src=world_size - 1)


def raise_on_every_rank(rank: int, world_size: int) -> None:
    dist.barrier()
    raise ValueError("a refusal")


def die_on_first(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def read_process_state(rank: int, world_size: int) -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "elastic": TorchElasticEnvironment.detect(),
        "rank": os.environ.get("RANK"),
        "world": os.environ.get("WORLD_SIZE"),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "rank_zero": rank_zero_only.rank,  # type: ignore[attr-defined]
        "group": dist.is_initialized(),
        "draw": torch.rand(1).item(),
        "threads": torch.get_num_threads(),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "files": os.listdir(),
    }


def disturb_process_state(rank: int, world_size: int) -> None:
    os.environ["PL_GLOBAL_SEED"] = "7"
    rank_zero_only.rank = 3  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.rand(100)
    open("litter", "w").close()


def fit_with_ddp(rank: int, world_size: int) -> tuple[int, int, torch.Tensor]:
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_steps=2,
        limit_val_batches=0,
        **QUIET,
    )
    model = BoringModel()
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, sum_over_ranks, 0.5)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world_size) for rank in range(world_size)]
    expected = torch.full((3,), 0.5 * world_size * (world_size + 1) / 2)
    assert all(torch.equal(total, expected) for _, _, total in results)


def test_tensors_are_returned_by_value(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks(2, return_tied_parameters)):
        expected = torch.arange(6, dtype=torch.float64).view(2, 3) + rank
        assert torch.equal(result["a"], expected)
        assert isinstance(result["a"], torch.nn.Parameter)
        assert result["a"] is result["b"]
        assert torch.equal(result["view"], expected[:, 1:])


def test_hang_is_named_and_ended_at_the_limit(ranks: Ranks) -> None:
    ranks(2, fit_once)
    start = time.monotonic()
    with pytest.raises(RanksHung, match=r"(?s)hang after 3 s: rank 1 of 2 did not return.*in wait_for_nobody"):
        ranks(2, wait_for_nobody, timeout=3)
    assert time.monotonic() - start < 8


def test_exception_brings_the_failing_ranks_traceback_without_the_limit(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)failure in rank.* 2.*in raise_on_last.*KeyError: 'missing head'"):
        ranks(3, raise_on_last, timeout=100)
    assert time.monotonic() - start < 60


def test_death_of_a_rank_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"failure in rank 0 of 2\nrank 0 of 2 failed:\nthe process ended .* -9"):
        ranks(2, die_on_first)


def test_value_that_cannot_be_pickled_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="return_a_lambda"):
        ranks(1, return_a_lambda)


def test_failed_workers_are_replaced_and_good_ones_kept(ranks: Ranks) -> None:
    first = [state["pid"] for state in ranks(2, read_process_state)]
    assert [state["pid"] for state in ranks(2, read_process_state)] == first
    with pytest.raises(RanksFailed):
        ranks(2, die_on_first)
    second = [state["pid"] for state in ranks(2, read_process_state)]
    assert first[0] not in second, "killed"
    with pytest.raises(RanksFailed):
        ranks(2, raise_on_every_rank)
    assert [state["pid"] for state in ranks(2, read_process_state)] == second, "all have reported, and left their group"


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that its parent has not yet collected."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_workers_with_groups_that_nobody_ends_are_replaced(ranks: Ranks) -> None:
    kept = ranks(2, keep_groups)
    assert ranks.pids()[:2] == kept  # type: ignore[attr-defined]
    ranks(2, sum_over_ranks, 1.0)
    assert not set(ranks.pids()) & set(kept)  # type: ignore[attr-defined]


def test_nothing_survives_a_hang_or_a_closed_pool(tmp_path: Path) -> None:
    pool = WorkerPool()
    pool(1, read_process_state)
    hung = pool.pids()
    with pytest.raises(RanksHung):
        pool(1, hang_with_child, tmp_path / "pid", timeout=2)
    pool(1, read_process_state)
    idle = pool.pids()
    assert [is_running(pid) for pid in idle] == [True]
    pool.close()
    child = int((tmp_path / "pid").read_text())
    assert not [pid for pid in [*hung, *idle, child] if is_running(pid)]


def test_calls_leave_no_traces(ranks: Ranks) -> None:
    before = ranks(2, read_process_state)
    ranks(2, disturb_process_state)
    assert ranks(2, read_process_state) == before
    assert [state["group"] for state in before] == [True, True]
    assert [(state["rank"], state["seed"], state["rank_zero"]) for state in before] == [(None, None, 0)] * 2
    assert [(state["threads"], state["sigterm"], state["files"]) for state in before] == [(1, True, [])] * 2


def test_lightning_launch_reads_like_torchrun(ranks: Ranks) -> None:
    for rank, state in enumerate(ranks(2, read_process_state, launch="lightning")):
        assert (state["elastic"], state["group"]) == (True, False)
        assert (state["rank"], state["world"], state["rank_zero"]) == (str(rank), "2", rank)


def test_trainer_joins_the_ranks_by_itself(ranks: Ranks) -> None:
    first, second = ranks(2, fit_with_ddp, launch="lightning")
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert torch.equal(first[2], second[2])
    assert not any(state["elastic"] for state in ranks(2, read_process_state))


def test_worker_functions_must_be_importable(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="must be a top-level function"):
        ranks(1, lambda rank, world_size: None)
    with pytest.raises(ValueError, match=r"world size must lie in 1\.\.8, got 9"):
        ranks(9, read_process_state)


def test_parent_does_not_join_any_group(ranks: Ranks) -> None:
    ranks(1, read_process_state)
    assert not dist.is_initialized()


SCRIPT_WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(f"child {child.pid}", flush=True)
child.wait()
"""


def test_script_returns_its_code_and_output(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), flush=True); print('bad', file=sys.stderr); sys.exit(3)"
    done = run_python(["-c", code], cwd=tmp_path, timeout=30)
    assert (done.returncode, done.output.split()) == (3, [str(tmp_path), "bad"])


def test_hung_script_is_ended_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"hang: -c did not end within 6 s\nchild \d+") as caught:
        run_python(["-c", SCRIPT_WITH_CHILD], cwd=tmp_path, timeout=6)
    child = int(str(caught.value).split()[-1])
    deadline = time.monotonic() + 5  # a killed process is gone once it has had its turn on a busy machine
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)
