"""`python -m dulbe_peft` is the command line."""

import sys

from dulbe_peft.commands.main import main

sys.exit(main())
