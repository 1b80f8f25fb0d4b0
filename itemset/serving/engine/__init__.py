"""Engine cores and schedulers."""
