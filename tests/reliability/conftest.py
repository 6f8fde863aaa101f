"""How many random trainings: 50 of each kind, always the same; HYPOTHESIS_PROFILE=nightly draws 500 new ones each."""

from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fifty", max_examples=50, suppress_health_check=slow)
settings.register_profile("nightly", max_examples=500, derandomize=False, print_blob=True, suppress_health_check=slow)
