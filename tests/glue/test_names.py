"""Strategy names are registered whatever is imported first, also next to the second package of Lightning."""

from __future__ import annotations

import re

import pytest

from lightning_parallel.strategies.registry import STRATEGY_NAMES
from tests.harness import run_python
from tests.harness.process import ROOT

# Both orders of imports need a process that has not seen Lightning, whose own dependencies are most of what it takes.
START = """
import os, sys, torch._dynamo, torchmetrics

assert not {"lightning", "pytorch_lightning", "lightning_parallel"} & set(sys.modules)
for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        output = os.open(f"{script}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        exec(open(script).read(), {"__name__": "__main__"})
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"{script} ended with {code}")
"""

# The hardest order: the import of a strategy is what imports Lightning, and with it registers the names.
STRATEGY_FIRST = """
import inspect, sys
import lightning_parallel
assert "lightning" not in sys.modules
import lightning_parallel.strategies.refusals  # which the names' registration must not need
import lightning_parallel.strategies.tensor_pipeline as ours
import lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
from lightning_parallel.strategies.registry import STRATEGY_NAMES
assert inspect.getsource(lightning.pytorch)
assert isinstance(StrategyRegistry.get("tp_pp"), ours.TensorPipelineStrategy)
assert all(isinstance(StrategyRegistry.get(name), ours.TensorPipelineStrategy) for name in STRATEGY_NAMES)
print(*[name for name in STRATEGY_NAMES if name in StrategyRegistry])
"""


MIXED = """
import sys, torch, lightning.pytorch as ours, pytorch_lightning as other
from torch.utils.data import DataLoader

try:
    ours.Trainer(strategy="tp_pp", accelerator="cpu")
except ValueError as error:
    print(f"without the import: {error}")
from lightning_parallel import TensorPipelineStrategy

def module(package):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
        def training_step(self, batch, batch_idx):
            return self.linear(batch).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
    return Module()

class Watching(other.Callback):
    pass

def trainer(package, **options):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
    return package.Trainer(accelerator="cpu", devices=1, strategy=TensorPipelineStrategy(1, 1), **quiet, **options)

def attempt(run):
    try:
        run()
    except (TypeError, ValueError) as error:
        print(f"refused: {error}")
    else:
        print("accepted")

data = DataLoader(torch.ones(4, 2))
attempt(lambda: trainer(ours).fit(module(ours), data))
attempt(lambda: trainer(ours, callbacks=[Watching()]).fit(module(ours), data))
attempt(lambda: trainer(ours).fit(module(other), data))
attempt(lambda: trainer(other))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a script -> what it printed; it ended well."""
    folder = tmp_path_factory.mktemp("names")
    scripts = {"strategy_first": STRATEGY_FIRST, "mixed": MIXED}
    for name, text in scripts.items():
        (folder / name).write_text(text)
    done = run_python(["-c", START, *scripts], cwd=folder, timeout=100)
    texts = {name: (folder / f"{name}.txt").read_text() for name in scripts}
    for name, text in texts.items():
        assert f"{name} ended with 0\n" in done.output, f"{done.output}\n{text}"
    return texts


def test_a_strategy_first(printed: dict[str, str]) -> None:
    assert printed["strategy_first"].split() == list(STRATEGY_NAMES)


def test_a_short_name_without_the_import_and_objects_of_the_second_lightning_package(printed: dict[str, str]) -> None:
    output = printed["mixed"]
    plain, callback, module, strategy = re.findall("^accepted|^refused: .*", output, re.MULTILINE)
    assert plain == "accepted"
    assert callback == (
        "refused: the Callback Watching comes from pytorch_lightning, a second package whose classes are not those of "
        "lightning; import it from lightning.pytorch"
    )
    # Lightning refuses these two before it asks the strategy; the warning tells why.
    assert module.startswith("refused: `model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got ")
    assert strategy.startswith(
        "refused: You selected an invalid strategy name: `strategy=<lightning_parallel.strategies"
    )
    assert "both lightning.pytorch and pytorch_lightning are imported, two packages with classes of their own" in output
    assert "without the import: You selected an invalid strategy name: `strategy='tp_pp'`" in output
    readme = (ROOT / "README.md").read_text()
    assert "the short names exist once `lightning_parallel` has\nbeen imported" in readme
