"""`python -m dulbe_peft` is the command line."""

import sys

from dulbe_peft.cli import main

sys.exit(main())
