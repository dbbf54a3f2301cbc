"""The parts of a model that are trained, and how: adapters, frozen parameters, parameter groups."""
