"""``python -m dcl_optim`` has the commands demo, compare and overhead."""

import sys

from dcl_optim.demo.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
