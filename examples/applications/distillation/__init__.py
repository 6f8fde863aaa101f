"""Knowledge distillation with and without Deep Companion Learning: ``python -m examples.applications.distillation``."""
