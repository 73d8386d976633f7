"""torchmetrics objects on every rank of a layout, against one plain process (fp32, 1e-5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision, MulticlassRecall

from tests.glue.oracle import CLASSES, LAYOUTS, Classifier, Layout, Samples, Site, check, weights
from tests.harness import Ranks


def values(tree: Any) -> Any:
    """Metrics' results as plain numbers; concatenated states are sorted, their order is that of the replicas."""
    if isinstance(tree, dict):
        return {key: values(value) for key, value in tree.items()}
    return sorted(tree.flatten().tolist())


class Measured(Classifier):
    """Metrics of every kind, updated where the predictions are."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.train_mean = MeanMetric()
        self.accuracy = MulticlassAccuracy(CLASSES, average="macro")
        self.losses = CatMetric()
        self.largest = MaxMetric()
        self.count = SumMetric()
        scores: Any = {
            "f1": MulticlassF1Score(CLASSES),
            "precision": MulticlassPrecision(CLASSES),
            "recall": MulticlassRecall(CLASSES),
            "micro": MulticlassAccuracy(CLASSES, average="micro"),
        }
        self.scores = MetricCollection(scores, prefix="val_")
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch["x"])
        loss = torch.nn.functional.cross_entropy(logits, batch["y"])
        self.train_accuracy(logits, batch["y"])
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.train_mean.update(loss.detach(), len(batch["y"]))
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("step", values(self.trainer.callback_metrics["train_accuracy_step"])))

    def on_train_epoch_end(self) -> None:
        self.seen.append(("train", values(self.train_accuracy.compute()), values(self.train_mean.compute())))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch["x"])
        losses = torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")
        self.accuracy.update(logits, batch["y"])
        self.log("accuracy", self.accuracy)
        self.losses.update(losses)
        self.largest.update(losses)
        self.count.update(len(losses))
        self.scores.update(logits, batch["y"])
        self.log_dict(self.scores)
        self.log("val_mean", losses.mean())

    def on_validation_epoch_end(self) -> None:
        own = {name: getattr(self, name).compute() for name in ("losses", "largest", "count", "accuracy")}
        self.seen.append(("validation", values(own), values(self.scores.compute())))
        self.log("largest_in_hook", self.largest.compute())
        self.log("count_in_hook", self.count)
        self.losses.reset()
        self.largest.reset()


def fit(site: Site, module: Any, **kwargs: Any) -> Any:
    trainer = site.trainer(**kwargs)
    trainer.fit(module, site.loader(Samples(20), 8), site.loader(Samples(11, first=100), 4))
    end = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
    return {"seen": module.seen, "end": end, "weights": weights(module)}


def metrics_of_every_kind(site: Site) -> Any:
    return fit(site, Measured())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_every_kind(ranks: Ranks, layout: Layout) -> None:
    check(ranks, metrics_of_every_kind, layout)
