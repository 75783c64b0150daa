#!/usr/bin/env python3
"""Ship a training config to a host, run it there, watch it, bring the results home: `deploy.py --help`."""

try:
    from deployer.cli import main
except KeyboardInterrupt:  # nothing has begun, and a trace tells nobody anything
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
