"""Random losses, loops and trainings of fixed seeds; ``python -m tests.adversary SEED`` explores another one."""
