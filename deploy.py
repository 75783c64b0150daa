#!/usr/bin/env python3
"""Ship a training config to a host, run it there, watch it, bring the results home: `deploy.py --help`."""

import sys

try:
    from deployer.cli import main
except KeyboardInterrupt:  # nothing has begun, and a trace tells nobody anything
    raise SystemExit(130) from None
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("deployer", "trainer"):
        raise
    hint = "activate the environment that Torchferry is installed in"
    sys.stderr.write(f"Error: {sys.executable} has no {error.name}\nhint: {hint}\n")
    sys.exit(2)

if __name__ == "__main__":
    main()
