"""Knowledge distillation with and without DCL: ``python -m examples.research.applications.distillation``."""
