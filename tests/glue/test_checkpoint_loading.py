"""Checkpoints that are loaded, wholly or in part, chosen by name, or refused; models without memory among them.

Reference: the same scenario in one plain process (1e-5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.glue.checkpointing import TiedGPT, on_layout, read, run_both
from tests.glue.oracle import PAIRS, PLAN, Layout, Site, assert_same, set_by_formula, weights
from tests.glue.test_checkpoints import Data, Learner
from tests.glue.training import VOCABULARY, Tokens
from tests.harness import Ranks


# ------------------------------------------------------------------------------------------------ by name
def best_and_last(site: Site, folder: Path) -> Any:
    save = ModelCheckpoint(folder / "kept", "{epoch}", monitor="val_loss", mode="max", save_last=True)
    trainer = site.trainer(max_epochs=3, callbacks=[save], enable_checkpointing=True)
    model, data = Learner(), Data(site)
    data.test_dataloader = data.val_dataloader  # type: ignore[method-assign]
    trainer.fit(model, datamodule=data)
    trained = weights(model)
    seen = [trainer.validate(datamodule=data, ckpt_path="best"), trainer.validate(datamodule=data, ckpt_path="last")]
    best = weights(model)
    seen.append(trainer.test(model, datamodule=data, ckpt_path=save.best_model_path, verbose=False))
    trainer.save_checkpoint(folder / "after-validation.ckpt")  # best weights, with the optimizer of the fit
    again = ModelCheckpoint(folder / "kept", "{epoch}", monitor="val_loss", mode="max")
    second = site.trainer(max_epochs=4, callbacks=[again], enable_checkpointing=True)
    second.fit(model, datamodule=data, ckpt_path=folder / "kept" / "last.ckpt")
    names = [Path(callback.best_model_path).name for callback in (save, again)]
    return seen, trained, best, weights(model), second.global_step, names


@pytest.mark.parametrize("layout", [*PAIRS, (1, 2, 2)], ids=str)
def test_best_and_last(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    names = run_both(ranks, layout, tmp_path, best_and_last)
    assert names == ["after-validation.ckpt", "kept/epoch=0.ckpt", "kept/last.ckpt"]
    assert read(tmp_path / "split" / "after-validation.ckpt")["optimizer_states"][0]["state"]


def leave_files(site: Site, folder: Path) -> Any:
    trainer = site.trainer(max_epochs=1)
    model = Learner(rate=0.03, name="kept")
    trainer.fit(model, datamodule=Data(site))
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return trainer.validate(model, datamodule=Data(site), verbose=False)


def test_a_file_of_four_ranks_is_read_without_the_package(ranks: Ranks, tmp_path: Path) -> None:
    losses = on_layout(ranks, (2, 2, 1), leave_files, tmp_path, plan=PLAN)[0]
    for name in ("whole", "weights"):
        model = Learner.load_from_checkpoint(tmp_path / f"{name}.ckpt", name="other")
        assert (model.hparams["rate"], model.hparams["name"]) == (0.03, "other")
        assert_same(weights(model), dict(read(tmp_path / f"{name}.ckpt")["state_dict"]), name, atol=0)
        found = Site().trainer().validate(model, datamodule=Data(Site()), verbose=False)
        assert_same(found, losses, name)
    assert "optimizer_states" not in read(tmp_path / "weights.ckpt")


class Wrapped(LightningModule):
    """A language model that somebody else wrote."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 4, "tie_word_embeddings": True}
        if kind == "llama":
            self.model: Any = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32, num_key_value_heads=2))
        else:
            dropout: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
        set_by_formula(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def two_steps(site: Site, folder: Path, kind: str) -> int:
    trainer = site.trainer(max_epochs=1)
    trainer.fit(Wrapped(kind), site.loader(Tokens(8), 4))
    trainer.save_checkpoint(folder / "after.ckpt")
    return trainer.global_step


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_files_of_models_that_somebody_else_wrote(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """Grouped heads, gated and packed projections, transposed weights, tied heads."""
    assert run_both(ranks, (2, 2, 1), tmp_path, two_steps, kind, plan="auto") == ["after.ckpt"]


# ------------------------------------------------------------------------------------------------ not quite fitting
class Lenient(Learner):
    """Loads what matches."""

    @property
    def strict_loading(self) -> bool:
        return False

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        raise AssertionError("not in this test")


def attempt(site: Site, model: LightningModule, file: Path) -> str:
    try:
        site.trainer(max_epochs=2).fit(model, datamodule=Data(site), ckpt_path=file)
    except (RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}".replace(type(model).__name__, "Model")
    return "no error"


def misfits(site: Site, folder: Path, files: Path) -> Any:
    torch.manual_seed(11)
    errors = {name: attempt(site, Learner(), files / f"{name}.ckpt") for name in ("renamed", "shape", "weights")}
    errors["lenient shape"] = attempt(site, Lenient(), files / "shape.ckpt")
    lenient = Lenient()
    errors["lenient"] = attempt(site, lenient, files / "renamed.ckpt")
    return errors, weights(lenient)


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_names_and_shapes_that_do_not_fit(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    leave_files(Site(), files)
    whole = read(files / "whole.ckpt")
    state = dict(whole["state_dict"])
    shape = {**state, "net.blocks.1.fc.weight": torch.zeros(3, 8)}
    torch.save({**whole, "state_dict": shape}, files / "shape.ckpt")
    state["net.extra.weight"] = state.pop("net.blocks.2.out.weight")
    torch.save({**whole, "state_dict": state}, files / "renamed.ckpt")
    run_both(ranks, layout, tmp_path, misfits, files)
    errors, _ = misfits(Site(), tmp_path, files)
    assert "net.extra.weight" in errors["renamed"]
    assert "net.blocks.2.out.weight" in errors["renamed"]
    assert "net.blocks.1.fc.weight" in errors["shape"]
    assert "net.blocks.1.fc.weight" in errors["lenient shape"]
    assert errors["weights"].startswith("KeyError")
    assert errors["lenient"] == "no error"


# ------------------------------------------------------------------------------------------------ without memory
class Scale(nn.Module):
    """A parameter of its own that nothing draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Drawn(TiedGPT):
    """A tied model whose weights are drawn, with one part that cannot be drawn again."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        if scale:
            self.layers.append(Scale())

    def reset_parameters(self) -> None:
        self.get_buffer("seen").zero_()

    def draw(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)) and module is not self.head:
                module.reset_parameters()


def from_nothing(site: Site, folder: Path) -> Any:
    with torch.device("cpu" if site.layout is None else "meta"):
        model = Drawn()
    torch.manual_seed(3 + site.rank)  # the first rank decides
    if site.layout is None:
        model.draw()
    trainer = site.trainer(max_epochs=1)
    trainer.fit(model, fresh_data(site))
    trainer.save_checkpoint(folder / "drawn.ckpt")
    with torch.device("cpu" if site.layout is None else "meta"):
        resumed = Drawn(scale=True)
    file = folder.parent / "scaled.ckpt"
    if site.layout is None:
        Site().trainer(max_epochs=0).fit(source := Drawn(scale=True), fresh_data(site))
        source.trainer.save_checkpoint(file)
    trainer = site.trainer(max_epochs=1)
    trainer.fit(resumed, fresh_data(site), ckpt_path=file)
    return weights(model), weights(resumed), resumed.head.weight is resumed.tok.weight


def refused(site: Site) -> str:
    with torch.device("meta"):
        model = Drawn(scale=True)
    with pytest.raises(ValueError, match="has no reset_parameters") as caught:
        site.trainer(max_epochs=1).fit(model, fresh_data(site))
    return str(caught.value)


def test_a_part_that_nothing_draws_is_named(ranks: Ranks) -> None:
    for text in on_layout(ranks, (1, 1, 2), refused):
        assert text.startswith("layers.2 was built on the meta device")


def fresh_data(site: Site) -> Any:
    return site.loader(Tokens(16), 8)


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_models_on_the_meta_device_start_and_resume(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    run_both(ranks, layout, tmp_path, from_nothing, plan="auto")
