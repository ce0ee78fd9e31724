"""Pure functions that the methods share: the training loop and its losses."""
