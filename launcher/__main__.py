"""`python -m horovodish.launcher` is the command `horovodish`."""

import sys

from horovodish.launcher.cli import main

sys.exit(main())
