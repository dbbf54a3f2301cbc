"""The watchdog of a rank: its beats in the store, its stacks, and the end of a run that hangs."""
