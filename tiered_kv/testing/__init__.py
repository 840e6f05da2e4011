"""What authors of backends and tests need: conformance suites, fakes, fault injection, models."""
