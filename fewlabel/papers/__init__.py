"""The tables of five papers as TOML, every row an experiment, and the code that runs them."""
