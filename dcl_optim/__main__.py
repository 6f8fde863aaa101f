"""``python -m dcl_optim`` runs the demo."""

import sys

from dcl_optim.demo import main

if __name__ == "__main__":
    sys.exit(main())
