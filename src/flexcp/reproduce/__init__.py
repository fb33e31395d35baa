"""The published tables beside ours, one experiment a file, and the lengths of the published data sets."""
