"""``python -m dcl_optim`` runs the demo, and ``python -m dcl_optim overhead my_script.py:make`` a trial."""

import sys

from dcl_optim.demo import main
from dcl_optim.trial.command import COMMANDS
from dcl_optim.trial.command import main as try_out

if __name__ == "__main__":
    is_trial = len(sys.argv) > 1 and sys.argv[1] in COMMANDS
    sys.exit(try_out(sys.argv[1:]) if is_trial else main())
