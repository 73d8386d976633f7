"""The same GPT through LightningCLI, everything chosen by a YAML file.

    python examples/train_gpt_cli.py fit --config examples/train_gpt.yaml
    python examples/train_gpt_cli.py fit --config examples/train_gpt.yaml --trainer.strategy ddp

The strategy's class path in the file needs no import here; the import lets the command line use the short names too.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from train_gpt import GPT, ByteData

import lightning_parallel  # noqa: F401 - makes "tp_pp", "tp" and "pp" known to the Trainer


class GPTCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")


def main() -> None:
    GPTCLI(GPT, ByteData)


if __name__ == "__main__":
    main()
