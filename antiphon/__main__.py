"""`python -m antiphon` is the command `antiphon`."""

import sys

from antiphon.main import main

sys.exit(main())
