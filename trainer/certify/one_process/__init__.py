"""The parts of one process with which a run is compared, for all that a config may ask for."""
