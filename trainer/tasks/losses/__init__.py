"""Losses that a task may build on."""
