"""`python -m mixfleet` is the command `mixfleet`."""

import sys

from mixfleet.cli import main

sys.exit(main())
