"""Entry point of `python -m sim.faults`."""

import sys

from sim.faults.campaign import main

sys.exit(main())
