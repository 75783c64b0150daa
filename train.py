"""Train as a config says: `python train.py configs/01_debug_sft.py target.device=cpu`; `--help` tells more."""

import sys

try:
    from trainer.commands.cli import main
except KeyboardInterrupt:  # nothing has begun, and a trace tells nobody anything
    raise SystemExit(130) from None
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "trainer":
        raise
    hint = "activate the environment that Torchferry is installed in"
    sys.stderr.write(f"Error: {sys.executable} has no {error.name}\nhint: {hint}\n")
    sys.exit(2)

if __name__ == "__main__":
    main()
