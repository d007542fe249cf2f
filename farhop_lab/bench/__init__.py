"""Benchmarks that `farhop bench` runs: real processes under real load, CPU time rather than wall time. Never a test."""
