"""`python -m quatrain` is the command `quatrain`."""

import sys

from quatrain.cli import main

sys.exit(main())
