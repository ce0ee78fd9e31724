"""A federation between machines: sites, server, messages over Flower, keys, consent and logs."""
