"""Train as a config says: `python train.py configs/01_debug_sft.py target.device=cpu`; `--help` tells more."""

from trainer.commands.cli import main

if __name__ == "__main__":
    main()
