"""Hosts that FlexCP runs inside; each integration has the same file names."""
