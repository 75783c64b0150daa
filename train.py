"""Train as a config says: `python train.py configs/01_debug_sft.py target.device=cpu`; `--help` tells more."""

try:
    from trainer.commands.cli import main
except KeyboardInterrupt:  # nothing has begun, and a trace tells nobody anything
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
