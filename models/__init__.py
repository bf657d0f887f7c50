"""What is measured: configurations, checkpoints, text, toys and an embedded tiny family."""
