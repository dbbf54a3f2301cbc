"""The memory and traffic that a run will need, measured before it runs by the engines' own code on
fake tensors.
"""
