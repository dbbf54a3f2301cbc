"""The recipes that ship: a folder for each thing that is trained, found by `trainer.recipe`."""
