"""Values that every other room speaks in: samples, clusters, model shapes, plans, traces, errors.

Standard library and numpy only. Nothing here decides anything and nothing here touches a device.
"""
