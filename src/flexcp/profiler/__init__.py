"""Measures real tasks on the ranks at hand and fits a calibration; attention is switched on by the caller."""
