"""Glue: one rank's exception or SIGTERM reaches every rank of a run, and all stop at the same step or are ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies import _compat
from lightning_parallel.watch import (
    TERMINATED,
    Watcher,
    WatchTimes,
    is_broken_connection,
    wait_for_parent,
)
from lightning_parallel.watch_hub import Hub

__all__ = ["FailureWatch"]


@dataclass
class _Sigterm:
    """This run's handler for SIGTERM, and what it stands in for."""

    handler: Callable[[int, FrameType | None], None]
    replaced: Any
    wakeup_fd: int


class FailureWatch:
    """Connects a strategy's hooks with the watch over all ranks; does nothing in a run of one process.

    On SIGTERM every rank finishes the training batch that no rank has begun, or leaves before the evaluation batch that
    no rank has begun, with Lightning's `SIGTERMException` and exit code 143.
    """

    def __init__(self, times: WatchTimes | None = None) -> None:
        self.times = times or WatchTimes()
        self._hub: Hub | None = None
        self._watcher: Watcher | None = None
        self._sigterm: _Sigterm | None = None
        self._trainer: Trainer | None = None
        self._follows_parent = False

    # -------------------------------------------------------------- begin and end
    @property
    def is_active(self) -> bool:
        """Whether all ranks are watched; the same on every rank."""
        return self._watcher is not None

    def start(self, trainer: Trainer, mesh: Mesh, main_address: str | None, follows_parent: bool) -> None:
        """Connects all ranks. Collective over the world.

        Args:
            trainer: the trainer of the coming run.
            mesh: groups of this rank.
            main_address: where other machines reach rank 0; None if every rank runs on this machine.
            follows_parent: this process was started by another rank, which kills the run when a child ends before it.
        """
        self.close(failed=False)
        self._trainer, self._follows_parent = trainer, follows_parent
        if mesh.world is None:
            return
        labels = [_label(mesh, rank) for rank in range(mesh.layout.world_size)]
        meeting, problem = None, None
        if mesh.rank == 0:
            try:
                self._hub = Hub(labels, "127.0.0.1" if main_address is None else "")
                meeting = (main_address or "127.0.0.1", self._hub.port, self._hub.token)
            except OSError as error:
                problem = f"{labels[0]} cannot listen: {error}"
        meeting = comm.broadcast_object(meeting, 0, mesh.world)
        if meeting is not None:
            try:
                self._watcher = Watcher(meeting[:2], meeting[2], mesh.rank, labels, self.times)
            except OSError as error:
                problem = f"{labels[mesh.rank]} does not reach {meeting[0]}:{meeting[1]}: {error}"
        problems = [p for p in comm.gather_objects(problem, mesh.world) if p is not None]
        if problems:
            self.close(failed=False)
            rank_zero_warn(f"ranks will not hear of one another's failures and of SIGTERM: {problems[0]}")

    def close(self, failed: bool) -> None:
        """Leaves the watch; no thread, socket or signal handler remains.

        Args:
            failed: the run ended with an exception: lets every rank tell and hear its news before it goes.
        """
        watcher, hub = self._watcher, self._hub
        self._watcher = self._hub = self._trainer = None
        if watcher is not None:
            if failed:
                watcher.settle(self.times.grace + 2)
                if self._follows_parent:
                    watcher.wait_for_hub(2 * self.times.grace)
            self._release_sigterm()
            watcher.close()
        if hub is not None:
            hub.close()
        if failed and watcher is not None and self._follows_parent:
            wait_for_parent(self.times.grace)  # a parent whose child ends first is killed by the launcher's observer

    # -------------------------------------------------------------- SIGTERM
    def take_sigterm(self) -> None:
        """Replaces Lightning's handler, whose broadcast would meet other traffic; keeps the user's own handlers."""
        watcher, trainer = self._watcher, self._trainer
        if watcher is None or trainer is None:
            return
        users = _compat.sigterm_handlers(trainer)
        if users is None:
            return

        def ask(signum: int, frame: FrameType | None) -> None:
            watcher.ask_to_stop()
            for handler in users:
                handler(signum, frame)

        replaced = signal.signal(signal.SIGTERM, ask)
        wakeup_fd = signal.set_wakeup_fd(watcher.wakeup_fd, warn_on_full_buffer=False)
        if wakeup_fd != -1:  # somebody else's event loop: the handler alone must do
            signal.set_wakeup_fd(wakeup_fd)
        self._sigterm = _Sigterm(ask, replaced, wakeup_fd)

    def _release_sigterm(self) -> None:
        taken, self._sigterm = self._sigterm, None
        if taken is None:
            return
        if taken.wakeup_fd == -1:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is taken.handler:
            signal.signal(signal.SIGTERM, taken.replaced)

    def finish(self) -> bool:
        """The run is over: whether SIGTERM came to some rank and no step was left to stop at."""
        return self._watcher is not None and self._watcher.finish(self.times.grace)

    def training_step(self) -> None:
        """Passes the start of a training batch; if all ranks stop with it, Lightning ends the run at its end."""
        if self._step(0) and self._trainer is not None:
            _compat.note_sigterm(self._trainer)

    def evaluation_step(self, dataloader_idx: int, batch_idx: int) -> None:
        """Passes the start of an evaluation batch.

        Raises:
            SIGTERMException: on all ranks, if they stop here.
        """
        if self._step(1, dataloader_idx, batch_idx):
            raise SIGTERMException

    def _step(self, *after_training_batch: int) -> bool:
        watcher, trainer = self._watcher, self._trainer
        if watcher is None or trainer is None:
            return False
        return watcher.step((trainer.fit_loop.total_batch_idx, *after_training_batch))

    # -------------------------------------------------------------- exceptions
    def tell(self, exception: BaseException) -> None:
        """Tells the other ranks why this one leaves, or names the rank that is to blame in the exception."""
        if isinstance(exception, SIGTERMException):
            exception.code = TERMINATED
        watcher = self._watcher
        if watcher is None:
            return
        if isinstance(exception, SIGTERMException):
            watcher.stopped()
            return
        broken = is_broken_connection(exception)
        cause = watcher.first_failure(self.times.notice) if broken else None
        if cause is None:
            text = " ".join(str(exception).split())
            clean = not broken and isinstance(exception, Exception)
            watcher.report(f"{type(exception).__name__}: {text}" if text else type(exception).__name__, clean)
            return
        watcher.stopped()
        seen = " ".join(str(exception).split()).split(". ")[0]
        exception.args = (f"this rank was stopped, because {cause} (here the connection broke: {seen})",)

    def check_collective(self, what: str) -> None:
        """Called before something that needs every rank. While an exception is handled, it can only succeed if all
        ranks handle one at the same step.

        Raises:
            RuntimeError: they do not.
        """
        exception, trainer = sys.exc_info()[1], self._trainer
        if self._watcher is None or exception is None or trainer is None:
            return
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        if isinstance(exception, SIGTERMException) or isinstance(exception.__context__, SIGTERMException):
            return
        self.tell(exception)
        if not self._watcher.settle(self.times.grace + 2):
            raise RuntimeError(
                f"{what} needs every rank, but not all of them stopped at this step in a state to take part"
            )


def _label(mesh: Mesh, rank: int) -> str:
    place = mesh.layout.coordinate(rank)
    return f"rank {rank} (stage {place.pipeline}, tensor {place.tensor}, replica {place.data})"
