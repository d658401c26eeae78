"""`python -m ds4mlx` is the same command as `ds4mlx`."""

import sys

from .cli import main

sys.exit(main())
