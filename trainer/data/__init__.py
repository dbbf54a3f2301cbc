"""Samples, and the order in which they are trained on."""
