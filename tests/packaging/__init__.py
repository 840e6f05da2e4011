"""Tests of the built distributions and of the source tree."""
