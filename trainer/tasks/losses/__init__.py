"""Losses that a task may build on, beside the cross-entropy."""
