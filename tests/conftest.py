"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and a failure must come back on the next run.
settings.register_profile("mixfleet", deadline=None, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mixfleet")
