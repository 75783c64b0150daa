#!/usr/bin/env python3
"""Ship a training config to a host, run it there, watch it, bring the results home: `deploy.py --help`."""

from deployer.cli import main

if __name__ == "__main__":
    main()
