"""The small reference trainer: configuration, data, and the loop over steps."""
